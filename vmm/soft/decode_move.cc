// Data movement: MOV and kin, LEA, BSWAP, MOVBE, CMOVcc, SETcc, CBW to CQO, XLAT, and their handlers.
#include "vmm/soft/select.h"

namespace vtrace::soft {
namespace {

// --- MOV, MOVZX, MOVSX, MOVSXD, LEA, MOVBE ---------------------------------------------------------------------------

template <class T>
const Op* mov_reg_reg(Cpu& cpu, const Op* op) {
    cpu.set<T>(op->reg, cpu.get<T>(op->rm));
    VTRACE_NEXT(cpu, op);
}
template <class T>
const Op* mov_reg_imm(Cpu& cpu, const Op* op) {
    cpu.set<T>(op->reg, static_cast<T>(op->imm));
    VTRACE_NEXT(cpu, op);
}
template <class T, class Ea, bool Fast = has_fast_path<Ea>>
const Op* mov_reg_mem(Cpu& cpu, const Op* op) {
    uint64_t address;
    T value;
    if (!Ea::get(cpu, op, sizeof(T), false, address))
        return nullptr;
    VTRACE_ACCESS(cpu.try_load(address, value), cpu.load(op, address, value), (mov_reg_mem<T, Ea, false>));
    cpu.set<T>(op->reg, value);
    VTRACE_NEXT(cpu, op);
}
template <class T, class Ea, bool Fast = has_fast_path<Ea>>
const Op* mov_mem_reg(Cpu& cpu, const Op* op) {
    uint64_t address;
    if (!Ea::get(cpu, op, sizeof(T), true, address))
        return nullptr;
    const T value = cpu.get<T>(op->rm);
    VTRACE_ACCESS(cpu.try_store(address, value), cpu.store(op, address, value), (mov_mem_reg<T, Ea, false>));
    VTRACE_NEXT(cpu, op);
}
template <class T, class Ea, bool Fast = has_fast_path<Ea>>
const Op* mov_mem_imm(Cpu& cpu, const Op* op) {
    uint64_t address;
    if (!Ea::get(cpu, op, sizeof(T), true, address))
        return nullptr;
    const T value = static_cast<T>(op->imm);
    VTRACE_ACCESS(cpu.try_store(address, value), cpu.store(op, address, value), (mov_mem_imm<T, Ea, false>));
    VTRACE_NEXT(cpu, op);
}
/// MOV AL/AX/EAX/RAX with a 64-bit absolute offset, in `imm`.
template <class T, bool Store>
const Op* mov_absolute(Cpu& cpu, const Op* op) {
    uint64_t address = cpu.segment_base[op->seg] + static_cast<uint64_t>(op->imm);
    if constexpr (Store) {
        if (!cpu.store(op, address, cpu.get<T>(RAX * 8)))
            return nullptr;
    } else {
        T value;
        if (!cpu.load(op, address, value))
            return nullptr;
        cpu.set<T>(RAX * 8, value);
    }
    VTRACE_NEXT(cpu, op);
}
/// Does the operand hold a 64-bit absolute address (opcodes A0-A3)?
bool is_absolute_64(const DecodeInput& in, const ZydisDecodedOperand& operand) {
    return in.mode == CodeMode::bits64 && in.instruction.address_width == 64 &&
           operand.mem.base == ZYDIS_REGISTER_NONE && operand.mem.index == ZYDIS_REGISTER_NONE &&
           (in.instruction.opcode & 0xfc) == 0xa0 && in.instruction.opcode_map == ZYDIS_OPCODE_MAP_DEFAULT;
}

bool decode_mov(const DecodeInput& in, Op& op) {
    const ZydisDecodedOperand &to = in.operands[0], &from = in.operands[1];
    const unsigned width = to.size;
    if ((is_register(to) && !is_gpr(to)) || (is_register(from) && !is_gpr(from)))
        return false; // segment, control and debug registers
    if (is_memory(to) && is_absolute_64(in, to)) {
        op.imm = to.mem.disp.value;
        op.fn = by_width(width, []<class T>() -> Handler { return mov_absolute<T, true>; });
    } else if (is_memory(from) && is_absolute_64(in, from)) {
        op.imm = from.mem.disp.value;
        op.fn = by_width(width, []<class T>() -> Handler { return mov_absolute<T, false>; });
    } else if (is_register(to)) {
        op.reg = gpr_offset(to.reg.value);
        if (is_register(from)) {
            op.rm = gpr_offset(from.reg.value);
            op.fn = by_width(width, []<class T>() -> Handler { return mov_reg_reg<T>; });
        } else if (is_immediate(from)) {
            op.fn = by_width(width, []<class T>() -> Handler { return mov_reg_imm<T>; });
        } else {
            op.fn = by_width(width, [&]<class T>() -> Handler {
                return by_shape(in.shape, []<class Ea>() -> Handler { return mov_reg_mem<T, Ea>; });
            });
        }
    } else if (is_register(from)) {
        op.rm = gpr_offset(from.reg.value);
        op.fn = by_width(width, [&]<class T>() -> Handler {
            return by_shape(in.shape, []<class Ea>() -> Handler { return mov_mem_reg<T, Ea>; });
        });
    } else {
        op.fn = by_width(width, [&]<class T>() -> Handler {
            return by_shape(in.shape, []<class Ea>() -> Handler { return mov_mem_imm<T, Ea>; });
        });
    }
    return true;
}

template <class To, class From, bool Signed>
To extend(From value) {
    if constexpr (Signed)
        return static_cast<To>(static_cast<std::make_signed_t<To>>(static_cast<std::make_signed_t<From>>(value)));
    else
        return static_cast<To>(value);
}
template <class To, class From, bool Signed>
const Op* extend_reg(Cpu& cpu, const Op* op) {
    cpu.set<To>(op->reg, extend<To, From, Signed>(cpu.get<From>(op->rm)));
    VTRACE_NEXT(cpu, op);
}
template <class To, class From, bool Signed, class Ea, bool Fast = has_fast_path<Ea>>
const Op* extend_mem(Cpu& cpu, const Op* op) {
    uint64_t address;
    From value;
    if (!Ea::get(cpu, op, sizeof(From), false, address))
        return nullptr;
    VTRACE_ACCESS(cpu.try_load(address, value), cpu.load(op, address, value),
                  (extend_mem<To, From, Signed, Ea, false>));
    cpu.set<To>(op->reg, extend<To, From, Signed>(value));
    VTRACE_NEXT(cpu, op);
}
template <bool Signed>
void select_extend(const DecodeInput& in, Op& op) {
    op.reg = gpr_offset(in.operands[0].reg.value);
    const bool from_register = is_register(in.operands[1]);
    if (from_register)
        op.rm = gpr_offset(in.operands[1].reg.value);
    op.fn = by_wide_width(in.operands[0].size, [&]<class To>() -> Handler {
        return by_width(in.operands[1].size, [&]<class From>() -> Handler {
            if constexpr (sizeof(From) == 8) {
                return nullptr;
            } else {
                if (from_register)
                    return extend_reg<To, From, Signed>;
                return by_shape(in.shape, []<class Ea>() -> Handler { return extend_mem<To, From, Signed, Ea>; });
            }
        });
    });
}

template <class T, class Ea>
const Op* lea(Cpu& cpu, const Op* op) {
    if constexpr (std::is_same_v<Ea, EaAny>) {
        cpu.set<T>(op->reg, static_cast<T>(effective_offset(cpu, op)));
    } else {
        uint64_t address;
        Ea::get(cpu, op, 0, false, address);
        cpu.set<T>(op->reg, static_cast<T>(address));
    }
    VTRACE_NEXT(cpu, op);
}

template <class T>
T byte_swap(T value) {
    if constexpr (sizeof(T) == 2)
        return __builtin_bswap16(value);
    else if constexpr (sizeof(T) == 4)
        return __builtin_bswap32(value);
    else
        return __builtin_bswap64(value);
}
template <class T>
const Op* bswap(Cpu& cpu, const Op* op) {
    // A 16-bit operand is undefined; processors store zero.
    cpu.set<T>(op->reg, sizeof(T) == 2 ? T{0} : byte_swap(cpu.get<T>(op->reg)));
    VTRACE_NEXT(cpu, op);
}
template <class T, class Ea, bool Store>
const Op* movbe(Cpu& cpu, const Op* op) {
    uint64_t address;
    if (!Ea::get(cpu, op, sizeof(T), Store, address))
        return nullptr;
    if constexpr (Store) {
        if (!cpu.store(op, address, byte_swap(cpu.get<T>(op->rm))))
            return nullptr;
    } else {
        T value;
        if (!cpu.load(op, address, value))
            return nullptr;
        cpu.set<T>(op->reg, byte_swap(value));
    }
    VTRACE_NEXT(cpu, op);
}

// --- conditions ------------------------------------------------------------------------------------------------------

template <unsigned Code, class T>
const Op* cmov_reg(Cpu& cpu, const Op* op) {
    // A 32-bit destination loses its upper half either way.
    cpu.set<T>(op->reg, condition<Code>(cpu.flags) ? cpu.get<T>(op->rm) : cpu.get<T>(op->reg));
    VTRACE_NEXT(cpu, op);
}
template <unsigned Code, class T, class Ea, bool Fast = has_fast_path<Ea>>
const Op* cmov_mem(Cpu& cpu, const Op* op) {
    uint64_t address;
    T value;
    if (!Ea::get(cpu, op, sizeof(T), false, address))
        return nullptr;
    VTRACE_ACCESS(cpu.try_load(address, value), cpu.load(op, address, value), (cmov_mem<Code, T, Ea, false>));
    cpu.set<T>(op->reg, condition<Code>(cpu.flags) ? value : cpu.get<T>(op->reg));
    VTRACE_NEXT(cpu, op);
}
template <unsigned Code>
const Op* setcc_reg(Cpu& cpu, const Op* op) {
    cpu.set<uint8_t>(op->reg, condition<Code>(cpu.flags));
    VTRACE_NEXT(cpu, op);
}
template <unsigned Code, class Ea>
const Op* setcc_mem(Cpu& cpu, const Op* op) {
    uint64_t address;
    if (!Ea::get(cpu, op, 1, true, address) || !cpu.store<uint8_t>(op, address, condition<Code>(cpu.flags)))
        return nullptr;
    VTRACE_NEXT(cpu, op);
}
void select_cmov(const DecodeInput& in, Op& op) {
    op.reg = gpr_offset(in.operands[0].reg.value);
    const bool from_register = is_register(in.operands[1]);
    if (from_register)
        op.rm = gpr_offset(in.operands[1].reg.value);
    op.fn = by_condition(in.instruction.opcode & 15, [&]<unsigned Code>() -> Handler {
        return by_wide_width(in.operands[0].size, [&]<class T>() -> Handler {
            if (from_register)
                return cmov_reg<Code, T>;
            return by_shape(in.shape, []<class Ea>() -> Handler { return cmov_mem<Code, T, Ea>; });
        });
    });
}
void select_setcc(const DecodeInput& in, Op& op) {
    const bool to_register = is_register(in.operands[0]);
    if (to_register)
        op.reg = gpr_offset(in.operands[0].reg.value);
    op.fn = by_condition(in.instruction.opcode & 15, [&]<unsigned Code>() -> Handler {
        if (to_register)
            return setcc_reg<Code>;
        return by_shape(in.shape, []<class Ea>() -> Handler { return setcc_mem<Code, Ea>; });
    });
}

// --- accumulator extension, XLAT
// -----------------------------------------------------------------------------------------

template <class To, class From>
const Op* extend_accumulator(Cpu& cpu, const Op* op) { // CBW, CWDE, CDQE
    cpu.set<To>(RAX * 8, extend<To, From, true>(cpu.get<From>(RAX * 8)));
    VTRACE_NEXT(cpu, op);
}
template <class T>
const Op* spread_sign(Cpu& cpu, const Op* op) { // CWD, CDQ, CQO
    cpu.set<T>(RDX * 8, cpu.get<T>(RAX * 8) >> (sizeof(T) * 8 - 1) ? static_cast<T>(~T{0}) : T{0});
    VTRACE_NEXT(cpu, op);
}
/// XLAT: op->seg and the address size are the decoder's, base RBX.
const Op* xlat(Cpu& cpu, const Op* op) {
    uint64_t offset = cpu.gpr[RBX] + cpu.get<uint8_t>(RAX * 8), linear;
    offset = truncate_offset(op, offset);
    uint8_t value;
    if (!segment_linear(cpu, op, static_cast<Seg>(op->seg), offset, 1, false, linear) || !cpu.load(op, linear, value))
        return nullptr;
    cpu.set<uint8_t>(RAX * 8, value);
    VTRACE_NEXT(cpu, op);
}
void select_xlat(const DecodeInput& in, Op& op) {
    op.seg = DS;
    for (unsigned i = 0; i < in.instruction.operand_count; ++i)
        if (is_memory(in.operands[i]))
            op.seg = static_cast<uint8_t>(in.operands[i].mem.segment - ZYDIS_REGISTER_ES);
    op.aux = address_size_code(in.instruction);
    op.fn = xlat;
}

} // namespace

bool decode_move(const DecodeInput& in, Op& op) {
    switch (in.instruction.mnemonic) {
    case ZYDIS_MNEMONIC_MOV:
        return decode_mov(in, op);
    case ZYDIS_MNEMONIC_MOVZX:
        select_extend<false>(in, op);
        return true;
    case ZYDIS_MNEMONIC_MOVSX:
    case ZYDIS_MNEMONIC_MOVSXD:
        select_extend<true>(in, op);
        return true;
    case ZYDIS_MNEMONIC_LEA:
        op.reg = gpr_offset(in.operands[0].reg.value);
        // No access: the segment doesn't count, so only the address size can make it uncommon.
        op.fn = by_wide_width(in.operands[0].size, [&]<class T>() -> Handler {
            return by_shape(in.shape, []<class Ea>() -> Handler { return lea<T, Ea>; });
        });
        return true;
    case ZYDIS_MNEMONIC_BSWAP:
        op.reg = gpr_offset(in.operands[0].reg.value);
        op.fn = by_wide_width(in.operands[0].size, []<class T>() -> Handler { return bswap<T>; });
        return true;
    case ZYDIS_MNEMONIC_MOVBE: {
        const bool store = is_memory(in.operands[0]);
        (store ? op.rm : op.reg) = gpr_offset(in.operands[store ? 1 : 0].reg.value);
        op.fn = by_wide_width(in.operands[0].size, [&]<class T>() -> Handler {
            return by_shape(in.shape,
                            [&]<class Ea>() -> Handler { return store ? movbe<T, Ea, true> : movbe<T, Ea, false>; });
        });
        return true;
    }
    case ZYDIS_MNEMONIC_CMOVB:
    case ZYDIS_MNEMONIC_CMOVBE:
    case ZYDIS_MNEMONIC_CMOVL:
    case ZYDIS_MNEMONIC_CMOVLE:
    case ZYDIS_MNEMONIC_CMOVNB:
    case ZYDIS_MNEMONIC_CMOVNBE:
    case ZYDIS_MNEMONIC_CMOVNL:
    case ZYDIS_MNEMONIC_CMOVNLE:
    case ZYDIS_MNEMONIC_CMOVNO:
    case ZYDIS_MNEMONIC_CMOVNP:
    case ZYDIS_MNEMONIC_CMOVNS:
    case ZYDIS_MNEMONIC_CMOVNZ:
    case ZYDIS_MNEMONIC_CMOVO:
    case ZYDIS_MNEMONIC_CMOVP:
    case ZYDIS_MNEMONIC_CMOVS:
    case ZYDIS_MNEMONIC_CMOVZ:
        select_cmov(in, op);
        return true;
    case ZYDIS_MNEMONIC_SETB:
    case ZYDIS_MNEMONIC_SETBE:
    case ZYDIS_MNEMONIC_SETL:
    case ZYDIS_MNEMONIC_SETLE:
    case ZYDIS_MNEMONIC_SETNB:
    case ZYDIS_MNEMONIC_SETNBE:
    case ZYDIS_MNEMONIC_SETNL:
    case ZYDIS_MNEMONIC_SETNLE:
    case ZYDIS_MNEMONIC_SETNO:
    case ZYDIS_MNEMONIC_SETNP:
    case ZYDIS_MNEMONIC_SETNS:
    case ZYDIS_MNEMONIC_SETNZ:
    case ZYDIS_MNEMONIC_SETO:
    case ZYDIS_MNEMONIC_SETP:
    case ZYDIS_MNEMONIC_SETS:
    case ZYDIS_MNEMONIC_SETZ:
        select_setcc(in, op);
        return true;
    case ZYDIS_MNEMONIC_CBW:
        op.fn = extend_accumulator<uint16_t, uint8_t>;
        return true;
    case ZYDIS_MNEMONIC_CWDE:
        op.fn = extend_accumulator<uint32_t, uint16_t>;
        return true;
    case ZYDIS_MNEMONIC_CDQE:
        op.fn = extend_accumulator<uint64_t, uint32_t>;
        return true;
    case ZYDIS_MNEMONIC_CWD:
        op.fn = spread_sign<uint16_t>;
        return true;
    case ZYDIS_MNEMONIC_CDQ:
        op.fn = spread_sign<uint32_t>;
        return true;
    case ZYDIS_MNEMONIC_CQO:
        op.fn = spread_sign<uint64_t>;
        return true;
    case ZYDIS_MNEMONIC_XLAT:
        select_xlat(in, op);
        return true;
    default:
        return false;
    }
}

} // namespace vtrace::soft
