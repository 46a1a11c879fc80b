#include "decode/codec_branch.h"

#include <algorithm>
#include <cassert>
#include <cstring>
#include <new>

namespace vtrace {

namespace {

/// Start of a branch payload; the four streams follow in this order.
struct PayloadHeader {
    uint32_t usual_flags; // of a branch without a note
    uint32_t run_bytes;
    uint32_t from_bytes;
    uint32_t to_bytes;
    uint32_t note_bytes;
};
static_assert(sizeof(PayloadHeader) == 20);

/// What a note is about.
enum class Note : uint8_t {
    time = 0,   // a time event: zigzag differences of time and of retired instructions to the last one
    cr3 = 1,    // a cr3 event: zigzag difference to the last one
    event = 2,  // any other event: flags, from, to
    branch = 3, // the next branch has other flags than usual: flags
};

constexpr uint64_t time_flags = ds::BtsFlags::make(ds::BtsKind::time);
constexpr uint64_t cr3_flags = ds::BtsFlags::make(ds::BtsKind::cr3);

// In the `to` stream: 0, the branch went where it went last time; 1..2^64-2, zigzag distance from `from` plus 1; the
// two distances left over take an escape and a byte.
constexpr uint64_t to_last_target = 0;
constexpr uint64_t to_escape = UINT64_MAX;

void put_distance(ByteWriter& out, uint64_t distance) {
    if (distance < to_escape - 1) {
        out.varint(distance + 1);
    } else {
        out.varint(to_escape);
        out.byte(distance == UINT64_MAX);
    }
}

/// `value` is what the stream holds there: neither 0 nor end of data.
uint64_t get_distance(ByteReader& in, uint64_t value) {
    if (value != to_escape)
        return value - 1;
    return in.byte() ? UINT64_MAX : UINT64_MAX - 1;
}

/// How far ahead the encoder asks for table lines: about a memory latency's worth of branches.
constexpr size_t prefetch_distance = 12;

} // namespace

BranchPredictor::BranchPredictor()
    : followers_(static_cast<Followers*>(std::calloc(size_t{1} << follower_bits, sizeof(Followers)))),
      targets_(static_cast<uint64_t*>(std::calloc(size_t{1} << target_bits, sizeof(uint64_t)))) {
    if (!followers_ || !targets_)
        throw std::bad_alloc(); // as any container would
}

void BranchPredictor::reset() {
    std::fill_n(followers_.get(), size_t{1} << follower_bits, Followers{});
    std::fill_n(targets_.get(), size_t{1} << target_bits, 0);
}

void BranchPredictor::reset(std::span<const ds::BtsRecord> seen) {
    constexpr size_t few = size_t{1} << (follower_bits - 3);
    if (seen.size() > few)
        return reset();
    followers(follower_index(0, 0)) = {};
    for (const auto& record : seen) {
        followers(follower_index(record.from, record.to)) = {};
        last_target(record.from) = 0;
    }
}

void BranchEncoder::add(std::span<const ds::BtsRecord> records) {
    assert(records_ + records.size() <= max_chunk_records);
    if (branches_ == 0) {
        for (const auto& record : records) {
            if (!ds::BtsFlags::is_event(record.flags)) {
                usual_flags_ = record.flags & ds::BtsFlags::predicted;
                break;
            }
        }
    }
    uint64_t previous_from = previous_from_, previous_to = previous_to_, run = run_;
    uint32_t branches = branches_;
    const uint64_t usual_flags = usual_flags_;
    for (size_t i = 0; i < records.size(); ++i) {
        const ds::BtsRecord& record = records[i];
        if (i + prefetch_distance < records.size()) {
            const ds::BtsRecord& ahead = records[i + prefetch_distance];
            __builtin_prefetch(&predictor_.followers(BranchPredictor::follower_index(ahead.from, ahead.to)), 1);
        }
        if (record.flags != usual_flags) [[unlikely]] {
            branches_ = branches;
            note(record);
            if (ds::BtsFlags::is_event(record.flags))
                continue;
        }
        ++branches;
        auto& guess = predictor_.followers(BranchPredictor::follower_index(previous_from, previous_to));
        if (guess.first.from == record.from && guess.first.to == record.to) [[likely]] {
            ++run;
        } else {
            uint64_t& target = predictor_.last_target(record.from);
            if (guess.second.from == record.from && guess.second.to == record.to) {
                runs_.varint(run << 1);
                std::swap(guess.first, guess.second);
            } else {
                runs_.varint(run << 1 | 1);
                froms_.varint(zigzag(record.from - previous_to));
                if (target == record.to)
                    tos_.varint(to_last_target);
                else
                    put_distance(tos_, zigzag(record.to - record.from));
                guess.second = guess.first;
                guess.first = {record.from, record.to};
            }
            target = record.to;
            run = 0;
        }
        previous_from = record.from;
        previous_to = record.to;
    }
    previous_from_ = previous_from;
    previous_to_ = previous_to;
    run_ = run;
    branches_ = branches;
    records_ += records.size();
}

void BranchEncoder::note(const ds::BtsRecord& record) {
    notes_.varint(branches_ - noted_at_);
    noted_at_ = branches_;
    if (record.flags == time_flags) {
        notes_.byte(static_cast<uint8_t>(Note::time));
        notes_.varint(zigzag(record.from - time_));
        notes_.varint(zigzag(record.to - retired_));
        time_ = record.from;
        retired_ = record.to;
    } else if (record.flags == cr3_flags && record.to == 0) {
        notes_.byte(static_cast<uint8_t>(Note::cr3));
        notes_.varint(zigzag(record.from - cr3_));
        cr3_ = record.from;
    } else if (ds::BtsFlags::is_event(record.flags)) {
        notes_.byte(static_cast<uint8_t>(Note::event));
        notes_.varint(record.flags);
        notes_.varint(record.from);
        notes_.varint(record.to);
    } else {
        notes_.byte(static_cast<uint8_t>(Note::branch));
        notes_.varint(record.flags);
    }
}

std::vector<uint8_t> BranchEncoder::finish() {
    if (run_ != 0)
        runs_.varint(run_ << 1);
    const PayloadHeader header{
        .usual_flags = static_cast<uint32_t>(usual_flags_),
        .run_bytes = static_cast<uint32_t>(runs_.size()),
        .from_bytes = static_cast<uint32_t>(froms_.size()),
        .to_bytes = static_cast<uint32_t>(tos_.size()),
        .note_bytes = static_cast<uint32_t>(notes_.size()),
    };
    std::vector<uint8_t> payload;
    payload.reserve(sizeof header + bytes());
    const auto append = [&](std::span<const uint8_t> part) { payload.insert(payload.end(), part.begin(), part.end()); };
    append({reinterpret_cast<const uint8_t*>(&header), sizeof header});
    for (ByteWriter* stream : {&runs_, &froms_, &tos_, &notes_}) {
        append(stream->view());
        stream->clear();
    }
    predictor_.reset();
    previous_from_ = previous_to_ = run_ = usual_flags_ = noted_at_ = 0;
    time_ = retired_ = cr3_ = 0;
    records_ = branches_ = 0;
    return payload;
}

void BranchDecoder::decode_branches(ds::BtsRecord* out, size_t count) {
    uint64_t from = previous_from_, to = previous_to_;
    ds::BtsRecord* const end = out + count;
    while (out != end) {
        if (!in_run_) {
            const uint64_t run = runs_.varint();
            if (runs_.failed()) // the rest repeats the guesses; decode() reports it
                run_ = UINT64_MAX;
            else
                run_ = run >> 1;
            spelled_ = run & 1;
            in_run_ = true;
        }
        const size_t guessed = std::min<uint64_t>(run_, end - out);
        run_ -= guessed;
        for (ds::BtsRecord* const stop = out + guessed; out != stop; ++out) {
            const auto& guess = predictor_.followers(BranchPredictor::follower_index(from, to)).first;
            from = guess.from;
            to = guess.to;
            *out = {from, to, usual_flags_};
        }
        if (out == end)
            break; // what ends the run belongs to the next branch, if there is one
        in_run_ = false;
        auto& guess = predictor_.followers(BranchPredictor::follower_index(from, to));
        if (spelled_) {
            from = to + unzigzag(froms_.varint());
            uint64_t& target = predictor_.last_target(from);
            const uint64_t code = tos_.varint();
            to = code == to_last_target ? target : from + unzigzag(get_distance(tos_, code));
            target = to;
            guess.second = guess.first;
            guess.first = {from, to};
        } else {
            std::swap(guess.first, guess.second);
            from = guess.first.from;
            to = guess.first.to;
            predictor_.last_target(from) = to;
        }
        *out++ = {from, to, usual_flags_};
    }
    previous_from_ = from;
    previous_to_ = to;
}

Result<> BranchDecoder::decode(std::span<const uint8_t> payload, uint32_t records, uint32_t branches,
                               std::vector<ds::BtsRecord>& out) {
    out.clear();
    auto result = decode_streams(payload, records, branches, out);
    // What was decoded, also before an error, is in `out`; its events do no harm here.
    predictor_.reset(out);
    return result;
}

Result<> BranchDecoder::decode_streams(std::span<const uint8_t> payload, uint32_t records, uint32_t branches,
                                       std::vector<ds::BtsRecord>& out) {
    if (records > max_chunk_records || branches > records)
        return fail("impossible record counts ({} records, {} branches)", records, branches);
    ByteReader in(payload);
    const auto header = in.object<PayloadHeader>();
    runs_ = ByteReader(in.bytes(header.run_bytes));
    froms_ = ByteReader(in.bytes(header.from_bytes));
    tos_ = ByteReader(in.bytes(header.to_bytes));
    ByteReader notes(in.bytes(header.note_bytes));
    if (in.failed() || in.left() != 0)
        return fail("its stream sizes do not add up to its size");
    previous_from_ = previous_to_ = run_ = 0;
    in_run_ = false;
    usual_flags_ = header.usual_flags;
    if (ds::BtsFlags::is_event(usual_flags_))
        return fail("its usual flags {:#x} are those of an event", usual_flags_);

    out.resize(records);
    uint64_t time = 0, retired = 0, cr3 = 0;
    uint64_t next_flags = 0;
    bool flags_noted = false;
    uint32_t done = 0, done_branches = 0;
    const auto advance = [&](uint64_t count) {
        if (count > branches - done_branches || count > records - done)
            return false;
        decode_branches(out.data() + done, count);
        if (flags_noted && count != 0) {
            out[done].flags = next_flags;
            flags_noted = false;
        }
        done += count;
        done_branches += count;
        return true;
    };
    while (notes.left() != 0) {
        if (!advance(notes.varint()))
            return fail("more branches than its header says");
        const auto what = static_cast<Note>(notes.byte());
        if (what == Note::branch) {
            next_flags = notes.varint();
            if (flags_noted || ds::BtsFlags::is_event(next_flags))
                return fail("a note on a branch is damaged");
            flags_noted = true;
            continue;
        }
        if (done == records)
            return fail("more events than its header says");
        if (what == Note::time) {
            time += unzigzag(notes.varint());
            retired += unzigzag(notes.varint());
            out[done++] = {time, retired, time_flags};
        } else if (what == Note::cr3) {
            cr3 += unzigzag(notes.varint());
            out[done++] = {cr3, 0, cr3_flags};
        } else if (what == Note::event) {
            const uint64_t flags = notes.varint(), from = notes.varint(), to = notes.varint();
            if (!ds::BtsFlags::is_event(flags))
                return fail("an event is damaged");
            out[done++] = {from, to, flags};
        } else {
            return fail("a note of unknown kind {}", static_cast<unsigned>(what));
        }
    }
    if (!advance(branches - done_branches) || done != records || flags_noted)
        return fail("it holds {} of {} records", done, records);
    if (runs_.failed() || froms_.failed() || tos_.failed() || notes.failed())
        return fail("a stream ends early");
    if (runs_.left() != 0 || froms_.left() != 0 || tos_.left() != 0 || (in_run_ && run_ != 0))
        return fail("a stream goes on after the last record");
    return {};
}

} // namespace vtrace
