// BranchStream: one vCPU's branches in order, each with what an analysis asks of it: its class, the privilege on both
// sides, and the code that ran since the branch before.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <vector>

#include <Zydis/Zydis.h>

#include "decode/classify.h"
#include "decode/privilege.h"
#include "decode/trace_reader.h"

namespace vtrace {

/// A branch, and the straight line of code that led to it.
struct StreamBranch {
    TraceRecord record;
    BranchInstruction instruction;
    Privilege from_privilege = Privilege::kernel, to_privilege = Privilege::kernel;
    uint64_t cr3 = 0;   // 0: not known
    uint64_t space = 0; // its page table's address: CR3 without PCID and flags
    /// The code between is not in the trace: this is the first branch of the range or of a window, or some were lost.
    bool after_gap = false;
    /// First instruction executed since the branch before; the branch itself where `after_gap` or where the addresses
    /// do not fit together.
    uint64_t block_start = 0;
    /// Instructions retired since the branch before, this branch included (an interrupted or faulting instruction is
    /// not). 0 where the code is not in the trace.
    uint32_t instructions = 0;
    /// The last time event before, and the instructions counted since.
    std::optional<uint64_t> event_time; // virtual ns
    uint64_t since_event = 0;

    bool delivered() const { // an interrupt or exception: `from` was not executed
        return record.kind == ds::BtsKind::interrupt || record.kind == ds::BtsKind::exception;
    }
};

/// Not thread-safe; the reader must outlive it. Memory: 4 MiB, and a decoded chunk.
///
/// What the code at an address is, is asked anew after each CR3 event (user code), every 4 million branches (kernel
/// code), and wherever a direct branch did not go where the code known would have sent it: as exact as `vtrace dump`
/// but for a return that was patched over another kind of indirect branch in between.
class BranchStream {
  public:
    /// Branches [first, last) of vCPU `vcpu`.
    BranchStream(const TraceReader& reader, unsigned vcpu, uint64_t first = 0, uint64_t last = UINT64_MAX);
    /// nullptr at the end. Valid until the next call.
    const StreamBranch* next();
    /// Branches so far of whose block not all code was in the trace: their `instructions` is 0.
    uint64_t unknown_blocks() const { return unknown_blocks_; }

  private:
    struct Class {
        uint64_t from = 0;
        uint32_t epoch = 0; // 0: empty
        BranchInstruction instruction;
    };
    struct Block {
        uint64_t start = 0, from = 0;
        uint32_t epoch = 0;
        uint32_t instructions = 0; // up to but without the one at `from`
        bool known = false;
    };

    void note(const TraceRecord& event);
    void classify(const TraceRecord& record);
    void set_privileges(const TraceRecord& record);
    void count_instructions(const TraceRecord& record);
    std::optional<uint32_t> decode_block(uint64_t position, uint64_t start, uint64_t from) const;
    std::optional<uint32_t> decode_block_as(const ZydisDecoder& decoder, uint64_t position, uint64_t start,
                                            uint64_t from) const;
    uint32_t epoch(uint64_t address) const { return upper_half(address) ? kernel_epoch_ : user_epoch_; }
    uint64_t cr3() const { return cursor_.state().cr3.value_or(0); }

    const TraceReader& reader_;
    unsigned vcpu_;
    RecordCursor cursor_;
    Classifier classifier_;
    std::array<ZydisDecoder, 3> decoders_; // 64, 32, 16 bits
    std::vector<Class> classes_;           // direct-mapped by address
    std::vector<Block> blocks_;            // direct-mapped by both ends
    uint32_t kernel_epoch_ = 1, user_epoch_ = 1;
    bool in_user_, start_known_;
    bool gap_ = true;
    std::optional<uint64_t> next_number_;
    uint64_t last_to_ = 0;
    uint64_t unknown_blocks_ = 0;
    StreamBranch branch_;
};

} // namespace vtrace
