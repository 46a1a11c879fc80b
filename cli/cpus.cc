// vtrace cpus: the processor models that a guest can have, and what each has of the Debug Store.
#include <bit>
#include <memory>

#include <nlohmann/json.hpp>

#include "cli/output.h"
#include "cli/subcommand.h"
#include "ds/cpu_model.h"
#include "vmm/soft/cpuid.h"

namespace vtrace::cli {
namespace {

using Json = nlohmann::ordered_json;

std::string pebs_text(const ds::CpuModel& model) {
    if (model.pebs == ds::PebsFormat::none)
        return "-";
    const char* adaptive = model.pebs == ds::PebsFormat::adaptive ? ", adaptive" : "";
    return fmt::format("format {}{}, {} counter{}", static_cast<unsigned>(model.pebs), adaptive, model.pebs_counters,
                       model.pebs_counters == 1 ? "" : "s");
}

std::string pmu_text(const ds::CpuModel& model) {
    const ds::PmuModel& pmu = model.pmu;
    return pmu.version ? fmt::format("v{}: {} + {} fixed", pmu.version, pmu.counters, pmu.fixed_counters) : "-";
}

Json as_json(const CpuidModel& cpuid) {
    Json json{{"name", cpuid.name()}, {"signature", cpuid.leaf(1, 0).eax}, {"long_mode", cpuid.has(Feature::lm)}};
    const ds::CpuModel* model = cpuid.debug_store();
    json["debug_store"] = nullptr;
    if (!model)
        return json;
    json["title"] = model->title;
    const auto& bits = model->debugctl;
    Json debugctl;
    for (const auto& [name, bit] : {std::pair{"LBR", bits.lbr}, {"BTF", bits.btf}, {"TR", bits.tr}, {"BTS", bits.bts},
                                    {"BTINT", bits.btint}, {"BTS_OFF_OS", bits.bts_off_os},
                                    {"BTS_OFF_USR", bits.bts_off_usr}, {"FREEZE_LBRS_ON_PMI", bits.freeze_lbrs_on_pmi},
                                    {"FREEZE_PERFMON_ON_PMI", bits.freeze_perfmon_on_pmi}})
        if (bit)
            debugctl[name] = std::countr_zero(bit);
    const bool ia32e = model->long_mode;
    json["debug_store"] = {{"dtes64", model->dtes64},
                           {"ds_cpl", model->ds_cpl},
                           {"debugctl_bits", debugctl},
                           {"bts_record_bytes", model->bts_record_size(ia32e)},
                           {"predicted_flag", model->predicted_flag}};
    json["pebs"] = nullptr;
    if (model->pebs != ds::PebsFormat::none)
        json["pebs"] = {{"format", static_cast<unsigned>(model->pebs)},
                        {"record_bytes", model->pebs_record_size(ia32e)},
                        {"counters", model->pebs_counters}};
    json["pmu"] = {{"version", model->pmu.version},
                   {"counters", model->pmu.counters},
                   {"counter_width", model->pmu.counter_width},
                   {"fixed_counters", model->pmu.fixed_counters},
                   {"full_width_writes", model->pmu.full_width_writes}};
    json["lbr"] = {{"depth", model->lbr.depth}};
    return json;
}

void print(Output& output, const std::vector<CpuidModel>& list) {
    output.print("{:<12} {:<7} {:<9} {:<10} {:<32} {:<16} {:<4} {}\n", "MODEL", "64-BIT", "BTS", "CPL FILTER", "PEBS",
                 "COUNTERS", "LBRS", "PROCESSOR");
    for (const CpuidModel& cpuid : list) {
        const ds::CpuModel* model = cpuid.debug_store();
        const char* long_mode = cpuid.has(Feature::lm) ? "yes" : "no";
        if (!model) {
            output.print("{:<12} {:<7} {:<9} {:<10} {:<32} {:<16} {:<4} {}\n", cpuid.name(), long_mode, "-", "-", "-", "-", "-",
                         "every instruction set that vtrace has");
            continue;
        }
        output.print("{:<12} {:<7} {:<9} {:<10} {:<32} {:<16} {:<4} {}\n", model->name, long_mode,
                     fmt::format("{} bytes", model->bts_record_size(model->long_mode)), model->ds_cpl ? "yes" : "no",
                     pebs_text(*model), pmu_text(*model), model->lbr.depth, model->title);
    }
}

} // namespace

Action define_cpus(CLI::App& app) {
    auto json = std::make_shared<bool>(false);
    app.add_flag("--json", *json, "One JSON document");
    return [json]() -> Result<ExitStatus> {
        std::vector<CpuidModel> list;
        for (const std::string& name : CpuidModel::names()) {
            auto model = CpuidModel::by_name(name);
            if (!model)
                return Unexpected(model.error());
            list.push_back(std::move(*model));
        }
        Output output;
        if (*json) {
            Json document = Json::array();
            for (const CpuidModel& model : list)
                document.push_back(as_json(model));
            output.print("{}\n", document.dump(2));
        } else {
            print(output, list);
        }
        VTRACE_TRY(output.finish());
        return ExitStatus::success;
    };
}

} // namespace vtrace::cli
