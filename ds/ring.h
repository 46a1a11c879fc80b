// Ring: BTS records from the thread that runs a vCPU to the thread that encodes them. One producer, one consumer,
// lock-free; each waits for the other (futex) when the ring is full or empty. Nothing is ever dropped.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>

#include "ds/bts.h"
#include "ds/result.h"

namespace vtrace::ds {

/// What a consumer of several rings waits on: any of them rings it.
class Doorbell {
  public:
    /// Thread-safe.
    void ring() {
        value_.fetch_add(1, std::memory_order_seq_cst);
        value_.notify_all();
    }
    /// The state to hand to wait(); take it before looking at the rings, and what comes after the look wakes the wait.
    uint32_t state() const { return value_.load(std::memory_order_seq_cst); }
    void wait(uint32_t seen) const { value_.wait(seen, std::memory_order_seq_cst); }

  private:
    std::atomic<uint32_t> value_{0};
};

class Ring {
  public:
    /// A ring of at least `records` (rounded up to a power of two, at least one page), on pages of its own. `bell` is
    /// rung at each release and at close(), and must outlive the ring. Error: no memory, or more than max_records.
    static Result<Ring> create(size_t records, Doorbell& bell);
    static constexpr size_t max_records = size_t{1} << 30;

    Ring() = default;
    Ring(Ring&& other) noexcept; // only while neither side is in use
    Ring& operator=(Ring&& other) noexcept;
    ~Ring();

    size_t capacity() const { return mask_ + 1; }

    // The producer's side.

    /// Appends all of `records`, waiting for room as often as needed.
    void write(std::span<const BtsRecord> records);
    /// Nothing follows. The consumer takes what is left, then sees finished().
    void close();
    /// Records written since the ring was made.
    uint64_t written() const { return control_->head.load(std::memory_order_acquire); } // any thread

    // The consumer's side.

    /// The oldest records that lie in one piece; empty when there is none now. Valid until release().
    std::span<const BtsRecord> acquire() const;
    /// Gives back the first `count` records of the span.
    void release(size_t count);
    /// Closed by the producer, and empty.
    bool finished() const;
    /// acquire(), but waits until there is something; empty: finished. For a ring that has its doorbell for itself.
    std::span<const BtsRecord> acquire_wait() const;

  private:
    struct Control {
        // Each on a cache line of its own: the producer writes the first, the consumer the second.
        alignas(64) std::atomic<uint64_t> head{0}; // records written
        alignas(64) std::atomic<uint64_t> tail{0}; // records given back
        alignas(64) std::atomic<bool> closed{false};
    };

    BtsRecord* records_ = nullptr;
    size_t mask_ = 0;
    size_t map_bytes_ = 0;
    Control* control_ = nullptr; // on the heap, so that a Ring can move
    Doorbell* bell_ = nullptr;
};

} // namespace vtrace::ds
