// SYSCALL, SYSRET, SYSENTER, SYSEXIT (SDM vol. 2, under these names; vol. 3, 5.8.7 and 5.8.8).
#include "vmm/soft/debug_register.h"
#include "vmm/soft/system.h"
#include "vmm/soft/system_handlers.h"
#include "vmm/soft/system_operand.h"

namespace vtrace::soft {
namespace {

/// STAR: SYSCALL's CS in bits 47:32, SYSRET's base in 63:48. The other selectors follow from them.
constexpr unsigned star_syscall_shift = 32, star_sysret_shift = 48;

/// The flat segments that these instructions load without looking at a descriptor table.
Segment flat_code(unsigned selector, unsigned level, bool long_code) {
    const uint16_t width = long_code ? SegAttr::l : SegAttr::db;
    const uint16_t attributes = SegAttr::code | SegAttr::write_or_read | SegAttr::accessed | SegAttr::s | SegAttr::p |
                                SegAttr::g | width | static_cast<uint16_t>(level << SegAttr::dpl_shift);
    return {0, 0xffff'ffff, static_cast<uint16_t>(selector), attributes};
}
Segment flat_stack(unsigned selector, unsigned level) {
    const uint16_t attributes = SegAttr::write_or_read | SegAttr::accessed | SegAttr::s | SegAttr::p | SegAttr::g |
                                SegAttr::db | static_cast<uint16_t>(level << SegAttr::dpl_shift);
    return {0, 0xffff'ffff, static_cast<uint16_t>(selector), attributes};
}

const Op* enter(Cpu& cpu, uint64_t from, const Segment& code, const Segment& stack, unsigned level, uint64_t rip) {
    cpu.segments[SS] = stack;
    cpu.rip = rip;
    set_code_segment(cpu, code, level);
    cpu.record(from, cpu.code_linear(rip));
    return cpu.leave_at(rip, Leave::boundary);
}

/// RFLAGS of SYSCALL and SYSRET: whether a single-step trap follows is for the TF that they load to say.
void load_flags(Cpu& cpu, uint64_t flags) {
    cpu.set_rflags(flags);
    cpu.no_step_trap = true;
    if (flags & Rflags::tf)
        cpu.pending_db |= Dr6::bs;
}

} // namespace

const Op* op_syscall(Cpu& cpu, const Op* op) {
    if (!cpu.code64() || !(cpu.efer & Efer::sce))
        return cpu.raise(op, Vector::ud);
    const uint64_t from = cpu.op_rip(op);
    const uint64_t flags = cpu.rflags();
    cpu.gpr[RCX] = cpu.next_rip(op);
    cpu.gpr[R11] = flags;
    const auto selector = static_cast<uint16_t>(cpu.star >> star_syscall_shift & 0xfffc);
    const Op* next = enter(cpu, from, flat_code(selector, 0, true), flat_stack(selector + 8u, 0), 0, cpu.lstar);
    load_flags(cpu, flags & ~(cpu.sfmask & 0xffff'ffff) & ~(Rflags::rf | Rflags::vm));
    return next;
}

const Op* op_sysret(Cpu& cpu, const Op* op) {
    if (!cpu.code64() || !(cpu.efer & Efer::sce))
        return cpu.raise(op, Vector::ud);
    const bool to64 = operand_size(op) == 8;
    if (cpu.cpl != 0 || (to64 && !cpu.is_canonical(cpu.gpr[RCX])))
        return cpu.raise(op, Vector::gp, 0);
    const uint64_t from = cpu.op_rip(op);
    const unsigned base = cpu.star >> star_sysret_shift & 0xffff;
    const uint64_t rip = to64 ? cpu.gpr[RCX] : static_cast<uint32_t>(cpu.gpr[RCX]);
    constexpr uint64_t taken = Rflags::status | Rflags::tf | Rflags::if_ | Rflags::df | Rflags::iopl | Rflags::nt |
                               Rflags::ac | Rflags::vif | Rflags::vip | Rflags::id;
    const uint64_t flags = (cpu.gpr[R11] & taken) | Rflags::reserved1;
    const Op* next =
        enter(cpu, from, flat_code((base + (to64 ? 16 : 0)) | 3, 3, to64), flat_stack((base + 8) | 3, 3), 3, rip);
    load_flags(cpu, flags);
    return next;
}

const Op* op_sysenter(Cpu& cpu, const Op* op) {
    const unsigned selector = cpu.sysenter_cs & 0xfffc;
    if (!(cpu.cr0 & Cr0::pe) || !selector)
        return cpu.raise(op, Vector::gp, 0);
    const uint64_t from = cpu.code_linear(cpu.op_rip(op));
    const bool long_mode = cpu.long_mode();
    cpu.gpr[RSP] = long_mode ? cpu.sysenter_esp : static_cast<uint32_t>(cpu.sysenter_esp);
    const uint64_t rip = long_mode ? cpu.sysenter_eip : static_cast<uint32_t>(cpu.sysenter_eip);
    const Op* next = enter(cpu, from, flat_code(selector, 0, long_mode), flat_stack(selector + 8, 0), 0, rip);
    cpu.set_rflags(cpu.rflags() & ~(Rflags::if_ | Rflags::vm));
    return next;
}

const Op* op_sysexit(Cpu& cpu, const Op* op) {
    const unsigned selector = cpu.sysenter_cs & 0xfffc;
    if (!(cpu.cr0 & Cr0::pe) || !selector || cpu.cpl != 0)
        return cpu.raise(op, Vector::gp, 0);
    const bool to64 = operand_size(op) == 8;
    if (to64 && (!cpu.is_canonical(cpu.gpr[RCX]) || !cpu.is_canonical(cpu.gpr[RDX])))
        return cpu.raise(op, Vector::gp, 0);
    const uint64_t from = cpu.code_linear(cpu.op_rip(op));
    const uint64_t rip = to64 ? cpu.gpr[RDX] : static_cast<uint32_t>(cpu.gpr[RDX]);
    cpu.gpr[RSP] = to64 ? cpu.gpr[RCX] : static_cast<uint32_t>(cpu.gpr[RCX]);
    const unsigned code = selector + (to64 ? 32 : 16);
    return enter(cpu, from, flat_code(code | 3, 3, to64), flat_stack((code + 8) | 3, 3), 3, rip);
}

} // namespace vtrace::soft
