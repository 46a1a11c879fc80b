// The vtrace command: finds the subcommand, parses its options, prints its error.
#include <csignal>
#include <cstdio>
#include <vector>

#include <CLI/CLI.hpp>
#include <fmt/format.h>

#include "cli/exit_status.h"
#include "cli/subcommand.h"

namespace vtrace::cli {
namespace {

constexpr Subcommand subcommands[] = {
    {"record", "Boot a guest and record every taken branch", define_record},
    {"run", "Boot a guest and record nothing, natively where there is KVM", define_run},
    {"verify", "Execute a guest on both engines, and compare them after each instruction", define_verify},
    {"report", "Say where the guest went: functions, edges, interrupts, syscalls", define_report},
    {"dump", "Print branches, a line each", define_dump},
    {"export", "Turn a trace into the files of other tools: flame graphs, callgrind, JSON lines ...", define_export},
    {"diff", "Compare two traces: where they part, and what changed", define_diff},
    {"info", "Describe a trace file: what is in it, and what is missing", define_info},
    {"cpus", "List the processor models a guest can have, with what each has of the Debug Store", define_cpus},
    {"check", "Say what this host offers, and what vtrace will do with it", define_check},
};

/// One line, as every error of vtrace.
int print_error(std::string_view message, ExitStatus status) {
    fmt::print(stderr, "vtrace: {}\n", message);
    return static_cast<int>(status);
}

int run(int argc, char** argv) {
    CLI::App app("vtrace runs an unmodified guest and records every taken branch that it executes.", "vtrace");
    app.set_version_flag("--version", std::string("vtrace ") + VTRACE_VERSION);
    app.require_subcommand(1);
    app.footer("'vtrace COMMAND --help' describes the options of a command.");

    std::vector<std::pair<CLI::App*, Action>> actions;
    for (const Subcommand& subcommand : subcommands) {
        CLI::App* sub = app.add_subcommand(subcommand.name, subcommand.summary);
        actions.emplace_back(sub, subcommand.define(*sub));
    }
    try {
        app.parse(argc, argv);
    } catch (const CLI::ParseError& error) {
        if (error.get_exit_code() == 0) // --help, --version
            return app.exit(error);
        const auto chosen = app.get_subcommands();
        const std::string command = chosen.empty() ? "vtrace" : "vtrace " + chosen.front()->get_name();
        return print_error(fmt::format("{} (see '{} --help')", error.what(), command), ExitStatus::usage);
    }
    for (const auto& [sub, action] : actions)
        if (sub->parsed()) {
            Result<ExitStatus> status = action();
            return status ? static_cast<int>(*status) : print_error(status.error().message, ExitStatus::failure);
        }
    return static_cast<int>(ExitStatus::usage);
}

} // namespace
} // namespace vtrace::cli

int main(int argc, char** argv) {
    // A reader that goes away is told by write(2) instead: see cli/output.h.
    std::signal(SIGPIPE, SIG_IGN);
    return vtrace::cli::run(argc, argv);
}
