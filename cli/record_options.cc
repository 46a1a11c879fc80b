#include "cli/record_options.h"

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <span>
#include <string_view>

#include <fmt/format.h>

namespace vtrace::cli {
namespace {

constexpr unsigned max_vcpus = 64; // streams of a trace

std::string base_name(const std::string& path) {
    return std::filesystem::path(path).filename().string();
}

struct Unit {
    std::string_view name;
    uint64_t factor;
};
constexpr Unit count_units[] = {{"", 1},          {"k", 1'000},         {"K", 1'000},
                                {"M", 1'000'000}, {"G", 1'000'000'000}, {"T", 1'000'000'000'000}};
constexpr Unit time_units[] = {{"", 1}, {"ns", 1}, {"us", 1'000}, {"ms", 1'000'000}, {"s", 1'000'000'000}};
constexpr Unit size_units[] = {{"", 1},           {"k", 1 << 10},    {"K", 1 << 10},
                               {"M", 1ull << 20}, {"G", 1ull << 30}, {"T", 1ull << 40}};

/// Turns "200M" into "200000000", as the units say; anything but a number, or one too large, is an error that names
/// `what` is expected.
CLI::Validator number_with_unit(std::span<const Unit> units, const char* what) {
    return CLI::Validator(
        [units, what](std::string& text) {
            uint64_t number = 0;
            const auto [rest, error] = std::from_chars(text.data(), text.data() + text.size(), number);
            const std::string_view name(rest, text.data() + text.size());
            const auto unit = std::find_if(units.begin(), units.end(), [&](const Unit& u) { return u.name == name; });
            if (error == std::errc::result_out_of_range ||
                (error == std::errc() && unit != units.end() && number > UINT64_MAX / unit->factor))
                return fmt::format("'{}' is too large", text);
            if (error != std::errc() || unit == units.end())
                return fmt::format("'{}' is not {}", text, what);
            text = std::to_string(number * unit->factor);
            return std::string();
        },
        "");
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

void add_record_options(CLI::App& app, RecordOptions& o) {
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
        ->transform(number_with_unit(size_units, "a size: a number, with K, M, G or T for powers of 1024"))
        ->type_name("SIZE")
        ->default_str("512M")
        ->group(machine);
    app.add_option("--cpus", o.vcpus, "Virtual CPUs; they take turns")
        ->check(CLI::Range(1u, max_vcpus))
        ->capture_default_str()
        ->group(machine);
    app.add_option("--cpu", o.cpu, "Processor model")
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

    const char* trace = "The trace";
    app.add_option("-o,--output", o.output, "Trace file")->type_name("FILE")->capture_default_str()->group(trace);
    auto* kernel_only = app.add_flag("--kernel-only", o.kernel_only, "Only branches to CPL 0")->group(trace);
    app.add_flag("--user-only", o.user_only, "Only branches to user mode")->excludes(kernel_only)->group(trace);
    app.add_option("-l,--limit", o.limits.instructions,
                   "End after so many instructions; units k, M, G, T are powers of 1000")
        ->transform(number_with_unit(count_units, "a count: a number, with k, M, G or T for powers of 1000"))
        ->type_name("COUNT")
        ->group(trace);
    app.add_option("--limit-time", o.limits.time, "End after so much guest time; units ns (the default), us, ms, s")
        ->transform(number_with_unit(time_units, "a time: a number, with ns, us, ms or s"))
        ->type_name("TIME")
        ->group(trace);
    app.add_flag("-q,--quiet", o.quiet, "No progress line and no summary")->group(trace);
    app.footer(
        "Exit status: 0 power-off, 1 error, 2 usage, 10 panic, 11 triple fault, 12 hang, 13 limit, 14 interrupted,\n"
        "15 reset, 16 unsupported, 64 and above: the guest's exit code (port 0xf4) plus 64.");
}

Result<MachineConfig> machine_config(const RecordOptions& o) {
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

nlohmann::json trace_config(const RecordOptions& o) {
    nlohmann::json modules = nlohmann::json::array();
    for (const std::string& module : o.boot.modules)
        modules.push_back(base_name(module));
    return {
        {"vtrace", VTRACE_VERSION},
        {"machine", {{"memory", o.memory}, {"vcpus", o.vcpus}, {"cpu", o.cpu}, {"engine", "soft"}, {"tsc_hz", tsc_hz}}},
        {"boot",
         {{"kernel", base_name(o.boot.kernel_path)},
          {"initrd", base_name(o.boot.initrd_path)},
          {"modules", modules},
          {"command_line", o.boot.command_line},
          {"as_shipped", o.boot.as_shipped},
          {"protocol", o.protocol},
          {"flat", o.flat_mode}}},
        {"filter", o.kernel_only ? "kernel"
                   : o.user_only ? "user"
                                 : "all"},
    };
}

} // namespace vtrace::cli
