// Bit tests and scans, and their handlers.
#include "vmm/soft/select.h"

namespace vtrace::soft {
namespace {

enum class BitAction : uint8_t { test, set, reset, complement };
template <BitAction Action, class T>
T apply_bit(T value, unsigned bit) {
    const T mask = static_cast<T>(T{1} << bit);
    if constexpr (Action == BitAction::set)
        return value | mask;
    else if constexpr (Action == BitAction::reset)
        return static_cast<T>(value & ~mask);
    else if constexpr (Action == BitAction::complement)
        return value ^ mask;
    else
        return value;
}
/// The bit offset: an immediate, or the register `rm`, with which a memory operand reaches beyond its own width.
template <bool Immediate, class T>
T bit_offset(const Cpu& cpu, const Op* op) {
    return Immediate ? static_cast<T>(static_cast<uint8_t>(op->imm)) : cpu.get<T>(op->rm);
}
template <BitAction Action, bool Immediate, class T>
const Op* bit_reg(Cpu& cpu, const Op* op) {
    T value = cpu.get<T>(op->reg);
    unsigned bit = bit_offset<Immediate, T>(cpu, op) % (sizeof(T) * 8);
    cpu.flags.set_cf(value >> bit & 1);
    if constexpr (Action != BitAction::test)
        cpu.set<T>(op->reg, apply_bit<Action>(value, bit));
    VTRACE_NEXT(cpu, op);
}
template <BitAction Action, bool Immediate, class T, class Ea>
const Op* bit_mem(Cpu& cpu, const Op* op) {
    constexpr bool writes = Action != BitAction::test;
    const T offset = bit_offset<Immediate, T>(cpu, op);
    const unsigned bit = offset % (sizeof(T) * 8);
    int64_t reach = 0;
    if constexpr (!Immediate)
        reach = (static_cast<int64_t>(static_cast<std::make_signed_t<T>>(offset)) >> std::countr_zero(sizeof(T) * 8)) *
                static_cast<int64_t>(sizeof(T));
    uint64_t address;
    if constexpr (std::is_same_v<Ea, EaAny>) {
        const uint64_t where = truncate_offset(op, effective_offset(cpu, op) + static_cast<uint64_t>(reach));
        if (!segment_linear(cpu, op, static_cast<Seg>(op->seg), where, sizeof(T), writes, address))
            return nullptr;
    } else {
        Ea::get(cpu, op, sizeof(T), writes, address);
        address += static_cast<uint64_t>(reach);
    }
    T value;
    if constexpr (writes) {
        if (!cpu.load_for_write(op, address, value) || !cpu.store(op, address, apply_bit<Action>(value, bit)))
            return nullptr;
    } else {
        if (!cpu.load(op, address, value))
            return nullptr;
    }
    cpu.flags.set_cf(value >> bit & 1);
    VTRACE_NEXT(cpu, op);
}
template <BitAction Action>
void select_bit(const DecodeInput& in, Op& op) {
    const bool immediate = is_immediate(in.operands[1]), reg = is_register(in.operands[0]);
    if (reg)
        op.reg = gpr_offset(in.operands[0].reg.value);
    if (!immediate)
        op.rm = gpr_offset(in.operands[1].reg.value);
    op.fn = by_wide_width(in.operands[0].size, [&]<class T>() -> Handler {
        if (reg)
            return immediate ? bit_reg<Action, true, T> : bit_reg<Action, false, T>;
        return by_shape(in.shape, [&]<class Ea>() -> Handler {
            return immediate ? bit_mem<Action, true, T, Ea> : bit_mem<Action, false, T, Ea>;
        });
    });
}

/// BSF and BSR. With a zero source the destination is undefined in the manuals; processors leave it, and so do we.
template <bool Forward, class T>
void scan(Cpu& cpu, const Op* op, T value) {
    cpu.flags.shifted(value, false, false);
    if (value == 0) {
        // A 32-bit destination keeps its upper half here, as on the processors at hand.
        return;
    }
    unsigned bit = Forward ? std::countr_zero(value) : sizeof(T) * 8 - 1 - std::countl_zero(value);
    cpu.set<T>(op->reg, static_cast<T>(bit));
}
/// TZCNT and LZCNT: CF for a zero source, ZF for a zero result.
template <bool Trailing, class T>
void count_zeros(Cpu& cpu, const Op* op, T value) {
    T zeros = static_cast<T>(Trailing ? std::countr_zero(value) : std::countl_zero(value));
    cpu.set<T>(op->reg, zeros);
    cpu.flags.shifted(zeros, value == 0, false);
}
struct Bsf {
    template <class T>
    static void run(Cpu& cpu, const Op* op, T value) {
        scan<true>(cpu, op, value);
    }
};
struct Bsr {
    template <class T>
    static void run(Cpu& cpu, const Op* op, T value) {
        scan<false>(cpu, op, value);
    }
};
struct Tzcnt {
    template <class T>
    static void run(Cpu& cpu, const Op* op, T value) {
        count_zeros<true>(cpu, op, value);
    }
};
struct Lzcnt {
    template <class T>
    static void run(Cpu& cpu, const Op* op, T value) {
        count_zeros<false>(cpu, op, value);
    }
};
template <class Operation, class T>
const Op* scan_reg(Cpu& cpu, const Op* op) {
    Operation::template run<T>(cpu, op, cpu.get<T>(op->rm));
    VTRACE_NEXT(cpu, op);
}
template <class Operation, class T, class Ea>
const Op* scan_mem(Cpu& cpu, const Op* op) {
    uint64_t address;
    T value;
    if (!Ea::get(cpu, op, sizeof(T), false, address) || !cpu.load(op, address, value))
        return nullptr;
    Operation::template run<T>(cpu, op, value);
    VTRACE_NEXT(cpu, op);
}
template <class Operation>
void select_scan(const DecodeInput& in, Op& op) {
    op.reg = gpr_offset(in.operands[0].reg.value);
    const bool reg = is_register(in.operands[1]);
    if (reg)
        op.rm = gpr_offset(in.operands[1].reg.value);
    op.fn = by_wide_width(in.operands[0].size, [&]<class T>() -> Handler {
        if (reg)
            return scan_reg<Operation, T>;
        return by_shape(in.shape, []<class Ea>() -> Handler { return scan_mem<Operation, T, Ea>; });
    });
}

} // namespace

bool decode_bits(const DecodeInput& in, Op& op) {
    switch (in.instruction.mnemonic) {
    case ZYDIS_MNEMONIC_BT:
        select_bit<BitAction::test>(in, op);
        return true;
    case ZYDIS_MNEMONIC_BTS:
        select_bit<BitAction::set>(in, op);
        return true;
    case ZYDIS_MNEMONIC_BTR:
        select_bit<BitAction::reset>(in, op);
        return true;
    case ZYDIS_MNEMONIC_BTC:
        select_bit<BitAction::complement>(in, op);
        return true;
    case ZYDIS_MNEMONIC_BSF:
        select_scan<Bsf>(in, op);
        return true;
    case ZYDIS_MNEMONIC_BSR:
        select_scan<Bsr>(in, op);
        return true;
    case ZYDIS_MNEMONIC_TZCNT:
        select_scan<Tzcnt>(in, op);
        return true;
    case ZYDIS_MNEMONIC_LZCNT:
        select_scan<Lzcnt>(in, op);
        return true;
    default:
        return false;
    }
}

} // namespace vtrace::soft
