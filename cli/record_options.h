// The options of `vtrace record`, as parsed.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include <CLI/CLI.hpp>

#include "cli/guest_options.h"
#include "cli/recording.h"
#include "vmm/trigger.h"

namespace vtrace::cli {

struct RecordOptions : GuestOptions {
    std::string output = "vtrace.vtr";
    bool kernel_only = false, user_only = false;
    std::string from, to; // SPECs of Trigger; empty: from the start, to the end
    uint64_t times = 1;
    uint64_t keep_last = 0; // branches; 0: all

    Privilege privilege() const {
        return kernel_only ? Privilege::kernel_only : user_only ? Privilege::user_only : Privilege::all;
    }
    bool windows() const { return !from.empty() || !to.empty(); }
};

void add_record_options(CLI::App& app, RecordOptions& options);

/// The windows of options.windows(), their symbols not yet looked up. Error: a SPEC that means nothing, or can't be had
/// under `native` execution.
Result<WindowPlan> window_plan(const RecordOptions& options, bool native);

/// The configuration chunk of the trace: what the machine is and runs, and what is traced.
nlohmann::json trace_config(const RecordOptions& options, const Machine& machine);

} // namespace vtrace::cli
