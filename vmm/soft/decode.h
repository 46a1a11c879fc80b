// From guest bytes to ops. Zydis says what the instruction is; here it gets its handler and its operands their places.
//
// The decoder knows nothing of the guest's state but code width and CPUID; what depends on more (CPL, CR0.TS, ...) the
// handlers test.
#pragma once

#include <cstdint>
#include <span>

#include <Zydis/Zydis.h>

#include "vmm/soft/cpu.h"

namespace vtrace::soft {

enum class EaShape : uint8_t { none, base, index, any };

/// One decoded instruction on its way to an op. decode_instruction() has filled all of the op but `fn` and what is said
/// to be the part's own: `len`, `before`, `offset`, `imm` (first immediate), and, if there is a memory operand, `base`,
/// `index`, `scale`, `disp`, `seg` and the address size in `aux` bits 1:0 (bits 15:2 are the part's own).
struct DecodeInput {
    const ZydisDecodedInstruction& instruction;
    const ZydisDecodedOperand* operands; // visible ones first, instruction.operand_count in all
    const uint8_t* bytes;                // instruction.length of them
    CodeMode mode;
    EaShape shape; // of the memory operand
    const CpuidModel& cpuid;
};

/// A decoder of code of this width, as the processor that CPUID describes decodes it.
ZydisDecoder make_decoder(CodeMode mode, const CpuidModel& cpuid);

/// Byte offset in Cpu::gpr of a general-purpose register of any width (AH..BH included). Asserts that it is one.
uint8_t gpr_offset(ZydisRegister reg);

/// What Op::aux says of the address size.
inline uint16_t address_size_code(const ZydisDecodedInstruction& instruction) {
    return instruction.address_width == 64 ? 2 : instruction.address_width == 32 ? 1 : 0;
}

/// Each part picks the handler for the mnemonics that are its own and says so; else false, op untouched.
/// Sets ends_block when the instruction must be the last of its block.
bool decode_move(const DecodeInput& input, Op& op);
bool decode_alu(const DecodeInput& input, Op& op);
bool decode_stack(const DecodeInput& input, Op& op);
bool decode_shift(const DecodeInput& input, Op& op);
bool decode_bits(const DecodeInput& input, Op& op);
bool decode_flags(const DecodeInput& input, Op& op);
bool decode_multiply(const DecodeInput& input, Op& op);
bool decode_exchange(const DecodeInput& input, Op& op);
bool decode_branch(const DecodeInput& input, Op& op, bool& ends_block);
bool decode_string(const DecodeInput& input, Op& op, bool& ends_block);
bool decode_system(const DecodeInput& input, Op& op, bool& ends_block); // decode_system.cc, privileged and segment instructions
bool decode_fp(const DecodeInput& input, Op& op, bool& ends_block);     // decode_fp.cc, x87, MMX, SSE, FXSAVE, XSAVE, MXCSR

enum class Compare : uint8_t { none, cmp_register, cmp_immediate, test_register, test_immediate };

/// What one instruction became.
struct Decoded {
    Op op;
    bool ends_block;
    // For fusion (fuse.h): a compare of registers or a register and an immediate, and its width in bits; a Jcc's condition.
    Compare compare = Compare::none;
    uint8_t compare_width = 0;
    int8_t condition = -1;
    ds::InstructionEvents events = 0; // what it is to performance counters
};

/// Decodes the instruction at the start of `bytes` (at most 15, fewer only at the end of what can be fetched). Never fails:
/// what isn't an instruction, or isn't offered by CPUID, becomes an op that raises #UD; one longer than 15 bytes, #GP.
/// `complete` is false when the bytes ran out first.
Decoded decode_instruction(std::span<const uint8_t> bytes, CodeMode mode, const CpuidModel& cpuid, bool& complete);

/// Gives a decoded op its place, `offset` bytes from the start of its block. `left` is the block's to fill.
void place_op(Op& op, unsigned offset);

const Op* raise_undefined(Cpu& cpu, const Op* op); // the handler of #UD

} // namespace vtrace::soft
