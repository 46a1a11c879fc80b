// One record as one line: for `vtrace dump`, and for the last branches before a crash.
#pragma once

#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include "decode/classify.h"
#include "decode/symbols.h"
#include "decode/trace_reader.h"
#include "ds/result.h"

namespace vtrace {

/// Not thread-safe. Borrows reader and symbols.
class BranchDescriber {
  public:
    BranchDescriber(const TraceReader& reader, const SymbolTable& symbols) : reader_(reader), symbols_(symbols) {}

    /// The kind of a branch, from its code where that is recorded. `state` is that of the cursor at this record.
    BranchInstruction classify(const TraceRecord& record, const StreamState& state);

    /// Without a newline, fields parted by spaces:
    ///   cpu number from -> to kind from-symbol -> to-symbol       addresses of 16 hex digits; "-" where no symbol is
    /// or for an event:
    ///   cpu number time NANOSECONDS ns RETIRED instructions       or: cpu number cr3 0x...
    ///   cpu number window N begins at ADDRESS symbol              or: ends at
    /// The kind is one field without spaces: "call", "indirect-jump", "interrupt:0x20", "#PF:0x2" (its error code).
    void append_text(const TraceRecord& record, const StreamState& state, std::string& line);
    /// One JSON object: cpu, number, from, to, kind, and where there is one from_symbol, to_symbol, vector, error_code;
    /// events: cpu, number, event "time" (time_ns, retired), "cr3" (cr3), "window_begin" or "window_end" (window, at).
    /// Addresses are strings: "0xffffffff81000000".
    void append_json(const TraceRecord& record, const StreamState& state, std::string& line);

  private:
    const std::string& symbol(uint64_t address); // "" where there is none

    const TraceReader& reader_;
    const SymbolTable& symbols_;
    Classifier classifier_;
    std::unordered_map<uint64_t, std::string> names_; // of addresses met; bounded
};

/// The record as it lay in the BTS area. The predicted bit is not kept by traces.
ds::BtsRecord to_bts_record(const TraceRecord& record);

/// The last `count` branches of a vCPU as lines of append_text(), oldest first: what led to a crash.
/// Errors: no such vCPU. What is damaged is left out, and told in reader.damage().
Result<std::vector<std::string>> last_branches(const TraceReader& reader, const SymbolTable& symbols, unsigned vcpu,
                                               uint64_t count);

} // namespace vtrace
