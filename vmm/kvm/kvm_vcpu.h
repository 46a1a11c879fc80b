// KvmVcpu: the KVM engine behind the Vcpu interface.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>

#include "vmm/kvm/kvm_cpu.h"
#include "vmm/msr_storage.h"
#include "vmm/vcpu.h"

namespace vtrace::kvm {

/// Runs natively on the thread that calls run(). Instructions aren't counted: VcpuRun::retired is 0, and `budget` is not
/// looked at. Every call but request_stop() needs the machine's lock, which run() gives up while the guest runs.
class KvmVcpu final : public Vcpu {
  public:
    /// All borrowed. `now`: called with the lock held whenever the guest has come out, to set the machine's clock.
    KvmVcpu(KvmCpu& cpu, CpuPins& pins, std::mutex& lock, std::function<void()> now);
    ~KvmVcpu() override;

    /// At an instruction boundary. What KVM keeps beyond CpuState (upper halves of YMM and the like) stays in it.
    CpuState state() const override;
    void set_state(const CpuState& state) override;

    /// Injects what is pending, runs to one exit, handles it. `device`: an access was made, or nothing in particular
    /// happened: run again. `breakpoint`: one of set_breakpoints() is at RIP, not yet executed.
    VcpuRun run(uint64_t budget) override;
    void request_stop() override;
    std::optional<Gpa> translate(Gva address) const override;

    /// Hardware breakpoints on instruction addresses, at most 4; empty: none. run() returns `breakpoint` before the
    /// instruction executes; the next run() passes it.
    void set_breakpoints(std::span<const Gva> addresses);
};

} // namespace vtrace::kvm
