#include "ds/cpu_model.h"

#include <vector>

#include <fmt/ranges.h>

namespace vtrace::ds {
namespace {

// SDM vol. 3: 17.12.1 (NetBurst, MSR_DEBUGCTLA), 17.14.1 (Pentium M, MSR_DEBUGCTLB), 17.4.1 (Core 2 and later).
constexpr DebugCtlBits netburst_bits = {.lbr = 1 << 0,
                                        .btf = 1 << 1,
                                        .tr = 1 << 2,
                                        .bts = 1 << 3,
                                        .btint = 1 << 4,
                                        .bts_off_os = 1 << 5,
                                        .bts_off_usr = 1 << 6,
                                        .freeze_lbrs_on_pmi = 0,
                                        .freeze_perfmon_on_pmi = 0};
constexpr DebugCtlBits pentium_m_bits = {.lbr = 1 << 0,
                                         .btf = 1 << 1,
                                         .tr = 1 << 6,
                                         .bts = 1 << 7,
                                         .btint = 1 << 8,
                                         .bts_off_os = 0,
                                         .bts_off_usr = 0,
                                         .freeze_lbrs_on_pmi = 0,
                                         .freeze_perfmon_on_pmi = 0};
constexpr DebugCtlBits core_bits = {.lbr = 1 << 0,
                                    .btf = 1 << 1,
                                    .tr = 1 << 6,
                                    .bts = 1 << 7,
                                    .btint = 1 << 8,
                                    .bts_off_os = 1 << 9,
                                    .bts_off_usr = 1 << 10,
                                    .freeze_lbrs_on_pmi = 1 << 11,
                                    .freeze_perfmon_on_pmi = 1 << 12};

constexpr LbrModel no_lbr = {};
constexpr LbrModel lbr_at_40(uint8_t depth) { return {depth, LbrFormat::lip, 0x40, 0x60, 0, false}; }
constexpr LbrModel lbr_at_680(uint8_t depth, LbrFormat format, uint32_t info = 0) {
    return {depth, format, 0x680, 0x6c0, info, true};
}

constexpr PmuModel no_pmu = {};
constexpr PmuModel pmu_v3 = {3, 4, 48, 3, 48, false};

// The steppings and models are such as stock Linux knows no erratum of that would make it leave the facility alone.
constexpr CpuModel models[] = {
    {.name = "netburst",
     .title = "Pentium 4, Xeon (NetBurst), 32-bit",
     .signature = 0x00000f29,
     .long_mode = false,
     .dtes64 = false,
     .ds_cpl = true,
     .debugctl = netburst_bits,
     .lbr = no_lbr,
     .pmu = no_pmu,
     .events = EventFamily::none,
     .pebs = PebsFormat::none,
     .pebs_counters = 0,
     .pebs_reset_slots = 1,
     .predicted_flag = true},
    {.name = "netburst64",
     .title = "Pentium 4, Xeon (NetBurst) with Intel 64",
     .signature = 0x00000f4a,
     .long_mode = true,
     .dtes64 = true,
     .ds_cpl = true,
     .debugctl = netburst_bits,
     .lbr = no_lbr,
     .pmu = no_pmu,
     .events = EventFamily::none,
     .pebs = PebsFormat::none,
     .pebs_counters = 0,
     .pebs_reset_slots = 1,
     .predicted_flag = true},
    {.name = "pentium-m",
     .title = "Pentium M (Dothan)",
     .signature = 0x000006d8,
     .long_mode = false,
     .dtes64 = false,
     .ds_cpl = false,
     .debugctl = pentium_m_bits,
     .lbr = no_lbr,
     .pmu = no_pmu,
     .events = EventFamily::none,
     .pebs = PebsFormat::none,
     .pebs_counters = 0,
     .pebs_reset_slots = 1,
     .predicted_flag = false},
    {.name = "core2",
     .title = "Core 2 (Penryn)",
     .signature = 0x0001067a,
     .long_mode = true,
     .dtes64 = true,
     .ds_cpl = true,
     .debugctl = core_bits,
     .lbr = lbr_at_40(4),
     .pmu = {2, 2, 40, 3, 40, false},
     .events = EventFamily::core,
     .pebs = PebsFormat::core,
     .pebs_counters = 1,
     .pebs_reset_slots = 1,
     .predicted_flag = false},
    {.name = "atom",
     .title = "Atom (Bonnell)",
     .signature = 0x000106ca,
     .long_mode = true,
     .dtes64 = true,
     .ds_cpl = true,
     .debugctl = core_bits,
     .lbr = lbr_at_40(8),
     .pmu = {3, 2, 40, 3, 40, false},
     .events = EventFamily::atom,
     .pebs = PebsFormat::core,
     .pebs_counters = 1,
     .pebs_reset_slots = 1,
     .predicted_flag = false},
    {.name = "nehalem",
     .title = "Core i7 (Nehalem)",
     .signature = 0x000106a5,
     .long_mode = true,
     .dtes64 = true,
     .ds_cpl = true,
     .debugctl = core_bits,
     .lbr = lbr_at_680(16, LbrFormat::eip_flags),
     .pmu = pmu_v3,
     .events = EventFamily::nehalem,
     .pebs = PebsFormat::nehalem,
     .pebs_counters = 4,
     .pebs_reset_slots = 4,
     .predicted_flag = false},
    {.name = "sandybridge",
     .title = "2nd generation Core (Sandy Bridge)",
     .signature = 0x000206a7,
     .long_mode = true,
     .dtes64 = true,
     .ds_cpl = true,
     .debugctl = core_bits,
     .lbr = lbr_at_680(16, LbrFormat::eip_flags),
     .pmu = pmu_v3,
     .events = EventFamily::sandy_bridge,
     .pebs = PebsFormat::nehalem,
     .pebs_counters = 4,
     .pebs_reset_slots = 4,
     .predicted_flag = false},
    {.name = "haswell",
     .title = "4th generation Core (Haswell)",
     .signature = 0x000306c3,
     .long_mode = true,
     .dtes64 = true,
     .ds_cpl = true,
     .debugctl = core_bits,
     .lbr = lbr_at_680(16, LbrFormat::eip_flags_tsx),
     .pmu = {3, 4, 48, 3, 48, true},
     .events = EventFamily::haswell,
     .pebs = PebsFormat::haswell,
     .pebs_counters = 4,
     .pebs_reset_slots = 4,
     .predicted_flag = false},
    {.name = "skylake",
     .title = "6th generation Core (Skylake)",
     .signature = 0x000506e3,
     .long_mode = true,
     .dtes64 = true,
     .ds_cpl = true,
     .debugctl = core_bits,
     .lbr = lbr_at_680(32, LbrFormat::info, 0xdc0),
     .pmu = {4, 4, 48, 3, 48, true},
     .events = EventFamily::haswell,
     .pebs = PebsFormat::skylake,
     .pebs_counters = 4,
     .pebs_reset_slots = 4,
     .predicted_flag = false},
    {.name = "icelake",
     .title = "10th generation Core (Ice Lake)",
     .signature = 0x000706e5,
     .long_mode = true,
     .dtes64 = true,
     .ds_cpl = true,
     .debugctl = core_bits,
     .lbr = lbr_at_680(32, LbrFormat::info, 0xdc0),
     .pmu = {5, 8, 48, 3, 48, true},
     .events = EventFamily::ice_lake,
     .pebs = PebsFormat::adaptive,
     .pebs_counters = 8,
     .pebs_reset_slots = 8,
     .predicted_flag = false},
};

} // namespace

size_t CpuModel::pebs_record_size(bool ia32e) const {
    switch (pebs) {
    case PebsFormat::core:
        return 0x90;
    case PebsFormat::nehalem:
        return 0xb0;
    case PebsFormat::haswell:
        return 0xc0;
    case PebsFormat::skylake:
        return 0xc8;
    case PebsFormat::adaptive:
        return 0x20;
    case PebsFormat::none:
        break;
    }
    // EFLAGS, EIP, eight registers; in IA-32e mode sixteen.
    return field_size(ia32e) == 4 ? 10 * 4 : 18 * 8;
}

std::span<const CpuModel> cpu_models() { return models; }

Result<const CpuModel*> find_cpu_model(std::string_view name) {
    std::vector<std::string_view> names;
    for (const CpuModel& model : models) {
        if (model.name == name)
            return &model;
        names.push_back(model.name);
    }
    return fail("no CPU model '{}'; there are: {}", name, fmt::join(names, ", "));
}

} // namespace vtrace::ds
