// Monitor: what the guest's own Debug Store and performance counters (ds/facility.h) need of the software engine.
//
// While the guest uses none of it, it costs nothing: no handler knows of it. Branches come through the record's append
// (its cursor is made to ask for a drain each time); retirement is counted where a block is left, and the budget of
// instructions is held short so that an overflow falls on a boundary:
//
//   counters of instructions or cycles only    blocks run on into each other, up to the next overflow
//   other events                               block by block, counted by what its instructions are
//   near an overflow, or a PEBS record         instruction by instruction
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <utility>

#include "ds/bts.h"
#include "ds/facility.h"
#include "vmm/soft/op.h"

namespace vtrace::soft {

class Monitor final : ds::GuestSpace, ds::PmiLine {
  public:
    Monitor(Cpu& cpu, const ds::CpuModel& model);

    ds::Facility& facility() { return facility_; }

    /// At each boundary, before anything executes: privilege level and mode may have changed, or registers.
    void at_boundary();
    /// A record was appended.
    void on_record(const ds::BtsRecord& record);
    /// `most`: instructions that may retire before the next boundary, if they begin with this block (null: one alone).
    uint64_t most_instructions(const Block* block) const;
    /// The instruction at the current boundary is about to be executed alone.
    void before_alone();
    /// Execution came back from this block, or from those that it has led to.
    void after_block(const Block& block);
    /// Instructions have retired elsewhere (another engine), or none are to be counted up to here.
    void forget_retired();

    /// All branches are to come to on_record().
    bool watches_branches() const { return watches_branches_; }
    /// Something needs the run loop before the next block: an interrupt was raised, code was written to, or events are
    /// counted.
    bool attention() const { return attention_; }
    /// A branch was taken since the last call: for DEBUGCTL.BTF.
    bool take_branch_taken() { return std::exchange(branch_taken_, false); }

  private:
    // ds::GuestSpace and ds::PmiLine
    bool read(uint64_t linear, void* bytes, size_t size) override;
    bool write(uint64_t linear, const void* bytes, size_t size) override;
    void raise_pmi() override;

    uint8_t* fast(uint64_t linear, size_t size) override;
    struct Pieces; // of an access, in host memory
    bool find(uint64_t linear, size_t size, bool for_write, Pieces& pieces);
    uint8_t* place(uint64_t linear, size_t size, bool for_write) const;
    void take_pebs_records();
    void count_not_taken(const Block& block, std::span<ds::InstructionEvents> events);

    Cpu& cpu_;
    ds::Facility facility_;
    uint64_t counted_ = 0; // instructions retired since construction, up to which counters have counted
    bool watches_branches_ = false, attention_ = false;
    // The last branch by an instruction, since the block was entered.
    bool taken_ = false, mispredicted_ = false, branch_taken_ = false;

    /// What a PEBS record needs of the state before its instruction.
    struct Before {
        uint64_t rip = 0; // linear
        uint64_t load_address = 0, store_address = 0;
    } before_;
};

} // namespace vtrace::soft
