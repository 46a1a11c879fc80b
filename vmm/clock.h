// Virtual time and the events that are due in it.
//
// Nothing here reads the host's clock: time is what the vCPU engines say has passed. One unit is one virtual nanosecond;
// the software engine retires one instruction in each, and the guest's TSC runs at 1 GHz, or as KVM's has to.
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <vector>

namespace vtrace {

using VirtualTime = uint64_t; // ns since the machine was switched on
inline constexpr VirtualTime never = std::numeric_limits<VirtualTime>::max();
inline constexpr uint64_t default_tsc_hz = 1'000'000'000; // a tick each ns

/// Events fire in order of due time, equal times in order of creation. Single-threaded: owned by the machine's thread.
class Clock {
  public:
    using Handle = unsigned;

    VirtualTime now() const { return now_; }

    /// The rate of the processors' time stamp counters. Before the machine runs.
    void set_tsc_hz(uint64_t hz) { tsc_hz_ = hz; }
    uint64_t tsc_hz() const { return tsc_hz_; }
    /// What a TSC that was never written to reads at `time`.
    uint64_t tsc_ticks(VirtualTime time) const {
        if (tsc_hz_ == default_tsc_hz)
            return time;
        return static_cast<uint64_t>(static_cast<unsigned __int128>(time) * tsc_hz_ / default_tsc_hz);
    }

    /// Makes an event that is not scheduled. `fire` runs inside run_due(), may schedule any event again.
    Handle create(std::string name, std::function<void()> fire);
    /// (Re)schedules at absolute time `due`; `never` takes it off. A time that has passed fires at the next run_due().
    void schedule(Handle event, VirtualTime due);
    VirtualTime due(Handle event) const { return events_[event].due; }

    /// Earliest due time, or `never`.
    VirtualTime next_due() const { return next_due_; }

    /// Sets the time, which never goes back. Fires nothing: the vCPU engine calls it to be exact at a device access.
    void set_now(VirtualTime now) {
        if (now > now_)
            now_ = now;
    }
    /// Fires all events due at or before now().
    void run_due();

  private:
    struct Event {
        std::string name;
        std::function<void()> fire;
        VirtualTime due = never;
    };
    void update_next();

    std::vector<Event> events_;
    uint64_t tsc_hz_ = default_tsc_hz;
    VirtualTime now_ = 0;
    VirtualTime next_due_ = never;
};

} // namespace vtrace
