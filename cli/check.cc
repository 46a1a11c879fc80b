// vtrace check: what this host offers, what vtrace does with it, and what to do about what is missing.
#include <algorithm>
#include <memory>
#include <optional>

#include <cpuid.h>
#include <linux/capability.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <nlohmann/json.hpp>

#include "cli/output.h"
#include "cli/subcommand.h"
#include "decode/text.h"
#include "vmm/kvm/host.h"
#include "vmm/kvm/trial.h"

namespace vtrace::cli {
namespace {

struct Options {
    std::string device = kvm::KvmHost::default_device;
    bool json = false;
};

using Json = nlohmann::ordered_json;

struct Processor {
    std::string vendor, model;
    std::optional<std::string> hypervisor; // its signature, where this machine is itself virtual
    const char* module;                    // that would make KVM of it; null: it shows no virtualization
};

struct FoundCapability {
    const kvm::Capability* capability;
    int value;
};

struct Facts {
    Processor processor;
    std::string device;
    std::string open_error; // empty: the device is open, and the following are filled in
    std::vector<FoundCapability> capabilities;
    std::string trial_error; // empty, unless the trial was made and failed
    std::optional<kvm::TrialSpeed> speed;
    std::optional<uint64_t> memlock; // bytes; none: no limit
    bool ipc_lock = false;

    std::vector<const kvm::Capability*> missing(bool required) const {
        std::vector<const kvm::Capability*> list;
        for (const FoundCapability& found : capabilities)
            if (found.value == 0 && found.capability->required == required)
                list.push_back(found.capability);
        return list;
    }
    bool kvm_usable() const { return speed && missing(true).empty(); }
};

/// Up to the first zero, without spaces at both ends.
std::string trimmed(std::string text) {
    text.resize(std::min(text.find('\0'), text.size()));
    text.erase(0, std::min(text.find_first_not_of(' '), text.size()));
    text.erase(text.find_last_not_of(' ') + 1);
    return text;
}

/// The text that CPUID gives in registers.
std::string register_text(std::initializer_list<unsigned> registers) {
    std::string text;
    for (unsigned value : registers)
        text.append(reinterpret_cast<const char*>(&value), sizeof value);
    return trimmed(std::move(text));
}

Processor find_processor() {
    constexpr unsigned brand_first = 0x8000'0002, brand_last = 0x8000'0004, hypervisor_leaf = 0x4000'0000;
    constexpr unsigned hypervisor_bit = 1u << 31; // leaf 1, ECX
    Processor processor{};
    unsigned a = 0, b = 0, c = 0, d = 0;
    __cpuid(0, a, b, c, d);
    processor.vendor = register_text({b, d, c});
    std::string model;
    if (static_cast<unsigned>(__get_cpuid_max(0x8000'0000, nullptr)) >= brand_last)
        for (unsigned leaf = brand_first; leaf <= brand_last; ++leaf) {
            __cpuid(leaf, a, b, c, d);
            for (unsigned value : {a, b, c, d})
                model.append(reinterpret_cast<const char*>(&value), sizeof value);
        }
    processor.model = trimmed(std::move(model));
    __cpuid(1, a, b, c, d);
    if (c & hypervisor_bit) {
        __cpuid(hypervisor_leaf, a, b, c, d);
        processor.hypervisor = register_text({b, c, d});
    }
    processor.module = kvm::hardware_module();
    return processor;
}

bool has_ipc_lock() {
    __user_cap_header_struct header{_LINUX_CAPABILITY_VERSION_3, 0};
    __user_cap_data_struct data[_LINUX_CAPABILITY_U32S_3]{};
    if (syscall(SYS_capget, &header, data) != 0)
        return false;
    return data[CAP_TO_INDEX(CAP_IPC_LOCK)].effective & CAP_TO_MASK(CAP_IPC_LOCK);
}

Facts find_facts(const Options& options) {
    Facts facts;
    facts.processor = find_processor();
    facts.device = options.device;
    rlimit limit{};
    if (getrlimit(RLIMIT_MEMLOCK, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY)
        facts.memlock = limit.rlim_cur;
    facts.ipc_lock = has_ipc_lock();

    auto host = kvm::KvmHost::open(options.device);
    if (!host) {
        facts.open_error = std::move(host.error().message);
        return facts;
    }
    for (const kvm::Capability& capability : kvm::capabilities())
        facts.capabilities.push_back({&capability, host->check(capability.number)});
    if (auto speed = kvm::trial(*host))
        facts.speed = *speed;
    else
        facts.trial_error = std::move(speed.error().message);
    return facts;
}

std::string names(const std::vector<const kvm::Capability*>& list) {
    std::string text;
    for (const kvm::Capability* capability : list)
        text += (text.empty() ? "" : ", ") + std::string(capability->name);
    return text;
}

std::string decision(const Facts& facts) {
    return facts.kvm_usable() ? "--accel auto will use kvm" : "--accel auto will use soft, the software engine";
}

/// What to do, a line for each thing missing.
std::vector<std::string> advice(const Facts& facts) {
    std::vector<std::string> lines;
    if (!facts.open_error.empty())
        lines.push_back(facts.open_error);
    if (const auto required = facts.missing(true); !required.empty())
        lines.push_back(fmt::format("this kernel's KVM lacks {}; use Linux 5.10 or newer", names(required)));
    if (!facts.trial_error.empty())
        lines.push_back(facts.trial_error);
    if (!facts.kvm_usable() && facts.processor.hypervisor && !facts.processor.module)
        lines.push_back(
            "this machine is virtual: let its hypervisor offer nested virtualization (for KVM: kvm_amd.nested=1 "
            "or kvm_intel.nested=1, and a CPU model with svm or vmx), or use a machine of metal");
    return lines;
}

void print_text(Output& out, const Facts& facts) {
    const auto row = [&out](std::string_view name, std::string_view text) {
        out.print("{:<13} {}\n", name, printable(text));
    };
    const Processor& processor = facts.processor;
    row("Processor", processor.model.empty() ? processor.vendor : processor.vendor + ", " + processor.model);
    row("Machine", processor.hypervisor ? fmt::format("virtual, under '{}': KVM in it is nested", *processor.hypervisor)
                                        : "real, or its hypervisor hides");
    row("Hardware", processor.module ? fmt::format("virtualization is offered (module {})", processor.module)
                                     : "no virtualization is offered (neither svm nor vmx)");
    row("KVM device", facts.device + (facts.open_error.empty() ? ": can be opened" : ": can't be opened"));
    if (!facts.capabilities.empty()) {
        const size_t lacking = facts.missing(true).size() + facts.missing(false).size();
        row("Capabilities", fmt::format("{} of {}", facts.capabilities.size() - lacking, facts.capabilities.size()));
        for (const FoundCapability& found : facts.capabilities) {
            const kvm::Capability& capability = *found.capability;
            const char* state = found.value ? "yes" : capability.required ? "MISSING" : "no";
            out.print("  {:<30} {:<8} {}\n", capability.name, state, capability.used_for);
        }
    }
    if (facts.speed)
        row("Trial", fmt::format("a guest ran, at {} million instructions a second or more",
                                 grouped(facts.speed->instructions_per_second / 1'000'000)));
    else if (facts.open_error.empty())
        row("Trial", "failed");
    row("Locked memory", fmt::format("{}, {}", facts.memlock ? byte_size(*facts.memlock) + " at most" : "no limit",
                                     facts.ipc_lock ? "with CAP_IPC_LOCK" : "without CAP_IPC_LOCK"));
    row("Decision", decision(facts));
    for (const std::string& line : advice(facts))
        row("To do", line);
}

Json to_json(const Facts& facts) {
    const Processor& processor = facts.processor;
    Json json = {{"usable", facts.kvm_usable()}, {"accel", facts.kvm_usable() ? "kvm" : "soft"}};
    json["processor"] = {{"vendor", processor.vendor}, {"model", processor.model}};
    json["processor"]["hypervisor"] = processor.hypervisor ? Json(*processor.hypervisor) : Json(nullptr);
    json["processor"]["module"] = processor.module ? Json(processor.module) : Json(nullptr);
    json["device"] = {{"path", facts.device}, {"open", facts.open_error.empty()}};
    json["device"]["error"] = facts.open_error.empty() ? Json(nullptr) : Json(facts.open_error);
    json["capabilities"] = Json::array();
    for (const FoundCapability& found : facts.capabilities)
        json["capabilities"].push_back({{"name", found.capability->name},
                                        {"value", found.value},
                                        {"required", found.capability->required},
                                        {"used_for", found.capability->used_for}});
    json["trial"] = {{"done", facts.open_error.empty()}, {"passed", facts.speed.has_value()}};
    json["trial"]["instructions_per_second"] = facts.speed ? Json(facts.speed->instructions_per_second) : Json(nullptr);
    json["trial"]["error"] = facts.trial_error.empty() ? Json(nullptr) : Json(facts.trial_error);
    json["memlock_bytes"] = facts.memlock ? Json(*facts.memlock) : Json(nullptr);
    json["cap_ipc_lock"] = facts.ipc_lock;
    json["to_do"] = advice(facts);
    return json;
}

Result<ExitStatus> run(const Options& options) {
    const Facts facts = find_facts(options);
    Output out;
    if (options.json)
        out.print("{}\n", to_json(facts).dump(2, ' ', false, Json::error_handler_t::replace));
    else
        print_text(out, facts);
    VTRACE_TRY(out.finish());
    return facts.kvm_usable() ? ExitStatus::success : ExitStatus::failure;
}

} // namespace

Action define_check(CLI::App& app) {
    auto options = std::make_shared<Options>();
    app.add_flag("--json", options->json, "Print one JSON object");
    app.add_option("--device", options->device, "The device file of KVM")->capture_default_str();
    app.footer("Exit status: 0 if KVM can be used, 1 if not. The software engine can always be used.");
    return [options] { return run(*options); };
}

} // namespace vtrace::cli
