// KvmCpu: one vCPU of KVM, as its file descriptor offers it: registers in and out, KVM_RUN, injection, debugging.
// KvmVcpu makes an engine of it; the lockstep stepper drives it instruction by instruction.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include <linux/kvm.h>

#include "vmm/cpu_state.h"
#include "vmm/kvm/vm.h"
#include "vmm/soft/cpuid.h"

namespace vtrace::kvm {

/// No locking: one thread at a time, except set_immediate_exit(). Ioctls that can only fail by a fault of ours or of the
/// host (a register value that no processor could hold) end up in failure(), and the next enter() returns it.
class KvmCpu {
  public:
    /// `vm` is borrowed. Gives the guest `cpuid`'s leaves with APIC id `id`. Error: what KVM refused.
    static Result<std::unique_ptr<KvmCpu>> create(KvmVm& vm, unsigned id, const CpuidModel& cpuid);
    ~KvmCpu();
    KvmCpu(const KvmCpu&) = delete;
    KvmCpu& operator=(const KvmCpu&) = delete;

    /// What KVM and we tell each other at each KVM_RUN.
    kvm_run& run() { return *run_; }

    /// KVM_RUN: 0, EINTR (kicked), or another errno. Registers changed by registers() go in with it.
    int enter();
    /// Completes what the last exit left to do (a port read's result to be loaded, RIP to be moved on), without
    /// executing an instruction: state() is then at an instruction boundary.
    void complete_exit();
    /// From any thread and from signal handlers: makes an enter() that is to come return EINTR at once. (One that is
    /// going on needs a signal, too.)
    void set_immediate_exit(bool on) { run_->immediate_exit = on; }

    /// RIP, GPRs, RFLAGS as of the last exit, without an ioctl where KVM_SYNC_X86_REGS is there.
    const kvm_regs& registers() const;
    const kvm_sregs& special_registers() const;
    /// Changes them; they go in with the next enter(), or state().
    void set_registers(const kvm_regs& registers);

    /// All of it: after a complete_exit(), or an exit that leaves nothing to complete. `apic_base` is CpuState's only
    /// foreign part: KVM derives CPUID bits from it.
    CpuState state() const;
    void set_state(const CpuState& state, uint64_t apic_base);
    uint64_t tsc() const;
    /// The x87, MMX, SSE part of it only.
    FpuImage fpu() const;

    /// KVM_INTERRUPT: only when run().ready_for_interrupt_injection, or to a vCPU that is known to take it.
    void inject_interrupt(uint8_t vector);
    void inject_nmi();

    /// KVM_SET_GUEST_DEBUG. `control`: KVM_GUESTDBG_ENABLE | SINGLESTEP | USE_HW_BP | BLOCKIRQ ..., 0: off. At most four
    /// instruction addresses. While any is on, every #DB comes to us.
    void set_guest_debug(uint32_t control, std::span<const Gva> breakpoints = {});

    std::optional<Gpa> translate(Gva address) const;

    /// What went wrong, or empty.
    const std::string& failure() const { return failure_; }
    KvmVm& vm() { return vm_; }
    const CpuidModel& cpuid() const { return cpuid_; }
    unsigned id() const { return id_; }

  private:
    KvmCpu(KvmVm& vm, unsigned id, const CpuidModel& cpuid) : vm_(vm), cpuid_(cpuid), id_(id) {}
    Result<> set_up();
    Result<> set_cpuid();
    int call(unsigned long request, void* argument, const char* name) const;

    KvmVm& vm_;
    const CpuidModel& cpuid_;
    const unsigned id_;
    Fd fd_;
    kvm_run* run_ = nullptr;
    bool sync_regs_ = false;
    mutable std::string failure_;
};

} // namespace vtrace::kvm
