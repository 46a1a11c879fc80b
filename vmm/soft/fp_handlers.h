// The handlers of x87, MMX and SSE instructions, chosen by decode_fp(). Op::reg and Op::rm are byte offsets: of
// general-purpose registers into Cpu::gpr, of XMM and MMX registers 16 times their number.
#pragma once

#include "vmm/soft/decode.h"
#include "vmm/soft/fp_stub.h"

namespace vtrace::soft {

/// `handler<EaBase>` etc. for a memory operand of the given shape.
#define VTRACE_BY_SHAPE(shape, handler)                                                                                \
    ((shape) == EaShape::base ? handler<EaBase> : (shape) == EaShape::index ? handler<EaIndex> : handler<EaAny>)

/// Stands for the effective address of an instruction without memory operand.
struct EaNone {};

// --- fp_simd.cc: MMX and SSE by stubs; Op::imm is the SimdForm's address ---------------------------------------------
Handler simd_handler(const SimdForm& form, EaShape shape);

// --- fp_x87.cc: x87 by stubs; Op::imm is the X87Form's address -------------------------------------------------------
Handler x87_handler(const X87Form& form, EaShape shape);

// --- fp_control.cc: x87 control instructions -------------------------------------------------------------------------
enum class X87Control : uint8_t {
    fninit,
    fnclex,
    fnop,
    fnop_no_wait,
    fwait,
    fnstsw_ax,
    fnstsw,
    fnstcw,
    fldcw,
    fnstenv,
    fldenv,
    fnsave,
    frstor
};
/// Op::reg: 1 for the 16-bit layout of FNSTENV, FLDENV, FNSAVE, FRSTOR.
Handler x87_control_handler(X87Control control, EaShape shape);

// --- fp_state.cc: whole-state instructions ---------------------------------------------------------------------------
enum class FpState : uint8_t { fxsave, fxrstor, xsave, xsaveopt, xrstor, xgetbv, xsetbv, ldmxcsr, stmxcsr, emms };
/// Op::reg: 1 for the forms with REX.W; Op::rm: 1 in 64-bit mode.
Handler fp_state_handler(FpState state, EaShape shape);

// --- fp_misc.cc: those in plain C++ ----------------------------------------------------------------------------------
enum class FpMisc : uint8_t { hint, movnti, maskmovq, maskmovdqu, rcpps, rcpss, rsqrtps, rsqrtss, popcnt, crc32 };
/// Op::aux bits 15:8: size of the source (of the destination for MOVNTI) in bytes; bit 2: CRC32 to a 64-bit register.
inline constexpr unsigned misc_size_shift = 8;
Handler fp_misc_handler(FpMisc misc, EaShape shape);

} // namespace vtrace::soft
