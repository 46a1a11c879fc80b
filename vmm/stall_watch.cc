#include "vmm/stall_watch.h"

namespace vtrace {

bool StallWatch::look(const CpuState& state, VirtualTime now) {
    const Registers registers{state.gpr, state.rip, state.rflags};
    if (registers == seen_) {
        looks_ = 0;
    } else if (++looks_ > window) {
        // They did not come back: this is work.
        seen_ = registers;
        looks_ = 0;
        since_ = now;
    }
    return now - since_ > patience;
}

} // namespace vtrace
