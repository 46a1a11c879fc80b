// TraceWriter: makes a trace file from the records of each vCPU and from what the machine tells beside them.
//
// Single-threaded; TraceRecorder (trace_recorder.h) puts it behind a thread and rings. The bytes written depend on the
// sequence of calls for each vCPU and on the sequence of code and console calls, and not on how the calls of one vCPU
// fall between those of others: see docs/trace-format.md, "Order".
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <nlohmann/json_fwd.hpp>

#include "decode/code_lines.h"
#include "decode/trace_format.h"
#include "ds/bts.h"
#include "ds/result.h"

namespace vtrace {

struct TraceWriterOptions {
    unsigned vcpus = 1;                // streams, 1..max_trace_vcpus
    uint32_t chunk_records = 4u << 20; // records in a branch chunk, at most max_chunk_records
    uint64_t chunk_ns = 1'000'000'000; // virtual time after which a chunk of at least min_timed_records is closed
    uint32_t min_timed_records = 64u << 10;
    uint64_t side_bytes = 8ull << 20; // code pages and console output after which a chunk is closed
    int compression = 3;              // zstd level
    bool windows = false;             // the records may hold windows
    /// Flight recorder: so many branches, of all vCPUs together, are kept at the end, and not many more (a chunk); 0:
    /// all. Numbers and positions stay those of the whole recording. Until it is closed the file may be twice as large
    /// as what it will keep, plus keep_slack_bytes, and three times for the moment when it is written anew.
    uint64_t keep_last = 0;
    uint64_t keep_slack_bytes = 4ull << 20;
};

class TraceWriter {
  public:
    /// Creates or truncates `path` (a pipe works too: then the file has to be read from a copy) and writes the
    /// configuration. Errors: cannot be created or written; options out of range; keep_last in what is not a regular file.
    static Result<TraceWriter> open(const std::string& path, const nlohmann::json& config,
                                    const TraceWriterOptions& options = {});
    TraceWriter(TraceWriter&&) noexcept;
    TraceWriter& operator=(TraceWriter&&) noexcept;
    /// Closes the file descriptor. Without close() before, the file is as that of a killed recorder: complete up to the
    /// last closed chunk.
    ~TraceWriter();

    /// Appends records of a vCPU. After an error (disk full, broken pipe ...) the incomplete chunk is cut off again,
    /// what was written before stays readable, and every further call returns the same error. window_begin records are
    /// also noted beside the records: what was told before them holds for none behind.
    Result<> add_records(unsigned vcpu, std::span<const ds::BtsRecord> records);

    /// As TraceSink's calls, which see. Must come before the record at `position` is added. Held back until the branch
    /// chunk that reaches `position` is written.
    /// True: much is held back now; drain the vCPU's area soon, so that the chunk can be closed.
    bool code_page(unsigned vcpu, uint64_t position, uint64_t gpa, std::span<const uint8_t, 4096> bytes) {
        return code_lines(vcpu, position, gpa, CodeLines(bytes));
    }
    bool code_lines(unsigned vcpu, uint64_t position, uint64_t gpa, CodeLines lines);
    bool code_mapping(unsigned vcpu, uint64_t position, uint64_t cr3, uint64_t gva, uint64_t gpa, bool global);
    void console(uint64_t time, std::string_view bytes);
    /// What is told from here on belongs to another window than what was told before. Of all vCPUs: between the last that
    /// is told in one and the first in the next.
    void begin_window();

    /// Writes what is held back, the symbols (sorted by address here), the outcome, the index and the footer; syncs the
    /// file (fdatasync) and closes it. After an earlier error only returns that.
    Result<> close(const nlohmann::json& outcome, std::vector<TraceSymbol> symbols = {});

    /// Progress: bytes in the file, and bytes of code and console output held back.
    uint64_t bytes_written() const;
    uint64_t bytes_held() const;
    uint64_t branches() const; // added, of all vCPUs

  private:
    struct State;
    explicit TraceWriter(std::unique_ptr<State> state);
    std::unique_ptr<State> state_;
};

} // namespace vtrace
