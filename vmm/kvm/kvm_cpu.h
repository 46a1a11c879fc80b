// KvmCpu: one vCPU of KVM, as its file descriptor offers it: registers in and out, KVM_RUN, injection, debugging.
// KvmVcpu makes an engine of it; the lockstep stepper drives it instruction by instruction.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "vmm/kvm/kvm_api.h"

#include "vmm/cpu_state.h"
#include "vmm/kvm/vm.h"
#include "vmm/soft/cpuid.h"

namespace vtrace::kvm {

/// The six of them, in the order of Seg.
std::array<Segment, 6> segments_of(const kvm_sregs& sregs);

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
    /// executing an instruction. False: the same instruction has come out again, or failed: handle that, and call again.
    /// True: get_state() is at an instruction boundary.
    bool complete_exit();
    /// From any thread and from signal handlers: makes an enter() that is to come return EINTR at once. (One that is
    /// going on needs a signal, too.)
    void set_immediate_exit(bool on) { run_->immediate_exit = on; }

    /// On: each exit brings registers() and special_registers() with it (KVM_SYNC_X86_REGS), for who looks at them at
    /// every exit. Off: they cost an ioctl when asked for.
    void set_sync(bool on);
    /// RIP, GPRs, RFLAGS as they are now.
    const kvm_regs& registers() const;
    const kvm_sregs& special_registers() const;
    /// Changes them; they go in with the next enter(), or state().
    void set_registers(const kvm_regs& registers);

    /// All that KVM holds, at an instruction boundary: after complete_exit(), or an exit that leaves nothing to complete.
    /// Not in it: `activity` (HLT is ours), `tsc`, and what the MSR filter keeps from KVM (misc_enable, debugctl, ds_area,
    /// and of `msrs` all but TSC_ADJUST): those are left as they are in `state`.
    void get_state(CpuState& state) const;
    /// Sets the same. `apic_base`: KVM derives CPUID bits from it.
    void set_state(const CpuState& state, uint64_t apic_base);
    /// The x87, MMX, SSE part of it only.
    FpuImage fpu() const;

    /// The counter that guests' time stamp counters are offset from, now. Samples of one vCPU serve all of the machine:
    /// with one sample for all, their TSCs stay in step.
    uint64_t tsc_base() const;
    /// What the guest would have read when tsc_base() was `base`.
    uint64_t tsc_at(uint64_t base) const;
    /// Makes it read `value` there, and go on from it.
    void set_tsc(uint64_t value, uint64_t base);

    /// KVM_INTERRUPT: only when run().ready_for_interrupt_injection, or to a vCPU that is known to take it.
    void inject_interrupt(uint8_t vector);
    void inject_nmi();
    /// #DB, with these bits set in DR6: a debug exception of the guest's own that KVM has given to us.
    void raise_debug_exception(uint64_t dr6_bits);

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
    Result<> check_supported(std::span<const kvm_cpuid_entry2> leaves) const;
    void get_fpu(CpuState& state) const;
    void set_fpu(const CpuState& state);
    void get_msrs(CpuState& state) const;
    void set_msrs(const CpuState& state);
    uint64_t tsc_offset() const;
    uint64_t read_tsc() const;
    int call(unsigned long request, void* argument, const char* name) const;

    KvmVm& vm_;
    const CpuidModel& cpuid_;
    const unsigned id_;
    Fd fd_;
    kvm_run* run_ = nullptr;
    bool svm_ = false;
    bool can_sync_ = false, sync_ = false;
    bool can_set_tsc_offset_ = false; // since Linux 5.16
    bool completed_ = true;           // the last exit leaves nothing to do

    // What registers() and special_registers() know; `fresh_`: the last KVM_RUN brought them.
    mutable kvm_regs registers_{};
    mutable kvm_sregs special_{};
    mutable bool registers_known_ = false, special_known_ = false;
    bool dirty_ = false; // registers_ is to go in
    bool fresh_ = false;
    mutable std::string failure_;
};

} // namespace vtrace::kvm
