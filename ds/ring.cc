#include "ds/ring.h"

#include <algorithm>
#include <bit>
#include <cassert>
#include <cerrno>
#include <cstring>
#include <new>
#include <utility>

#include <sys/mman.h>

namespace vtrace::ds {

namespace {
constexpr size_t host_page = 4096;
}

Result<Ring> Ring::create(size_t records, Doorbell& bell) {
    if (records > max_records)
        return fail("cannot make a ring of {} records: the most is {}", records, max_records);
    const size_t capacity = std::bit_ceil(std::max<size_t>(records, host_page / sizeof(BtsRecord)));
    const size_t bytes = (capacity * sizeof(BtsRecord) + host_page - 1) & ~(host_page - 1);
    void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED)
        return fail("cannot allocate a ring of {} records ({} MiB): {}", capacity, bytes >> 20, errno_text(errno));
    Ring ring;
    ring.records_ = static_cast<BtsRecord*>(memory);
    ring.mask_ = capacity - 1;
    ring.map_bytes_ = bytes;
    ring.control_ = new Control;
    ring.bell_ = &bell;
    return ring;
}

Ring::Ring(Ring&& other) noexcept
    : records_(std::exchange(other.records_, nullptr)), mask_(std::exchange(other.mask_, 0)),
      map_bytes_(std::exchange(other.map_bytes_, 0)), control_(std::exchange(other.control_, nullptr)),
      bell_(std::exchange(other.bell_, nullptr)) {}

Ring& Ring::operator=(Ring&& other) noexcept {
    std::swap(records_, other.records_);
    std::swap(mask_, other.mask_);
    std::swap(map_bytes_, other.map_bytes_);
    std::swap(control_, other.control_);
    std::swap(bell_, other.bell_);
    return *this;
}

Ring::~Ring() {
    if (records_)
        munmap(records_, map_bytes_);
    delete control_;
}

void Ring::write(std::span<const BtsRecord> records) {
    assert(!control_->closed.load(std::memory_order_relaxed));
    uint64_t head = control_->head.load(std::memory_order_relaxed);
    while (!records.empty()) {
        const uint64_t tail = control_->tail.load(std::memory_order_acquire);
        const size_t room = capacity() - (head - tail);
        if (room == 0) {
            control_->tail.wait(tail, std::memory_order_acquire);
            continue;
        }
        const size_t at = head & mask_;
        const size_t count = std::min({records.size(), room, capacity() - at});
        std::memcpy(records_ + at, records.data(), count * sizeof(BtsRecord));
        records = records.subspan(count);
        head += count;
        control_->head.store(head, std::memory_order_release);
        bell_->ring();
    }
}

void Ring::close() {
    control_->closed.store(true, std::memory_order_release);
    bell_->ring();
}

std::span<const BtsRecord> Ring::acquire() const {
    const uint64_t tail = control_->tail.load(std::memory_order_relaxed);
    const uint64_t head = control_->head.load(std::memory_order_acquire);
    const size_t at = tail & mask_;
    return {records_ + at, std::min<size_t>(head - tail, capacity() - at)};
}

void Ring::release(size_t count) {
    const uint64_t tail = control_->tail.load(std::memory_order_relaxed);
    assert(count <= control_->head.load(std::memory_order_relaxed) - tail);
    control_->tail.store(tail + count, std::memory_order_release);
    control_->tail.notify_all(); // one thread at most waits here; notify_one may wake a waiter of another atomic
}

bool Ring::finished() const {
    // The order of the two looks matters: what was written before the close is seen after it.
    return control_->closed.load(std::memory_order_acquire) && acquire().empty();
}

std::span<const BtsRecord> Ring::acquire_wait() const {
    for (;;) {
        const uint32_t seen = bell_->state();
        const auto records = acquire();
        if (!records.empty() || finished())
            return records.empty() ? acquire() : records;
        bell_->wait(seen);
    }
}

} // namespace vtrace::ds
