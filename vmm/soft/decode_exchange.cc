// XCHG, XADD and compare-and-exchange, and their handlers. One thread runs the machine: LOCK needs nothing.
#include "vmm/soft/select.h"

namespace vtrace::soft {
namespace {

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

} // namespace

bool decode_exchange(const DecodeInput& in, Op& op) {
    switch (in.instruction.mnemonic) {
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
    default:
        return false;
    }
}

} // namespace vtrace::soft
