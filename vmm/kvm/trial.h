// A trial of KVM: does it run a guest, and at a processor's speed?
#pragma once

#include <cstdint>

#include "vmm/kvm/host.h"

namespace vtrace::kvm {

struct TrialSpeed {
    uint64_t instructions_per_second; // of the host's time; a lower limit, as the trial is short
};

/// Below this a hypervisor that answers as KVM does interprets guests, and the software engine is faster.
inline constexpr uint64_t trial_least_speed = 3'333'333;

/// Creates a VM of one vCPU and runs some 300,000 instructions of 64-bit kernel code in it, up to a port write whose
/// value must be right. Takes about a millisecond where KVM is real, and at most about 100 ms. Error: what KVM refused,
/// what came out wrong, or how slowly it ran. Installs a handler for SIGRTMIN + 1, which stays.
Result<TrialSpeed> trial(const KvmHost& host);

} // namespace vtrace::kvm
