// DebugStore: the Branch Trace Store of one virtual CPU, with a buffer area that the VMM owns.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "ds/bts.h"
#include "ds/layout.h"
#include "ds/result.h"
#include "ds/ring.h"

namespace vtrace::ds {

/// The engine appends through cursor() and calls drain() when append() says so; records, in their order, go to the
/// ring.
///
/// All calls are the engine's thread's, except where noted; nothing here locks. The object does not move, so that
/// compiled code may hold the cursor's address.
class DebugStore {
  public:
    /// An area of `records` records (at least min_records). `ring` must outlive the store. Error: no memory.
    static Result<std::unique_ptr<DebugStore>> create(size_t records, Ring& ring);
    /// Half of a host's second-level cache, and often enough for a reader to know the time.
    static constexpr size_t default_records = 8192;
    static constexpr size_t min_records = 64;
    static constexpr size_t max_records = size_t{1} << 24;

    DebugStore(const DebugStore&) = delete;
    DebugStore& operator=(const DebugStore&) = delete;
    ~DebugStore();

    BtsCursor& cursor() { return cursor_; }

    /// IA32_DEBUGCTL as far as it concerns the VMM's own recording: nothing is recorded until TR and BTS are set here.
    /// Error: a bit that has no name in DebugCtl, or TR and BTS without BTINT (a circular area: not supported).
    Result<> set_debugctl(uint64_t value);
    uint64_t debugctl() const { return debugctl_; }

    /// The CPL from now on. For a branch that changes it, call this before the branch is appended: the filter bits test
    /// the CPL after the branch, so with BTS_OFF_OS a return to user mode is recorded, and an entry to the kernel is
    /// not.
    void set_cpl(unsigned cpl) {
        cpl_ = cpl;
        update_stride();
    }

    /// The guest's CR3 from now on. Appends an event if it changed, whatever the CPL filter says (a reader needs it for
    /// user branches too); while recording is off, it waits until it is on. True: drain before the next record.
    [[nodiscard]] bool set_cr3(uint64_t cr3);

    /// Moves all records to the ring, followed by a time event, and starts the area anew. Waits while the ring is full.
    /// Call it when append() returns true, when the vCPU stops, and once at its start, so that a reader knows the time
    /// from there on. With several vCPUs on one thread, drain all whenever one needs it: it lets the encoder put their
    /// chunks in order. Nothing is added where neither a record nor time has come since the last drain, nor ever while
    /// recording is off. `time`: virtual ns; `retired`: instructions retired by this vCPU; both at this place of the
    /// stream.
    void drain(uint64_t time, uint64_t retired);
    bool drain_due() const { return drain_requested_ || cursor_.index >= threshold_; }
    /// Makes the next append() ask for a drain.
    void request_drain() {
        drain_requested_ = true;
        update_threshold();
    }
    /// While on, every append() returns true, also of records that the filter drops, so that its caller can look at it.
    /// Then drain_due() says whether to drain.
    void watch(bool on) {
        watched_ = on;
        update_threshold();
    }

    /// A window of the recording begins or ends here: `number`, from 1, and the linear address of the next instruction.
    /// Recording is on. Drain after each: for the time, and because there may be no next record for long.
    void begin_window(uint64_t number, uint64_t address);
    void end_window(uint64_t number, uint64_t address);
    /// Of the last window that began; 0: none did.
    uint64_t window() const { return window_; }

    /// Records appended since creation, events included: the position of the next one in this vCPU's stream.
    uint64_t position() const { return drained_ + (cursor_.index - base_); }

    /// The management area as the processor would show it now.
    DsManagementArea64 management_area() const;

  private:
    DebugStore() = default;
    bool recording() const;
    void update_stride();
    void update_threshold() { cursor_.threshold = watched_ || drain_requested_ ? base_ : threshold_; }
    void append_event(uint64_t from, uint64_t to, BtsKind kind);

    BtsCursor cursor_{};
    BtsRecord* base_ = nullptr;
    BtsRecord* threshold_ = nullptr;
    BtsRecord* absolute_maximum_ = nullptr;
    size_t map_bytes_ = 0;
    Ring* ring_ = nullptr;
    uint64_t debugctl_ = 0;
    unsigned cpl_ = 0;
    bool watched_ = false, drain_requested_ = false;
    uint64_t drained_ = 0;
    uint64_t window_ = 0;
    std::optional<uint64_t> recorded_cr3_; // the last one appended
    std::optional<uint64_t> cr3_;          // the guest's
    uint64_t last_time_ = UINT64_MAX;      // of the last time event
    uint64_t last_retired_ = UINT64_MAX;
};

} // namespace vtrace::ds
