// Counting a trace's edges: each (from, to) pair once, with how often it was taken and what kind of branch it is.
//
// All that a report says follows from these counts, so that symbols are looked up once an edge and not once a branch.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "decode/classify.h"
#include "decode/privilege.h"
#include "decode/trace_reader.h"
#include "ds/result.h"

namespace vtrace {

struct Edge {
    uint64_t from = 0;
    uint64_t to = 0;
    uint64_t count = 0;
    BranchClass branch_class = BranchClass::unknown;
    uint8_t vector = 0;                         // interrupts, exceptions, INT n
    Privilege privilege = Privilege::kernel;    // of `from`
    Privilege to_privilege = Privilege::kernel; // of `to`
};

struct EdgeOptions {
    std::optional<unsigned> vcpu; // nullopt: all
    uint64_t first = 0;           // branch numbers [first, last) of each vCPU
    uint64_t last = UINT64_MAX;
    PrivilegeFilter filter = PrivilegeFilter::all; // by privilege of `from`
    unsigned threads = 0;                          // 0: one for each processor
    /// By vCPU, of these only [first, last); empty: no further bound.
    std::vector<std::pair<uint64_t, uint64_t>> ranges = {};
};

/// The edges, most taken first; ties ascending by (from, to). Deterministic, whatever the threads.
///
/// An edge that was of several classes (code that changed between) counts as one edge for each, as closely as one look
/// at the code in each chunk of the file tells. Damaged chunks are left out and told in reader.damage().
/// Memory: 40 bytes an edge, and two decoded chunks a thread. Errors: as TraceReader::map_chunks().
Result<std::vector<Edge>> count_edges(const TraceReader& reader, const EdgeOptions& options = {});

} // namespace vtrace
