// The decoder's part for x87, MMX and SSE up to SSE4.2, whole-state instructions and hints.
#include <cassert>

#include "vmm/soft/fp_handlers.h"
#include "vmm/soft/fp_host.h"

namespace vtrace::soft {

bool host_supports(Feature feature) {
    switch (feature) {
    case Feature::sse3:
        return __builtin_cpu_supports("sse3");
    case Feature::ssse3:
        return __builtin_cpu_supports("ssse3");
    case Feature::sse4_1:
        return __builtin_cpu_supports("sse4.1");
    case Feature::sse4_2:
        return __builtin_cpu_supports("sse4.2");
    default: // in C++, on any host
        return true;
    }
}

namespace {

constexpr uint8_t bits_per_byte = 8;

bool offered(const DecodeInput& input, Feature feature) {
    return input.cpuid.has(feature) && host_supports(feature);
}

/// Whether the guest's processor has the instruction set; those that aren't ours it hasn't.
bool isa_offered(const DecodeInput& input) {
    switch (input.instruction.meta.isa_set) {
    case ZYDIS_ISA_SET_X87:
    case ZYDIS_ISA_SET_FCMOV:
    case ZYDIS_ISA_SET_PPRO:
    case ZYDIS_ISA_SET_PENTIUMMMX:
    case ZYDIS_ISA_SET_SSE:
    case ZYDIS_ISA_SET_SSE2:
    case ZYDIS_ISA_SET_SSE2MMX:
    case ZYDIS_ISA_SET_SSEMXCSR:
    case ZYDIS_ISA_SET_FXSAVE:
    case ZYDIS_ISA_SET_FXSAVE64:
        return true;
    case ZYDIS_ISA_SET_SSE3:
    case ZYDIS_ISA_SET_SSE3X87:
        return offered(input, Feature::sse3);
    case ZYDIS_ISA_SET_SSSE3:
    case ZYDIS_ISA_SET_SSSE3MMX:
        return offered(input, Feature::ssse3);
    case ZYDIS_ISA_SET_SSE4:
        return offered(input, Feature::sse4_1);
    case ZYDIS_ISA_SET_SSE42:
        return offered(input, Feature::sse4_2);
    case ZYDIS_ISA_SET_POPCNT:
        return offered(input, Feature::popcnt);
    case ZYDIS_ISA_SET_XSAVE:
        return offered(input, Feature::xsave);
    case ZYDIS_ISA_SET_XSAVEOPT:
        return offered(input, Feature::xsave) && offered(input, Feature::xsaveopt);
    default:
        return false;
    }
}

bool writes(const ZydisDecodedOperand& operand) {
    return operand.actions & ZYDIS_OPERAND_ACTION_MASK_WRITE;
}
bool visible(const ZydisDecodedOperand& operand) {
    return operand.visibility != ZYDIS_OPERAND_VISIBILITY_HIDDEN;
}

/// The explicit memory operand, or null.
const ZydisDecodedOperand* memory_operand(const DecodeInput& input) {
    for (unsigned i = 0; i < input.instruction.operand_count; i++)
        if (input.operands[i].type == ZYDIS_OPERAND_TYPE_MEMORY && visible(input.operands[i]))
            return &input.operands[i];
    return nullptr;
}

FpOperand operand_kind(const ZydisDecodedOperand& operand) {
    if (operand.type != ZYDIS_OPERAND_TYPE_REGISTER)
        return FpOperand::none;
    switch (ZydisRegisterGetClass(operand.reg.value)) {
    case ZYDIS_REGCLASS_XMM:
        return FpOperand::xmm;
    case ZYDIS_REGCLASS_MMX:
        return FpOperand::mmx;
    case ZYDIS_REGCLASS_GPR8:
    case ZYDIS_REGCLASS_GPR16:
    case ZYDIS_REGCLASS_GPR32:
    case ZYDIS_REGCLASS_GPR64:
        return FpOperand::gpr;
    default:
        return FpOperand::none;
    }
}
uint8_t register_offset(const ZydisDecodedOperand& operand) {
    if (operand_kind(operand) == FpOperand::gpr)
        return gpr_offset(operand.reg.value);
    return static_cast<uint8_t>(ZydisRegisterGetId(operand.reg.value) * Fx::slot_size);
}

// --- SIMD by stubs ---------------------------------------------------------------------------------------------------

/// Instructions whose 16-byte memory operand may lie anywhere.
bool allows_misalignment(ZydisMnemonic mnemonic) {
    switch (mnemonic) {
    case ZYDIS_MNEMONIC_MOVUPS:
    case ZYDIS_MNEMONIC_MOVUPD:
    case ZYDIS_MNEMONIC_MOVDQU:
    case ZYDIS_MNEMONIC_LDDQU:
    case ZYDIS_MNEMONIC_PCMPESTRI:
    case ZYDIS_MNEMONIC_PCMPESTRM:
    case ZYDIS_MNEMONIC_PCMPISTRI:
    case ZYDIS_MNEMONIC_PCMPISTRM:
        return true;
    default:
        return false;
    }
}

/// Instructions that may raise SIMD floating-point exceptions (SDM vol. 1, appendix D), or whose result depends on
/// MXCSR.
bool is_arithmetic(ZydisMnemonic mnemonic) {
    switch (mnemonic) {
#define VTRACE_FOUR(name)                                                                                              \
    case ZYDIS_MNEMONIC_##name##PS:                                                                                    \
    case ZYDIS_MNEMONIC_##name##PD:                                                                                    \
    case ZYDIS_MNEMONIC_##name##SS:                                                                                    \
    case ZYDIS_MNEMONIC_##name##SD:
        VTRACE_FOUR(ADD)
        VTRACE_FOUR(SUB)
        VTRACE_FOUR(MUL)
        VTRACE_FOUR(DIV)
        VTRACE_FOUR(SQRT)
        VTRACE_FOUR(MIN)
        VTRACE_FOUR(MAX)
        VTRACE_FOUR(CMP)
        VTRACE_FOUR(ROUND)
#undef VTRACE_FOUR
    case ZYDIS_MNEMONIC_COMISS:
    case ZYDIS_MNEMONIC_COMISD:
    case ZYDIS_MNEMONIC_UCOMISS:
    case ZYDIS_MNEMONIC_UCOMISD:
    case ZYDIS_MNEMONIC_ADDSUBPS:
    case ZYDIS_MNEMONIC_ADDSUBPD:
    case ZYDIS_MNEMONIC_HADDPS:
    case ZYDIS_MNEMONIC_HADDPD:
    case ZYDIS_MNEMONIC_HSUBPS:
    case ZYDIS_MNEMONIC_HSUBPD:
    case ZYDIS_MNEMONIC_DPPS:
    case ZYDIS_MNEMONIC_DPPD:
    case ZYDIS_MNEMONIC_CVTDQ2PD:
    case ZYDIS_MNEMONIC_CVTDQ2PS:
    case ZYDIS_MNEMONIC_CVTPD2DQ:
    case ZYDIS_MNEMONIC_CVTPD2PI:
    case ZYDIS_MNEMONIC_CVTPD2PS:
    case ZYDIS_MNEMONIC_CVTPI2PD:
    case ZYDIS_MNEMONIC_CVTPI2PS:
    case ZYDIS_MNEMONIC_CVTPS2DQ:
    case ZYDIS_MNEMONIC_CVTPS2PD:
    case ZYDIS_MNEMONIC_CVTPS2PI:
    case ZYDIS_MNEMONIC_CVTSD2SI:
    case ZYDIS_MNEMONIC_CVTSD2SS:
    case ZYDIS_MNEMONIC_CVTSI2SD:
    case ZYDIS_MNEMONIC_CVTSI2SS:
    case ZYDIS_MNEMONIC_CVTSS2SD:
    case ZYDIS_MNEMONIC_CVTSS2SI:
    case ZYDIS_MNEMONIC_CVTTPD2DQ:
    case ZYDIS_MNEMONIC_CVTTPD2PI:
    case ZYDIS_MNEMONIC_CVTTPS2DQ:
    case ZYDIS_MNEMONIC_CVTTPS2PI:
    case ZYDIS_MNEMONIC_CVTTSD2SI:
    case ZYDIS_MNEMONIC_CVTTSS2SI:
        return true;
    default:
        return false;
    }
}

HostEncoding host_encoding(const ZydisDecodedInstruction& instruction) {
    HostEncoding encoding;
    for (unsigned i = 0; i < instruction.raw.prefix_count; i++)
        if (instruction.raw.prefixes[i].type == ZYDIS_PREFIX_TYPE_MANDATORY)
            encoding.prefix = instruction.raw.prefixes[i].value;
    encoding.rex_w = instruction.raw.rex.W;
    constexpr uint8_t escape_0f = 0x0f, escape_38 = 0x38, escape_3a = 0x3a;
    switch (instruction.opcode_map) {
    case ZYDIS_OPCODE_MAP_0F38:
        encoding.escape[1] = escape_38;
        encoding.escape[0] = escape_0f;
        break;
    case ZYDIS_OPCODE_MAP_0F3A:
        encoding.escape[1] = escape_3a;
        encoding.escape[0] = escape_0f;
        break;
    case ZYDIS_OPCODE_MAP_0F:
        encoding.escape[0] = escape_0f;
        break;
    default: // x87
        break;
    }
    encoding.opcode = instruction.opcode;
    encoding.has_imm = instruction.raw.imm[0].size != 0;
    encoding.imm = encoding.has_imm ? static_cast<uint8_t>(instruction.raw.imm[0].value.u) : 0;
    return encoding;
}

/// What the instruction reads and writes beside its explicit operands.
void describe_implicit(ZydisMnemonic mnemonic, SimdForm& form) {
    switch (mnemonic) {
    case ZYDIS_MNEMONIC_BLENDVPS:
    case ZYDIS_MNEMONIC_BLENDVPD:
    case ZYDIS_MNEMONIC_PBLENDVB:
        form.xmm0_read = true;
        break;
    case ZYDIS_MNEMONIC_PCMPESTRI:
    case ZYDIS_MNEMONIC_PCMPISTRI:
        form.rcx_written = form.flags_written = true;
        form.string_lengths = mnemonic == ZYDIS_MNEMONIC_PCMPESTRI;
        break;
    case ZYDIS_MNEMONIC_PCMPESTRM:
    case ZYDIS_MNEMONIC_PCMPISTRM:
        form.xmm0_written = form.flags_written = true;
        form.string_lengths = mnemonic == ZYDIS_MNEMONIC_PCMPESTRM;
        break;
    case ZYDIS_MNEMONIC_COMISS:
    case ZYDIS_MNEMONIC_COMISD:
    case ZYDIS_MNEMONIC_UCOMISS:
    case ZYDIS_MNEMONIC_UCOMISD:
    case ZYDIS_MNEMONIC_PTEST:
        form.flags_written = true;
        break;
    default:
        break;
    }
}

bool decode_simd(const DecodeInput& input, Op& op) {
    const ZydisDecodedInstruction& instruction = input.instruction;
    constexpr unsigned register_direct = 3 << 6, reg_shift = 3;
    SimdForm form;
    form.encoding = host_encoding(instruction);
    unsigned modrm_reg = instruction.raw.modrm.reg; // an opcode extension unless an operand takes it
    unsigned modrm_rm = modrm_memory_rsi;
    Op changed = op;
    for (unsigned i = 0; i < instruction.operand_count; i++) {
        const ZydisDecodedOperand& operand = input.operands[i];
        FpOperand kind = operand_kind(operand);
        if (operand.encoding == ZYDIS_OPERAND_ENCODING_MODRM_REG && kind != FpOperand::none) {
            form.reg = kind;
            form.reg_written = writes(operand);
            modrm_reg = kind == FpOperand::gpr ? stub_gpr : stub_reg;
            changed.reg = register_offset(operand);
        } else if (operand.encoding == ZYDIS_OPERAND_ENCODING_MODRM_RM && kind != FpOperand::none) {
            form.rm = kind;
            form.rm_written = writes(operand);
            modrm_rm = register_direct | (kind == FpOperand::gpr ? stub_gpr : stub_rm);
            changed.rm = register_offset(operand);
        } else if (operand.encoding == ZYDIS_OPERAND_ENCODING_MODRM_RM && operand.type == ZYDIS_OPERAND_TYPE_MEMORY) {
            form.memory_size = static_cast<uint8_t>(operand.size / bits_per_byte);
            form.memory_written = writes(operand);
        }
    }
    form.encoding.modrm = static_cast<uint8_t>(modrm_reg << reg_shift | modrm_rm);
    form.aligned = form.memory_size == Fx::slot_size && !allows_misalignment(instruction.mnemonic);
    form.arithmetic = is_arithmetic(instruction.mnemonic);
    describe_implicit(instruction.mnemonic, form);
    form.mmx = form.reg == FpOperand::mmx || form.rm == FpOperand::mmx;
    // CVTPI2PS with a memory operand switches to MMX as with a register, CVTPI2PD doesn't (SDM vol. 2).
    if (instruction.mnemonic == ZYDIS_MNEMONIC_CVTPI2PS)
        form.mmx = true;
    form.sse = form.reg == FpOperand::xmm || form.rm == FpOperand::xmm;

    const SimdForm* found = find_simd_form(form);
    if (!found)
        return false;
    op = changed;
    op.imm = reinterpret_cast<int64_t>(found);
    op.fn = simd_handler(*found, input.shape);
    return true;
}

// --- x87 -------------------------------------------------------------------------------------------------------------

bool decode_control(const DecodeInput& input, X87Control control, Op& op) {
    op.reg = input.instruction.operand_width == 16; // 16-bit layout of environments
    op.fn = x87_control_handler(control, input.shape);
    return true;
}

bool decode_x87(const DecodeInput& input, Op& op) {
    const ZydisDecodedInstruction& instruction = input.instruction;
    const ZydisDecodedOperand* memory = memory_operand(input);
    switch (instruction.mnemonic) {
    case ZYDIS_MNEMONIC_FNINIT:
        return decode_control(input, X87Control::fninit, op);
    case ZYDIS_MNEMONIC_FNCLEX:
        return decode_control(input, X87Control::fnclex, op);
    case ZYDIS_MNEMONIC_FNOP:
        return decode_control(input, X87Control::fnop, op);
    case ZYDIS_MNEMONIC_FENI8087_NOP:
    case ZYDIS_MNEMONIC_FDISI8087_NOP:
    case ZYDIS_MNEMONIC_FSETPM287_NOP:
        return decode_control(input, X87Control::fnop_no_wait, op);
    case ZYDIS_MNEMONIC_FWAIT:
        return decode_control(input, X87Control::fwait, op);
    case ZYDIS_MNEMONIC_FNSTSW:
        return decode_control(input, memory ? X87Control::fnstsw : X87Control::fnstsw_ax, op);
    case ZYDIS_MNEMONIC_FNSTCW:
        return decode_control(input, X87Control::fnstcw, op);
    case ZYDIS_MNEMONIC_FLDCW:
        return decode_control(input, X87Control::fldcw, op);
    case ZYDIS_MNEMONIC_FNSTENV:
        return decode_control(input, X87Control::fnstenv, op);
    case ZYDIS_MNEMONIC_FLDENV:
        return decode_control(input, X87Control::fldenv, op);
    case ZYDIS_MNEMONIC_FNSAVE:
        return decode_control(input, X87Control::fnsave, op);
    case ZYDIS_MNEMONIC_FRSTOR:
        return decode_control(input, X87Control::frstor, op);
    default:
        break;
    }
    X87Form form;
    form.encoding = host_encoding(instruction);
    form.encoding.prefix = 0;
    form.encoding.rex_w = false;
    if (memory) {
        constexpr unsigned reg_shift = 3;
        form.memory_size = static_cast<uint8_t>(memory->size / bits_per_byte);
        form.memory_written = writes(*memory);
        form.encoding.modrm = static_cast<uint8_t>(instruction.raw.modrm.reg << reg_shift | modrm_memory_rsi);
    } else {
        form.encoding.modrm = input.bytes[instruction.raw.modrm.offset];
    }
    switch (instruction.mnemonic) {
    case ZYDIS_MNEMONIC_FCOMI:
    case ZYDIS_MNEMONIC_FCOMIP:
    case ZYDIS_MNEMONIC_FUCOMI:
    case ZYDIS_MNEMONIC_FUCOMIP:
        form.flags_written = true;
        break;
    default:
        form.flags_read = instruction.meta.isa_set == ZYDIS_ISA_SET_FCMOV;
    }
    const X87Form* found = find_x87_form(form);
    if (!found)
        return false;
    op.imm = reinterpret_cast<int64_t>(found);
    op.fn = x87_handler(*found, input.shape);
    return true;
}

// --- the rest --------------------------------------------------------------------------------------------------------

bool decode_state(const DecodeInput& input, FpState state, Op& op) {
    op.reg = input.instruction.raw.rex.W;
    op.rm = input.mode == CodeMode::bits64;
    op.fn = fp_state_handler(state, input.shape);
    return true;
}

/// Registers by their places in modrm, and the size of the `sized` operand.
bool decode_misc(const DecodeInput& input, FpMisc misc, unsigned sized, Op& op) {
    for (unsigned i = 0; i < input.instruction.operand_count; i++) {
        const ZydisDecodedOperand& operand = input.operands[i];
        if (operand_kind(operand) == FpOperand::none)
            continue;
        if (operand.encoding == ZYDIS_OPERAND_ENCODING_MODRM_REG)
            op.reg = register_offset(operand);
        else if (operand.encoding == ZYDIS_OPERAND_ENCODING_MODRM_RM)
            op.rm = register_offset(operand);
    }
    op.aux = static_cast<uint16_t>((op.aux & op_address_size_mask) | input.operands[sized].size / bits_per_byte
                                                                         << misc_size_shift);
    op.fn = fp_misc_handler(misc, memory_operand(input) ? input.shape : EaShape::none);
    return true;
}

/// The store's address is an implicit operand: [RDI] in the address size, DS or what a prefix says.
bool decode_masked_store(const DecodeInput& input, FpMisc misc, Op& op) {
    const ZydisDecodedInstruction& instruction = input.instruction;
    for (unsigned i = 0; i < instruction.operand_count; i++) {
        if (input.operands[i].type != ZYDIS_OPERAND_TYPE_MEMORY)
            continue;
        op.base = RDI * sizeof(uint64_t);
        op.index = Cpu::zero_register * sizeof(uint64_t);
        op.scale = 0;
        op.disp = 0;
        op.seg = static_cast<uint8_t>(ZydisRegisterGetId(input.operands[i].mem.segment));
    }
    constexpr uint16_t address16 = 0, address32 = 1, address64 = 2;
    bool ok = decode_misc(input, misc, 0, op);
    op.aux = static_cast<uint16_t>((op.aux & ~op_address_size_mask) | (instruction.address_width == 64   ? address64
                                                                       : instruction.address_width == 32 ? address32
                                                                                                         : address16));
    return ok;
}

/// 0F 0D and 0F 18..1F: prefetches and hints, today's and tomorrow's; a processor that doesn't know one does nothing.
/// No access, no fault, whatever the operand.
bool is_hint(const ZydisDecodedInstruction& instruction) {
    constexpr uint8_t prefetchw = 0x0d, first_hint = 0x18, last_hint = 0x1f;
    return instruction.opcode_map == ZYDIS_OPCODE_MAP_0F && instruction.encoding == ZYDIS_INSTRUCTION_ENCODING_LEGACY &&
           (instruction.opcode == prefetchw || (instruction.opcode >= first_hint && instruction.opcode <= last_hint));
}

} // namespace

bool decode_fp(const DecodeInput& input, Op& op, bool& ends_block) {
    const ZydisDecodedInstruction& instruction = input.instruction;
    constexpr uint8_t fwait = 0x9b, first_escape = 0xd8, last_escape = 0xdf;
    if (instruction.encoding != ZYDIS_INSTRUCTION_ENCODING_LEGACY)
        return false;
    ends_block = false;
    if (is_hint(instruction)) {
        op.fn = fp_misc_handler(FpMisc::hint, EaShape::none);
        return true;
    }
    if (!isa_offered(input))
        return false;
    if (instruction.opcode_map == ZYDIS_OPCODE_MAP_DEFAULT) {
        bool x87 =
            instruction.opcode == fwait || (instruction.opcode >= first_escape && instruction.opcode <= last_escape);
        return x87 && decode_x87(input, op);
    }
    switch (instruction.mnemonic) {
    case ZYDIS_MNEMONIC_LFENCE:
    case ZYDIS_MNEMONIC_MFENCE:
    case ZYDIS_MNEMONIC_SFENCE: // memory is as one processor sees it, always
        op.fn = fp_misc_handler(FpMisc::hint, EaShape::none);
        return true;
    case ZYDIS_MNEMONIC_EMMS:
        return decode_state(input, FpState::emms, op);
    case ZYDIS_MNEMONIC_FXSAVE:
    case ZYDIS_MNEMONIC_FXSAVE64:
        return decode_state(input, FpState::fxsave, op);
    case ZYDIS_MNEMONIC_FXRSTOR:
    case ZYDIS_MNEMONIC_FXRSTOR64:
        return decode_state(input, FpState::fxrstor, op);
    case ZYDIS_MNEMONIC_XSAVE:
    case ZYDIS_MNEMONIC_XSAVE64:
        return decode_state(input, FpState::xsave, op);
    case ZYDIS_MNEMONIC_XSAVEOPT:
    case ZYDIS_MNEMONIC_XSAVEOPT64:
        return decode_state(input, FpState::xsaveopt, op);
    case ZYDIS_MNEMONIC_XRSTOR:
    case ZYDIS_MNEMONIC_XRSTOR64:
        return decode_state(input, FpState::xrstor, op);
    case ZYDIS_MNEMONIC_XGETBV:
        return decode_state(input, FpState::xgetbv, op);
    case ZYDIS_MNEMONIC_XSETBV:
        return decode_state(input, FpState::xsetbv, op);
    case ZYDIS_MNEMONIC_LDMXCSR:
        return decode_state(input, FpState::ldmxcsr, op);
    case ZYDIS_MNEMONIC_STMXCSR:
        return decode_state(input, FpState::stmxcsr, op);
    case ZYDIS_MNEMONIC_MOVNTI:
        return decode_misc(input, FpMisc::movnti, 0, op);
    case ZYDIS_MNEMONIC_POPCNT:
        return decode_misc(input, FpMisc::popcnt, 1, op);
    case ZYDIS_MNEMONIC_CRC32:
        return decode_misc(input, FpMisc::crc32, 1, op);
    case ZYDIS_MNEMONIC_RCPPS:
        return decode_misc(input, FpMisc::rcpps, 1, op);
    case ZYDIS_MNEMONIC_RCPSS:
        return decode_misc(input, FpMisc::rcpss, 1, op);
    case ZYDIS_MNEMONIC_RSQRTPS:
        return decode_misc(input, FpMisc::rsqrtps, 1, op);
    case ZYDIS_MNEMONIC_RSQRTSS:
        return decode_misc(input, FpMisc::rsqrtss, 1, op);
    case ZYDIS_MNEMONIC_MASKMOVQ:
        return decode_masked_store(input, FpMisc::maskmovq, op);
    case ZYDIS_MNEMONIC_MASKMOVDQU:
        return decode_masked_store(input, FpMisc::maskmovdqu, op);
    default:
        break;
    }
    if (is_arithmetic(instruction.mnemonic)) // CVTSD2SI and its like may have no SIMD register
        return decode_simd(input, op);
    for (unsigned i = 0; i < instruction.operand_count; i++) {
        FpOperand kind = operand_kind(input.operands[i]);
        if (kind == FpOperand::xmm || kind == FpOperand::mmx)
            return decode_simd(input, op);
    }
    return false;
}

} // namespace vtrace::soft
