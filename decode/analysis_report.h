// The report: where a guest went, as numbers. cli/report.cc puts it into words.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "decode/analysis_edges.h"
#include "decode/symbols.h"
#include "decode/trace_reader.h"
#include "ds/result.h"

namespace vtrace {

struct ReportOptions {
    EdgeOptions edges;
    size_t top = 20;           // functions, edges and handlers in each list
    size_t console_lines = 10; // from the end
};

/// Code as the report names it: a function, or all code of one sort that has no symbol.
struct CodePlace {
    std::string name; // "memcpy", or "[user]", "[kernel]", "[boot]" for code without a symbol
    std::string module;
    uint64_t address = 0; // of the function; 0 for code without a symbol
};

struct FunctionCount {
    CodePlace place;
    uint64_t branches = 0; // executed inside
    uint64_t entries = 0;  // branches from elsewhere, and calls from anywhere, to its first instruction
};

struct NamedEdge {
    Edge edge;
    std::string from, to; // "name+0x12"; for user code and code without a symbol "0x401000"
};

/// Interrupts or exceptions of one vector.
struct VectorCount {
    uint8_t vector = 0;
    uint64_t kernel = 0; // interrupted the kernel
    uint64_t user = 0;
    std::string name;    // "#PF"; empty for interrupts
    std::string handler; // where most of them went; empty where that has no symbol
};

struct HandlerCount {
    std::string name; // "__x64_sys_read"
    uint64_t entries = 0;
};

struct VcpuTime {
    unsigned vcpu = 0;
    uint64_t branches = 0;
    uint64_t first_time = 0, last_time = 0; // virtual ns
    uint64_t retired = 0;                   // instructions, at last_time
};

struct Report {
    uint64_t branches = 0; // that were counted: within the range and the filter
    uint64_t kernel = 0, user = 0;
    std::array<std::array<uint64_t, branch_classes>, 2> classes{}; // [Privilege][BranchClass]
    std::vector<FunctionCount> by_branches, by_entries;            // at most `top`, highest first
    size_t functions_seen = 0;                                     // functions that were executed
    std::vector<NamedEdge> edges;                                  // at most `top`, highest first
    size_t edges_seen = 0;
    std::vector<VectorCount> interrupts, exceptions; // ascending by vector
    uint64_t syscalls = 0;                           // SYSCALL, SYSENTER and INT 80h out of user code
    std::vector<HandlerCount> syscall_handlers;      // at most `top`, highest first

    // Of the whole file, whatever the range.
    std::vector<VcpuTime> time;
    size_t windows = 0; // that it has, or had before old branches were dropped; 0: a recording of all of the run
    uint64_t dropped = 0; // branches recorded before those that are there, and not kept
    size_t symbols = 0;
    bool complete = false;
    std::optional<nlohmann::json> outcome;
    std::vector<std::string> console;  // lines, control characters made harmless
    std::vector<std::string> warnings; // of the reader, and what it met while counting
};

/// Errors: as count_edges(). Missing symbols, outcome or console are no errors, but warnings.
Result<Report> make_report(const TraceReader& reader, const ReportOptions& options);

/// Counts of functions out of edges, in no particular order. Public for other analyses.
std::vector<FunctionCount> count_functions(const std::vector<Edge>& edges, const SymbolTable& symbols);

} // namespace vtrace
