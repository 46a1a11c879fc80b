#include "vmm/soft/decode.h"

#include <cassert>
#include <limits>

#include "vmm/soft/fuse.h"
#include "vmm/soft/instruction_events.h"

namespace vtrace::soft {
namespace {

/// Does this processor have the instruction set that the instruction belongs to?
bool offered(const ZydisDecodedInstruction& instruction, const CpuidModel& cpuid) {
    switch (instruction.meta.isa_set) {
    case ZYDIS_ISA_SET_I86:
    case ZYDIS_ISA_SET_I186:
    case ZYDIS_ISA_SET_I286PROTECTED:
    case ZYDIS_ISA_SET_I286REAL:
    case ZYDIS_ISA_SET_I386:
    case ZYDIS_ISA_SET_I486:
    case ZYDIS_ISA_SET_I486REAL:
    case ZYDIS_ISA_SET_PENTIUMREAL:
    case ZYDIS_ISA_SET_PENTIUMMMX:
    case ZYDIS_ISA_SET_PPRO:
    case ZYDIS_ISA_SET_CMOV:
    case ZYDIS_ISA_SET_FAT_NOP:
    case ZYDIS_ISA_SET_FCMOV:
    case ZYDIS_ISA_SET_X87:
    case ZYDIS_ISA_SET_FXSAVE:
    case ZYDIS_ISA_SET_FXSAVE64:
    case ZYDIS_ISA_SET_LONGMODE:
    case ZYDIS_ISA_SET_CLFSH:
    case ZYDIS_ISA_SET_PAUSE:
    case ZYDIS_ISA_SET_PREFETCH_NOP:
    case ZYDIS_ISA_SET_PREFETCHWT1: // 0F 0D /2, a hint like the others
    case ZYDIS_ISA_SET_SSE:
    case ZYDIS_ISA_SET_SSEMXCSR:
    case ZYDIS_ISA_SET_SSE_PREFETCH:
    case ZYDIS_ISA_SET_SSE2:
    case ZYDIS_ISA_SET_SSE2MMX:
        return true;
    case ZYDIS_ISA_SET_SSE3:
    case ZYDIS_ISA_SET_SSE3X87:
        return cpuid.has(Feature::sse3);
    case ZYDIS_ISA_SET_MONITOR:
        return cpuid.has(Feature::monitor);
    case ZYDIS_ISA_SET_SSSE3:
    case ZYDIS_ISA_SET_SSSE3MMX:
        return cpuid.has(Feature::ssse3);
    case ZYDIS_ISA_SET_SSE4:
        return cpuid.has(Feature::sse4_1);
    case ZYDIS_ISA_SET_SSE42:
        return cpuid.has(Feature::sse4_2);
    case ZYDIS_ISA_SET_POPCNT:
        return cpuid.has(Feature::popcnt);
    case ZYDIS_ISA_SET_CMPXCHG16B:
        return cpuid.has(Feature::cx16);
    case ZYDIS_ISA_SET_LAHF:
        return instruction.machine_mode != ZYDIS_MACHINE_MODE_LONG_64 || cpuid.has(Feature::lahf_lm);
    case ZYDIS_ISA_SET_MOVBE:
        return cpuid.has(Feature::movbe);
    case ZYDIS_ISA_SET_RDTSCP:
        return cpuid.has(Feature::rdtscp);
    case ZYDIS_ISA_SET_RDWRFSGS:
        return cpuid.has(Feature::fsgsbase);
    case ZYDIS_ISA_SET_SMAP:
        return cpuid.has(Feature::smap);
    case ZYDIS_ISA_SET_INVPCID:
        return cpuid.has(Feature::invpcid);
    case ZYDIS_ISA_SET_XSAVE:
        return cpuid.has(Feature::xsave);
    case ZYDIS_ISA_SET_XSAVEOPT:
        return cpuid.has(Feature::xsaveopt);
    case ZYDIS_ISA_SET_RDPMC:
        return true; // exists; what it may read is another question
    case ZYDIS_ISA_SET_RDRAND:
        return cpuid.has(Feature::rdrand);
    case ZYDIS_ISA_SET_RDSEED:
        return cpuid.has(Feature::rdseed);
    case ZYDIS_ISA_SET_CLFLUSHOPT:
        return cpuid.has(Feature::clflushopt);
    default:
        return false;
    }
}

/// What Zydis 4.0.0 gets wrong: with a 32-bit address, REX.B and a SIB byte that says "no base", it takes R13D for the
/// base and loses the displacement (right with 64-bit addresses).
ZydisDecodedOperandMem corrected(const ZydisDecodedInstruction& instruction, ZydisDecodedOperandMem memory) {
    constexpr uint8_t sib_follows = 4, no_base = 5;
    if (memory.base == ZYDIS_REGISTER_R13D && instruction.raw.modrm.mod == 0 &&
        instruction.raw.modrm.rm == sib_follows && instruction.raw.sib.base == no_base) {
        memory.base = ZYDIS_REGISTER_NONE;
        memory.disp.value = instruction.raw.disp.value;
    }
    return memory;
}

void place_memory_operand(const ZydisDecodedInstruction& instruction, const ZydisDecodedOperandMem& as_decoded,
                          CodeMode mode, Op& op, EaShape& shape) {
    const ZydisDecodedOperandMem memory = corrected(instruction, as_decoded);
    op.seg = static_cast<uint8_t>(memory.segment - ZYDIS_REGISTER_ES);
    op.aux = address_size_code(instruction);
    const bool flat = mode == CodeMode::bits64 && instruction.address_width == 64 && op.seg < FS;
    int64_t displacement = memory.disp.value;
    const bool rip_relative = memory.base == ZYDIS_REGISTER_RIP || memory.base == ZYDIS_REGISTER_EIP;
    op.base = rip_relative                              ? Cpu::rip_register * 8
              : memory.base == ZYDIS_REGISTER_NONE ? Cpu::zero_register * 8
                                                        : gpr_offset(memory.base);
    op.index = memory.index == ZYDIS_REGISTER_NONE ? Cpu::zero_register * 8 : gpr_offset(memory.index);
    op.scale = memory.scale == 8 ? 3 : memory.scale == 4 ? 2 : memory.scale == 2 ? 1 : 0;
    bool indexed = memory.index != ZYDIS_REGISTER_NONE;
    if (rip_relative && displacement > std::numeric_limits<int32_t>::max() - int64_t{2 * page_size}) {
        // place_op() will add the place in the block, and that must fit.
        op.index = Cpu::two_gib_register * 8;
        displacement -= int64_t{1} << 31;
        indexed = true;
    }
    if (displacement != static_cast<int32_t>(displacement)) {
        // Only MOV's 64-bit absolute form, whose handler takes the address from `imm`, and 32-bit addresses.
        op.imm = displacement;
    }
    op.disp = static_cast<int32_t>(displacement);
    shape = !flat ? EaShape::any : indexed ? EaShape::index : EaShape::base;
}

const Op* raise_too_long(Cpu& cpu, const Op* op) { return cpu.raise(op, Vector::gp, 0); }

Decoded no_instruction(Handler handler) {
    Decoded decoded{};
    decoded.op.fn = handler;
    decoded.op.len = 1;
    decoded.ends_block = true;
    return decoded;
}

} // namespace

ZydisDecoder make_decoder(CodeMode mode, const CpuidModel& cpuid) {
    ZydisDecoder decoder;
    ZydisMachineMode machine = mode == CodeMode::bits64   ? ZYDIS_MACHINE_MODE_LONG_64
                               : mode == CodeMode::bits32 ? ZYDIS_MACHINE_MODE_LEGACY_32
                                                          : ZYDIS_MACHINE_MODE_LEGACY_16;
    ZydisStackWidth stack = mode == CodeMode::bits64   ? ZYDIS_STACK_WIDTH_64
                            : mode == CodeMode::bits32 ? ZYDIS_STACK_WIDTH_32
                                                       : ZYDIS_STACK_WIDTH_16;
    ZydisDecoderInit(&decoder, machine, stack);
    // What these extensions took from the NOP space is a NOP (and F3 BSF a BSF) on a processor without them.
    for (ZydisDecoderMode off : {ZYDIS_DECODER_MODE_MPX, ZYDIS_DECODER_MODE_CET, ZYDIS_DECODER_MODE_CLDEMOTE,
                                 ZYDIS_DECODER_MODE_WBNOINVD, ZYDIS_DECODER_MODE_KNC})
        ZydisDecoderEnableMode(&decoder, off, ZYAN_FALSE);
    ZydisDecoderEnableMode(&decoder, ZYDIS_DECODER_MODE_TZCNT, cpuid.has(Feature::bmi1));
    ZydisDecoderEnableMode(&decoder, ZYDIS_DECODER_MODE_LZCNT, cpuid.has(Feature::lzcnt));
    return decoder;
}

const Op* raise_undefined(Cpu& cpu, const Op* op) { return cpu.raise(op, Vector::ud); }

uint8_t gpr_offset(ZydisRegister reg) {
    if (reg >= ZYDIS_REGISTER_AH && reg <= ZYDIS_REGISTER_BH)
        return static_cast<uint8_t>((reg - ZYDIS_REGISTER_AH) * 8 + 1);
    ZyanI8 id = ZydisRegisterGetId(reg);
    switch (ZydisRegisterGetClass(reg)) {
    case ZYDIS_REGCLASS_GPR8:
        // Zydis numbers AL..BL 0-3, AH..BH 4-7, SPL.. 8 and up.
        return static_cast<uint8_t>((id < 4 ? id : id - 4) * 8);
    case ZYDIS_REGCLASS_GPR16:
    case ZYDIS_REGCLASS_GPR32:
    case ZYDIS_REGCLASS_GPR64:
        return static_cast<uint8_t>(id * 8);
    default:
        assert(!"not a general-purpose register");
        return Cpu::zero_register * 8;
    }
}

void place_op(Op& op, unsigned offset) {
    op.offset = static_cast<uint16_t>(offset);
    if (op.base == Cpu::rip_register * 8)
        op.disp += static_cast<int32_t>(offset + op.len);
}

Decoded decode_instruction(std::span<const uint8_t> bytes, CodeMode mode, const CpuidModel& cpuid, bool& complete) {
    ZydisDecoder decoder = make_decoder(mode, cpuid);
    ZydisDecodedInstruction instruction;
    ZydisDecodedOperand operands[ZYDIS_MAX_OPERAND_COUNT];
    ZyanStatus status = ZydisDecoderDecodeFull(&decoder, bytes.data(), bytes.size(), &instruction, operands);
    complete = true;
    if (status == ZYDIS_STATUS_NO_MORE_DATA) {
        if (bytes.size() >= max_instruction_length)
            return no_instruction(raise_too_long);
        complete = false;
        return {};
    }
    if (status == ZYDIS_STATUS_INSTRUCTION_TOO_LONG)
        return no_instruction(raise_too_long);
    if (ZYAN_FAILED(status))
        return no_instruction(raise_undefined);

    Decoded decoded{};
    Op& op = decoded.op;
    op.len = instruction.length;
    op.base = op.index = Cpu::zero_register * 8;
    op.seg = DS;
    EaShape shape = EaShape::none;
    bool have_immediate = false;
    for (unsigned i = 0; i < instruction.operand_count; ++i) {
        const ZydisDecodedOperand& operand = operands[i];
        if (operand.visibility == ZYDIS_OPERAND_VISIBILITY_HIDDEN)
            continue;
        if (operand.type == ZYDIS_OPERAND_TYPE_IMMEDIATE && !have_immediate) {
            have_immediate = true;
            op.imm = operand.imm.is_signed || operand.imm.is_relative ? operand.imm.value.s
                                                                      : static_cast<int64_t>(operand.imm.value.u);
        }
        if (operand.type == ZYDIS_OPERAND_TYPE_MEMORY && shape == EaShape::none &&
            operand.visibility == ZYDIS_OPERAND_VISIBILITY_EXPLICIT)
            place_memory_operand(instruction, operand.mem, mode, op, shape);
    }
    DecodeInput input{instruction, operands, bytes.data(), mode, shape, cpuid};
    bool& ends = decoded.ends_block;
    if (!offered(instruction, cpuid) ||
        !(decode_move(input, op) || decode_alu(input, op) || decode_stack(input, op) || decode_shift(input, op) ||
          decode_bits(input, op) || decode_flags(input, op) || decode_multiply(input, op) ||
          decode_exchange(input, op) || decode_branch(input, op, ends) || decode_string(input, op, ends) ||
          decode_system(input, op, ends) || decode_fp(input, op, ends))) {
        uint8_t length = op.len;
        decoded = no_instruction(raise_undefined);
        op.len = length;
    } else {
        note_fusion(instruction, operands, mode, decoded);
        decoded.events = instruction_events(instruction, operands);
    }
    return decoded;
}

// ---------------------------------------------------------------------------------------------------------------------

uint64_t effective_offset(const Cpu& cpu, const Op* op) {
    return truncate_offset(op, cpu.get<uint64_t>(op->base) + (cpu.get<uint64_t>(op->index) << op->scale) +
                                   static_cast<int64_t>(op->disp));
}

Linear checked_linear(Cpu& cpu, const Op* op, Seg seg, uint64_t offset, unsigned size, bool write) {
    if (cpu.code64())
        return {cpu.segment_base[seg] + offset, true};
    const Segment& segment = cpu.segments[seg];
    const uint16_t attributes = segment.attributes;
    bool ok;
    if (!(cpu.cr0 & Cr0::pe)) {
        ok = offset + size - 1 <= segment.limit;
    } else {
        ok = attributes & SegAttr::p;
        if (attributes & SegAttr::code)
            ok = ok && !write && (attributes & SegAttr::write_or_read);
        else if (write)
            ok = ok && (attributes & SegAttr::write_or_read);
        const uint64_t last = offset + size - 1;
        if (!(attributes & SegAttr::code) && (attributes & SegAttr::conforming_or_down)) {
            const uint64_t top = attributes & SegAttr::db ? 0xffff'ffff : 0xffff; // expand-down: valid above the limit
            ok = ok && offset > segment.limit && last <= top;
        } else {
            ok = ok && last <= segment.limit;
        }
    }
    if (!ok) {
        cpu.raise(op, seg == SS ? Vector::ss : Vector::gp, 0);
        return {0, false};
    }
    return {static_cast<uint32_t>(segment.base + offset), true};
}

} // namespace vtrace::soft
