// Arithmetic and logic: ADD, ADC, SUB, SBB, CMP, AND, OR, XOR, TEST, INC, DEC, NEG, NOT, and their handlers.
#include "vmm/soft/modify.h"

namespace vtrace::soft {
namespace {

// --- two operands ----------------------------------------------------------------------------------------------------

struct Add {
    static constexpr bool writes = true;
    template <class T>
    [[gnu::always_inline]] static T run(LazyFlags& f, T a, T b) {
        return f.add(a, b);
    }
};
struct Adc {
    static constexpr bool writes = true;
    template <class T>
    [[gnu::always_inline]] static T run(LazyFlags& f, T a, T b) {
        return f.add(a, b, f.cf());
    }
};
struct Sub {
    static constexpr bool writes = true;
    template <class T>
    [[gnu::always_inline]] static T run(LazyFlags& f, T a, T b) {
        return f.sub(a, b);
    }
};
struct Sbb {
    static constexpr bool writes = true;
    template <class T>
    [[gnu::always_inline]] static T run(LazyFlags& f, T a, T b) {
        return f.sub(a, b, f.cf());
    }
};
struct Cmp {
    static constexpr bool writes = false;
    template <class T>
    [[gnu::always_inline]] static T run(LazyFlags& f, T a, T b) {
        return f.sub(a, b);
    }
};
struct And {
    static constexpr bool writes = true;
    template <class T>
    [[gnu::always_inline]] static T run(LazyFlags& f, T a, T b) {
        f.logic(static_cast<T>(a & b));
        return a & b;
    }
};
struct Or {
    static constexpr bool writes = true;
    template <class T>
    [[gnu::always_inline]] static T run(LazyFlags& f, T a, T b) {
        f.logic(static_cast<T>(a | b));
        return a | b;
    }
};
struct Xor {
    static constexpr bool writes = true;
    template <class T>
    [[gnu::always_inline]] static T run(LazyFlags& f, T a, T b) {
        f.logic(static_cast<T>(a ^ b));
        return a ^ b;
    }
};
struct Test {
    static constexpr bool writes = false;
    template <class T>
    [[gnu::always_inline]] static T run(LazyFlags& f, T a, T b) {
        f.logic(static_cast<T>(a & b));
        return a;
    }
};

template <class Operation, class T>
const Op* reg_reg(Cpu& cpu, const Op* op) {
    T result = Operation::template run<T>(cpu.flags, cpu.get<T>(op->reg), cpu.get<T>(op->rm));
    if constexpr (Operation::writes)
        cpu.set<T>(op->reg, result);
    VTRACE_NEXT(cpu, op);
}
template <class Operation, class T>
const Op* reg_imm(Cpu& cpu, const Op* op) {
    T result = Operation::template run<T>(cpu.flags, cpu.get<T>(op->reg), static_cast<T>(op->imm));
    if constexpr (Operation::writes)
        cpu.set<T>(op->reg, result);
    VTRACE_NEXT(cpu, op);
}
template <class Operation, class T, class Ea, bool Fast = has_fast_path<Ea>>
const Op* reg_mem(Cpu& cpu, const Op* op) {
    uint64_t address;
    T value;
    if (!Ea::get(cpu, op, sizeof(T), false, address))
        return nullptr;
    VTRACE_ACCESS(cpu.try_load(address, value), cpu.load(op, address, value), (reg_mem<Operation, T, Ea, false>));
    T result = Operation::template run<T>(cpu.flags, cpu.get<T>(op->reg), value);
    if constexpr (Operation::writes)
        cpu.set<T>(op->reg, result);
    VTRACE_NEXT(cpu, op);
}
/// Memory is the first operand; `second` gives the other.
template <class Operation, class T, class Ea, class Second, bool Fast = has_fast_path<Ea>>
const Op* mem_any(Cpu& cpu, const Op* op) {
    uint64_t address;
    T value;
    if (!Ea::get(cpu, op, sizeof(T), Operation::writes, address))
        return nullptr;
    if constexpr (!Operation::writes) {
        VTRACE_ACCESS(cpu.try_load(address, value), cpu.load(op, address, value),
                      (mem_any<Operation, T, Ea, Second, false>));
        Operation::template run<T>(cpu.flags, value, Second::template get<T>(cpu, op));
    } else {
        if (!modify<Fast, T>(cpu, op, address, [&](LazyFlags& flags, T old) {
                return Operation::template run<T>(flags, old, Second::template get<T>(cpu, op));
            }))
            return slow_or_leave<Fast>(cpu, op, mem_any<Operation, T, Ea, Second, false>);
    }
    VTRACE_NEXT(cpu, op);
}
struct SecondRegister {
    template <class T>
    static T get(Cpu& cpu, const Op* op) {
        return cpu.get<T>(op->rm);
    }
};
struct SecondImmediate {
    template <class T>
    static T get(Cpu&, const Op* op) {
        return static_cast<T>(op->imm);
    }
};

template <class Operation>
void select_binary(const DecodeInput& in, Op& op) {
    const unsigned width = in.operands[0].size;
    if (is_register(in.operands[0])) {
        op.reg = gpr_offset(in.operands[0].reg.value);
        if (is_register(in.operands[1])) {
            op.rm = gpr_offset(in.operands[1].reg.value);
            op.fn = by_width(width, []<class T>() -> Handler { return reg_reg<Operation, T>; });
        } else if (is_immediate(in.operands[1])) {
            op.fn = by_width(width, []<class T>() -> Handler { return reg_imm<Operation, T>; });
        } else {
            op.fn = by_width(width, [&]<class T>() -> Handler {
                return by_shape(in.shape, []<class Ea>() -> Handler { return reg_mem<Operation, T, Ea>; });
            });
        }
    } else if (is_register(in.operands[1])) {
        op.rm = gpr_offset(in.operands[1].reg.value);
        op.fn = by_width(width, [&]<class T>() -> Handler {
            return by_shape(in.shape, []<class Ea>() -> Handler { return mem_any<Operation, T, Ea, SecondRegister>; });
        });
    } else {
        op.fn = by_width(width, [&]<class T>() -> Handler {
            return by_shape(in.shape, []<class Ea>() -> Handler { return mem_any<Operation, T, Ea, SecondImmediate>; });
        });
    }
}

// --- one operand, read and written -----------------------------------------------------------------------------------

struct Inc {
    template <class T>
    [[gnu::always_inline]] static T run(LazyFlags& f, T a, const Cpu&, const Op*) {
        return f.inc(a);
    }
};
struct Dec {
    template <class T>
    [[gnu::always_inline]] static T run(LazyFlags& f, T a, const Cpu&, const Op*) {
        return f.dec(a);
    }
};
struct Neg {
    template <class T>
    [[gnu::always_inline]] static T run(LazyFlags& f, T a, const Cpu&, const Op*) {
        return f.sub(T{0}, a);
    }
};
struct Not {
    template <class T>
    [[gnu::always_inline]] static T run(LazyFlags&, T a, const Cpu&, const Op*) {
        return static_cast<T>(~a);
    }
};

} // namespace

bool decode_alu(const DecodeInput& in, Op& op) {
    switch (in.instruction.mnemonic) {
    case ZYDIS_MNEMONIC_ADD:
        select_binary<Add>(in, op);
        return true;
    case ZYDIS_MNEMONIC_ADC:
        select_binary<Adc>(in, op);
        return true;
    case ZYDIS_MNEMONIC_SUB:
        select_binary<Sub>(in, op);
        return true;
    case ZYDIS_MNEMONIC_SBB:
        select_binary<Sbb>(in, op);
        return true;
    case ZYDIS_MNEMONIC_CMP:
        select_binary<Cmp>(in, op);
        return true;
    case ZYDIS_MNEMONIC_AND:
        select_binary<And>(in, op);
        return true;
    case ZYDIS_MNEMONIC_OR:
        select_binary<Or>(in, op);
        return true;
    case ZYDIS_MNEMONIC_XOR:
        select_binary<Xor>(in, op);
        return true;
    case ZYDIS_MNEMONIC_TEST:
        select_binary<Test>(in, op);
        return true;
    case ZYDIS_MNEMONIC_INC:
        select_unary<Inc>(in, op);
        return true;
    case ZYDIS_MNEMONIC_DEC:
        select_unary<Dec>(in, op);
        return true;
    case ZYDIS_MNEMONIC_NEG:
        select_unary<Neg>(in, op);
        return true;
    case ZYDIS_MNEMONIC_NOT:
        select_unary<Not>(in, op);
        return true;
    default:
        return false;
    }
}

} // namespace vtrace::soft
