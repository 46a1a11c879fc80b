// Where two recordings part, and what changed: for the good run and the bad run.
//
// Two streams are the same where their branches are: from, to, kind and vector. Addresses are compared as they are, or,
// for kernels that lie elsewhere (KASLR) or were built anew, as function and offset. After a difference both streams are
// read on until the same `diff_anchor` branches follow in both; the nearest such place counts. That takes bounded
// memory, however long the recordings are: a difference longer than `diff_window` branches ends the comparison.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "decode/symbols.h"
#include "decode/trace_reader.h"
#include "ds/result.h"

namespace vtrace {

inline constexpr size_t diff_anchor = 32;      // branches that must agree for two streams to be aligned again
inline constexpr size_t diff_window = 1 << 18; // branches of each stream that are searched for it

enum class DiffBy : uint8_t {
    automatic, // addresses where both recordings have the same symbols at the same addresses, or one has none
    address,
    symbol, // function and offset; code without a symbol by its address
};

struct DiffOptions {
    DiffBy by = DiffBy::automatic;
    std::optional<unsigned> cpu; // only this vCPU
    size_t top = 20;             // entries in each list
};

/// A stretch of one stream against a stretch of the other. Either may be empty: then the other was inserted there.
struct Difference {
    uint64_t number_a = 0, count_a = 0; // number of the first branch, branches
    uint64_t number_b = 0, count_b = 0;
};

struct VcpuDiff {
    unsigned vcpu = 0;
    uint64_t branches_a = 0, branches_b = 0; // of the whole stream; 0 where a recording has no such vCPU
    uint64_t common = 0;                     // branches found in both, in order
    uint64_t differences = 0;
    std::vector<Difference> listed; // the first `top` of them
    bool aligned = true; // false: the last difference did not end within diff_window, what follows is not compared
};

/// Branches executed inside a function and entries to it, in each recording; `name` may be "[user]" and the like.
struct FunctionDiff {
    std::string name, module;
    uint64_t branches_a = 0, branches_b = 0;
    uint64_t entries_a = 0, entries_b = 0;
};

struct TraceDiff {
    bool by_symbol = false;
    std::vector<VcpuDiff> vcpus;
    // Empty where the recordings are the same. At most `top` each, those with most branches, or most changed, first.
    std::vector<FunctionDiff> only_a, only_b, changed;
    size_t only_a_count = 0, only_b_count = 0, changed_count = 0;

    bool same() const;
};

/// Compares all vCPUs, or one. Damaged chunks are passed over and told in damage() of the reader concerned: differences
/// are then not to be trusted. Errors: a vCPU that neither recording has; as count_edges().
Result<TraceDiff> diff_traces(const TraceReader& a, const SymbolTable& symbols_a, const TraceReader& b,
                              const SymbolTable& symbols_b, const DiffOptions& options);

} // namespace vtrace
