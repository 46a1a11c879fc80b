// What report, dump and info have in common: the trace's path, and which branches.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <CLI/CLI.hpp>

#include "decode/privilege.h"
#include "decode/trace_reader.h"
#include "ds/result.h"

namespace vtrace::cli {

/// Which part of a trace to look at, as its options say.
struct TraceSelection {
    std::string path;
    std::optional<unsigned> cpu;
    std::optional<uint64_t> from, to; // branch numbers, [from, to)
    std::optional<uint64_t> window;
    bool kernel_only = false, user_only = false;

    /// Adds FILE, --cpu, --from and --to.
    void add_range(CLI::App& app);
    /// Adds those, --window, --kernel-only and --user-only.
    void add_options(CLI::App& app);
    PrivilegeFilter filter() const;
    /// Opens the file. Errors: as TraceReader::open(); a --cpu that the trace does not have; --from above --to.
    Result<TraceReader> open() const;
    /// The branches [first, last) of --window, by vCPU; empty without --window. Error: the trace has no such window.
    Result<std::vector<std::pair<uint64_t, uint64_t>>> window_ranges(const TraceReader& reader) const;
};

/// Adds the positional FILE alone.
void add_trace_path(CLI::App& app, std::string& path);

} // namespace vtrace::cli
