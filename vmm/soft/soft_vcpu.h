// SoftVcpu: the software engine behind the Vcpu interface.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <unordered_map>
#include <vector>

#include "ds/facility.h"
#include "vmm/soft/block_cache.h"
#include "vmm/soft/cpu.h"

namespace vtrace::soft {

class SoftVcpu final : public Vcpu {
  public:
    /// What is handed over by reference is borrowed and must outlive it. vCPUs of one machine share one cache; null: one
    /// of its own.
    SoftVcpu(GuestMemory& memory, CpuPins& pins, Clock& clock, const CpuidModel& cpuid,
             std::shared_ptr<BlockCache> blocks = nullptr);
    ~SoftVcpu() override;

    CpuState state() const override;
    void set_state(const CpuState& state) override;
    VcpuRun run(uint64_t budget) override;
    void request_stop() override { cpu_->stop_requested.store(true, std::memory_order_relaxed); }
    std::optional<Gpa> translate(Gva address) const override;

    void set_breakpoints(std::span<const Gva> addresses) override;
    bool interrupts_allowed() const override { return cpu_->system_flags & Rflags::if_; }

    /// From now on records go there; with null pointers, nowhere. What was told of code before is told again.
    void record(const Recording& recording);
    /// Guest memory was written to by others than the machine's SoftVcpus and devices: forgets what was known of it. To be
    /// called for each vCPU.
    void forget_memory();
    /// For who wants an instruction alone: run() leaves interrupts and NMIs pending, and also returns after the delivery of
    /// an exception.
    void hold_interrupts(bool on) { hold_interrupts_ = on; }
    ActivityState activity() const { return cpu_->activity; }
    /// Linear address of the next instruction.
    Gva next_instruction() const { return cpu_->code_linear(cpu_->rip); }
    /// The guest's own Debug Store and counters; null: its model has none.
    ds::Facility* facility() const;
    uint64_t tsc_offset() const { return cpu_->tsc_offset; }
    /// Instructions retired since construction.
    uint64_t retired() const { return cpu_->run_retired_base; }
    /// Empties the BTS area into the ring, however full it is.
    void drain_records() { cpu_->drain_records(); }
    const BlockCache& blocks() const { return *blocks_; }

  private:
    /// What a boundary leads to.
    enum class Boundary : uint8_t { execute, execute_single, halted, ended };

    Boundary at_boundary();
    bool breakpoint_in_page(Gva page) const;
    bool at_breakpoint();
    bool deliver_pending_event();
    bool deliver_interrupt(uint8_t vector);
    bool deliver_nmi();
    Block* find_block();
    void execute_block(Block* block);
    void execute_single();
    bool decode_single();
    bool run_alone();
    int64_t hold_back(Block*& block);
    void note_code_page(uint64_t address, const Translation& where);
    void note_address_space();

    std::unique_ptr<Cpu> cpu_; // large: TLBs inside
    std::shared_ptr<BlockCache> blocks_;

    // The one instruction that is executed alone, and the op that leaves it.
    struct SingleBlock;
    std::unique_ptr<SingleBlock> single_;

    bool hold_interrupts_ = false;
    std::vector<Gva> breakpoints_;
    std::optional<Gva> passing_; // the breakpoint that was reported last, at which the guest still stands

    // What the log knows.
    struct Mapping {
        uint64_t space, page;
        bool operator==(const Mapping&) const = default;
    };
    struct MappingHash {
        size_t operator()(const Mapping& m) const { return (m.space * 0x9e3779b97f4a7c15 ^ m.page) * 0xff51afd7ed558ccd >> 16; }
    };
    std::unordered_map<Mapping, Gpa, MappingHash> logged_mappings_;
};

} // namespace vtrace::soft
