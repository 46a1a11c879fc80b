// Stacks of far transfers and event delivery: frames that are written whole or not at all, and the pops that undo them.
#pragma once

#include <cstdint>

#include "vmm/soft/cpu.h"

namespace vtrace::soft {

/// Which rules the stack of `level` obeys (SDM vol. 3, 4.6.1: pushes of a transfer are explicit accesses).
inline MmuContext stack_context(const Cpu& cpu, unsigned level) {
    if (level == 3)
        return MmuContext::user;
    return (cpu.system_flags & Rflags::ac) && (cpu.cr4 & Cr4::smap) ? MmuContext::supervisor_ac
                                                                    : MmuContext::supervisor;
}

/// Which part of RSP addresses a stack, and so changes with it (SDM vol. 3, 6.14.2; vol. 1, 6.2.3).
inline uint64_t stack_pointer_mask(bool stack64, const Segment& ss) {
    return stack64 ? ~0ull : ss.attributes & SegAttr::db ? 0xffff'ffffull : 0xffffull;
}

/// Values to push on one stack. Nothing is written, and RSP stays, until commit(); push() makes the segment checks.
class StackFrame {
  public:
    /// `stack64`: addresses are 64 bits wide and `ss` isn't looked at.
    StackFrame(Cpu& cpu, bool stack64, const Segment& ss, uint64_t rsp, unsigned level, uint32_t fault_code);

    /// False: #SS, in Cpu::fault, with the code given to the constructor.
    bool push(uint64_t value, unsigned size);
    /// Writes all; false with Cpu::fault if the memory doesn't allow it, nothing written then.
    bool commit();
    /// RSP with what has been pushed.
    uint64_t rsp() const { return rsp_; }

  private:
    static constexpr unsigned max_values = 40; // 31 parameters of a call gate and the frame
    struct Value {
        uint64_t address, value;
        unsigned size;
    };

    Cpu& cpu_;
    const bool stack64_;
    const Segment& ss_;
    uint64_t rsp_;
    const uint64_t mask_;
    const MmuContext context_;
    const bool level3_aligned_; // misaligned values are #AC
    const uint32_t fault_code_;
    Value values_[max_values];
    unsigned count_ = 0;
};

/// Reads down from the current stack, at the current CPL; RSP stays until the caller sets it.
class StackReader {
  public:
    explicit StackReader(Cpu& cpu);
    bool pop(unsigned size, uint64_t& value); // false: #SS(0) or #PF in Cpu::fault
    void skip(uint64_t bytes);
    uint64_t rsp() const { return rsp_; }

  private:
    Cpu& cpu_;
    uint64_t rsp_;
    const uint64_t mask_;
};

/// Does [offset, +size) lie in the stack segment? Any segment but a present writable one has no room.
bool stack_has(const Segment& ss, uint64_t offset, unsigned size);

// --- one value, for instructions -------------------------------------------------------------------------------------

/// PUSH: all checks, the store, then RSP. False: raised on `op`.
bool push_value(Cpu& cpu, const Op* op, uint64_t value, unsigned size);
/// What POP would read; RSP stays (see drop_value). False: raised on `op`.
bool peek_value(Cpu& cpu, const Op* op, unsigned size, uint64_t& value);
void drop_value(Cpu& cpu, unsigned size);
/// RSP as drop_value() would leave it.
uint64_t rsp_after_pop(const Cpu& cpu, unsigned size);
/// PUSH that moves RSP by 4 and writes 2 bytes: segment registers outside of 64-bit mode.
bool push_low_half(Cpu& cpu, const Op* op, uint16_t value);

} // namespace vtrace::soft
