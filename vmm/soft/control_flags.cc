// RFLAGS as a whole, the interrupt flag, HLT (SDM vol. 2, CLI, STI, PUSHF, POPF, STAC, CLAC, HLT).
#include "vmm/soft/stack_frame.h"
#include "vmm/soft/system_handlers.h"
#include "vmm/soft/system_operand.h"

namespace vtrace::soft {
namespace {

unsigned iopl(const Cpu& cpu) {
    return (cpu.system_flags & Rflags::iopl) >> Rflags::iopl_shift;
}

/// CLI and STI outside of real mode need CPL <= IOPL; there are no virtual interrupts (CR4.PVI) here.
bool may_change_if(Cpu& cpu, const Op* op) {
    if (!(cpu.cr0 & Cr0::pe) || cpu.cpl <= iopl(cpu))
        return true;
    cpu.raise(op, Vector::gp, 0);
    return false;
}

const Op* set_ac(Cpu& cpu, const Op* op, bool value) {
    if (cpu.cpl != 0)
        return cpu.raise(op, Vector::ud);
    cpu.set_rflags(value ? cpu.rflags() | Rflags::ac : cpu.rflags() & ~Rflags::ac);
    VTRACE_NEXT_BY_LOOP(cpu, op);
}

} // namespace

const Op* op_cli(Cpu& cpu, const Op* op) {
    if (!may_change_if(cpu, op))
        return nullptr;
    cpu.system_flags &= ~Rflags::if_;
    VTRACE_NEXT_BY_LOOP(cpu, op); // nothing new can interrupt after it
}

const Op* op_sti(Cpu& cpu, const Op* op) {
    if (!may_change_if(cpu, op))
        return nullptr;
    if (!(cpu.system_flags & Rflags::if_)) {
        cpu.system_flags |= Rflags::if_;
        cpu.shadow = InterruptShadow::sti;
    }
    return retire(cpu, op);
}

const Op* op_pushf(Cpu& cpu, const Op* op) {
    const uint64_t flags = cpu.rflags() & ~(Rflags::rf | Rflags::vm);
    if (!push_value(cpu, op, flags, operand_size(op)))
        return nullptr;
    VTRACE_NEXT_BY_LOOP(cpu, op);
}

const Op* op_popf(Cpu& cpu, const Op* op) {
    const unsigned size = operand_size(op);
    uint64_t value;
    if (!peek_value(cpu, op, size, value))
        return nullptr;
    uint64_t mask = Rflags::status | Rflags::tf | Rflags::df | Rflags::nt;
    if (size > 2)
        mask |= Rflags::ac | Rflags::id;
    const bool real = !(cpu.cr0 & Cr0::pe);
    if (real || cpu.cpl <= iopl(cpu))
        mask |= Rflags::if_;
    if (real || cpu.cpl == 0)
        mask |= Rflags::iopl;
    drop_value(cpu, size);
    uint64_t flags = (cpu.rflags() & ~mask) | (value & mask);
    if (size > 2)
        flags &= ~Rflags::rf;
    cpu.set_rflags(flags);
    return retire(cpu, op);
}

const Op* op_stac(Cpu& cpu, const Op* op) {
    return set_ac(cpu, op, true);
}
const Op* op_clac(Cpu& cpu, const Op* op) {
    return set_ac(cpu, op, false);
}

const Op* op_hlt(Cpu& cpu, const Op* op) {
    if (cpu.cpl != 0)
        return cpu.raise(op, Vector::gp, 0);
    cpu.activity = ActivityState::halted;
    return cpu.leave_at(cpu.next_rip(op), Leave::halted);
}

} // namespace vtrace::soft
