// The handlers of system instructions, by file; decode_system() chooses among them. Operands: see system_operand.h.
#pragma once

#include "vmm/soft/cpu.h"

namespace vtrace::soft {

// syscall.cc
const Op* op_syscall(Cpu& cpu, const Op* op);
const Op* op_sysret(Cpu& cpu, const Op* op);
const Op* op_sysenter(Cpu& cpu, const Op* op);
const Op* op_sysexit(Cpu& cpu, const Op* op);

// control.cc: control and debug registers. `reg`: the general register; register_number(): the other one.
const Op* op_read_cr(Cpu& cpu, const Op* op);
const Op* op_write_cr(Cpu& cpu, const Op* op);
const Op* op_smsw(Cpu& cpu, const Op* op);
const Op* op_lmsw(Cpu& cpu, const Op* op);
const Op* op_clts(Cpu& cpu, const Op* op);
const Op* op_read_dr(Cpu& cpu, const Op* op);
const Op* op_write_dr(Cpu& cpu, const Op* op);

// control_table.cc: descriptor tables and TLBs.
const Op* op_sgdt(Cpu& cpu, const Op* op);
const Op* op_sidt(Cpu& cpu, const Op* op);
const Op* op_lgdt(Cpu& cpu, const Op* op);
const Op* op_lidt(Cpu& cpu, const Op* op);
const Op* op_sldt(Cpu& cpu, const Op* op);
const Op* op_str(Cpu& cpu, const Op* op);
const Op* op_lldt(Cpu& cpu, const Op* op);
const Op* op_ltr(Cpu& cpu, const Op* op);
const Op* op_invlpg(Cpu& cpu, const Op* op);
const Op* op_invpcid(Cpu& cpu, const Op* op);

// control_segment.cc: segment registers and descriptors.
const Op* op_lar(Cpu& cpu, const Op* op);
const Op* op_lsl(Cpu& cpu, const Op* op);
const Op* op_verr(Cpu& cpu, const Op* op);
const Op* op_verw(Cpu& cpu, const Op* op);
const Op* op_arpl(Cpu& cpu, const Op* op);
const Op* op_mov_from_segment(Cpu& cpu, const Op* op);
const Op* op_mov_to_segment(Cpu& cpu, const Op* op);
const Op* op_push_segment(Cpu& cpu, const Op* op);
const Op* op_pop_segment(Cpu& cpu, const Op* op);
const Op* op_load_far_pointer(Cpu& cpu, const Op* op); // LDS, LES, LFS, LGS, LSS
const Op* op_swapgs(Cpu& cpu, const Op* op);
const Op* op_read_segment_base(Cpu& cpu, const Op* op); // RDFSBASE, RDGSBASE
const Op* op_write_segment_base(Cpu& cpu, const Op* op);

// control_far.cc: far transfers and software interrupts.
const Op* op_far_jump_memory(Cpu& cpu, const Op* op);
const Op* op_far_jump_immediate(Cpu& cpu, const Op* op); // imm: offset, rm and reg: low and high byte of the selector
const Op* op_far_call_memory(Cpu& cpu, const Op* op);
const Op* op_far_call_immediate(Cpu& cpu, const Op* op);
const Op* op_far_return(Cpu& cpu, const Op* op);
const Op* op_iret(Cpu& cpu, const Op* op);
const Op* op_int(Cpu& cpu, const Op* op);
const Op* op_int1(Cpu& cpu, const Op* op);
const Op* op_int3(Cpu& cpu, const Op* op);
const Op* op_into(Cpu& cpu, const Op* op);
const Op* op_bound(Cpu& cpu, const Op* op);

// control_flags.cc: what concerns interrupts and RFLAGS as a whole.
const Op* op_cli(Cpu& cpu, const Op* op);
const Op* op_sti(Cpu& cpu, const Op* op);
const Op* op_pushf(Cpu& cpu, const Op* op);
const Op* op_popf(Cpu& cpu, const Op* op);
const Op* op_stac(Cpu& cpu, const Op* op);
const Op* op_clac(Cpu& cpu, const Op* op);
const Op* op_hlt(Cpu& cpu, const Op* op);

// control_io.cc. `imm`: the port unless SystemAux::special, then it is DX; size in `reg`.
const Op* op_in(Cpu& cpu, const Op* op);
const Op* op_out(Cpu& cpu, const Op* op);

// control_misc.cc: identification, time, MSRs, caches.
const Op* op_cpuid(Cpu& cpu, const Op* op);
const Op* op_rdmsr(Cpu& cpu, const Op* op);
const Op* op_wrmsr(Cpu& cpu, const Op* op);
const Op* op_rdtsc(Cpu& cpu, const Op* op);
const Op* op_rdtscp(Cpu& cpu, const Op* op);
const Op* op_rdpmc(Cpu& cpu, const Op* op);
const Op* op_wbinvd(Cpu& cpu, const Op* op); // INVD too
const Op* op_random(Cpu& cpu, const Op* op); // RDRAND, RDSEED

} // namespace vtrace::soft
