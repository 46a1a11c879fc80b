// The windows of a trace: the parts of a run that were recorded.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "decode/trace_reader.h"
#include "ds/result.h"

namespace vtrace {

/// One vCPU's part of one window.
struct TraceWindow {
    uint64_t number = 0; // from 1
    unsigned vcpu = 0;
    uint64_t first = 0, last = 0;                     // its branches, by number: [first, last)
    std::optional<uint64_t> begin_address;            // of the first instruction; nullopt: the begin was not kept
    std::optional<uint64_t> end_address;              // of the one after the last; nullopt: the recording ends within it
    std::optional<uint64_t> begin_time, end_time;     // virtual ns; nullopt: as the addresses
};

/// Ascending by number, then by vCPU; empty where all of the run was recorded. Decodes the whole trace: as fast as a
/// report. Damaged chunks are left out and told in reader.damage(). Errors: as TraceReader::map_chunks().
Result<std::vector<TraceWindow>> find_windows(const TraceReader& reader);

} // namespace vtrace
