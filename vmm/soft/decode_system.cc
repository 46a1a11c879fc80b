// Which handler executes which system instruction, and where its operands are.
#include "vmm/soft/decode.h"
#include "vmm/soft/system_handlers.h"
#include "vmm/soft/system_operand.h"

namespace vtrace::soft {
namespace {

/// The op while it is filled in.
struct Builder {
    const DecodeInput& input;
    Op& op;
    bool& ends_block;

    ZydisMnemonic mnemonic() const { return input.instruction.mnemonic; }
    const ZydisDecodedOperand& operand(unsigned i) const { return input.operands[i]; }
    bool is_register(unsigned i) const {
        return i < input.instruction.operand_count && operand(i).type == ZYDIS_OPERAND_TYPE_REGISTER;
    }
    bool is_class(unsigned i, ZydisRegisterClass wanted) const {
        return is_register(i) && ZydisRegisterGetClass(operand(i).reg.value) == wanted;
    }
    bool is_far() const { return input.instruction.meta.branch_type == ZYDIS_BRANCH_TYPE_FAR; }

    /// Operand size in bits into its place in Op::aux; the address size stays.
    void set_size(unsigned bits) {
        const uint16_t code = bits == 64 ? 2 : bits == 32 ? 1 : 0;
        op.aux = static_cast<uint16_t>((op.aux & ~(3u << SystemAux::size_shift)) | code << SystemAux::size_shift);
    }
    void set_number(unsigned number) { op.aux |= static_cast<uint16_t>(number << SystemAux::number_shift); }
    void set_special() { op.aux |= SystemAux::special; }
    /// Operand `i` is r/m: memory is in place already.
    void set_rm(unsigned i) {
        if (operand(i).type == ZYDIS_OPERAND_TYPE_MEMORY)
            op.aux |= SystemAux::memory;
        else
            op.rm = gpr_offset(operand(i).reg.value);
    }
    void set_reg(unsigned i) { op.reg = gpr_offset(operand(i).reg.value); }
    unsigned segment_number(unsigned i) const { return operand(i).reg.value - ZYDIS_REGISTER_ES; }

    bool use(Handler handler, bool ends) {
        op.fn = handler;
        ends_block = ends;
        return true;
    }
};

constexpr bool ends = true, goes_on = false;

/// MOV, PUSH and POP are ours with segment, control and debug registers only.
bool decode_move(Builder& b) {
    if (b.is_class(0, ZYDIS_REGCLASS_SEGMENT)) {
        b.set_number(b.segment_number(0));
        b.set_rm(1);
        return b.use(op_mov_to_segment, ends);
    }
    if (b.is_class(1, ZYDIS_REGCLASS_SEGMENT)) {
        b.set_number(b.segment_number(1));
        b.set_rm(0);
        b.set_size(b.operand(0).size);
        return b.use(op_mov_from_segment, goes_on);
    }
    if (b.is_class(0, ZYDIS_REGCLASS_CONTROL)) {
        b.set_number(ZydisRegisterGetId(b.operand(0).reg.value));
        b.set_reg(1);
        return b.use(op_write_cr, ends);
    }
    if (b.is_class(1, ZYDIS_REGCLASS_CONTROL)) {
        b.set_number(ZydisRegisterGetId(b.operand(1).reg.value));
        b.set_reg(0);
        return b.use(op_read_cr, goes_on);
    }
    if (b.is_class(0, ZYDIS_REGCLASS_DEBUG)) {
        b.set_number(ZydisRegisterGetId(b.operand(0).reg.value));
        b.set_reg(1);
        return b.use(op_write_dr, ends);
    }
    if (b.is_class(1, ZYDIS_REGCLASS_DEBUG)) {
        b.set_number(ZydisRegisterGetId(b.operand(1).reg.value));
        b.set_reg(0);
        return b.use(op_read_dr, goes_on);
    }
    return false;
}

bool decode_segment_stack(Builder& b) {
    if (!b.is_class(0, ZYDIS_REGCLASS_SEGMENT))
        return false;
    b.set_number(b.segment_number(0));
    b.set_size(b.input.instruction.operand_width);
    return b.mnemonic() == ZYDIS_MNEMONIC_PUSH ? b.use(op_push_segment, goes_on) : b.use(op_pop_segment, ends);
}

bool decode_far(Builder& b) {
    const bool call = b.mnemonic() == ZYDIS_MNEMONIC_CALL;
    b.set_size(b.input.instruction.operand_width);
    if (b.operand(0).type == ZYDIS_OPERAND_TYPE_POINTER) {
        const uint16_t selector = b.operand(0).ptr.segment;
        b.op.imm = b.operand(0).ptr.offset;
        b.op.rm = static_cast<uint8_t>(selector);
        b.op.reg = static_cast<uint8_t>(selector >> 8);
        return b.use(call ? op_far_call_immediate : op_far_jump_immediate, ends);
    }
    return b.use(call ? op_far_call_memory : op_far_jump_memory, ends);
}

/// r/m is operand 0, nothing else.
bool decode_rm(Builder& b, Handler handler, bool ends_block) {
    b.set_rm(0);
    b.set_size(b.operand(0).size);
    return b.use(handler, ends_block);
}

/// A destination register and r/m; a size of 16 bits for the selector of r/m.
bool decode_reg_rm(Builder& b, Handler handler) {
    b.set_reg(0);
    b.set_rm(1);
    b.set_size(b.operand(0).size);
    return b.use(handler, goes_on);
}

bool decode_far_pointer_load(Builder& b, Seg seg) {
    b.set_reg(0);
    b.set_size(b.operand(0).size);
    b.set_number(seg);
    return b.use(op_load_far_pointer, ends);
}

bool decode_segment_base(Builder& b, Handler handler, Seg seg) {
    b.set_rm(0);
    b.set_size(b.operand(0).size);
    b.set_number(seg);
    return b.use(handler, goes_on);
}

/// IN and OUT: the port is an immediate or DX, the data AL, AX or EAX.
bool decode_io(Builder& b, Handler handler, unsigned port_operand) {
    if (b.is_register(port_operand))
        b.set_special();
    b.op.reg = static_cast<uint8_t>(b.operand(1 - port_operand).size / 8);
    return b.use(handler, ends);
}

bool decode_sized(Builder& b, Handler handler, unsigned bits, bool ends_block) {
    b.set_size(bits);
    return b.use(handler, ends_block);
}

bool decode_transfer(Builder& b) {
    const unsigned width = b.input.instruction.operand_width;
    switch (b.mnemonic()) {
    case ZYDIS_MNEMONIC_JMP:
    case ZYDIS_MNEMONIC_CALL:
        return b.is_far() && decode_far(b);
    case ZYDIS_MNEMONIC_RET:
        return b.is_far() && decode_sized(b, op_far_return, width, ends);
    case ZYDIS_MNEMONIC_IRET:
        return decode_sized(b, op_iret, 16, ends);
    case ZYDIS_MNEMONIC_IRETD:
        return decode_sized(b, op_iret, 32, ends);
    case ZYDIS_MNEMONIC_IRETQ:
        return decode_sized(b, op_iret, 64, ends);
    case ZYDIS_MNEMONIC_INT:
        return b.use(op_int, ends);
    case ZYDIS_MNEMONIC_INT1:
        return b.use(op_int1, ends);
    case ZYDIS_MNEMONIC_INT3:
        return b.use(op_int3, ends);
    case ZYDIS_MNEMONIC_INTO:
        return b.use(op_into, ends);
    case ZYDIS_MNEMONIC_BOUND:
        b.set_reg(0);
        return decode_sized(b, op_bound, b.operand(0).size, goes_on);
    case ZYDIS_MNEMONIC_SYSCALL:
        return b.use(op_syscall, ends);
    case ZYDIS_MNEMONIC_SYSRET:
        return decode_sized(b, op_sysret, width == 64 ? 64 : 32, ends);
    case ZYDIS_MNEMONIC_SYSENTER:
        return b.use(op_sysenter, ends);
    case ZYDIS_MNEMONIC_SYSEXIT:
        return decode_sized(b, op_sysexit, width == 64 ? 64 : 32, ends);
    default:
        return false;
    }
}

bool decode_segments(Builder& b) {
    switch (b.mnemonic()) {
    case ZYDIS_MNEMONIC_MOV:
        return decode_move(b);
    case ZYDIS_MNEMONIC_PUSH:
    case ZYDIS_MNEMONIC_POP:
        return decode_segment_stack(b);
    case ZYDIS_MNEMONIC_LDS:
        return decode_far_pointer_load(b, DS);
    case ZYDIS_MNEMONIC_LES:
        return decode_far_pointer_load(b, ES);
    case ZYDIS_MNEMONIC_LFS:
        return decode_far_pointer_load(b, FS);
    case ZYDIS_MNEMONIC_LGS:
        return decode_far_pointer_load(b, GS);
    case ZYDIS_MNEMONIC_LSS:
        return decode_far_pointer_load(b, SS);
    case ZYDIS_MNEMONIC_SGDT:
        return b.use(op_sgdt, goes_on);
    case ZYDIS_MNEMONIC_SIDT:
        return b.use(op_sidt, goes_on);
    case ZYDIS_MNEMONIC_LGDT:
        return decode_sized(b, op_lgdt, b.input.instruction.operand_width, ends);
    case ZYDIS_MNEMONIC_LIDT:
        return decode_sized(b, op_lidt, b.input.instruction.operand_width, ends);
    case ZYDIS_MNEMONIC_SLDT:
        return decode_rm(b, op_sldt, goes_on);
    case ZYDIS_MNEMONIC_STR:
        return decode_rm(b, op_str, goes_on);
    case ZYDIS_MNEMONIC_LLDT:
        return decode_rm(b, op_lldt, ends);
    case ZYDIS_MNEMONIC_LTR:
        return decode_rm(b, op_ltr, ends);
    case ZYDIS_MNEMONIC_VERR:
        return decode_rm(b, op_verr, goes_on);
    case ZYDIS_MNEMONIC_VERW:
        return decode_rm(b, op_verw, goes_on);
    case ZYDIS_MNEMONIC_LAR:
        return decode_reg_rm(b, op_lar);
    case ZYDIS_MNEMONIC_LSL:
        return decode_reg_rm(b, op_lsl);
    case ZYDIS_MNEMONIC_ARPL:
        b.set_reg(1);
        return decode_rm(b, op_arpl, goes_on);
    case ZYDIS_MNEMONIC_SWAPGS:
        return b.use(op_swapgs, goes_on);
    case ZYDIS_MNEMONIC_RDFSBASE:
        return decode_segment_base(b, op_read_segment_base, FS);
    case ZYDIS_MNEMONIC_RDGSBASE:
        return decode_segment_base(b, op_read_segment_base, GS);
    case ZYDIS_MNEMONIC_WRFSBASE:
        return decode_segment_base(b, op_write_segment_base, FS);
    case ZYDIS_MNEMONIC_WRGSBASE:
        return decode_segment_base(b, op_write_segment_base, GS);
    default:
        return false;
    }
}

bool decode_control(Builder& b) {
    switch (b.mnemonic()) {
    case ZYDIS_MNEMONIC_SMSW:
        return decode_rm(b, op_smsw, goes_on);
    case ZYDIS_MNEMONIC_LMSW:
        return decode_rm(b, op_lmsw, ends);
    case ZYDIS_MNEMONIC_CLTS:
        return b.use(op_clts, ends);
    case ZYDIS_MNEMONIC_INVLPG:
        return b.use(op_invlpg, ends);
    case ZYDIS_MNEMONIC_INVPCID:
        b.set_reg(0);
        return b.use(op_invpcid, ends);
    case ZYDIS_MNEMONIC_WBINVD:
    case ZYDIS_MNEMONIC_INVD:
        return b.use(op_wbinvd, goes_on);
    case ZYDIS_MNEMONIC_HLT:
        return b.use(op_hlt, ends);
    case ZYDIS_MNEMONIC_CLI:
        return b.use(op_cli, goes_on);
    case ZYDIS_MNEMONIC_STI:
        return b.use(op_sti, ends);
    case ZYDIS_MNEMONIC_STAC:
        return b.use(op_stac, goes_on);
    case ZYDIS_MNEMONIC_CLAC:
        return b.use(op_clac, goes_on);
    case ZYDIS_MNEMONIC_PUSHF:
        return decode_sized(b, op_pushf, 16, goes_on);
    case ZYDIS_MNEMONIC_PUSHFD:
        return decode_sized(b, op_pushf, 32, goes_on);
    case ZYDIS_MNEMONIC_PUSHFQ:
        return decode_sized(b, op_pushf, 64, goes_on);
    case ZYDIS_MNEMONIC_POPF:
        return decode_sized(b, op_popf, 16, ends);
    case ZYDIS_MNEMONIC_POPFD:
        return decode_sized(b, op_popf, 32, ends);
    case ZYDIS_MNEMONIC_POPFQ:
        return decode_sized(b, op_popf, 64, ends);
    case ZYDIS_MNEMONIC_IN:
        return decode_io(b, op_in, 1);
    case ZYDIS_MNEMONIC_OUT:
        return decode_io(b, op_out, 0);
    case ZYDIS_MNEMONIC_CPUID:
        return b.use(op_cpuid, goes_on);
    case ZYDIS_MNEMONIC_RDMSR:
        return b.use(op_rdmsr, ends);
    case ZYDIS_MNEMONIC_WRMSR:
        return b.use(op_wrmsr, ends);
    case ZYDIS_MNEMONIC_RDTSC:
        return b.use(op_rdtsc, goes_on);
    case ZYDIS_MNEMONIC_RDTSCP:
        return b.use(op_rdtscp, goes_on);
    case ZYDIS_MNEMONIC_RDPMC:
        return b.use(op_rdpmc, ends);
    case ZYDIS_MNEMONIC_RDRAND:
    case ZYDIS_MNEMONIC_RDSEED:
        return decode_rm(b, op_random, goes_on);
    // No system management mode, no monitor hardware: these are undefined on this processor.
    case ZYDIS_MNEMONIC_RSM:
    case ZYDIS_MNEMONIC_MONITOR:
    case ZYDIS_MNEMONIC_MWAIT:
    case ZYDIS_MNEMONIC_UD0:
    case ZYDIS_MNEMONIC_UD1:
    case ZYDIS_MNEMONIC_UD2:
        return b.use(raise_undefined, ends);
    default:
        return false;
    }
}

} // namespace

bool decode_system(const DecodeInput& input, Op& op, bool& ends_block) {
    Builder builder{input, op, ends_block};
    return decode_transfer(builder) || decode_segments(builder) || decode_control(builder);
}

} // namespace vtrace::soft
