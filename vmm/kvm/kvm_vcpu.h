// KvmVcpu: the KVM engine behind the Vcpu interface.
#pragma once

#include <pthread.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "vmm/common_msrs.h"
#include "vmm/kvm/kvm_cpu.h"
#include "vmm/vcpu.h"

namespace vtrace::kvm {

/// Runs natively on the thread that calls run(). Instructions aren't counted: VcpuRun::retired is 0, and `budget` is not
/// looked at. Every call but request_stop() needs the machine's lock; run() gives it up while the guest runs.
class KvmVcpu final : public Vcpu {
  public:
    /// All borrowed.
    KvmVcpu(KvmCpu& cpu, CpuPins& pins, std::mutex& lock) : cpu_(cpu), pins_(pins), lock_(lock) {}
    /// Called with the lock held whenever the guest has come out, to set the machine's clock.
    void on_time(std::function<void()> sync_time) { sync_time_ = std::move(sync_time); }

    /// At an instruction boundary. What KVM keeps beyond CpuState (upper halves of YMM and the like) stays in it.
    /// `tsc_base` (KvmCpu::tsc_base()): one for all vCPUs of a machine, so that their TSCs stay in step.
    CpuState state_at(uint64_t tsc_base) const;
    void set_state_at(const CpuState& state, uint64_t tsc_base);
    CpuState state() const override { return state_at(cpu_.tsc_base()); }
    void set_state(const CpuState& state) override { set_state_at(state, cpu_.tsc_base()); }

    /// Injects what is pending, runs to one exit, handles it; `budget` here means: nothing in particular has happened. After
    /// `stopped` and `breakpoint` the guest is at an instruction boundary.
    VcpuRun run(uint64_t budget) override;
    /// From any thread. run() returns `stopped`, at once if it isn't going on.
    void request_stop() override;
    /// Something waits that a run() which is going on could be made to look at, or a halted one would wake for.
    bool has_work() const { return pins_.nmi_pending() || pins_.interrupt_pending(); }
    bool wakes() const { return pins_.nmi_pending() || (pins_.interrupt_pending() && interrupts_allowed()); }
    /// With the lock held: makes a run() that is going on do so; `always`: also if it will by itself before long.
    void look_at_interrupts(bool always);

    std::optional<Gpa> translate(Gva address) const override { return cpu_.translate(address); }
    bool interrupts_allowed() const override { return cpu_.run().if_flag; }

    /// By the debug registers, so at most four; the guest's own rest meanwhile.
    static constexpr size_t max_breakpoints = 4;
    void set_breakpoints(std::span<const Gva> addresses) override;

    /// What went wrong with KVM itself, or empty.
    const std::string& failure() const { return cpu_.failure(); }
    KvmCpu& cpu() { return cpu_; }

    /// Installs the signal that kicks a vCPU out of KVM_RUN, once for the process.
    static void install_kick_signal();

  private:
    void kick();
    void inject_events();
    VcpuRun stop();
    VcpuRun enter_failed(int error) const;
    CommonMsrs msrs() { return {kept_.msrs, kept_.misc_enable, pins_, cpu_.cpuid(), nullptr}; }
    VcpuRun handle_exit();
    void handle_io();
    void handle_mmio();
    void handle_rdmsr();
    void handle_wrmsr();
    VcpuExit handle_debug();
    VcpuRun internal_error();
    std::string where() const;

    KvmCpu& cpu_;
    CpuPins& pins_;
    std::mutex& lock_;
    std::function<void()> sync_time_;

    // What KVM doesn't hold for us.
    CpuState kept_;
    std::vector<Gva> breakpoints_;

    std::atomic<bool> stop_requested_{false};
    std::atomic<bool> inside_{false}; // in KVM_RUN: a signal is needed to bring it out
    pthread_t thread_{};
};

} // namespace vtrace::kvm
