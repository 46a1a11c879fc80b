// The branch codec: one chunk of a vCPU's records to bytes and back. docs/trace-format.md, "Branch payload".
//
// A branch is predicted from the record before it: a table remembers, for each record seen, the last two that followed.
// The stream says how long the first guess held, and then either "the second guess" or the branch itself, as
// differences from its neighbours. Guesses start empty with each chunk, so that chunks stand alone. Events, and
// branches whose flags are not the usual ones, are noted in a stream of their own and do not disturb the guesses.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <span>
#include <vector>

#include "decode/codec_bytes.h"
#include "decode/trace_format.h"
#include "ds/bts.h"
#include "ds/result.h"

namespace vtrace {

/// What both directions keep about the branches so far.
class BranchPredictor {
  public:
    struct Guess {
        uint64_t from, to;
    };
    /// What followed a record: `first` is tried first.
    struct Followers {
        Guess first, second;
    };
    static_assert(sizeof(Followers) == 32);

    static constexpr unsigned follower_bits = 17; // sets: 4 MiB, the size at which a boot hardly gains from more
    static constexpr unsigned target_bits = 17;

    BranchPredictor();
    /// Forgets everything. `seen` holds at least the branches that it was told since the last reset: a few are
    /// forgotten one by one.
    void reset(std::span<const ds::BtsRecord> seen);
    void reset();

    static size_t follower_index(uint64_t from, uint64_t to) {
        return (from * 0x9e3779b97f4a7c15 ^ to * 0xc2b2ae3d27d4eb4f) >> (64 - follower_bits);
    }
    Followers& followers(size_t index) { return followers_[index]; }
    /// Where the branch at `from` went last time that it had to be spelled out or was the second guess; 0: never.
    uint64_t& last_target(uint64_t from) { return targets_[from * 0x9e3779b97f4a7c15 >> (64 - target_bits)]; }

  private:
    struct Free {
        void operator()(void* memory) const { std::free(memory); }
    };
    // From calloc(): untouched pages of a table cost nothing.
    std::unique_ptr<Followers[], Free> followers_;
    std::unique_ptr<uint64_t[], Free> targets_;
};

class BranchEncoder {
  public:
    /// Appends to the open chunk. The caller keeps the records of a chunk within max_chunk_records.
    void add(std::span<const ds::BtsRecord> records);

    uint32_t records() const { return records_; }
    uint32_t branches() const { return branches_; }
    size_t bytes() const { return runs_.size() + froms_.size() + tos_.size() + notes_.size(); } // so far, before zstd

    /// Ends the chunk: its payload, uncompressed; then starts a new, empty one.
    std::vector<uint8_t> finish();

  private:
    void note(const ds::BtsRecord& record);

    BranchPredictor predictor_;
    ByteWriter runs_, froms_, tos_, notes_;
    uint64_t previous_from_ = 0, previous_to_ = 0;
    uint64_t run_ = 0;
    uint64_t usual_flags_ = 0;
    uint64_t noted_at_ = 0; // branches before the last note
    uint64_t time_ = 0, retired_ = 0, cr3_ = 0;
    uint32_t records_ = 0, branches_ = 0;
};

/// Decodes a payload of `records` records, `branches` of them branches. Its predictor is large: keep one a thread. The
/// output is never larger than `records`, which must not exceed max_chunk_records. Error: the payload is not one that
/// an encoder makes.
class BranchDecoder {
  public:
    Result<> decode(std::span<const uint8_t> payload, uint32_t records, uint32_t branches,
                    std::vector<ds::BtsRecord>& out);

  private:
    Result<> decode_streams(std::span<const uint8_t> payload, uint32_t records, uint32_t branches,
                            std::vector<ds::BtsRecord>& out);
    void decode_branches(ds::BtsRecord* out, size_t count);

    BranchPredictor predictor_;
    ByteReader runs_, froms_, tos_;
    uint64_t previous_from_ = 0, previous_to_ = 0;
    uint64_t run_ = 0;
    uint64_t usual_flags_ = 0;
    bool in_run_ = false;  // run_ and spelled_ are of the run at hand
    bool spelled_ = false; // what ends it: a branch spelled out, or the second guess
};

} // namespace vtrace
