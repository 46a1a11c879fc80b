// TraceReader: everything that is in a trace file, with random access, in bounded memory.
//
// Files are hostile: whatever the bytes, a reader returns an Error or a partial answer with warnings, and never
// allocates more than trace_format.h's limits allow. What is damaged or missing is skipped and told (info().warnings
// and info().missing): a number that comes out is one that was recorded.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <nlohmann/json_fwd.hpp>

#include "decode/codec_side.h"
#include "decode/trace_format.h"
#include "ds/bts.h"
#include "ds/result.h"

namespace vtrace {

/// A stretch of one vCPU's stream that the file should hold and does not.
struct MissingRange {
    unsigned vcpu;
    uint64_t first_number;         // number of the first branch that is missing
    std::optional<uint64_t> count; // branches; nullopt: not known (nothing after it, or its header is lost too)
    std::string reason;
};

/// Totals of one vCPU's stream, of what is readable.
struct StreamInfo {
    uint64_t branches = 0;     // readable
    uint64_t events = 0;       // time, cr3 and window records
    uint64_t dropped = 0;      // branches before the first one, recorded and on purpose not kept: it has this number
    uint64_t end_number = 0;   // one past the highest branch number; == dropped + branches where nothing is missing
    uint64_t first_time = 0;   // virtual ns
    uint64_t last_time = 0;    // virtual ns
    uint64_t last_retired = 0; // instructions retired at last_time
    uint64_t chunks = 0;
    uint64_t stored_bytes = 0; // of its branch chunks, headers included
};

struct ChunkTypeInfo {
    uint16_t type = 0; // ChunkType, or one of a later version
    uint64_t chunks = 0;
    uint64_t count = 0; // sum of ChunkHeader::count
    uint64_t stored_bytes = 0;
    uint64_t raw_bytes = 0;
};

struct TraceInfo {
    uint32_t version = 0;
    uint64_t file_bytes = 0;
    bool complete = false; // closed by its recorder: outcome, index and footer are there, and nothing is damaged
    std::vector<StreamInfo> vcpus;
    std::vector<ChunkTypeInfo> types;  // ascending by type, those that occur
    std::vector<std::string> warnings; // one line each
    std::vector<MissingRange> missing;
    uint64_t branches() const; // of all vCPUs
};

/// What is known at a place of a stream.
struct StreamState {
    std::optional<uint64_t> cr3;     // as written by the guest, with PCID and flag bits
    std::optional<uint64_t> time;    // virtual ns, of the last time event before
    std::optional<uint64_t> retired; // instructions retired at that event
};

/// One record of a stream: a branch, or an event.
struct TraceRecord {
    uint64_t from = 0;     // branch; for events see ds::BtsKind
    uint64_t to = 0;       // branch
    uint64_t number = 0;   // branches of this vCPU before this record: a branch's own number
    uint64_t position = 0; // records of this vCPU before this one
    uint32_t error_code = 0;
    uint16_t vcpu = 0;
    ds::BtsKind kind = ds::BtsKind::branch;
    uint8_t vector = 0; // interrupts and exceptions

    bool is_branch() const { return static_cast<uint8_t>(kind) < 0x10; }
    bool is_window() const { return kind == ds::BtsKind::window_begin || kind == ds::BtsKind::window_end; }
};

/// The records of one branch chunk, decoded.
struct ChunkRecords {
    unsigned vcpu = 0;
    uint64_t first_number = 0;   // number of the first branch
    uint64_t first_position = 0; // position of the first record
    StreamState start;           // state before the first record
    std::vector<ds::BtsRecord> records;
};

class TraceReader;

/// Walks one vCPU's branches [first, last) in order. Not thread-safe; several cursors on one reader may live on several
/// threads. The reader must outlive it. Damaged chunks are passed over: the numbers jump.
class RecordCursor {
  public:
    /// The next record, or nullptr at the end. Valid until the next call.
    const TraceRecord* next();
    /// State at the record last returned (an event is included in it).
    const StreamState& state() const { return state_; }

  private:
    friend class TraceReader;
    bool load_next_chunk();

    const TraceReader* reader_ = nullptr;
    unsigned vcpu_ = 0;
    uint64_t last_ = 0;
    uint64_t skip_to_ = 0;
    bool with_events_ = false;
    size_t next_chunk_ = 0; // into the vCPU's list of branch chunks
    std::shared_ptr<const ChunkRecords> chunk_;
    size_t next_record_ = 0;
    uint64_t next_number_ = 0;
    bool done_ = false;
    TraceRecord record_;
    StreamState state_;
};

/// Thread-safe once opened: all methods are const, and the caches inside have their own locks.
class TraceReader {
  public:
    /// Reads header and index, or walks the chunks where there is no index. Errors: not readable, not a trace, a
    /// version that this program does not know. A damaged file opens, with warnings.
    static Result<TraceReader> open(const std::string& path);

    TraceReader(TraceReader&&) noexcept;
    TraceReader& operator=(TraceReader&&) noexcept;
    ~TraceReader();

    /// Totals from the chunk headers. Damaged payloads show up here only after check(), or once they were met:
    /// then in damage().
    const TraceInfo& info() const;
    /// Warnings about payloads met as damaged since open(), one line each with the range that is missing.
    std::vector<std::string> damage() const;
    /// Reads every chunk and verifies all checksums and counts; the lines are what is wrong. `threads` as for
    /// map_chunks().
    std::vector<std::string> check(unsigned threads = 1) const;

    /// The machine configuration, or how the run ended. Error where the chunk is missing or damaged.
    Result<nlohmann::json> config() const;
    Result<nlohmann::json> outcome() const;
    /// Ascending by address; empty where the file has none.
    Result<std::vector<TraceSymbol>> symbols() const;

    Result<std::vector<ConsolePiece>> console() const;

    /// What was recorded before the first branches and not kept, one a vCPU; all zeros where that is nothing.
    const std::vector<DroppedStart>& dropped() const;
    /// Where windows begin, also those whose begin was not kept; in no particular order. Empty where all of the run was
    /// recorded.
    std::vector<WindowBegin> window_begins() const;

    unsigned vcpus() const;

    /// Branches [first, last) of a vCPU, by number; with_events: also the time and cr3 events between them (those
    /// before the first branch of the range only where they follow the branch before it).
    RecordCursor records(unsigned vcpu, uint64_t first = 0, uint64_t last = UINT64_MAX, bool with_events = false) const;

    /// Decodes the branch chunks of a vCPU (nullopt: of all, vCPU by vCPU) on `threads` threads (0: one for each
    /// processor), calls map(const ChunkRecords&) -> T on them, concurrently, and reduce(T&&) in the order of the
    /// stream, one at a time, on any of those threads. At most 2 results a thread wait. Damaged chunks are left out and
    /// told in damage(). `first`, `last`: only chunks that hold branches of [first, last); they come whole.
    template <class Map, class Reduce>
    Result<> map_chunks(std::optional<unsigned> vcpu, unsigned threads, Map map, Reduce reduce, uint64_t first = 0,
                        uint64_t last = UINT64_MAX) const {
        using T = decltype(map(std::declval<const ChunkRecords&>()));
        return map_chunks_erased(
            vcpu, threads, first, last,
            [&](const ChunkRecords& chunk) -> std::shared_ptr<void> { return std::make_shared<T>(map(chunk)); },
            [&](std::shared_ptr<void> result) { reduce(std::move(*static_cast<T*>(result.get()))); });
    }

    /// The code bytes at linear address `gva` as this vCPU could fetch them at this place of its stream, under `cr3`
    /// (PCID and flag bits are ignored). Fills `buffer` from its start and returns how many bytes are known: fewer than
    /// its size where the next page was never executed, 0 where nothing is known. Only what ran in the same window is
    /// known. Cheap for neighbouring places; thread-safe.
    size_t code_at(unsigned vcpu, uint64_t position, uint64_t cr3, uint64_t gva, std::span<uint8_t> buffer) const;

  private:
    friend class RecordCursor;
    struct State;
    explicit TraceReader(std::unique_ptr<State> state);
    Result<> map_chunks_erased(std::optional<unsigned> vcpu, unsigned threads, uint64_t first, uint64_t last,
                               const std::function<std::shared_ptr<void>(const ChunkRecords&)>& map,
                               const std::function<void(std::shared_ptr<void>)>& reduce) const;

    std::unique_ptr<State> state_;
};

} // namespace vtrace
