// KvmVm: one virtual machine of KVM: its memory slots, MSR filter and vCPU file descriptors. No in-kernel irqchip: PIC,
// IOAPIC, APICs and PIT are the machine's own, as under the software engine.
#pragma once

#include <cstdint>
#include <memory>

#include "vmm/guest_memory.h"
#include "vmm/kvm/host.h"

namespace vtrace::kvm {

/// Everything that isn't answered by the processor itself goes to the machine: the filter denies all MSRs but those
/// that KVM and `soft` agree about (SYSCALL, SYSENTER, segment bases, EFER, PAT, TSC); accesses to the others are
/// KVM_EXIT_X86_RDMSR and WRMSR.
class KvmVm {
  public:
    /// `host` and `memory` are borrowed for its lifetime. Error: what KVM refused, and what it said.
    static Result<std::unique_ptr<KvmVm>> create(const KvmHost& host, GuestMemory& memory);

    /// KVM_CREATE_VCPU.
    Result<Fd> create_vcpu(unsigned id);
    const KvmHost& host() const { return host_; }
    GuestMemory& memory() { return memory_; }
    /// Bytes of a vCPU's struct kvm_run mapping.
    size_t run_size() const { return run_size_; }
    /// The frequency at which guests' TSC run, in Hz: that of the host, unless KVM could set 1 GHz.
    uint64_t tsc_hz() const { return tsc_hz_; }

  private:
    KvmVm(const KvmHost& host, GuestMemory& memory, Fd fd) : host_(host), memory_(memory), fd_(std::move(fd)) {}
    Result<> set_up();
    Result<> add_memory();
    Result<> filter_msrs();
    Result<> find_tsc_rate();

    const KvmHost& host_;
    GuestMemory& memory_;
    Fd fd_;
    size_t run_size_ = 0;
    uint64_t tsc_hz_ = 0;
};

} // namespace vtrace::kvm
