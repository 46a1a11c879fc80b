#include "decode/diff.h"

#include <algorithm>
#include <map>
#include <utility>

#include "decode/analysis_edges.h"
#include "decode/analysis_report.h"
#include "decode/diff_stream.h"

namespace vtrace {
namespace {

constexpr size_t block = 1 << 17; // branches of each stream that are compared at a time

bool same_symbols(const SymbolTable& a, const SymbolTable& b) {
    return std::equal(a.functions().begin(), a.functions().end(), b.functions().begin(), b.functions().end(),
                      [](const Function& x, const Function& y) {
                          return x.address == y.address && x.name == y.name && x.module == y.module;
                      });
}

bool compares_by_symbol(DiffBy by, const SymbolTable& a, const SymbolTable& b) {
    if (by == DiffBy::automatic)
        return !a.empty() && !b.empty() && !same_symbols(a, b);
    return by == DiffBy::symbol;
}

/// How many branches both windows have in common from their start on.
size_t common_prefix(const KeyStream& a, const KeyStream& b) {
    const auto keys_a = a.keys(), keys_b = b.keys();
    const auto end = std::mismatch(keys_a.begin(), keys_a.end(), keys_b.begin(), keys_b.end());
    return static_cast<size_t>(end.first - keys_a.begin());
}

bool wants_more(const KeyStream& stream) { return stream.size() == 0 && !stream.ended(); }

VcpuDiff diff_vcpu(unsigned vcpu, KeyStream a, KeyStream b, size_t top) {
    VcpuDiff diff;
    diff.vcpu = vcpu;
    for (;;) {
        // Only once there is nothing left to compare: where differences are many, windows are not to be moved for each.
        if (wants_more(a) || wants_more(b))
            fill_both(a, b, block);
        const size_t common = common_prefix(a, b);
        a.drop(common);
        b.drop(common);
        diff.common += common;
        if (wants_more(a) || wants_more(b))
            continue;
        if (a.size() == 0 && b.size() == 0)
            return diff;
        Difference difference{a.number(), 0, b.number(), 0};
        // Where one stream is over, the rest of the other is the difference, however long.
        const bool over = a.size() == 0 || b.size() == 0;
        const auto alignment = over ? std::nullopt : align(a, b);
        if (alignment) {
            difference.count_a = alignment->drop_a;
            difference.count_b = alignment->drop_b;
            a.drop(alignment->drop_a);
            b.drop(alignment->drop_b);
        } else {
            diff.aligned = over;
            difference.count_a = a.drain();
            difference.count_b = b.drain();
        }
        ++diff.differences;
        if (diff.listed.size() < std::max<size_t>(top, 1)) // the first is told in any case
            diff.listed.push_back(difference);
        if (!alignment)
            return diff;
    }
}

uint64_t stream_branches(const TraceReader& reader, unsigned vcpu) {
    return vcpu < reader.vcpus() ? reader.info().vcpus[vcpu].branches : 0;
}

using FunctionKey = std::pair<std::string, std::string>; // name and module
using Counts = std::map<FunctionKey, FunctionDiff>;

/// Adds one recording's counts; static functions of one name are counted as one.
Result<> add_counts(const TraceReader& reader, const SymbolTable& symbols, std::optional<unsigned> cpu,
                    uint64_t FunctionDiff::*branches, uint64_t FunctionDiff::*entries, Counts& counts) {
    if (cpu && *cpu >= reader.vcpus())
        return {};
    EdgeOptions options;
    options.vcpu = cpu;
    auto edges = count_edges(reader, options);
    if (!edges)
        return Unexpected(std::move(edges.error()));
    for (const FunctionCount& count : count_functions(*edges, symbols)) {
        FunctionDiff& diff = counts[{count.place.name, count.place.module}];
        diff.name = count.place.name;
        diff.module = count.place.module;
        diff.*branches += count.branches;
        diff.*entries += count.entries;
    }
    return {};
}

uint64_t distance(uint64_t a, uint64_t b) { return a > b ? a - b : b - a; }

uint64_t change(const FunctionDiff& diff) { return distance(diff.branches_a, diff.branches_b); }

/// Highest first by what changed; ties by name, which the map gave.
void keep_top(std::vector<FunctionDiff>& list, size_t top) {
    std::stable_sort(list.begin(), list.end(),
                     [](const FunctionDiff& x, const FunctionDiff& y) { return change(x) > change(y); });
    if (list.size() > top)
        list.resize(top);
}

} // namespace

bool TraceDiff::same() const {
    return std::all_of(vcpus.begin(), vcpus.end(), [](const VcpuDiff& vcpu) { return vcpu.differences == 0; });
}

Result<TraceDiff> diff_traces(const TraceReader& a, const SymbolTable& symbols_a, const TraceReader& b,
                              const SymbolTable& symbols_b, const DiffOptions& options) {
    const unsigned vcpus = std::max(a.vcpus(), b.vcpus());
    if (options.cpu && *options.cpu >= vcpus)
        return fail("neither recording has a vCPU {}: they have {} and {}, counted from 0", *options.cpu, a.vcpus(),
                    b.vcpus());
    TraceDiff diff;
    diff.by_symbol = compares_by_symbol(options.by, symbols_a, symbols_b);
    const unsigned first = options.cpu.value_or(0), end = options.cpu ? first + 1 : vcpus;
    for (unsigned vcpu = first; vcpu < end; ++vcpu) {
        VcpuDiff entry = diff_vcpu(vcpu, KeyStream(a, vcpu, diff.by_symbol ? &symbols_a : nullptr),
                                   KeyStream(b, vcpu, diff.by_symbol ? &symbols_b : nullptr), options.top);
        entry.branches_a = stream_branches(a, vcpu);
        entry.branches_b = stream_branches(b, vcpu);
        diff.vcpus.push_back(std::move(entry));
    }
    if (diff.same())
        return diff;

    Counts counts;
    VTRACE_TRY(add_counts(a, symbols_a, options.cpu, &FunctionDiff::branches_a, &FunctionDiff::entries_a, counts));
    VTRACE_TRY(add_counts(b, symbols_b, options.cpu, &FunctionDiff::branches_b, &FunctionDiff::entries_b, counts));
    for (auto& [key, function] : counts) {
        const bool in_a = function.branches_a || function.entries_a, in_b = function.branches_b || function.entries_b;
        if (in_a && !in_b)
            diff.only_a.push_back(std::move(function));
        else if (in_b && !in_a)
            diff.only_b.push_back(std::move(function));
        else if (function.branches_a != function.branches_b || function.entries_a != function.entries_b)
            diff.changed.push_back(std::move(function));
    }
    diff.only_a_count = diff.only_a.size();
    diff.only_b_count = diff.only_b.size();
    diff.changed_count = diff.changed.size();
    keep_top(diff.only_a, options.top);
    keep_top(diff.only_b, options.top);
    keep_top(diff.changed, options.top);
    return diff;
}

} // namespace vtrace
