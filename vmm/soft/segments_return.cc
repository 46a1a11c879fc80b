// Far RET and IRET (SDM vol. 2, RET and IRET).
#include "vmm/soft/segments_return.h"

#include <fmt/format.h>

#include "vmm/soft/stack_frame.h"
#include "vmm/soft/system.h"

namespace vtrace::soft {

bool check_return_code(Cpu& cpu, uint16_t cs, ReturnTarget& target) {
    if (is_null(cs))
        return set_fault(cpu, Vector::gp, 0);
    Descriptor& code = target.code;
    if (!read_descriptor(cpu, cs, Vector::gp, 0, code))
        return false;
    const unsigned level = rpl(cs);
    if (!code.is_code() || level < cpu.cpl)
        return set_fault(cpu, Vector::gp, selector_error(cs));
    if (code.conforming() ? code.dpl() > level : code.dpl() != level)
        return set_fault(cpu, Vector::gp, selector_error(cs));
    if (!check_code_type(cpu, code, cs))
        return false;
    if (!code.present())
        return set_fault(cpu, Vector::np, selector_error(cs));
    target.cs = cs;
    target.level = level;
    return true;
}

bool check_return_stack(Cpu& cpu, uint16_t ss, ReturnTarget& target) {
    target.ss = ss;
    if (is_null(ss)) {
        if (is_code64(cpu, target.code) && target.level != 3 && rpl(ss) == target.level)
            return true;
        return set_fault(cpu, Vector::gp, 0);
    }
    Descriptor& stack = target.stack;
    if (!read_descriptor(cpu, ss, Vector::gp, 0, stack))
        return false;
    if (rpl(ss) != target.level || !stack.writable() || stack.dpl() != target.level)
        return set_fault(cpu, Vector::gp, selector_error(ss));
    if (!stack.present())
        return set_fault(cpu, Vector::ss, selector_error(ss));
    return true;
}

bool mark_return_accessed(Cpu& cpu, ReturnTarget& target) {
    return mark_accessed(cpu, target.code) && mark_accessed(cpu, target.stack);
}

namespace {

/// Data and nonconforming code segments that the new CPL may not use become null (SDM vol. 3, 5.8.6).
void drop_inner_segments(Cpu& cpu) {
    for (Seg seg : {ES, DS, FS, GS}) {
        Segment& segment = cpu.segments[seg];
        const unsigned dpl = segment.attributes >> SegAttr::dpl_shift & 3;
        constexpr uint16_t conforming = SegAttr::code | SegAttr::conforming_or_down;
        const bool conforming_code = (segment.attributes & conforming) == conforming;
        if ((segment.attributes & SegAttr::p) && !conforming_code && cpu.cpl > dpl) {
            segment.selector = 0;
            segment.attributes = 0;
        }
    }
}

} // namespace

void enter_return(Cpu& cpu, const ReturnTarget& target, bool load_stack, uint64_t rsp) {
    const bool outer = target.level > cpu.cpl;
    cpu.segments[CS] = target.code.segment(target.cs);
    if (load_stack) {
        cpu.segments[SS] = is_null(target.ss) ? null_stack_segment(target.level) : target.stack.segment(target.ss);
        const uint64_t mask = stack_pointer_mask(is_code64(cpu, target.code), cpu.segments[SS]);
        cpu.gpr[RSP] = mask == 0xffff ? (cpu.gpr[RSP] & ~mask) | (rsp & mask) : rsp & mask;
    } else {
        cpu.gpr[RSP] = rsp;
    }
    cpu.cpl = static_cast<uint8_t>(target.level);
    if (outer)
        drop_inner_segments(cpu);
    cpu.update_mode();
}

namespace {

// ---------------------------------------------------------------------------------------------------------------------
// RET

bool return_real_mode(Cpu& cpu, unsigned size, unsigned extra) {
    StackReader stack(cpu);
    uint64_t rip, cs;
    if (!stack.pop(size, rip) || !stack.pop(size, cs))
        return false;
    if (rip > cpu.segments[CS].limit)
        return set_fault(cpu, Vector::gp, 0);
    stack.skip(extra);
    cpu.gpr[RSP] = stack.rsp();
    set_real_mode_code(cpu, static_cast<uint16_t>(cs));
    cpu.rip = rip;
    return true;
}

bool return_protected(Cpu& cpu, unsigned size, unsigned extra) {
    StackReader stack(cpu);
    uint64_t rip, cs, rsp = 0, ss;
    ReturnTarget target;
    if (!stack.pop(size, rip) || !stack.pop(size, cs) || !check_return_code(cpu, static_cast<uint16_t>(cs), target))
        return false;
    stack.skip(extra);
    const bool outer = target.level > cpu.cpl;
    if (outer &&
        (!stack.pop(size, rsp) || !stack.pop(size, ss) || !check_return_stack(cpu, static_cast<uint16_t>(ss), target)))
        return false;
    if (!check_code_offset(cpu, target.code, rip) || !mark_return_accessed(cpu, target))
        return false;
    enter_return(cpu, target, outer, outer ? rsp : stack.rsp());
    if (outer) { // the caller's parameters are on both stacks
        const uint64_t mask = stack_pointer_mask(cpu.code64(), cpu.segments[SS]);
        const uint64_t sum = cpu.gpr[RSP] + extra;
        cpu.gpr[RSP] = mask == 0xffff ? (cpu.gpr[RSP] & ~mask) | (sum & mask) : sum & mask;
    }
    cpu.rip = rip;
    return true;
}

// ---------------------------------------------------------------------------------------------------------------------
// IRET

/// Flags that IRET takes from the stack; all others stay.
uint64_t iret_flags_mask(const Cpu& cpu, unsigned size) {
    uint64_t mask = Rflags::status | Rflags::tf | Rflags::df | Rflags::nt;
    if (size > 2)
        mask |= Rflags::rf | Rflags::ac | Rflags::id;
    if (cpu.cpl <= (cpu.system_flags & Rflags::iopl) >> Rflags::iopl_shift)
        mask |= Rflags::if_;
    if (cpu.cpl == 0) {
        mask |= Rflags::iopl;
        if (size > 2)
            mask |= Rflags::vif | Rflags::vip;
    }
    return mask;
}

void set_returned_flags(Cpu& cpu, uint64_t value, uint64_t mask) {
    cpu.set_rflags((cpu.rflags() & ~mask) | (value & mask));
}

bool iret_real_mode(Cpu& cpu, unsigned size) {
    StackReader stack(cpu);
    uint64_t rip, cs, flags;
    if (!stack.pop(size, rip) || !stack.pop(size, cs) || !stack.pop(size, flags))
        return false;
    if (rip > cpu.segments[CS].limit)
        return set_fault(cpu, Vector::gp, 0);
    cpu.gpr[RSP] = stack.rsp();
    set_real_mode_code(cpu, static_cast<uint16_t>(cs));
    cpu.rip = rip;
    const uint64_t mask = iret_flags_mask(cpu, size) & ~(Rflags::vif | Rflags::vip);
    set_returned_flags(cpu, flags, mask);
    return true;
}

bool iret_protected(Cpu& cpu, unsigned size) {
    if (cpu.system_flags & Rflags::nt) {
        if (cpu.long_mode())
            return set_fault(cpu, Vector::gp, 0);
        return set_unsupported(
            cpu, fmt::format("IRET with NT set near {:#x}:{:#x}; hardware task switches are not implemented",
                             cpu.segments[CS].selector, cpu.gpr[Cpu::rip_register]));
    }
    StackReader stack(cpu);
    uint64_t rip, cs, flags, rsp = 0, ss;
    if (!stack.pop(size, rip) || !stack.pop(size, cs) || !stack.pop(size, flags))
        return false;
    if ((flags & Rflags::vm) && size == 4 && cpu.cpl == 0 && !cpu.long_mode())
        return set_unsupported(cpu, fmt::format("IRET to virtual-8086 mode near {:#x}:{:#x}, which is not implemented",
                                                cpu.segments[CS].selector, cpu.gpr[Cpu::rip_register]));
    ReturnTarget target;
    if (!check_return_code(cpu, static_cast<uint16_t>(cs), target))
        return false;
    // 64-bit mode pops SS:RSP whatever the levels are.
    const bool load_stack = cpu.code64() || target.level > cpu.cpl;
    if (load_stack &&
        (!stack.pop(size, rsp) || !stack.pop(size, ss) || !check_return_stack(cpu, static_cast<uint16_t>(ss), target)))
        return false;
    if (!check_code_offset(cpu, target.code, rip) || !mark_return_accessed(cpu, target))
        return false;

    const uint64_t mask = iret_flags_mask(cpu, size); // by the CPL before
    enter_return(cpu, target, load_stack, load_stack ? rsp : stack.rsp());
    set_returned_flags(cpu, flags, mask);
    cpu.rip = rip;
    return true;
}

template <class Return>
const Op* do_return(Cpu& cpu, const Op* op, Return&& transfer) {
    const uint64_t from = cpu.code_linear(cpu.op_rip(op));
    begin_transfer(cpu);
    if (!transfer())
        return failed_transfer(cpu, op);
    cpu.record(from, cpu.code_linear(cpu.rip));
    return cpu.leave_at(cpu.rip, Leave::boundary);
}

} // namespace

const Op* far_return(Cpu& cpu, const Op* op, unsigned operand_size, unsigned extra_bytes) {
    return do_return(cpu, op, [&] {
        return cpu.cr0 & Cr0::pe ? return_protected(cpu, operand_size, extra_bytes)
                                 : return_real_mode(cpu, operand_size, extra_bytes);
    });
}

const Op* interrupt_return(Cpu& cpu, const Op* op, unsigned operand_size) {
    // NMIs are unblocked even by an IRET that faults (SDM vol. 3, 6.7.1 and 27.2.3).
    cpu.nmi_blocked = false;
    return do_return(cpu, op, [&] {
        return cpu.cr0 & Cr0::pe ? iret_protected(cpu, operand_size) : iret_real_mode(cpu, operand_size);
    });
}

} // namespace vtrace::soft
