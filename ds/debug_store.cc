#include "ds/debug_store.h"

#include <cassert>
#include <cerrno>

#include <sys/mman.h>

namespace vtrace::ds {

namespace {

constexpr size_t host_page = 4096;
/// Records that still fit when the threshold is met: the events that precede the drain.
constexpr size_t threshold_reserve = 16;
constexpr uint64_t known_bits =
    DebugCtl::tr | DebugCtl::bts | DebugCtl::btint | DebugCtl::bts_off_os | DebugCtl::bts_off_usr;

} // namespace

Result<std::unique_ptr<DebugStore>> DebugStore::create(size_t records, Ring& ring) {
    if (records < min_records || records > max_records)
        return fail("cannot make a BTS area of {} records: it takes {} to {}", records, min_records, max_records);
    // One more record: while recording is off, records land in the slot at the index, which may be the absolute
    // maximum. Behind it, a page that an engine which forgets to drain cannot write.
    const size_t bytes = ((records + 1) * sizeof(BtsRecord) + host_page - 1) & ~(host_page - 1);
    void* memory = mmap(nullptr, bytes + host_page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED)
        return fail("cannot allocate a BTS area of {} records: {}", records, errno_text(errno));
    std::unique_ptr<DebugStore> store(new DebugStore);
    store->map_bytes_ = bytes + host_page;
    store->base_ = static_cast<BtsRecord*>(memory);
    store->absolute_maximum_ = store->base_ + records;
    store->threshold_ = store->absolute_maximum_ - threshold_reserve;
    store->cursor_ = {.index = store->base_, .threshold = store->threshold_, .stride = 0};
    store->ring_ = &ring;
    if (mprotect(static_cast<char*>(memory) + bytes, host_page, PROT_NONE) != 0)
        return fail("cannot protect the end of a BTS area: {}", errno_text(errno));
    return store;
}

DebugStore::~DebugStore() {
    if (base_)
        munmap(base_, map_bytes_);
}

bool DebugStore::recording() const {
    constexpr uint64_t on = DebugCtl::tr | DebugCtl::bts;
    return (debugctl_ & on) == on;
}

void DebugStore::update_stride() {
    const uint64_t off = cpl_ == 0 ? DebugCtl::bts_off_os : DebugCtl::bts_off_usr;
    cursor_.stride = recording() && !(debugctl_ & off) ? sizeof(BtsRecord) : 0;
}

Result<> DebugStore::set_debugctl(uint64_t value) {
    if (value & ~known_bits)
        return fail("cannot set IA32_DEBUGCTL to {:#x}: bits {:#x} are not supported", value, value & ~known_bits);
    if ((value & DebugCtl::tr) && (value & DebugCtl::bts) && !(value & DebugCtl::btint))
        return fail("cannot set IA32_DEBUGCTL to {:#x}: a circular BTS area (BTINT clear) is not supported", value);
    debugctl_ = value;
    update_stride();
    if (recording() && cr3_ && cr3_ != recorded_cr3_) {
        append_event(*cr3_, 0, BtsKind::cr3);
        recorded_cr3_ = cr3_;
    }
    return {};
}

void DebugStore::append_event(uint64_t from, uint64_t to, BtsKind kind) {
    assert(cursor_.index < absolute_maximum_ && "the area was not drained at its threshold");
    *cursor_.index++ = {from, to, BtsFlags::make(kind)};
}

bool DebugStore::set_cr3(uint64_t cr3) {
    cr3_ = cr3;
    if (recording() && cr3_ != recorded_cr3_) {
        append_event(cr3, 0, BtsKind::cr3);
        recorded_cr3_ = cr3_;
    }
    return drain_due();
}

void DebugStore::begin_window(uint64_t number, uint64_t address) {
    append_event(address, number, BtsKind::window_begin);
    window_ = number;
    recorded_cr3_.reset(); // it may have changed and changed back; a reader of this window alone wants it too
    last_time_ = UINT64_MAX;
}

void DebugStore::end_window(uint64_t number, uint64_t address) { append_event(address, number, BtsKind::window_end); }

void DebugStore::drain(uint64_t time, uint64_t retired) {
    const bool any = cursor_.index != base_;
    if (any || (recording() && (time != last_time_ || retired != last_retired_))) {
        append_event(time, retired, BtsKind::time);
        last_time_ = time;
        last_retired_ = retired;
        ring_->write({base_, cursor_.index});
        drained_ += cursor_.index - base_;
        cursor_.index = base_;
    }
    drain_requested_ = false;
    update_threshold();
}

DsManagementArea64 DebugStore::management_area() const {
    const auto address = [](const BtsRecord* record) { return reinterpret_cast<uint64_t>(record); };
    return {.bts_buffer_base = address(base_),
            .bts_index = address(cursor_.index),
            .bts_absolute_maximum = address(absolute_maximum_),
            .bts_interrupt_threshold = address(threshold_),
            .pebs_buffer_base = 0,
            .pebs_index = 0,
            .pebs_absolute_maximum = 0,
            .pebs_interrupt_threshold = 0,
            .pebs_counter_reset = {}};
}

} // namespace vtrace::ds
