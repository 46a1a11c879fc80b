// CommonMsrs: model-specific registers that are the machine's, whichever engine runs the guest.
//
// The software engine asks here for what it doesn't hold itself; under KVM, the MSR filter sends the guest's accesses
// here. What only one engine knows (segment bases, EFER, SYSCALL, TSC) is not here.
#pragma once

#include <cstdint>
#include <optional>

#include "ds/facility.h"
#include "vmm/msr_storage.h"
#include "vmm/soft/cpuid.h"
#include "vmm/vcpu.h"

namespace vtrace {

/// A view of one vCPU's; everything is borrowed.
struct CommonMsrs {
    MsrStorage& storage;
    uint64_t& misc_enable;
    CpuPins& pins;
    const CpuidModel& cpuid;
    ds::Facility* facility; // Debug Store and counters; null: there are none

    /// Goes to the local APIC: the machine's clock must be exact.
    static bool is_apic(const CpuidModel& cpuid, uint32_t msr);

    /// nullopt: there is no such register: #GP(0).
    std::optional<uint64_t> read(uint32_t msr) const;
    /// False: #GP(0), for a register that isn't there or can't hold the value.
    bool write(uint32_t msr, uint64_t value) const;
};

} // namespace vtrace
