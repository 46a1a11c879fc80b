#include "cli/guest_options.h"

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <map>
#include <string_view>

#include <fmt/format.h>

#include "cli/units.h"
#include "vmm/kvm/trial.h"

namespace vtrace::cli {
namespace {

constexpr unsigned max_vcpus = 64; // streams of a trace

std::string base_name(const std::string& path) {
    return std::filesystem::path(path).filename().string();
}

/// "0x7c00", or decimal.
CLI::Validator address() {
    return CLI::Validator(
        [](std::string& text) {
            const bool hex = text.starts_with("0x") || text.starts_with("0X");
            const char* end = text.data() + text.size();
            uint64_t number = 0;
            const auto [rest, error] = std::from_chars(text.data() + (hex ? 2 : 0), end, number, hex ? 16 : 10);
            if (error != std::errc() || rest != end)
                return fmt::format("'{}' is not an address, such as 0x7c00", text);
            text = std::to_string(number);
            return std::string();
        },
        "");
}

/// What the console can be searched for.
CLI::Validator console_text() {
    return CLI::Validator(
        [](std::string& text) {
            if (text.find_first_of("\r\n") != std::string::npos)
                return std::string("the text must lie within one line");
            if (text.size() > ConsoleWatch::max_text)
                return fmt::format("the text is longer than {} bytes", ConsoleWatch::max_text);
            return std::string();
        },
        "");
}

} // namespace

void add_guest_options(CLI::App& app, GuestOptions& o) {
    const char* guest = "The guest";
    app.add_option("-k,--kernel", o.boot.kernel_path,
                   "bzImage, vmlinux, PVH or Multiboot 1 ELF; what it is, its content tells")
        ->required()
        ->type_name("FILE")
        ->group(guest);
    app.add_option("-i,--initrd", o.boot.initrd_path, "Initial RAM disk")->type_name("FILE")->group(guest);
    app.add_option("-a,--append", o.boot.command_line, "Kernel command line")->type_name("TEXT")->group(guest);
    app.add_option("--module", o.boot.modules, "Multiboot or PVH module, with its arguments; may be repeated")
        ->type_name("\"FILE [ARGUMENTS]\"")
        ->group(guest);
    app.add_flag("--as-shipped", o.boot.as_shipped,
                 "Enter the bzImage itself: the kernel decompresses itself and applies its KASLR")
        ->group(guest);
    app.add_option("--protocol", o.protocol, "How to enter the kernel")
        ->check(CLI::IsMember({"auto", "linux64", "pvh", "multiboot"}))
        ->capture_default_str()
        ->group(guest);
    auto* flat =
        app.add_option("--flat", o.flat_mode, "The kernel is a flat binary, started in 16-, 32- or 64-bit mode")
            ->check(CLI::IsMember({"16", "32", "64"}))
            ->type_name("BITS")
            ->group(guest);
    app.add_option("--flat-load", o.flat_load_address, "Where it goes (default 0x7c00 in 16-bit mode, else 0x100000)")
        ->transform(address())
        ->type_name("ADDRESS")
        ->needs(flat)
        ->group(guest);
    app.add_option("--flat-entry", o.flat_entry, "Where it starts (default: where it was loaded)")
        ->transform(address())
        ->type_name("ADDRESS")
        ->needs(flat)
        ->group(guest);

    const char* machine = "The machine";
    app.add_option("-m,--memory", o.memory, "Guest memory; units K, M, G, T are powers of 1024")
        ->transform(size_with_unit())
        ->type_name("SIZE")
        ->default_str("512M")
        ->group(machine);
    app.add_option("--cpus", o.vcpus, "Virtual CPUs; they take turns")
        ->check(CLI::Range(1u, max_vcpus))
        ->capture_default_str()
        ->group(machine);
    app.add_option("--cpu", o.cpu, "Processor model: vtrace cpus lists them")
        ->check(CLI::IsMember(CpuidModel::names()))
        ->capture_default_str()
        ->group(machine);
    app.add_option("--console", o.console,
                   "Where the guest's serial console goes: a file, '-' (standard output), 'none'")
        ->type_name("FILE")
        ->capture_default_str()
        ->group(machine);
    app.add_option("--input", o.input, "What is typed at the guest's serial console: the contents of a file")
        ->type_name("FILE")
        ->group(machine);
    app.add_option("--input-after", o.input_after, "Type it once the console shows this text (default: at once)")
        ->check(console_text())
        ->type_name("TEXT")
        ->needs("--input")
        ->group(machine);

    const char* run = "The run";
    const std::map<std::string, Accel> engines{{"auto", Accel::automatic}, {"kvm", Accel::kvm}, {"soft", Accel::soft}};
    app.add_option("--accel", o.accel,
                   "What runs the guest where it isn't traced (auto: KVM, if it's of use here)")
        ->transform(CLI::Transformer(engines).description(""))
        ->type_name("auto|kvm|soft")
        ->default_str("auto")
        ->group(run);
    app.add_option("--kvm-device", o.device, "The device file of KVM")
        ->type_name("FILE")
        ->capture_default_str()
        ->group(run);
    app.add_option("-l,--limit", o.limits.instructions,
                   "End after so many instructions of the software engine; units k, M, G, T are powers of 1000")
        ->transform(count_with_unit())
        ->type_name("COUNT")
        ->group(run);
    app.add_option("--limit-time", o.limits.time, "End after so much guest time; units ns (the default), us, ms, s")
        ->transform(time_with_unit())
        ->type_name("TIME")
        ->group(run);
    app.add_flag("-q,--quiet", o.quiet, "No progress line and no summary")->group(run);
    app.footer(
        "Exit status: 0 power-off, 1 error, 2 usage, 10 panic, 11 triple fault, 12 hang, 13 limit, 14 interrupted,\n"
        "15 reset, 16 unsupported, 64 and above: the guest's exit code (port 0xf4) plus 64.");
}

void note_given_options(const CLI::App& app, GuestOptions& o) {
    o.flat_load_given = app.count("--flat-load") > 0;
    o.flat_entry_given = app.count("--flat-entry") > 0;
}

Result<MachineConfig> machine_config(const GuestOptions& o) {
    auto cpuid = CpuidModel::by_name(o.cpu);
    if (!cpuid)
        return Unexpected(cpuid.error());
    MachineConfig config{.memory = o.memory, .vcpus = o.vcpus, .cpuid = *cpuid, .boot = o.boot};
    if (o.protocol == "linux64")
        config.boot.protocol = BootProtocol::linux64;
    else if (o.protocol == "pvh")
        config.boot.protocol = BootProtocol::pvh;
    else if (o.protocol == "multiboot")
        config.boot.protocol = BootProtocol::multiboot;
    if (!o.flat_mode.empty()) {
        FlatOptions flat;
        flat.mode = o.flat_mode == "16"   ? FlatOptions::Mode::real16
                    : o.flat_mode == "32" ? FlatOptions::Mode::protected32
                                          : FlatOptions::Mode::long64;
        if (o.flat_load_given)
            flat.load_address = o.flat_load_address;
        if (o.flat_entry_given)
            flat.entry = o.flat_entry;
        config.boot.flat = flat;
    }
    return config;
}

nlohmann::json guest_json(const GuestOptions& o, const Machine& machine) {
    nlohmann::json modules = nlohmann::json::array();
    for (const std::string& module : o.boot.modules)
        modules.push_back(base_name(module));
    return {
        {"machine",
         {{"memory", o.memory},
          {"vcpus", o.vcpus},
          {"cpu", o.cpu},
          {"engine", machine.native() ? "kvm, soft in windows" : "soft"},
          {"tsc_hz", machine.tsc_hz()}}},
        {"boot",
         {{"kernel", base_name(o.boot.kernel_path)},
          {"initrd", base_name(o.boot.initrd_path)},
          {"modules", modules},
          {"command_line", o.boot.command_line},
          {"as_shipped", o.boot.as_shipped},
          {"protocol", o.protocol},
          {"flat", o.flat_mode}}},
    };
}

Result<Engine> choose_engine(const GuestOptions& o, bool native) {
    if (o.accel == Accel::soft)
        return Engine{nullptr, "as asked for"};
    if (!native)
        return Engine{nullptr, "all of the run is traced"};
    auto host = kvm::KvmHost::open_for_use(o.device);
    std::string why_not;
    if (!host)
        why_not = host.error().message;
    else if (auto speed = kvm::trial(*host); !speed)
        why_not = speed.error().message;
    if (why_not.empty())
        return Engine{std::make_unique<kvm::KvmHost>(std::move(*host)),
                      o.accel == Accel::kvm ? "as asked for" : "it is there, and passed its trial"};
    if (o.accel == Accel::kvm)
        return fail("cannot run the guest under KVM: {} ('vtrace check' tells more)", why_not);
    return Engine{nullptr, "no KVM: " + why_not};
}

} // namespace vtrace::cli
