// The options of `vtrace record`, as parsed.
#pragma once

#include <cstdint>
#include <string>

#include <CLI/CLI.hpp>

#include "cli/recording.h"
#include "vmm/machine.h"

namespace vtrace::cli {

struct RecordOptions {
    BootOptions boot;
    std::string flat_mode; // empty, "16", "32" or "64"
    uint64_t flat_load_address = 0, flat_entry = 0;
    std::string protocol = "auto";
    uint64_t memory = 512ull << 20;
    unsigned vcpus = 1;
    std::string cpu = "atom";
    std::string output = "vtrace.vtr";
    std::string console = "-";
    std::string input;
    std::string input_after;
    RunLimits limits;
    bool kernel_only = false, user_only = false;
    bool quiet = false;

    Privilege privilege() const {
        return kernel_only ? Privilege::kernel_only : user_only ? Privilege::user_only : Privilege::all;
    }
    bool flat_load_given = false, flat_entry_given = false;
};

void add_record_options(CLI::App& app, RecordOptions& options);

/// The machine that the options describe. Errors: an unknown CPU model or number that makes no sense.
Result<MachineConfig> machine_config(const RecordOptions& options);

/// The configuration chunk of the trace: what the machine is and runs. Nothing in it depends on the host, on the time or
/// on the folder that the files are in.
nlohmann::json trace_config(const RecordOptions& options);

} // namespace vtrace::cli
