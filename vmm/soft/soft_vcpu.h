// SoftVcpu: the software engine behind the Vcpu interface.
#pragma once

#include <memory>

#include "vmm/soft/block_cache.h"
#include "vmm/soft/branch_log.h"
#include "vmm/soft/cpu.h"

namespace vtrace::soft {

class SoftVcpu final : public Vcpu {
  public:
    /// All references are borrowed and must outlive it. `log` may be null: nothing is recorded.
    SoftVcpu(GuestMemory& memory, CpuPins& pins, Clock& clock, const CpuidModel& cpuid, BranchLog* log = nullptr);
    ~SoftVcpu() override;

    CpuState state() const override;
    void set_state(const CpuState& state) override;
    VcpuRun run(uint64_t budget) override;
    void request_stop() override { cpu_->stop_requested.store(true, std::memory_order_relaxed); }
    std::optional<Gpa> translate(Gva address) const override;

    /// Instructions retired since construction.
    uint64_t retired() const { return retired_; }
    const BlockCache& blocks() const { return blocks_; }

  private:
    bool deliver_pending(); // interrupts, NMIs, debug traps; false: shutdown
    Block* find_block();
    void execute_single();
    void finish_instruction_traps(uint64_t flags_before, uint64_t rip_before);

    std::unique_ptr<Cpu> cpu_; // large: TLBs inside
    BlockCache blocks_;
    uint64_t retired_ = 0;
};

} // namespace vtrace::soft
