// StallWatch: tells a processor that will never get anywhere from one that is busy.
//
// With interrupts off, only the processor itself can end a loop. A loop that goes nowhere comes by the same registers
// over and over; work with interrupts off (a kernel that decompresses itself does it for seconds) does not. So a
// processor is taken for stalled when for `patience` it has neither allowed interrupts nor touched a device, and its
// registers kept coming back to what they were.
#pragma once

#include <array>
#include <cstdint>

#include "vmm/clock.h"
#include "vmm/cpu_state.h"

namespace vtrace {

class StallWatch {
  public:
    static constexpr VirtualTime patience = 2'000'000'000;
    /// Looks within which the registers must come back; loops of up to about so many instructions are found.
    static constexpr unsigned window = 64;

    /// The processor has allowed interrupts, or touched a device.
    void progress(VirtualTime now) {
        since_ = now;
        looks_ = window; // look anew
    }
    /// How long it has done neither.
    VirtualTime quiet_for(VirtualTime now) const { return now - since_; }
    /// To be called now and then, at times that fall anywhere in a loop. True: stalled.
    bool look(const CpuState& state, VirtualTime now);

  private:
    struct Registers {
        std::array<uint64_t, 16> gpr{};
        uint64_t rip = 0, rflags = 0;
        bool operator==(const Registers&) const = default;
    };
    Registers seen_;
    unsigned looks_ = window; // since seen_ was taken or met again
    VirtualTime since_ = 0;
};

} // namespace vtrace
