// vtrace record: boots a guest and leaves a trace of every branch that it took.
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
#include "cli/record_options.h"
#include "cli/recording.h"
#include "cli/subcommand.h"
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

/// Writing the trace or the console must not destroy what the run reads.
Result<> check_files(const RecordOptions& options) {
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
        if (same(path, options.output))
            return fail("cannot write the trace to '{}': it is {}", options.output, what);
        if (same(path, options.console))
            return fail("cannot write the console to '{}': it is {}", options.console, what);
    }
    if (same(options.console, options.output) || options.console == options.output)
        return fail("cannot write both the console and the trace to '{}'", options.output);
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
class RecordCommand {
  public:
    explicit RecordCommand(const RecordOptions& options) : options_(options), progress_(!options.quiet) {}

    Result<ExitStatus> run() {
        VTRACE_TRY(check_files(options_));
        auto console = Console::open(options_.console);
        if (!console)
            return Unexpected(console.error());
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
            console->write(bytes);
            if (recording_ && machine_)
                recording_->console(machine_->clock().now(), bytes);
        };
        config->input = std::move(input);
        config->input_after = options_.input_after;

        // The machine first: a kernel that can't be loaded must not cost an older trace.
        auto machine = Machine::create(std::move(*config));
        if (!machine)
            return Unexpected(machine.error());
        machine_ = std::move(*machine);
        auto recording =
            Recording::start(options_.output, trace_config(options_), options_.vcpus, options_.privilege());
        if (!recording)
            return Unexpected(recording.error());
        recording_ = std::move(*recording);
        machine_->record(recording_->for_vcpus());

        RunResult result;
        {
            StopBySignal stop(*machine_);
            result = machine_->run(options_.limits, [&] { on_progress(); });
        }
        progress_.clear();
        return finish(result, *console);
    }

  private:
    void on_progress() {
        if (recording_->failed())
            machine_->request_stop();
        progress_.update(
            {machine_->retired(), recording_->branches(), recording_->bytes_written(), machine_->clock().now()});
    }

    Result<ExitStatus> finish(const RunResult& result, Console& console) {
        machine_->drain_records();
        const double seconds = progress_.seconds();
        std::string no_symbols;
        const bool flat = machine_->guest().kind == KernelKind::flat;
        std::vector<TraceSymbol> symbols;
        if (!flat)
            symbols = guest_symbols(*machine_, options_.boot.kernel_path, no_symbols);
        const bool any_symbols = !symbols.empty();
        const nlohmann::json outcome = outcome_json(result, *machine_);
        const Result<> finished = recording_->finish(outcome, std::move(symbols));
        VTRACE_TRY(console.finish());
        if (!finished)
            return Unexpected(finished.error());

        if (result.outcome == Outcome::triple_fault || result.outcome == Outcome::hang ||
            result.outcome == Outcome::unsupported)
            fmt::print(stderr, "{}Code at RIP: {}\n{}", registers_text(machine_->vcpu(result.vcpu).state()),
                       code_text(*machine_, result.vcpu), last_branches_text(options_.output, result.vcpu));
        if (!options_.quiet) {
            const uint64_t branches = recording_->branches(), bytes = recording_->bytes_written();
            fmt::print(stderr,
                       "vtrace: {}; {} instructions in {:.2f} s ({:.0f} MIPS), {} branches, {}B ({:.3f} bytes a "
                       "branch) in {}\n",
                       outcome_text(outcome), short_count(result.instructions), seconds,
                       static_cast<double>(result.instructions) / seconds / 1e6, short_count(branches),
                       short_count(bytes), branches ? static_cast<double>(bytes) / static_cast<double>(branches) : 0.0,
                       options_.output);
            if (!machine_->input_typed())
                fmt::print(stderr, "vtrace: nothing was typed: the console never showed '{}'\n",
                           printable(options_.input_after));
            if (!any_symbols && !flat)
                fmt::print(stderr, "vtrace: no symbols: {}\n", no_symbols);
        }
        return names_of(result).status;
    }

    const RecordOptions& options_;
    Progress progress_;
    std::unique_ptr<Recording> recording_; // outlives the machine, which appends to it
    std::unique_ptr<Machine> machine_;
};

} // namespace

Action define_record(CLI::App& app) {
    auto options = std::make_shared<RecordOptions>();
    add_record_options(app, *options);
    return [options, &app]() -> Result<ExitStatus> {
        options->flat_load_given = app.count("--flat-load") > 0;
        options->flat_entry_given = app.count("--flat-entry") > 0;
        return RecordCommand(*options).run();
    };
}

} // namespace vtrace::cli
