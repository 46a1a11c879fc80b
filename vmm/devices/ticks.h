// Exact conversion between virtual nanoseconds and the ticks of an oscillator that doesn't divide them.
#pragma once

#include <cstdint>

#include "vmm/clock.h"

namespace vtrace {

/// An oscillator of `hz` (below 2^33) that started at time 0. Integer arithmetic without loss: tick n begins at
/// ceil(n / hz), and ticks_at(time_of(n)) == n for hz up to 1 GHz.
struct Oscillator {
    uint64_t hz;

    static constexpr uint64_t ns_per_second = 1'000'000'000;

    /// Ticks completed at `time`.
    constexpr uint64_t ticks_at(VirtualTime time) const {
        return time / ns_per_second * hz + time % ns_per_second * hz / ns_per_second;
    }
    /// The first nanosecond at which `ticks` are completed; `never` when that lies beyond virtual time.
    constexpr VirtualTime time_of(uint64_t ticks) const {
        const uint64_t seconds = ticks / hz;
        if (seconds >= never / ns_per_second)
            return never;
        return seconds * ns_per_second + (ticks % hz * ns_per_second + hz - 1) / hz;
    }
};

} // namespace vtrace
