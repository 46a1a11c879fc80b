// Data movement and bits: MOV and kin, LEA, stack, exchange, compare-and-exchange, conditional moves, bit tests and scans,
// flag bits, NOPs; and their handlers.
#include "vmm/soft/select.h"
#include "vmm/soft/stack.h"

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
    return in.mode == CodeMode::bits64 && in.instruction.address_width == 64 && operand.mem.base == ZYDIS_REGISTER_NONE &&
           operand.mem.index == ZYDIS_REGISTER_NONE && (in.instruction.opcode & 0xfc) == 0xa0 &&
           in.instruction.opcode_map == ZYDIS_OPCODE_MAP_DEFAULT;
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
    VTRACE_ACCESS(cpu.try_load(address, value), cpu.load(op, address, value), (extend_mem<To, From, Signed, Ea, false>));
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

// --- stack -----------------------------------------------------------------------------------------------------------

unsigned stack_width(const DecodeInput& in) {
    for (unsigned i = 0; i < in.instruction.operand_count; ++i)
        if (is_memory(in.operands[i]) && in.operands[i].visibility == ZYDIS_OPERAND_VISIBILITY_HIDDEN)
            return in.operands[i].size;
    return in.instruction.operand_width;
}

template <class T, bool Flat, bool Fast = Flat>
const Op* push_reg(Cpu& cpu, const Op* op) {
    const T value = cpu.get<T>(op->reg);
    VTRACE_ACCESS(Stack<Flat>::try_push(cpu, value), Stack<Flat>::push(cpu, op, value), (push_reg<T, Flat, false>));
    VTRACE_NEXT(cpu, op);
}
template <class T, bool Flat>
const Op* push_imm(Cpu& cpu, const Op* op) {
    if (!Stack<Flat>::push(cpu, op, static_cast<T>(op->imm)))
        return nullptr;
    VTRACE_NEXT(cpu, op);
}
template <class T, bool Flat, class Ea>
const Op* push_mem(Cpu& cpu, const Op* op) {
    uint64_t address;
    T value;
    if (!Ea::get(cpu, op, sizeof(T), false, address) || !cpu.load(op, address, value) ||
        !Stack<Flat>::push(cpu, op, value))
        return nullptr;
    VTRACE_NEXT(cpu, op);
}
template <class T, bool Flat, bool Fast = Flat>
const Op* pop_reg(Cpu& cpu, const Op* op) {
    T value;
    VTRACE_ACCESS(Stack<Flat>::try_pop(cpu, value), Stack<Flat>::pop(cpu, op, value), (pop_reg<T, Flat, false>));
    cpu.set<T>(op->reg, value); // after the increment: POP RSP gives what was popped
    VTRACE_NEXT(cpu, op);
}
template <class T, bool Flat, class Ea>
const Op* pop_mem(Cpu& cpu, const Op* op) {
    // An address that uses RSP sees it incremented; a fault must see it as it was.
    const uint64_t before = cpu.gpr[RSP];
    uint64_t address;
    T value;
    if (!Stack<Flat>::pop(cpu, op, value))
        return nullptr;
    if (!Ea::get(cpu, op, sizeof(T), true, address) || !cpu.store(op, address, value)) {
        cpu.gpr[RSP] = before;
        return nullptr;
    }
    VTRACE_NEXT(cpu, op);
}
template <bool Flat>
void select_stack(const DecodeInput& in, Op& op, bool push) {
    const ZydisDecodedOperand& operand = in.operands[0];
    const unsigned width = stack_width(in);
    if (is_memory(operand)) {
        op.fn = by_wide_width(width, [&]<class T>() -> Handler {
            return by_shape(in.shape,
                            [&]<class Ea>() -> Handler { return push ? push_mem<T, Flat, Ea> : pop_mem<T, Flat, Ea>; });
        });
        return;
    }
    op.seg = SS;
    if (is_immediate(operand)) {
        op.fn = by_wide_width(width, []<class T>() -> Handler { return push_imm<T, Flat>; });
    } else {
        op.reg = gpr_offset(operand.reg.value);
        op.fn = by_wide_width(width, [&]<class T>() -> Handler { return push ? push_reg<T, Flat> : pop_reg<T, Flat>; });
    }
}

template <class T>
const Op* pusha(Cpu& cpu, const Op* op) {
    using S = Stack<false>;
    const uint64_t top = S::pointer(cpu);
    for (unsigned i = 0; i < 8; ++i)
        if (!S::store(cpu, op, top - (i + 1) * sizeof(T), cpu.get<T>(i * 8)))
            return nullptr;
    S::set_pointer(cpu, top - 8 * sizeof(T));
    VTRACE_NEXT(cpu, op);
}
template <class T>
const Op* popa(Cpu& cpu, const Op* op) {
    using S = Stack<false>;
    const uint64_t top = S::pointer(cpu);
    T values[8];
    for (unsigned i = 0; i < 8; ++i)
        if (!S::load(cpu, op, top + i * sizeof(T), values[i]))
            return nullptr;
    for (unsigned i = 0; i < 8; ++i)
        if (7 - i != RSP)
            cpu.set<T>((7 - i) * 8, values[i]);
    S::set_pointer(cpu, top + 8 * sizeof(T));
    VTRACE_NEXT(cpu, op);
}
template <class T, bool Flat>
const Op* leave(Cpu& cpu, const Op* op) {
    using S = Stack<Flat>;
    const uint64_t frame = cpu.gpr[RBP] & S::mask(cpu);
    T value;
    if (!S::load(cpu, op, frame, value))
        return nullptr;
    S::set_pointer(cpu, frame + sizeof(T));
    cpu.set<T>(RBP * 8, value);
    VTRACE_NEXT(cpu, op);
}
/// ENTER: `imm` is the size of the frame, `rm` the nesting level, 0..31.
template <class T, bool Flat>
const Op* enter(Cpu& cpu, const Op* op) {
    using S = Stack<Flat>;
    const unsigned level = op->rm;
    uint64_t stack = S::pointer(cpu) - sizeof(T);
    if (!S::store(cpu, op, stack, cpu.get<T>(RBP * 8)))
        return nullptr;
    const uint64_t frame = stack;
    uint64_t outer = cpu.gpr[RBP];
    for (unsigned i = 1; i < level; ++i) {
        T value;
        outer -= sizeof(T);
        stack -= sizeof(T);
        if (!S::load(cpu, op, outer & S::mask(cpu), value) || !S::store(cpu, op, stack, value))
            return nullptr;
    }
    if (level > 0) {
        stack -= sizeof(T);
        if (!S::store(cpu, op, stack, static_cast<T>(frame)))
            return nullptr;
    }
    stack -= static_cast<uint16_t>(op->imm);
    // The new top must be writable, though nothing is written there (SDM: "#PF if the final value would fault").
    T probe;
    uint64_t linear;
    if (!segment_linear(cpu, op, SS, stack & S::mask(cpu), sizeof(T), true, linear) ||
        !cpu.load_for_write(op, linear, probe))
        return nullptr;
    S::set_pointer(cpu, stack);
    cpu.set<T>(RBP * 8, static_cast<T>(frame));
    VTRACE_NEXT(cpu, op);
}

// --- exchange --------------------------------------------------------------------------------------------------------

template <class T>
const Op* xchg_reg(Cpu& cpu, const Op* op) {
    T a = cpu.get<T>(op->reg), b = cpu.get<T>(op->rm);
    cpu.set<T>(op->reg, b);
    cpu.set<T>(op->rm, a);
    VTRACE_NEXT(cpu, op);
}
template <class T, class Ea>
const Op* xchg_mem(Cpu& cpu, const Op* op) {
    uint64_t address;
    T value;
    if (!Ea::get(cpu, op, sizeof(T), true, address) || !cpu.load_for_write(op, address, value) ||
        !cpu.store(op, address, cpu.get<T>(op->rm)))
        return nullptr;
    cpu.set<T>(op->rm, value);
    VTRACE_NEXT(cpu, op);
}
template <class T>
const Op* xadd_reg(Cpu& cpu, const Op* op) {
    T a = cpu.get<T>(op->reg), b = cpu.get<T>(op->rm);
    T sum = cpu.flags.add(a, b);
    cpu.set<T>(op->rm, a);
    cpu.set<T>(op->reg, sum); // last: XADD AX, AX leaves the sum
    VTRACE_NEXT(cpu, op);
}
template <class T, class Ea>
const Op* xadd_mem(Cpu& cpu, const Op* op) {
    uint64_t address;
    T value;
    if (!Ea::get(cpu, op, sizeof(T), true, address) || !cpu.load_for_write(op, address, value))
        return nullptr;
    LazyFlags flags = cpu.flags;
    if (!cpu.store(op, address, flags.add(value, cpu.get<T>(op->rm))))
        return nullptr;
    cpu.flags = flags;
    cpu.set<T>(op->rm, value);
    VTRACE_NEXT(cpu, op);
}
template <class T>
const Op* cmpxchg_reg(Cpu& cpu, const Op* op) {
    T value = cpu.get<T>(op->reg), expected = cpu.get<T>(RAX * 8);
    cpu.flags.sub(expected, value);
    if (expected == value)
        cpu.set<T>(op->reg, cpu.get<T>(op->rm));
    else
        cpu.set<T>(RAX * 8, value);
    VTRACE_NEXT(cpu, op);
}
template <class T, class Ea>
const Op* cmpxchg_mem(Cpu& cpu, const Op* op) {
    uint64_t address;
    T value, expected = cpu.get<T>(RAX * 8);
    if (!Ea::get(cpu, op, sizeof(T), true, address) || !cpu.load_for_write(op, address, value))
        return nullptr;
    // The old value is written back on a mismatch, as the processor does.
    if (!cpu.store(op, address, value == expected ? cpu.get<T>(op->rm) : value))
        return nullptr;
    cpu.flags.sub(expected, value);
    if (value != expected)
        cpu.set<T>(RAX * 8, value);
    VTRACE_NEXT(cpu, op);
}
/// CMPXCHG8B and CMPXCHG16B: Half is a register's width.
template <class Half, class Ea>
const Op* cmpxchg_pair(Cpu& cpu, const Op* op) {
    struct Pair {
        Half low, high;
        bool operator==(const Pair&) const = default;
    };
    uint64_t address;
    Pair value, expected{cpu.get<Half>(RAX * 8), cpu.get<Half>(RDX * 8)};
    if (!Ea::get(cpu, op, sizeof(Pair), true, address))
        return nullptr;
    if (sizeof(Pair) == 16 && address % 16 != 0)
        return cpu.raise(op, Vector::gp, 0);
    if (!cpu.load_for_write(op, address, value))
        return nullptr;
    const bool equal = value == expected;
    if (!cpu.store(op, address, equal ? Pair{cpu.get<Half>(RBX * 8), cpu.get<Half>(RCX * 8)} : value))
        return nullptr;
    if (!equal) {
        cpu.set<Half>(RAX * 8, value.low);
        cpu.set<Half>(RDX * 8, value.high);
    }
    uint64_t flags = cpu.flags.get() & ~Rflags::zf;
    cpu.flags.set(flags | (equal ? Rflags::zf : 0));
    VTRACE_NEXT(cpu, op);
}
/// r/m is the first operand, a register the second.
template <template <class> class Reg, template <class, class> class Mem>
void select_exchange(const DecodeInput& in, Op& op) {
    const ZydisDecodedOperand &first = in.operands[0], &second = in.operands[1];
    if (is_register(first) && is_register(second)) {
        op.reg = gpr_offset(first.reg.value);
        op.rm = gpr_offset(second.reg.value);
        op.fn = by_width(first.size, []<class T>() -> Handler { return Reg<T>::handler; });
    } else {
        op.rm = gpr_offset(is_register(first) ? first.reg.value : second.reg.value);
        op.fn = by_width(first.size, [&]<class T>() -> Handler {
            return by_shape(in.shape, []<class Ea>() -> Handler { return Mem<T, Ea>::handler; });
        });
    }
}
#define VTRACE_EXCHANGE(name)                                                                                          \
    template <class T>                                                                                                 \
    struct name##_reg_handler {                                                                                        \
        static constexpr Handler handler = name##_reg<T>;                                                              \
    };                                                                                                                 \
    template <class T, class Ea>                                                                                       \
    struct name##_mem_handler {                                                                                        \
        static constexpr Handler handler = name##_mem<T, Ea>;                                                          \
    };
VTRACE_EXCHANGE(xchg)
VTRACE_EXCHANGE(xadd)
VTRACE_EXCHANGE(cmpxchg)
#undef VTRACE_EXCHANGE

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

// --- bits ------------------------------------------------------------------------------------------------------------

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
        uint64_t where = effective_offset(cpu, op) + static_cast<uint64_t>(reach);
        const unsigned size = op->aux & op_address_size_mask;
        where = size == 0 ? static_cast<uint16_t>(where) : size == 1 ? static_cast<uint32_t>(where) : where;
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
    static void run(Cpu& cpu, const Op* op, T value) { scan<true>(cpu, op, value); }
};
struct Bsr {
    template <class T>
    static void run(Cpu& cpu, const Op* op, T value) { scan<false>(cpu, op, value); }
};
struct Tzcnt {
    template <class T>
    static void run(Cpu& cpu, const Op* op, T value) { count_zeros<true>(cpu, op, value); }
};
struct Lzcnt {
    template <class T>
    static void run(Cpu& cpu, const Op* op, T value) { count_zeros<false>(cpu, op, value); }
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

// --- accumulator extension, flags, and nothing at all -----------------------------------------------------------------

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
const Op* clc(Cpu& cpu, const Op* op) {
    cpu.flags.set_cf(false);
    VTRACE_NEXT(cpu, op);
}
const Op* stc(Cpu& cpu, const Op* op) {
    cpu.flags.set_cf(true);
    VTRACE_NEXT(cpu, op);
}
const Op* cmc(Cpu& cpu, const Op* op) {
    cpu.flags.set_cf(!cpu.flags.cf());
    VTRACE_NEXT(cpu, op);
}
const Op* cld(Cpu& cpu, const Op* op) {
    cpu.system_flags &= ~Rflags::df;
    VTRACE_NEXT(cpu, op);
}
const Op* std_(Cpu& cpu, const Op* op) {
    cpu.system_flags |= Rflags::df;
    VTRACE_NEXT(cpu, op);
}
constexpr uint64_t lahf_flags = Rflags::sf | Rflags::zf | Rflags::af | Rflags::pf | Rflags::cf;
const Op* lahf(Cpu& cpu, const Op* op) {
    cpu.set<uint8_t>(RAX * 8 + 1, static_cast<uint8_t>((cpu.flags.get() & lahf_flags) | Rflags::reserved1));
    VTRACE_NEXT(cpu, op);
}
const Op* sahf(Cpu& cpu, const Op* op) {
    cpu.flags.set((cpu.flags.get() & Rflags::of) | (cpu.get<uint8_t>(RAX * 8 + 1) & lahf_flags));
    VTRACE_NEXT(cpu, op);
}
const Op* salc(Cpu& cpu, const Op* op) {
    cpu.set<uint8_t>(RAX * 8, cpu.flags.cf() ? 0xff : 0);
    VTRACE_NEXT(cpu, op);
}
const Op* nop(Cpu& cpu, const Op* op) { VTRACE_NEXT(cpu, op); }

/// XLAT: op->seg and the address size are the decoder's, base RBX.
const Op* xlat(Cpu& cpu, const Op* op) {
    uint64_t offset = cpu.gpr[RBX] + cpu.get<uint8_t>(RAX * 8), linear;
    const unsigned size = op->aux & op_address_size_mask;
    offset = size == 0 ? static_cast<uint16_t>(offset) : size == 1 ? static_cast<uint32_t>(offset) : offset;
    uint8_t value;
    if (!segment_linear(cpu, op, static_cast<Seg>(op->seg), offset, 1, false, linear) || !cpu.load(op, linear, value))
        return nullptr;
    cpu.set<uint8_t>(RAX * 8, value);
    VTRACE_NEXT(cpu, op);
}
/// CLFLUSH: there is no cache to flush, but it is checked as a load of a byte (SDM vol. 2).
template <class Ea>
const Op* clflush(Cpu& cpu, const Op* op) {
    uint64_t address;
    uint8_t value;
    if (!Ea::get(cpu, op, sizeof value, false, address) || !cpu.load(op, address, value))
        return nullptr;
    VTRACE_NEXT(cpu, op);
}
void select_xlat(const DecodeInput& in, Op& op) {
    op.seg = DS;
    for (unsigned i = 0; i < in.instruction.operand_count; ++i)
        if (is_memory(in.operands[i]))
            op.seg = static_cast<uint8_t>(in.operands[i].mem.segment - ZYDIS_REGISTER_ES);
    op.aux = in.instruction.address_width == 64 ? 2 : in.instruction.address_width == 32 ? 1 : 0;
    op.fn = xlat;
}

} // namespace

bool decode_move(const DecodeInput& in, Op& op) {
    const bool flat = in.mode == CodeMode::bits64;
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
            return by_shape(in.shape, [&]<class Ea>() -> Handler { return store ? movbe<T, Ea, true> : movbe<T, Ea, false>; });
        });
        return true;
    }

    case ZYDIS_MNEMONIC_PUSH:
    case ZYDIS_MNEMONIC_POP: {
        if (is_register(in.operands[0]) && !is_gpr(in.operands[0]))
            return false; // segment registers
        const bool push = in.instruction.mnemonic == ZYDIS_MNEMONIC_PUSH;
        flat ? select_stack<true>(in, op, push) : select_stack<false>(in, op, push);
        return true;
    }
    case ZYDIS_MNEMONIC_PUSHA:
        op.fn = pusha<uint16_t>;
        op.seg = SS;
        return true;
    case ZYDIS_MNEMONIC_PUSHAD:
        op.fn = pusha<uint32_t>;
        op.seg = SS;
        return true;
    case ZYDIS_MNEMONIC_POPA:
        op.fn = popa<uint16_t>;
        op.seg = SS;
        return true;
    case ZYDIS_MNEMONIC_POPAD:
        op.fn = popa<uint32_t>;
        op.seg = SS;
        return true;
    case ZYDIS_MNEMONIC_LEAVE:
        op.seg = SS;
        op.fn = by_wide_width(stack_width(in),
                              [&]<class T>() -> Handler { return flat ? leave<T, true> : leave<T, false>; });
        return true;
    case ZYDIS_MNEMONIC_ENTER:
        op.seg = SS;
        op.rm = static_cast<uint8_t>(in.operands[1].imm.value.u & 31);
        op.fn = by_wide_width(stack_width(in),
                              [&]<class T>() -> Handler { return flat ? enter<T, true> : enter<T, false>; });
        return true;

    case ZYDIS_MNEMONIC_XCHG:
        select_exchange<xchg_reg_handler, xchg_mem_handler>(in, op);
        return true;
    case ZYDIS_MNEMONIC_XADD:
        select_exchange<xadd_reg_handler, xadd_mem_handler>(in, op);
        return true;
    case ZYDIS_MNEMONIC_CMPXCHG:
        select_exchange<cmpxchg_reg_handler, cmpxchg_mem_handler>(in, op);
        return true;
    case ZYDIS_MNEMONIC_CMPXCHG8B:
        op.fn = by_shape(in.shape, []<class Ea>() -> Handler { return cmpxchg_pair<uint32_t, Ea>; });
        return true;
    case ZYDIS_MNEMONIC_CMPXCHG16B:
        op.fn = by_shape(in.shape, []<class Ea>() -> Handler { return cmpxchg_pair<uint64_t, Ea>; });
        return true;

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
    case ZYDIS_MNEMONIC_CLC:
        op.fn = clc;
        return true;
    case ZYDIS_MNEMONIC_STC:
        op.fn = stc;
        return true;
    case ZYDIS_MNEMONIC_CMC:
        op.fn = cmc;
        return true;
    case ZYDIS_MNEMONIC_CLD:
        op.fn = cld;
        return true;
    case ZYDIS_MNEMONIC_STD:
        op.fn = std_;
        return true;
    case ZYDIS_MNEMONIC_LAHF:
        op.fn = lahf;
        return true;
    case ZYDIS_MNEMONIC_SAHF:
        op.fn = sahf;
        return true;
    case ZYDIS_MNEMONIC_SALC:
        op.fn = salc;
        return true;
    case ZYDIS_MNEMONIC_XLAT:
        select_xlat(in, op);
        return true;
    case ZYDIS_MNEMONIC_CLFLUSH:
    case ZYDIS_MNEMONIC_CLFLUSHOPT:
        op.fn = by_shape(in.shape, []<class Ea>() -> Handler { return clflush<Ea>; });
        return true;
    case ZYDIS_MNEMONIC_NOP:
    case ZYDIS_MNEMONIC_PAUSE:
    case ZYDIS_MNEMONIC_ENDBR32:
    case ZYDIS_MNEMONIC_ENDBR64:
        op.fn = nop;
        return true;
    default:
        return false;
    }
}

} // namespace vtrace::soft
