// Stubs: host code that executes one guest instruction with its operands moved to fixed registers.
//
// Guest and host have the same instruction set, so x87, MMX and SSE instructions are executed by themselves: an
// instruction is re-encoded with modrm.reg -> register 1 (or EAX), modrm.rm -> register 2 (or EAX) or memory at [RSI],
// and wrapped in code that loads and stores these. Equal encodings share a stub, whatever registers the guest uses;
// stubs are made once in a process, are never freed, and their number is bounded by the instruction set (below 32,000,
// 4 MiB).
//
// A stub neither changes host MXCSR and x87 control, nor leaves MMX state behind, nor touches memory beyond its frame.
#pragma once

#include <compare>
#include <cstdint>

#include "ds/result.h"
#include "vmm/soft/fp_image.h"

namespace vtrace::soft {

/// An instruction without what varies among its uses: registers, addresses, ignored prefixes.
struct HostEncoding {
    uint8_t prefix = 0; // mandatory 66, F2 or F3
    bool rex_w = false;
    uint8_t escape[2] = {}; // 0F; 0F 38; 0F 3A; none for x87
    uint8_t opcode = 0;
    uint8_t modrm = 0;
    bool has_imm = false;
    uint8_t imm = 0;
    auto operator<=>(const HostEncoding&) const = default;
};
inline constexpr uint8_t modrm_memory_rsi = 6;                     // mod 0, rm RSI
inline constexpr unsigned stub_reg = 1, stub_rm = 2, stub_gpr = 0; // host register numbers of the operands

enum class FpOperand : uint8_t { none, xmm, mmx, gpr };

/// Operands of a SIMD instruction on their way in and out of its stub.
struct alignas(16) SimdFrame {
    uint8_t reg[16];  // operand of modrm.reg, XMM or MMX
    uint8_t rm[16];   // operand of modrm.rm, XMM or MMX
    uint8_t xmm0[16]; // implicit operand
    uint8_t memory[16];
    uint64_t rax; // general-purpose operand, wherever encoded; length of the first string of PCMPESTRx
    uint64_t rcx; // result of PCMPxSTRI
    uint64_t rdx; // length of the second string
    uint64_t rflags;
    uint32_t mxcsr; // to execute with
    uint32_t mxcsr_after;
    uint32_t host_mxcsr;
};

/// A SIMD instruction: its stub and all that the handler must know.
struct SimdForm {
    void (*stub)(SimdFrame*) = nullptr;
    void (*direct)(void* reg,
                   const void* rm) = nullptr; // XMM, XMM or memory, nothing else; null if it isn't that simple
    HostEncoding encoding;
    FpOperand reg = FpOperand::none, rm = FpOperand::none;
    bool reg_written = false, rm_written = false;
    uint8_t memory_size = 0; // bytes; 0: no memory operand
    bool memory_written = false, aligned = false;
    bool xmm0_read = false, xmm0_written = false;
    bool string_lengths = false; // PCMPESTRx
    bool rcx_written = false, flags_written = false;
    bool arithmetic = false; // may raise SIMD floating-point exceptions
    bool mmx = false;        // switches the x87 unit to MMX
    bool sse = false;        // XMM registers or MXCSR take part
};

struct alignas(64) X87Frame {
    FpuImage image;
    uint8_t memory[16];
    uint64_t rflags;
    uint32_t host_mxcsr;
    uint16_t host_fcw;
};

struct X87Form {
    void (*stub)(X87Frame*) = nullptr;
    HostEncoding encoding;
    uint8_t memory_size = 0;
    bool memory_written = false;
    bool flags_read = false, flags_written = false;
};

/// The form with its stub, made if need be; lives as long as the process. `wanted` has no stub. Any thread. Null when
/// no executable memory can be had: see fp_stub_memory().
const SimdForm* find_simd_form(const SimdForm& wanted);
const X87Form* find_x87_form(const X87Form& wanted);

/// Whether this process may generate code; the error says what to change.
Result<void> fp_stub_memory();

} // namespace vtrace::soft
