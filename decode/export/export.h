// Exports: a trace as the files that other people's tools read.
//
// Each export streams: whatever the length of the trace, memory stays bounded. vCPUs come one after the other. Numbers
// count what `vtrace dump` of the same range prints.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "decode/code_names.h"
#include "decode/privilege.h"
#include "decode/trace_reader.h"
#include "ds/result.h"

namespace vtrace {

/// Where an export goes.
class ExportSink {
  public:
    virtual ~ExportSink() = default;
    virtual void write(std::string_view bytes) = 0;
    /// Nothing more is of use: an export may stop.
    virtual bool closed() const = 0;
};

/// What to export. The reader and the tables must outlive the export.
struct ExportSource {
    const TraceReader& reader;
    const SymbolTable& symbols;            // of the trace
    const SymbolTable& user_symbols;       // of a program that was named; may be empty
    std::optional<unsigned> vcpu;          // nullopt: all
    uint64_t first = 0, last = UINT64_MAX; // branch numbers [first, last) of each vCPU

    unsigned first_vcpu() const { return vcpu.value_or(0); }
    unsigned end_vcpu() const { return vcpu ? *vcpu + 1 : reader.vcpus(); }
};

/// What a user should know about an export that was made, one line each.
using ExportNotes = std::vector<std::string>;

enum class StackWeight : uint8_t { branches, instructions };

/// One JSON object a line for each branch; docs/branch.schema.json describes it.
Result<ExportNotes> export_jsonl(const ExportSource& source, ExportSink& sink);
/// "a;b;c 123" a line for each call stack, as flamegraph.pl, speedscope and inferno read them.
Result<ExportNotes> export_folded(const ExportSource& source, StackWeight weight, ExportSink& sink);
/// Callgrind's profile format, as callgrind_annotate and KCachegrind read it.
Result<ExportNotes> export_callgrind(const ExportSource& source, ExportSink& sink);
/// Chrome's trace events as JSON: a timeline of functions, interrupts and console lines for ui.perfetto.dev.
Result<ExportNotes> export_chrome(const ExportSource& source, ExportSink& sink);
/// drcov, version 2: blocks executed, with kernel, modules and user programs as modules.
Result<ExportNotes> export_drcov(const ExportSource& source, ExportSink& sink);
/// lcov's tracefile for genhtml: lines and functions of the ELF file `elf`, by its DWARF. Errors: as
/// SourceLines::read().
Result<ExportNotes> export_lcov(const ExportSource& source, const std::string& elf, ExportSink& sink);
/// CSV in zstd, one row a branch: docs/exports.md has the columns.
Result<ExportNotes> export_columns(const ExportSource& source, ExportSink& sink);
/// perf.data at `path`, with intel_bts AUX data, and beside it the code that perf looks at: path.vmlinux for the
/// kernel's, path.PID for that under each page table. Code that changed in between is there as it was first executed.
/// Errors: a file cannot be written.
Result<ExportNotes> export_perf(const ExportSource& source, const std::string& path);

} // namespace vtrace
