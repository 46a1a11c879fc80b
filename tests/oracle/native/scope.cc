#include "tests/oracle/native/scope.h"

#include "vmm/soft/cpuid.h"
#include <cpuid.h>

namespace vtrace::oracle {

bool Instruction::decode() {
    struct Decoders {
        ZydisDecoder bits64, bits32;
        Decoders() {
            ZydisDecoderInit(&bits64, ZYDIS_MACHINE_MODE_LONG_64, ZYDIS_STACK_WIDTH_64);
            ZydisDecoderInit(&bits32, ZYDIS_MACHINE_MODE_LONG_COMPAT_32, ZYDIS_STACK_WIDTH_32);
        }
    };
    static const Decoders decoders;
    const ZydisDecoder& decoder = mode == Mode::bits64 ? decoders.bits64 : decoders.bits32;
    if (!ZYAN_SUCCESS(ZydisDecoderDecodeFull(&decoder, bytes.data(), bytes.size(), &info, operands)))
        return false;
    // Zydis 4.0.0 takes R13D for the base where there is none: 32-bit address, REX.B, SIB without base.
    for (unsigned i = 0; i < info.operand_count; i++)
        if (operands[i].type == ZYDIS_OPERAND_TYPE_MEMORY && operands[i].mem.base == ZYDIS_REGISTER_R13D &&
            info.raw.modrm.mod == 0 && info.raw.modrm.rm == 4 && info.raw.sib.base == 5) {
            operands[i].mem.base = ZYDIS_REGISTER_NONE;
            operands[i].mem.disp.has_displacement = true;
            operands[i].mem.disp.value = info.raw.disp.value;
        }
    return true;
}

std::string Instruction::text() const {
    ZydisFormatter formatter;
    ZydisFormatterInit(&formatter, ZYDIS_FORMATTER_STYLE_INTEL);
    char buffer[200];
    if (!ZYAN_SUCCESS(ZydisFormatterFormatInstruction(&formatter, &info, operands, info.operand_count_visible, buffer,
                                                      sizeof buffer, 0, nullptr)))
        return "?";
    return buffer;
}

const ZydisDecodedOperand* Instruction::visible_memory() const {
    for (unsigned i = 0; i < info.operand_count_visible; i++)
        if (operands[i].type == ZYDIS_OPERAND_TYPE_MEMORY)
            return &operands[i];
    return nullptr;
}

namespace {

bool in_set(ZydisISASet set) {
    switch (set) {
    case ZYDIS_ISA_SET_I86:
    case ZYDIS_ISA_SET_I186:
    case ZYDIS_ISA_SET_I286REAL:
    case ZYDIS_ISA_SET_I286PROTECTED:
    case ZYDIS_ISA_SET_I386:
    case ZYDIS_ISA_SET_I486:
    case ZYDIS_ISA_SET_I486REAL:
    case ZYDIS_ISA_SET_PENTIUMREAL:
    case ZYDIS_ISA_SET_PENTIUMMMX:
    case ZYDIS_ISA_SET_PPRO:
    case ZYDIS_ISA_SET_CMOV:
    case ZYDIS_ISA_SET_FCMOV:
    case ZYDIS_ISA_SET_X87:
    case ZYDIS_ISA_SET_FXSAVE:
    case ZYDIS_ISA_SET_FXSAVE64:
    case ZYDIS_ISA_SET_LONGMODE:
    case ZYDIS_ISA_SET_SSE:
    case ZYDIS_ISA_SET_SSE2:
    case ZYDIS_ISA_SET_SSE2MMX:
    case ZYDIS_ISA_SET_SSEMXCSR:
    case ZYDIS_ISA_SET_SSE3:
    case ZYDIS_ISA_SET_SSE3X87:
    case ZYDIS_ISA_SET_SSSE3:
    case ZYDIS_ISA_SET_SSSE3MMX:
    case ZYDIS_ISA_SET_SSE4:
    case ZYDIS_ISA_SET_SSE42:
    case ZYDIS_ISA_SET_SSE_PREFETCH:
    case ZYDIS_ISA_SET_PREFETCH_NOP:
    case ZYDIS_ISA_SET_FAT_NOP:
    case ZYDIS_ISA_SET_PAUSE:
    case ZYDIS_ISA_SET_LAHF:
    case ZYDIS_ISA_SET_MOVBE:
    case ZYDIS_ISA_SET_POPCNT:
    case ZYDIS_ISA_SET_CMPXCHG16B:
    case ZYDIS_ISA_SET_CLFSH:
        return true;
    default:
        return false;
    }
}

bool has_repeat_prefix(const ZydisDecodedInstruction& info) {
    for (unsigned n = 0; n < info.raw.prefix_count; n++)
        if (info.raw.prefixes[n].value == 0xf2 || info.raw.prefixes[n].value == 0xf3)
            return true;
    return false;
}

} // namespace

bool in_scope(const Instruction& instruction) {
    const ZydisDecodedInstruction& info = instruction.info;
    if (info.encoding != ZYDIS_INSTRUCTION_ENCODING_LEGACY || !in_set(info.meta.isa_set))
        return info.mnemonic == ZYDIS_MNEMONIC_PREFETCHW;
    if (info.meta.branch_type == ZYDIS_BRANCH_TYPE_FAR)
        return false; // needs descriptor tables of the host's kernel
    switch (info.mnemonic) {
    // Answers that are the processor's or the kernel's own.
    case ZYDIS_MNEMONIC_CPUID:
    case ZYDIS_MNEMONIC_RDTSC:
    case ZYDIS_MNEMONIC_RDPMC:
    case ZYDIS_MNEMONIC_SGDT:
    case ZYDIS_MNEMONIC_SIDT:
    case ZYDIS_MNEMONIC_SLDT:
    case ZYDIS_MNEMONIC_STR:
    case ZYDIS_MNEMONIC_SMSW:
    case ZYDIS_MNEMONIC_LAR:
    case ZYDIS_MNEMONIC_LSL:
    case ZYDIS_MNEMONIC_VERR:
    case ZYDIS_MNEMONIC_VERW:
    case ZYDIS_MNEMONIC_ARPL:
    // Enter the host's kernel, or leave this process.
    case ZYDIS_MNEMONIC_SYSCALL:
    case ZYDIS_MNEMONIC_SYSENTER:
    case ZYDIS_MNEMONIC_SYSRET:
    case ZYDIS_MNEMONIC_SYSEXIT:
    case ZYDIS_MNEMONIC_INT:
    case ZYDIS_MNEMONIC_INT1:
    case ZYDIS_MNEMONIC_INT3:
    case ZYDIS_MNEMONIC_INTO:
    case ZYDIS_MNEMONIC_IRET:
    case ZYDIS_MNEMONIC_IRETD:
    case ZYDIS_MNEMONIC_IRETQ:
    case ZYDIS_MNEMONIC_RSM:
    // Load segment registers.
    case ZYDIS_MNEMONIC_LDS:
    case ZYDIS_MNEMONIC_LES:
    case ZYDIS_MNEMONIC_LFS:
    case ZYDIS_MNEMONIC_LGS:
    case ZYDIS_MNEMONIC_LSS:
    // May be open to user mode on the host (I/O privilege, bitmap); their like is tested by privileged guests.
    case ZYDIS_MNEMONIC_INSB:
    case ZYDIS_MNEMONIC_INSW:
    case ZYDIS_MNEMONIC_INSD:
    case ZYDIS_MNEMONIC_OUTSB:
    case ZYDIS_MNEMONIC_OUTSW:
    case ZYDIS_MNEMONIC_OUTSD:
    // Results differ among processors, as the manuals allow.
    case ZYDIS_MNEMONIC_F2XM1:
    case ZYDIS_MNEMONIC_FYL2X:
    case ZYDIS_MNEMONIC_FYL2XP1:
    case ZYDIS_MNEMONIC_FPTAN:
    case ZYDIS_MNEMONIC_FPATAN:
    case ZYDIS_MNEMONIC_FSIN:
    case ZYDIS_MNEMONIC_FCOS:
    case ZYDIS_MNEMONIC_FSINCOS:
    // Not instructions of their own on every processor of the class.
    case ZYDIS_MNEMONIC_SALC:
    case ZYDIS_MNEMONIC_FDISI8087_NOP:
    case ZYDIS_MNEMONIC_FENI8087_NOP:
    case ZYDIS_MNEMONIC_FSETPM287_NOP:
        return false;
    default:
        break;
    }
    // REX.B with PAUSE: XCHG on some processors. PREFETCH of a register: NOP on Intel, #UD on AMD.
    if ((info.mnemonic == ZYDIS_MNEMONIC_PAUSE && info.raw.rex.B) ||
        (info.opcode_map == ZYDIS_OPCODE_MAP_0F && info.opcode == 0x0d && info.raw.modrm.mod == 3))
        return false;
    // A repeat prefix turns LOOPE and LOOPNE into one another on AMD. How much a push of a segment register writes with
    // a 32-bit operand differs.
    if ((info.mnemonic == ZYDIS_MNEMONIC_LOOPE || info.mnemonic == ZYDIS_MNEMONIC_LOOPNE) && has_repeat_prefix(info))
        return false;
    if (info.mnemonic == ZYDIS_MNEMONIC_PUSH && info.operand_width == 32 &&
        ZydisRegisterGetClass(instruction.operands[0].reg.value) == ZYDIS_REGCLASS_SEGMENT &&
        instruction.operands[0].type == ZYDIS_OPERAND_TYPE_REGISTER)
        return false;
    // 66 before a near branch: ignored by Intel, a 16-bit target on AMD.
    if (info.meta.branch_type != ZYDIS_BRANCH_TYPE_NONE && instruction.has(ZYDIS_ATTRIB_HAS_OPERANDSIZE))
        return false;
    for (unsigned i = 0; i < info.operand_count; i++) {
        const ZydisDecodedOperand& operand = instruction.operands[i];
        if (operand.type == ZYDIS_OPERAND_TYPE_REGISTER && (operand.actions & ZYDIS_OPERAND_ACTION_MASK_WRITE) &&
            ZydisRegisterGetClass(operand.reg.value) == ZYDIS_REGCLASS_SEGMENT)
            return false;
        // Segment bases of compatibility mode are the host's libc's.
        if (operand.type == ZYDIS_OPERAND_TYPE_MEMORY && instruction.mode == Mode::bits32 &&
            (operand.mem.segment == ZYDIS_REGISTER_FS || operand.mem.segment == ZYDIS_REGISTER_GS ||
             operand.mem.segment == ZYDIS_REGISTER_CS))
            return false;
    }
    return both_offer(instruction);
}

bool both_offer(const Instruction& instruction) {
    static const unsigned c = [] {
        unsigned eax, ebx, ecx = 0, edx;
        __get_cpuid(1, &eax, &ebx, &ecx, &edx);
        return ecx;
    }();
    static const bool movbe = [] {
        auto model = CpuidModel::by_name(guest_model);
        return model && model->has(Feature::movbe);
    }();
    switch (instruction.info.meta.isa_set) {
    case ZYDIS_ISA_SET_MOVBE:
        return movbe && c & bit_MOVBE;
    case ZYDIS_ISA_SET_SSE42:
        return c & bit_SSE4_2;
    default:
        return true;
    }
}

bool is_approximate(ZydisMnemonic mnemonic) {
    return mnemonic == ZYDIS_MNEMONIC_RCPSS || mnemonic == ZYDIS_MNEMONIC_RCPPS || mnemonic == ZYDIS_MNEMONIC_RSQRTSS ||
           mnemonic == ZYDIS_MNEMONIC_RSQRTPS;
}

} // namespace vtrace::oracle
