// Arithmetic and logic: ADD..CMP and TEST, INC/DEC/NEG/NOT, shifts and rotates, MUL/DIV, BCD, and their handlers.
//
// Flags that the manuals leave undefined are chosen once here; docs/undefined.md lists the choices.
#include "vmm/soft/select.h"

namespace vtrace::soft {
namespace {

// --- memory read, changed and written ---------------------------------------------------------------------------------

/// Replaces a T in memory by `change(flags, old)`. Fast: false where the fast path doesn't do, with nothing changed. Else:
/// false when the handler must leave; flags are committed only after the store.
template <bool Fast, class T, class Change>
[[gnu::always_inline]] inline bool modify(Cpu& cpu, const Op* op, uint64_t address, Change change) {
    T value;
    if constexpr (Fast) {
        uint8_t* host = cpu.try_write<T>(address);
        if (VTRACE_UNLIKELY(!host))
            return false;
        std::memcpy(&value, host, sizeof value);
        value = change(cpu.flags, value);
        std::memcpy(host, &value, sizeof value);
        return true;
    } else {
        if (!cpu.load_for_write(op, address, value))
            return false;
        LazyFlags flags = cpu.flags;
        value = change(flags, value);
        if (!cpu.store(op, address, value))
            return false;
        cpu.flags = flags;
        return true;
    }
}
template <bool Fast>
[[gnu::always_inline]] inline const Op* slow_or_leave(Cpu& cpu, const Op* op, Handler slow) {
    if constexpr (Fast)
        return slow(cpu, op);
    return nullptr;
}

// --- two operands ----------------------------------------------------------------------------------------------------

struct Add {
    static constexpr bool writes = true;
    template <class T>
    [[gnu::always_inline]] static T run(LazyFlags& f, T a, T b) { return f.add(a, b); }
};
struct Adc {
    static constexpr bool writes = true;
    template <class T>
    [[gnu::always_inline]] static T run(LazyFlags& f, T a, T b) { return f.add(a, b, f.cf()); }
};
struct Sub {
    static constexpr bool writes = true;
    template <class T>
    [[gnu::always_inline]] static T run(LazyFlags& f, T a, T b) { return f.sub(a, b); }
};
struct Sbb {
    static constexpr bool writes = true;
    template <class T>
    [[gnu::always_inline]] static T run(LazyFlags& f, T a, T b) { return f.sub(a, b, f.cf()); }
};
struct Cmp {
    static constexpr bool writes = false;
    template <class T>
    [[gnu::always_inline]] static T run(LazyFlags& f, T a, T b) { return f.sub(a, b); }
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
    static T get(Cpu& cpu, const Op* op) { return cpu.get<T>(op->rm); }
};
struct SecondImmediate {
    template <class T>
    static T get(Cpu&, const Op* op) { return static_cast<T>(op->imm); }
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
    [[gnu::always_inline]] static T run(LazyFlags& f, T a, const Cpu&, const Op*) { return f.inc(a); }
};
struct Dec {
    template <class T>
    [[gnu::always_inline]] static T run(LazyFlags& f, T a, const Cpu&, const Op*) { return f.dec(a); }
};
struct Neg {
    template <class T>
    [[gnu::always_inline]] static T run(LazyFlags& f, T a, const Cpu&, const Op*) { return f.sub(T{0}, a); }
};
struct Not {
    template <class T>
    [[gnu::always_inline]] static T run(LazyFlags&, T a, const Cpu&, const Op*) { return static_cast<T>(~a); }
};

/// Shift counts are masked to 5 bits, 6 for 64-bit operands; a zero count changes no flag.
template <class T>
unsigned masked_count(unsigned count) {
    return count & (sizeof(T) == 8 ? 63 : 31);
}
struct CountImmediate {
    static unsigned get(const Cpu&, const Op* op) { return static_cast<uint8_t>(op->imm); }
};
struct CountCl {
    static unsigned get(const Cpu& cpu, const Op*) { return cpu.get<uint8_t>(RCX * 8); }
};

template <class T>
constexpr unsigned bits_of = sizeof(T) * 8;
template <class T>
bool top_bit(T value) {
    return value >> (bits_of<T> - 1) & 1;
}

template <class Count>
struct Shl {
    template <class T>
    [[gnu::always_inline]] static T run(LazyFlags& f, T a, const Cpu& cpu, const Op* op) {
        unsigned n = masked_count<T>(Count::get(cpu, op));
        if (n == 0)
            return a;
        T result = n < bits_of<T> ? static_cast<T>(a << n) : T{0};
        bool carry = n <= bits_of<T> && (a >> (bits_of<T> - n) & 1);
        f.shifted(result, carry, carry != top_bit(result));
        return result;
    }
};
template <class Count>
struct Shr {
    template <class T>
    [[gnu::always_inline]] static T run(LazyFlags& f, T a, const Cpu& cpu, const Op* op) {
        unsigned n = masked_count<T>(Count::get(cpu, op));
        if (n == 0)
            return a;
        T result = n < bits_of<T> ? static_cast<T>(a >> n) : T{0};
        bool carry = n <= bits_of<T> && (a >> (n - 1) & 1);
        f.shifted(result, carry, n == 1 ? top_bit(a) : false);
        return result;
    }
};
template <class Count>
struct Sar {
    template <class T>
    [[gnu::always_inline]] static T run(LazyFlags& f, T a, const Cpu& cpu, const Op* op) {
        using Signed = std::make_signed_t<T>;
        unsigned n = masked_count<T>(Count::get(cpu, op));
        if (n == 0)
            return a;
        unsigned reach = std::min(n, bits_of<T> - 1);
        T result = static_cast<T>(static_cast<Signed>(a) >> reach);
        bool carry = n < bits_of<T> ? static_cast<Signed>(a) >> (n - 1) & 1 : top_bit(a);
        f.shifted(result, carry, false);
        return result;
    }
};
template <class Count>
struct Rol {
    template <class T>
    [[gnu::always_inline]] static T run(LazyFlags& f, T a, const Cpu& cpu, const Op* op) {
        unsigned n = masked_count<T>(Count::get(cpu, op));
        if (n == 0)
            return a;
        T result = std::rotl(a, static_cast<int>(n % bits_of<T>));
        bool carry = result & 1;
        f.set_cf_of(carry, carry != top_bit(result));
        return result;
    }
};
template <class Count>
struct Ror {
    template <class T>
    [[gnu::always_inline]] static T run(LazyFlags& f, T a, const Cpu& cpu, const Op* op) {
        unsigned n = masked_count<T>(Count::get(cpu, op));
        if (n == 0)
            return a;
        T result = std::rotr(a, static_cast<int>(n % bits_of<T>));
        bool carry = top_bit(result);
        f.set_cf_of(carry, carry != (result >> (bits_of<T> - 2) & 1));
        return result;
    }
};
/// Rotate through carry: 9, 17, 33 or 65 bits wide.
template <class Count>
struct Rcl {
    template <class T>
    [[gnu::always_inline]] static T run(LazyFlags& f, T a, const Cpu& cpu, const Op* op) {
        unsigned n = masked_count<T>(Count::get(cpu, op)) % (bits_of<T> + 1);
        bool carry = f.cf();
        if (masked_count<T>(Count::get(cpu, op)) == 0)
            return a;
        for (; n; --n) {
            bool out = top_bit(a);
            a = static_cast<T>(a << 1 | carry);
            carry = out;
        }
        f.set_cf_of(carry, carry != top_bit(a));
        return a;
    }
};
template <class Count>
struct Rcr {
    template <class T>
    [[gnu::always_inline]] static T run(LazyFlags& f, T a, const Cpu& cpu, const Op* op) {
        unsigned n = masked_count<T>(Count::get(cpu, op)) % (bits_of<T> + 1);
        bool carry = f.cf();
        if (masked_count<T>(Count::get(cpu, op)) == 0)
            return a;
        for (; n; --n) {
            bool out = a & 1;
            a = static_cast<T>(a >> 1 | static_cast<T>(static_cast<T>(carry) << (bits_of<T> - 1)));
            carry = out;
        }
        f.set_cf_of(carry, top_bit(a) != (a >> (bits_of<T> - 2) & 1));
        return a;
    }
};

template <class Operation, class T>
const Op* unary_reg(Cpu& cpu, const Op* op) {
    cpu.set<T>(op->reg, Operation::template run<T>(cpu.flags, cpu.get<T>(op->reg), cpu, op));
    VTRACE_NEXT(cpu, op);
}
template <class Operation, class T, class Ea, bool Fast = has_fast_path<Ea>>
const Op* unary_mem(Cpu& cpu, const Op* op) {
    uint64_t address;
    if (!Ea::get(cpu, op, sizeof(T), true, address))
        return nullptr;
    if (!modify<Fast, T>(cpu, op, address,
                         [&](LazyFlags& flags, T old) { return Operation::template run<T>(flags, old, cpu, op); }))
        return slow_or_leave<Fast>(cpu, op, unary_mem<Operation, T, Ea, false>);
    VTRACE_NEXT(cpu, op);
}
template <class Operation>
void select_unary(const DecodeInput& in, Op& op) {
    const unsigned width = in.operands[0].size;
    if (is_register(in.operands[0])) {
        op.reg = gpr_offset(in.operands[0].reg.value);
        op.fn = by_width(width, []<class T>() -> Handler { return unary_reg<Operation, T>; });
    } else {
        op.fn = by_width(width, [&]<class T>() -> Handler {
            return by_shape(in.shape, []<class Ea>() -> Handler { return unary_mem<Operation, T, Ea>; });
        });
    }
}
template <template <class> class Operation>
void select_shift(const DecodeInput& in, Op& op) {
    if (is_register(in.operands[1]))
        select_unary<Operation<CountCl>>(in, op);
    else
        select_unary<Operation<CountImmediate>>(in, op);
}

// --- double shifts ---------------------------------------------------------------------------------------------------

/// SHLD and SHRD. A 16-bit count above 16 is undefined: the 32-bit pattern first:second is rotated on, as processors do.
template <bool Left, class Count, class T>
[[gnu::always_inline]] inline T double_shift(LazyFlags& f, T a, T b, const Cpu& cpu, const Op* op) {
    unsigned n = masked_count<T>(Count::get(cpu, op));
    if (n == 0)
        return a;
    T result;
    bool carry;
    if constexpr (sizeof(T) == 2) {
        if (Left) {
            uint64_t wide = uint64_t{a} << 32 | uint64_t{b} << 16 | a;
            result = static_cast<T>(wide << n >> 32);
            carry = wide >> (48 - n) & 1;
        } else {
            uint64_t wide = uint64_t{a} << 32 | uint64_t{b} << 16 | a;
            result = static_cast<T>(wide >> n);
            carry = wide >> (n - 1) & 1;
        }
    } else if (Left) {
        result = static_cast<T>(a << n | b >> (bits_of<T> - n));
        carry = a >> (bits_of<T> - n) & 1;
    } else {
        result = static_cast<T>(a >> n | b << (bits_of<T> - n));
        carry = a >> (n - 1) & 1;
    }
    f.shifted(result, carry, top_bit(static_cast<T>(result ^ a)));
    return result;
}
template <bool Left, class Count, class T>
const Op* double_shift_reg(Cpu& cpu, const Op* op) {
    cpu.set<T>(op->reg,
               double_shift<Left, Count, T>(cpu.flags, cpu.get<T>(op->reg), cpu.get<T>(op->rm), cpu, op));
    VTRACE_NEXT(cpu, op);
}
template <bool Left, class Count, class T, class Ea>
const Op* double_shift_mem(Cpu& cpu, const Op* op) {
    uint64_t address;
    T value;
    if (!Ea::get(cpu, op, sizeof(T), true, address) || !cpu.load_for_write(op, address, value))
        return nullptr;
    LazyFlags flags = cpu.flags;
    if (!cpu.store(op, address, double_shift<Left, Count, T>(flags, value, cpu.get<T>(op->rm), cpu, op)))
        return nullptr;
    cpu.flags = flags;
    VTRACE_NEXT(cpu, op);
}
template <bool Left, class Count>
void select_double_shift(const DecodeInput& in, Op& op) {
    op.rm = gpr_offset(in.operands[1].reg.value);
    if (is_register(in.operands[0])) {
        op.reg = gpr_offset(in.operands[0].reg.value);
        op.fn = by_wide_width(in.operands[0].size, []<class T>() -> Handler { return double_shift_reg<Left, Count, T>; });
    } else {
        op.fn = by_wide_width(in.operands[0].size, [&]<class T>() -> Handler {
            return by_shape(in.shape, []<class Ea>() -> Handler { return double_shift_mem<Left, Count, T, Ea>; });
        });
    }
}

// --- multiply and divide ---------------------------------------------------------------------------------------------

template <class T>
using Wide = std::conditional_t<sizeof(T) == 1, uint16_t,
                                std::conditional_t<sizeof(T) == 2, uint32_t,
                                                   std::conditional_t<sizeof(T) == 4, uint64_t, unsigned __int128>>>;
template <class T>
using SignedWide = std::conditional_t<
    sizeof(T) == 1, int16_t,
    std::conditional_t<sizeof(T) == 2, int32_t, std::conditional_t<sizeof(T) == 4, int64_t, __int128>>>;

/// The register pair of one-operand MUL and DIV: AX, DX:AX, EDX:EAX, RDX:RAX.
template <class T>
Wide<T> read_pair(const Cpu& cpu) {
    if constexpr (sizeof(T) == 1)
        return cpu.get<uint16_t>(RAX * 8);
    else
        return static_cast<Wide<T>>(cpu.get<T>(RDX * 8)) << bits_of<T> | cpu.get<T>(RAX * 8);
}
template <class T>
void write_pair(Cpu& cpu, Wide<T> value) {
    if constexpr (sizeof(T) == 1) {
        cpu.set<uint16_t>(RAX * 8, value);
    } else {
        cpu.set<T>(RAX * 8, static_cast<T>(value));
        cpu.set<T>(RDX * 8, static_cast<T>(value >> bits_of<T>));
    }
}

/// Signed product of the operands; `overflow` if it doesn't fit T.
template <class T>
SignedWide<T> signed_product(T a, T b, bool& overflow) {
    using Signed = std::make_signed_t<T>;
    auto product = static_cast<SignedWide<T>>(static_cast<SignedWide<T>>(static_cast<Signed>(a)) *
                                              static_cast<SignedWide<T>>(static_cast<Signed>(b)));
    overflow = product != static_cast<Signed>(product);
    return product;
}

struct Mul {
    template <class T>
    static bool run(Cpu& cpu, T value) {
        auto product = static_cast<Wide<T>>(static_cast<Wide<T>>(cpu.get<T>(RAX * 8)) * value);
        write_pair<T>(cpu, product);
        bool overflow = product >> bits_of<T>;
        cpu.flags.shifted(static_cast<T>(product), overflow, overflow);
        return true;
    }
};
struct Imul1 {
    template <class T>
    static bool run(Cpu& cpu, T value) {
        bool overflow;
        auto product = signed_product<T>(cpu.get<T>(RAX * 8), value, overflow);
        write_pair<T>(cpu, static_cast<Wide<T>>(product));
        cpu.flags.shifted(static_cast<T>(product), overflow, overflow);
        return true;
    }
};
/// False: #DE. All flags are undefined after a division; they stay as they were.
struct Div {
    template <class T>
    static bool run(Cpu& cpu, T value) {
        Wide<T> dividend = read_pair<T>(cpu);
        if (value == 0)
            return false;
        Wide<T> quotient = dividend / value;
        if (quotient >> bits_of<T>)
            return false;
        T remainder = static_cast<T>(dividend % value);
        set_results(cpu, static_cast<T>(quotient), remainder);
        return true;
    }
    template <class T>
    static void set_results(Cpu& cpu, T quotient, T remainder) {
        if constexpr (sizeof(T) == 1) {
            cpu.set<uint16_t>(RAX * 8, static_cast<uint16_t>(remainder << 8 | quotient));
        } else {
            cpu.set<T>(RAX * 8, quotient);
            cpu.set<T>(RDX * 8, remainder);
        }
    }
};
struct Idiv {
    template <class T>
    static bool run(Cpu& cpu, T value) {
        using Signed = std::make_signed_t<T>;
        if (value == 0)
            return false;
        const Wide<T> dividend = read_pair<T>(cpu);
        const bool negative = dividend >> (2 * bits_of<T> - 1) & 1;
        // Magnitudes, since the smallest dividend over -1 overflows in the host too.
        const auto magnitude = static_cast<Wide<T>>(negative ? Wide<T>(0) - dividend : dividend);
        const bool divisor_negative = top_bit(value);
        const T divisor = divisor_negative ? static_cast<T>(T{0} - value) : value;
        const Wide<T> quotient = magnitude / divisor;
        const bool quotient_negative = negative != divisor_negative;
        const Wide<T> limit = (Wide<T>{1} << (bits_of<T> - 1)) - !quotient_negative;
        if (quotient > limit)
            return false;
        const T remainder = static_cast<T>(magnitude % divisor);
        Div::set_results<T>(cpu, static_cast<T>(quotient_negative ? T{0} - static_cast<T>(quotient) : static_cast<T>(quotient)),
                            static_cast<T>(negative ? T{0} - remainder : remainder));
        static_cast<void>(sizeof(Signed));
        return true;
    }
};

template <class Operation, class T>
const Op* pair_reg(Cpu& cpu, const Op* op) {
    if (!Operation::template run<T>(cpu, cpu.get<T>(op->reg)))
        return cpu.raise(op, Vector::de);
    VTRACE_NEXT(cpu, op);
}
template <class Operation, class T, class Ea>
const Op* pair_mem(Cpu& cpu, const Op* op) {
    uint64_t address;
    T value;
    if (!Ea::get(cpu, op, sizeof(T), false, address) || !cpu.load(op, address, value))
        return nullptr;
    if (!Operation::template run<T>(cpu, value))
        return cpu.raise(op, Vector::de);
    VTRACE_NEXT(cpu, op);
}
template <class Operation>
void select_pair(const DecodeInput& in, Op& op) {
    const unsigned width = in.operands[0].size;
    if (is_register(in.operands[0])) {
        op.reg = gpr_offset(in.operands[0].reg.value);
        op.fn = by_width(width, []<class T>() -> Handler { return pair_reg<Operation, T>; });
    } else {
        op.fn = by_width(width, [&]<class T>() -> Handler {
            return by_shape(in.shape, []<class Ea>() -> Handler { return pair_mem<Operation, T, Ea>; });
        });
    }
}

/// IMUL reg, r/m and reg, r/m, imm: `Three` takes the immediate as the second factor.
template <class T>
void multiply_into(Cpu& cpu, const Op* op, T a, T b) {
    bool overflow;
    auto product = signed_product<T>(a, b, overflow);
    cpu.set<T>(op->reg, static_cast<T>(product));
    cpu.flags.shifted(static_cast<T>(product), overflow, overflow);
}
template <class T, bool Three>
const Op* imul_reg(Cpu& cpu, const Op* op) {
    multiply_into<T>(cpu, op, cpu.get<T>(op->rm), Three ? static_cast<T>(op->imm) : cpu.get<T>(op->reg));
    VTRACE_NEXT(cpu, op);
}
template <class T, bool Three, class Ea>
const Op* imul_mem(Cpu& cpu, const Op* op) {
    uint64_t address;
    T value;
    if (!Ea::get(cpu, op, sizeof(T), false, address) || !cpu.load(op, address, value))
        return nullptr;
    multiply_into<T>(cpu, op, value, Three ? static_cast<T>(op->imm) : cpu.get<T>(op->reg));
    VTRACE_NEXT(cpu, op);
}
template <bool Three>
void select_imul(const DecodeInput& in, Op& op) {
    op.reg = gpr_offset(in.operands[0].reg.value);
    if (is_register(in.operands[1])) {
        op.rm = gpr_offset(in.operands[1].reg.value);
        op.fn = by_wide_width(in.operands[0].size, []<class T>() -> Handler { return imul_reg<T, Three>; });
    } else {
        op.fn = by_wide_width(in.operands[0].size, [&]<class T>() -> Handler {
            return by_shape(in.shape, []<class Ea>() -> Handler { return imul_mem<T, Three, Ea>; });
        });
    }
}

// --- decimal adjust (16- and 32-bit code only) -----------------------------------------------------------------------

/// DAA and DAS. SDM vol. 2.
template <bool Subtract>
const Op* decimal_adjust(Cpu& cpu, const Op* op) {
    uint8_t old = cpu.get<uint8_t>(RAX * 8), al = old;
    bool old_carry = cpu.flags.cf(), carry = false, auxiliary = cpu.flags.af();
    if ((old & 0xf) > 9 || auxiliary) {
        carry = old_carry || (Subtract ? old < 6 : old > 0xff - 6);
        al = Subtract ? al - 6 : al + 6;
        auxiliary = true;
    }
    if (old > 0x99 || old_carry) {
        al = Subtract ? al - 0x60 : al + 0x60;
        carry = true;
    }
    cpu.set<uint8_t>(RAX * 8, al);
    cpu.flags.shifted(al, carry, false);
    cpu.flags.aux |= auxiliary ? LazyFlags::aux_af : 0;
    VTRACE_NEXT(cpu, op);
}
/// AAA and AAS.
template <bool Subtract>
const Op* ascii_adjust(Cpu& cpu, const Op* op) {
    uint16_t ax = cpu.get<uint16_t>(RAX * 8);
    bool adjust = (ax & 0xf) > 9 || cpu.flags.af();
    if (adjust)
        ax = Subtract ? static_cast<uint16_t>(ax - 0x106) : static_cast<uint16_t>(ax + 0x106);
    ax &= 0xff0f;
    cpu.set<uint16_t>(RAX * 8, ax);
    cpu.flags.shifted(static_cast<uint8_t>(ax), adjust, false);
    cpu.flags.aux |= adjust ? LazyFlags::aux_af : 0;
    VTRACE_NEXT(cpu, op);
}
const Op* aam(Cpu& cpu, const Op* op) {
    auto base = static_cast<uint8_t>(op->imm);
    if (base == 0)
        return cpu.raise(op, Vector::de);
    uint8_t al = cpu.get<uint8_t>(RAX * 8);
    cpu.set<uint16_t>(RAX * 8, static_cast<uint16_t>(al / base << 8 | al % base));
    cpu.flags.shifted(static_cast<uint8_t>(al % base), false, false);
    VTRACE_NEXT(cpu, op);
}
const Op* aad(Cpu& cpu, const Op* op) {
    uint16_t ax = cpu.get<uint16_t>(RAX * 8);
    auto al = static_cast<uint8_t>(ax + (ax >> 8) * static_cast<uint8_t>(op->imm));
    cpu.set<uint16_t>(RAX * 8, al);
    cpu.flags.shifted(al, false, false);
    VTRACE_NEXT(cpu, op);
}

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
    case ZYDIS_MNEMONIC_SHL:
        select_shift<Shl>(in, op);
        return true;
    case ZYDIS_MNEMONIC_SHR:
        select_shift<Shr>(in, op);
        return true;
    case ZYDIS_MNEMONIC_SAR:
        select_shift<Sar>(in, op);
        return true;
    case ZYDIS_MNEMONIC_ROL:
        select_shift<Rol>(in, op);
        return true;
    case ZYDIS_MNEMONIC_ROR:
        select_shift<Ror>(in, op);
        return true;
    case ZYDIS_MNEMONIC_RCL:
        select_shift<Rcl>(in, op);
        return true;
    case ZYDIS_MNEMONIC_RCR:
        select_shift<Rcr>(in, op);
        return true;
    case ZYDIS_MNEMONIC_SHLD:
        is_register(in.operands[2]) ? select_double_shift<true, CountCl>(in, op)
                                    : select_double_shift<true, CountImmediate>(in, op);
        return true;
    case ZYDIS_MNEMONIC_SHRD:
        is_register(in.operands[2]) ? select_double_shift<false, CountCl>(in, op)
                                    : select_double_shift<false, CountImmediate>(in, op);
        return true;
    case ZYDIS_MNEMONIC_MUL:
        select_pair<Mul>(in, op);
        return true;
    case ZYDIS_MNEMONIC_IMUL:
        if (in.instruction.operand_count_visible == 1)
            select_pair<Imul1>(in, op);
        else if (in.instruction.operand_count_visible == 2)
            select_imul<false>(in, op);
        else
            select_imul<true>(in, op);
        return true;
    case ZYDIS_MNEMONIC_DIV:
        select_pair<Div>(in, op);
        return true;
    case ZYDIS_MNEMONIC_IDIV:
        select_pair<Idiv>(in, op);
        return true;
    case ZYDIS_MNEMONIC_DAA:
        op.fn = decimal_adjust<false>;
        return true;
    case ZYDIS_MNEMONIC_DAS:
        op.fn = decimal_adjust<true>;
        return true;
    case ZYDIS_MNEMONIC_AAA:
        op.fn = ascii_adjust<false>;
        return true;
    case ZYDIS_MNEMONIC_AAS:
        op.fn = ascii_adjust<true>;
        return true;
    case ZYDIS_MNEMONIC_AAM:
        op.fn = aam;
        return true;
    case ZYDIS_MNEMONIC_AAD:
        op.fn = aad;
        return true;
    default:
        return false;
    }
}

} // namespace vtrace::soft
