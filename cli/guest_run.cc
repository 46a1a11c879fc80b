#include "cli/guest_run.h"

#include <algorithm>
#include <atomic>
#include <csignal>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <vector>

#include <sys/resource.h>

#include "cli/crash_report.h"
#include "cli/guest_symbols.h"
#include "cli/outcome_text.h"
#include "cli/output.h"
#include "cli/progress.h"
#include "cli/recording.h"
#include "decode/text.h"
#include "vmm/machine.h"

namespace vtrace::cli {
namespace {

// Ctrl-C, SIGTERM and a terminal that goes away end the recording cleanly; a second one kills, should that ever take
// too long.
std::atomic<Machine*> running_machine{nullptr};

extern "C" void stop_machine(int signal) {
    if (Machine* machine = running_machine.load())
        machine->request_stop();
    std::signal(signal, SIG_DFL);
}

/// Stops the machine by signal for as long as it lives.
class StopBySignal {
  public:
    explicit StopBySignal(Machine& machine) {
        running_machine = &machine;
        for (int signal : signals)
            std::signal(signal, stop_machine);
    }
    ~StopBySignal() {
        for (int signal : signals)
            std::signal(signal, SIG_DFL);
        running_machine = nullptr;
    }

  private:
    static constexpr int signals[] = {SIGINT, SIGTERM, SIGHUP};
};

/// The guest's serial console on this side.
class Console {
  public:
    static Result<Console> open(const std::string& where) {
        Console console;
        if (where == "-") {
            console.output_.emplace();
        } else if (where != "none") {
            auto file = Output::create(where);
            if (!file)
                return Unexpected(file.error());
            console.output_.emplace(std::move(*file));
        }
        return console;
    }
    void write(std::string_view bytes) {
        if (output_)
            output_->write(bytes);
        if (output_ && bytes.find('\n') != std::string_view::npos)
            output_->flush();
    }
    Result<> finish() { return output_ ? output_->finish() : Result<>(); }

  private:
    std::optional<Output> output_;
};

Result<std::string> read_file(const std::string& path) {
    constexpr size_t most = 16u << 20; // a UART at 115200 Bd takes 20 minutes for it
    const std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::fopen(path.c_str(), "rbe"), std::fclose);
    if (!file)
        return fail("cannot open the console input '{}': {}", path, errno_text(errno));
    std::string bytes;
    char buffer[1 << 16];
    while (const size_t count = std::fread(buffer, 1, sizeof buffer, file.get())) {
        bytes.append(buffer, count);
        if (bytes.size() > most)
            return fail("cannot use the console input '{}': it is larger than {} MiB", path, most >> 20);
    }
    if (std::ferror(file.get()))
        return fail("cannot read the console input '{}': {}", path, errno_text(errno));
    return bytes;
}

/// Writing the trace (`output`, if any) or the console must not destroy what the run reads.
Result<> check_files(const GuestOptions& options, const std::string* output) {
    const auto same = [](const std::string& one, const std::string& other) {
        std::error_code ignored; // one that does not exist is no other one
        return std::filesystem::is_regular_file(one, ignored) && std::filesystem::equivalent(one, other, ignored);
    };
    std::vector<std::pair<const char*, std::string>> read{{"the kernel", options.boot.kernel_path},
                                                          {"the initrd", options.boot.initrd_path},
                                                          {"the console input", options.input}};
    for (const std::string& module : options.boot.modules)
        read.emplace_back("a module", module.substr(0, module.find(' ')));
    for (const auto& [what, path] : read) {
        if (output && same(path, *output))
            return fail("cannot write the trace to '{}': it is {}", *output, what);
        if (same(path, options.console))
            return fail("cannot write the console to '{}': it is {}", options.console, what);
    }
    if (output && (same(options.console, *output) || options.console == *output))
        return fail("cannot write both the console and the trace to '{}'", *output);
    return {};
}

struct OutcomeNames {
    const char* name; // in the trace, and for scripts
    ExitStatus status;
};
OutcomeNames names_of(const RunResult& result) {
    switch (result.outcome) {
    case Outcome::power_off:
        return {"power-off", ExitStatus::success};
    case Outcome::reset:
        return {"reset", ExitStatus::reset};
    case Outcome::guest_exit:
        return {"guest-exit", guest_exit_status(result.code)};
    case Outcome::panic:
        return {"panic", ExitStatus::panic};
    case Outcome::triple_fault:
        return {"triple-fault", ExitStatus::triple_fault};
    case Outcome::hang:
        return {"hang", ExitStatus::hang};
    case Outcome::limit:
        return {"limit", ExitStatus::limit};
    case Outcome::stopped:
        return {"interrupted", ExitStatus::interrupted};
    case Outcome::unsupported:
        return {"unsupported", ExitStatus::unsupported};
    }
    return {"unknown", ExitStatus::failure};
}

/// A first fault of #UD is most often an instruction that this model has not: says which.
std::string detail_of(const RunResult& result, Machine& machine) {
    if (result.outcome != Outcome::triple_fault || result.detail.find(": #UD") == std::string::npos)
        return result.detail;
    return fmt::format("{}; #UD: the CPU '{}' has no such instruction: {}", result.detail, machine.cpu_name(),
                       code_text(machine, result.vcpu));
}

nlohmann::json outcome_json(const RunResult& result, Machine& machine) {
    nlohmann::json json{{"outcome", names_of(result).name},
                        {"instructions", result.instructions},
                        {"time_ns", result.time},
                        {"kernel", machine.guest().version}};
    if (result.outcome == Outcome::guest_exit)
        json["exit_code"] = result.code;
    if (const std::string detail = detail_of(result, machine); !detail.empty())
        json["detail"] = detail;
    return json;
}

/// One run, from options to exit status.
class GuestRun {
  public:
    GuestRun(const GuestOptions& options, const RecordOptions* record)
        : options_(options), record_(record), progress_(!options.quiet) {}

    Result<ExitStatus> run() {
        VTRACE_TRY(check_files(options_, record_ ? &record_->output : nullptr));
        auto console = Console::open(options_.console);
        if (!console)
            return Unexpected(console.error());
        // The machine first: a kernel that can't be loaded must not cost an older trace.
        VTRACE_TRY(make_machine(*console));
        VTRACE_TRY(set_windows());
        if (!options_.quiet)
            fmt::print(stderr, "{}", engine_);
        if (record_) {
            auto recording = Recording::start(record_->output, trace_config(*record_, *machine_),
                                              {.vcpus = options_.vcpus,
                                               .privilege = record_->privilege(),
                                               .windows = has_windows(),
                                               .keep_last = record_->keep_last});
            if (!recording)
                return Unexpected(recording.error());
            recording_ = std::move(*recording);
            machine_->record(recording_->for_vcpus());
        }
        RunResult result;
        {
            StopBySignal stop(*machine_);
            result = machine_->run(options_.limits, [&] { on_progress(); });
        }
        progress_.clear();
        return finish(result, *console);
    }

  private:
    bool has_windows() const { return record_ && record_->windows(); }

    Result<> make_machine(Console& console) {
        std::string input;
        if (!options_.input.empty()) {
            auto bytes = read_file(options_.input);
            if (!bytes)
                return Unexpected(bytes.error());
            input = std::move(*bytes);
        }
        auto config = machine_config(options_);
        if (!config)
            return Unexpected(config.error());
        config->console = [&](std::string_view bytes) {
            progress_.clear();
            console.write(bytes);
            if (recording_ && machine_)
                recording_->console(machine_->clock().now(), bytes);
        };
        config->input = std::move(input);
        config->input_after = options_.input_after;

        const bool native = !record_ || !record_->from.empty();
        if (options_.accel == Accel::kvm && !native)
            return fail("cannot trace all of the run under KVM: say where a window begins (--from), or --accel soft");
        auto engine = choose_engine(options_, native);
        if (!engine)
            return Unexpected(engine.error());
        kvm_ = std::move(engine->kvm);
        config->kvm = kvm_.get();
        auto machine = Machine::create(std::move(*config));
        if (!machine)
            return Unexpected(machine.error());
        machine_ = std::move(*machine);
        if (native)
            engine_ = fmt::format("vtrace: engine: {} ({})\n",
                                  !kvm_ ? "soft" : record_ ? "kvm, and soft in windows" : "kvm", engine->reason);
        return {};
    }

    Result<> set_windows() {
        if (!record_)
            machine_->trace_nothing();
        if (!has_windows())
            return {};
        auto plan = window_plan(*record_, machine_->native());
        if (!plan)
            return Unexpected(plan.error());
        if (plan->from)
            VTRACE_TRY(resolve(*plan->from));
        VTRACE_TRY(resolve(plan->to));
        machine_->trace_windows(std::move(*plan));
        return {};
    }

    /// A symbol's address, from the kernel as it was loaded.
    Result<> resolve(Trigger& trigger) {
        if (trigger.kind != Trigger::Kind::symbol)
            return {};
        if (symbols_.empty()) {
            std::string none;
            if (machine_->guest().kind == KernelKind::linux_as_shipped)
                return fail("cannot look up '{}': a kernel that unpacks itself (--as-shipped) has no symbols before it runs",
                            trigger.text);
            symbols_ = guest_symbols(*machine_, options_.boot.kernel_path, none);
            if (symbols_.empty())
                return fail("cannot look up '{}': {}", trigger.text, none);
        }
        const auto found = std::find_if(symbols_.begin(), symbols_.end(),
                                        [&](const TraceSymbol& symbol) { return symbol.name == trigger.text; });
        if (found == symbols_.end())
            return fail("cannot look up '{}': the kernel has no such symbol", trigger.text);
        trigger = {.kind = Trigger::Kind::address, .text = {}, .value = found->address + trigger.value};
        return {};
    }

    void on_progress() {
        if (recording_ && recording_->failed())
            machine_->request_stop();
        progress_.update({machine_->retired(), recording_ ? recording_->branches() : 0,
                          recording_ ? recording_->bytes_written() : 0, machine_->clock().now()});
    }

    Result<ExitStatus> finish(const RunResult& result, Console& console) {
        const double seconds = progress_.seconds();
        const nlohmann::json outcome = outcome_json(result, *machine_);
        std::string no_symbols;
        const bool flat = machine_->guest().kind == KernelKind::flat;
        if (recording_) {
            std::vector<TraceSymbol> symbols;
            if (!flat)
                symbols = guest_symbols(*machine_, options_.boot.kernel_path, no_symbols);
            if (!symbols.empty())
                no_symbols.clear();
            const Result<> finished = recording_->finish(outcome, std::move(symbols));
            VTRACE_TRY(console.finish());
            if (!finished)
                return Unexpected(finished.error());
        } else {
            VTRACE_TRY(console.finish());
        }
        if (result.outcome == Outcome::triple_fault || result.outcome == Outcome::hang ||
            result.outcome == Outcome::unsupported)
            fmt::print(stderr, "{}Code at RIP: {}\n{}", registers_text(machine_->vcpu(result.vcpu).state()),
                       code_text(*machine_, result.vcpu),
                       record_ ? last_branches_text(record_->output, result.vcpu) : std::string());
        if (!options_.quiet) {
            print_summary(result, outcome, seconds);
            if (!machine_->input_typed())
                fmt::print(stderr, "vtrace: nothing was typed: the console never showed '{}'\n",
                           printable(options_.input_after));
            if (!no_symbols.empty())
                fmt::print(stderr, "vtrace: no symbols: {}\n", no_symbols);
        }
        return names_of(result).status;
    }

    void print_summary(const RunResult& result, const nlohmann::json& outcome, double seconds) {
        std::string line = "vtrace: " + outcome_text(outcome);
        if (result.instructions)
            line += fmt::format("; {} instructions in {:.2f} s", short_count(result.instructions), seconds);
        else
            line += fmt::format("; {:.2f} s", seconds);
        if (result.instructions && !machine_->native())
            line += fmt::format(" ({:.0f} MIPS)", static_cast<double>(result.instructions) / seconds / 1e6);
        if (recording_) {
            const uint64_t branches = recording_->branches(), bytes = recording_->bytes_written();
            if (record_->keep_last)
                line += fmt::format(", {} branches, {}B with the last {} or slightly more in {}", short_count(branches),
                                    short_count(bytes), short_count(record_->keep_last), record_->output);
            else
                line += fmt::format(", {} branches, {}B ({:.3f} bytes a branch) in {}", short_count(branches), short_count(bytes),
                                    branches ? static_cast<double>(bytes) / static_cast<double>(branches) : 0.0,
                                    record_->output);
        }
        fmt::print(stderr, "{}\n", line);
        if (has_windows())
            print_windows();
    }

    void print_windows() {
        const Windows& windows = machine_->windows();
        std::string line = fmt::format("vtrace: {} window{}", windows.count(), windows.count() == 1 ? "" : "s");
        if (windows.open() && record_->to != "end" && !record_->to.empty())
            line += ", the last one open to the end: what should close it never came";
        else if (windows.count() < record_->times && !windows.open())
            line += fmt::format(" of {}: '{}' did not come {}", record_->times, printable(record_->from),
                                windows.count() ? "again" : "at all");
        if (machine_->native()) {
            const auto mean_us = [](const HandOvers::Cost& cost) {
                return cost.count ? static_cast<double>(cost.host_ns) / static_cast<double>(cost.count) / 1e3 : 0.0;
            };
            const HandOvers& costs = machine_->hand_overs();
            line += fmt::format("; a hand-over took {:.0f} us from KVM, {:.0f} us back to it", mean_us(costs.to_soft),
                                mean_us(costs.to_native));
        }
        fmt::print(stderr, "{}\n", line);
    }

    const GuestOptions& options_;
    const RecordOptions* record_;
    Progress progress_;
    std::string engine_; // the line that says which, where there is a choice
    std::vector<TraceSymbol> symbols_; // before the run
    std::unique_ptr<kvm::KvmHost> kvm_; // both outlive the machine, which uses them
    std::unique_ptr<Recording> recording_;
    std::unique_ptr<Machine> machine_;
};

} // namespace

Result<ExitStatus> run_guest(const GuestOptions& options) { return GuestRun(options, nullptr).run(); }
Result<ExitStatus> record_guest(const RecordOptions& options) { return GuestRun(options, &options).run(); }

} // namespace vtrace::cli
