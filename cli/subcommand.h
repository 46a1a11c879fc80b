// A subcommand: one file that holds its options, their help, and what it does.
#pragma once

#include <functional>
#include <string_view>

#include <CLI/CLI.hpp>

#include "cli/exit_status.h"
#include "ds/result.h"

namespace vtrace::cli {

/// What to do once the options are parsed. An Error is printed as "vtrace: ..." and ends with ExitStatus::failure.
using Action = std::function<Result<ExitStatus>()>;

struct Subcommand {
    const char* name;
    const char* summary; // a line of `vtrace --help`
    /// Adds options to `app`. Called once; the Action may hold what they are parsed into.
    Action (*define)(CLI::App& app);
};

Action define_check(CLI::App& app);
Action define_cpus(CLI::App& app);
Action define_diff(CLI::App& app);
Action define_dump(CLI::App& app);
Action define_export(CLI::App& app);
Action define_info(CLI::App& app);
Action define_record(CLI::App& app);
Action define_report(CLI::App& app);
Action define_run(CLI::App& app);
Action define_verify(CLI::App& app);

} // namespace vtrace::cli
