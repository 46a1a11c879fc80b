#include "decode/analysis_report.h"

#include <algorithm>
#include <map>
#include <set>
#include <tuple>
#include <unordered_map>

#include "decode/text.h"

namespace vtrace {
namespace {

constexpr uint8_t linux_syscall_vector = 0x80;

/// User code has symbols of its own programs, which a trace does not hold: those of the kernel must not answer for it.
std::optional<SymbolTable::Index> find_code(const SymbolTable& symbols, uint64_t address, Privilege privilege) {
    return privilege == Privilege::user ? std::nullopt : symbols.find(address);
}

std::string describe(const SymbolTable& symbols, uint64_t address, Privilege privilege) {
    return privilege == Privilege::user ? fmt::format("{:#x}", address) : symbols.describe(address);
}

/// Is this a function that the kernel's syscall table leads to? (arch/x86/include/asm/syscall_wrapper.h)
bool is_syscall_handler(std::string_view name) {
    return name.starts_with("__x64_sys_") || name.starts_with("__ia32_sys_") || name.starts_with("__x64_compat_sys_") ||
           name.starts_with("__ia32_compat_sys_");
}

/// Does this edge enter the function at its destination, rather than loop back to its first instruction?
bool enters_function(const Edge& edge, bool same_function) {
    return !same_function || is_call(edge.branch_class);
}

bool is_syscall(const Edge& edge) {
    if (edge.privilege != Privilege::user)
        return false;
    return edge.branch_class == BranchClass::syscall || edge.branch_class == BranchClass::sysenter ||
           (edge.branch_class == BranchClass::int_n && edge.vector == linux_syscall_vector);
}

std::vector<VectorCount> count_vectors(const std::vector<Edge>& edges, const SymbolTable& symbols, BranchClass which) {
    std::map<uint8_t, VectorCount> vectors;
    std::map<uint8_t, std::map<std::string, uint64_t>> handlers;
    for (const Edge& edge : edges) {
        if (edge.branch_class != which)
            continue;
        VectorCount& count = vectors[edge.vector];
        count.vector = edge.vector;
        (edge.privilege == Privilege::user ? count.user : count.kernel) += edge.count;
        if (auto function = find_code(symbols, edge.to, edge.to_privilege))
            handlers[edge.vector][symbols[*function].name] += edge.count;
    }
    std::vector<VectorCount> result;
    for (auto& [vector, count] : vectors) {
        uint64_t most = 0;
        for (const auto& [name, times] : handlers[vector])
            if (times > most) {
                most = times;
                count.handler = name;
            }
        if (which == BranchClass::exception || vector == 2) // NMI is delivered as an interrupt
            count.name = exception_name(vector);
        result.push_back(count);
    }
    return result;
}

/// Keeps the `top` highest by `key`, ties by name and address; drops what counts 0.
template <class Key>
std::vector<FunctionCount> highest(const std::vector<FunctionCount>& functions, size_t top, Key key) {
    std::vector<FunctionCount> sorted;
    std::copy_if(functions.begin(), functions.end(), std::back_inserter(sorted),
                 [&](const FunctionCount& function) { return key(function) != 0; });
    std::sort(sorted.begin(), sorted.end(), [&](const FunctionCount& a, const FunctionCount& b) {
        return std::tuple(key(b), std::string_view(a.place.name), a.place.address) <
               std::tuple(key(a), std::string_view(b.place.name), b.place.address);
    });
    if (sorted.size() > top)
        sorted.resize(top);
    return sorted;
}

std::vector<HandlerCount> count_handlers(const std::vector<FunctionCount>& functions, size_t top) {
    std::map<std::string, uint64_t> entries; // several functions may have one name
    for (const FunctionCount& function : functions)
        if (function.entries && is_syscall_handler(function.place.name))
            entries[function.place.name] += function.entries;
    std::vector<HandlerCount> handlers;
    for (const auto& [name, count] : entries)
        handlers.push_back({name, count});
    std::stable_sort(handlers.begin(), handlers.end(),
                     [](const HandlerCount& a, const HandlerCount& b) { return a.entries > b.entries; });
    if (handlers.size() > top)
        handlers.resize(top);
    return handlers;
}

void add_file_facts(const TraceReader& reader, const ReportOptions& options, Report& report) {
    const TraceInfo& info = reader.info();
    report.complete = info.complete;
    std::set<uint64_t> windows;
    for (const WindowBegin& begin : reader.window_begins())
        windows.insert(begin.number);
    report.windows = windows.size();
    for (unsigned vcpu = 0; vcpu < info.vcpus.size(); ++vcpu) {
        const StreamInfo& stream = info.vcpus[vcpu];
        report.dropped += stream.dropped;
        report.time.push_back({vcpu, stream.branches, stream.first_time, stream.last_time, stream.last_retired});
    }
    if (auto outcome = reader.outcome())
        report.outcome = std::move(*outcome);
    if (auto console = reader.console()) {
        std::string text;
        for (const auto& piece : *console)
            text += piece.bytes;
        report.console = last_lines(text, options.console_lines);
    } else {
        report.warnings.push_back(console.error().message);
    }
    report.warnings.insert(report.warnings.end(), info.warnings.begin(), info.warnings.end());
    for (std::string& line : reader.damage())
        report.warnings.push_back(std::move(line));
}

} // namespace

std::vector<FunctionCount> count_functions(const std::vector<Edge>& edges, const SymbolTable& symbols) {
    struct Count {
        uint64_t branches = 0, entries = 0;
    };
    std::vector<Count> counts(symbols.functions().size());
    Count user, kernel, low; // code without a symbol
    auto nameless = [&](uint64_t address, Privilege privilege) -> Count& {
        return privilege == Privilege::user ? user : upper_half(address) ? kernel : low;
    };
    for (const Edge& edge : edges) {
        auto from = find_code(symbols, edge.from, edge.privilege), to = find_code(symbols, edge.to, edge.to_privilege);
        Count& inside = from ? counts[*from] : nameless(edge.from, edge.privilege);
        inside.branches += edge.count;
        if (to && symbols[*to].address == edge.to && enters_function(edge, from == to))
            counts[*to].entries += edge.count;
        if (Count& target = nameless(edge.to, edge.to_privilege); !to && &target != &inside)
            target.entries += edge.count;
    }
    std::vector<FunctionCount> result;
    for (size_t i = 0; i < counts.size(); ++i)
        if (counts[i].branches || counts[i].entries) {
            const Function& function = symbols.functions()[i];
            result.push_back(
                {{function.name, function.module, function.address}, counts[i].branches, counts[i].entries});
        }
    for (auto& [name, count] : {std::pair("[user]", &user), std::pair("[kernel]", &kernel), std::pair("[boot]", &low)})
        if (count->branches || count->entries)
            result.push_back({{name, {}, 0}, count->branches, count->entries});
    return result;
}

Result<Report> make_report(const TraceReader& reader, const ReportOptions& options) {
    Report report;
    SymbolTable symbols;
    if (auto list = reader.symbols()) {
        report.symbols = list->size();
        symbols = SymbolTable(std::move(*list));
    } else {
        report.warnings.push_back(list.error().message);
    }
    auto edges = count_edges(reader, options.edges);
    if (!edges)
        return Unexpected(std::move(edges.error()));

    for (const Edge& edge : *edges) {
        report.branches += edge.count;
        (edge.privilege == Privilege::user ? report.user : report.kernel) += edge.count;
        report.classes[static_cast<size_t>(edge.privilege)][static_cast<size_t>(edge.branch_class)] += edge.count;
        if (is_syscall(edge))
            report.syscalls += edge.count;
    }
    report.edges_seen = edges->size();
    for (size_t i = 0; i < std::min(options.top, edges->size()); ++i) {
        const Edge& edge = (*edges)[i];
        report.edges.push_back(
            {edge, describe(symbols, edge.from, edge.privilege), describe(symbols, edge.to, edge.to_privilege)});
    }
    std::vector<FunctionCount> functions = count_functions(*edges, symbols);
    report.functions_seen = static_cast<size_t>(
        std::count_if(functions.begin(), functions.end(), [](const auto& f) { return f.place.address != 0; }));
    report.by_branches = highest(functions, options.top, [](const FunctionCount& f) { return f.branches; });
    // What has no symbol has no start that could be entered.
    std::erase_if(functions, [](const FunctionCount& function) { return function.place.address == 0; });
    report.by_entries = highest(functions, options.top, [](const FunctionCount& f) { return f.entries; });
    report.syscall_handlers = count_handlers(functions, options.top);
    report.interrupts = count_vectors(*edges, symbols, BranchClass::interrupt);
    report.exceptions = count_vectors(*edges, symbols, BranchClass::exception);
    add_file_facts(reader, options, report);
    return report;
}

} // namespace vtrace
