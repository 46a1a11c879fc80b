// Shifts, rotates and double shifts, and their handlers.
//
// Flags that the manuals leave undefined are chosen once; docs/undefined.md lists the choices.
#include "vmm/soft/modify.h"

namespace vtrace::soft {
namespace {

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

struct Shl {
    template <class T>
    [[gnu::always_inline]] static T apply(LazyFlags& f, T a, unsigned n) {
        T result = n < bits_of<T> ? static_cast<T>(a << n) : T{0};
        bool carry = n <= bits_of<T> && (a >> (bits_of<T> - n) & 1);
        f.shifted(result, carry, carry != top_bit(result));
        return result;
    }
};
struct Shr {
    template <class T>
    [[gnu::always_inline]] static T apply(LazyFlags& f, T a, unsigned n) {
        T result = n < bits_of<T> ? static_cast<T>(a >> n) : T{0};
        bool carry = n <= bits_of<T> && (a >> (n - 1) & 1);
        f.shifted(result, carry, n == 1 ? top_bit(a) : false);
        return result;
    }
};
struct Sar {
    template <class T>
    [[gnu::always_inline]] static T apply(LazyFlags& f, T a, unsigned n) {
        using Signed = std::make_signed_t<T>;
        unsigned reach = std::min(n, bits_of<T> - 1);
        T result = static_cast<T>(static_cast<Signed>(a) >> reach);
        bool carry = n < bits_of<T> ? static_cast<Signed>(a) >> (n - 1) & 1 : top_bit(a);
        f.shifted(result, carry, false);
        return result;
    }
};
struct Rol {
    template <class T>
    [[gnu::always_inline]] static T apply(LazyFlags& f, T a, unsigned n) {
        T result = std::rotl(a, static_cast<int>(n % bits_of<T>));
        bool carry = result & 1;
        f.set_cf_of(carry, carry != top_bit(result));
        return result;
    }
};
struct Ror {
    template <class T>
    [[gnu::always_inline]] static T apply(LazyFlags& f, T a, unsigned n) {
        T result = std::rotr(a, static_cast<int>(n % bits_of<T>));
        bool carry = top_bit(result);
        f.set_cf_of(carry, carry != (result >> (bits_of<T> - 2) & 1));
        return result;
    }
};
/// Rotate through carry: 9, 17, 33 or 65 bits wide.
struct Rcl {
    template <class T>
    [[gnu::always_inline]] static T apply(LazyFlags& f, T a, unsigned n) {
        bool carry = f.cf();
        for (n %= bits_of<T> + 1; n; --n) {
            bool out = top_bit(a);
            a = static_cast<T>(a << 1 | carry);
            carry = out;
        }
        f.set_cf_of(carry, carry != top_bit(a));
        return a;
    }
};
struct Rcr {
    template <class T>
    [[gnu::always_inline]] static T apply(LazyFlags& f, T a, unsigned n) {
        bool carry = f.cf();
        for (n %= bits_of<T> + 1; n; --n) {
            bool out = a & 1;
            a = static_cast<T>(a >> 1 | static_cast<T>(static_cast<T>(carry) << (bits_of<T> - 1)));
            carry = out;
        }
        f.set_cf_of(carry, top_bit(a) != (a >> (bits_of<T> - 2) & 1));
        return a;
    }
};

/// A shift or rotate with its count; its operation is asked for counts other than zero only.
template <class Operation, class Count>
struct Shift {
    template <class T>
    [[gnu::always_inline]] static T run(LazyFlags& f, T a, const Cpu& cpu, const Op* op) {
        const unsigned n = masked_count<T>(Count::get(cpu, op));
        return n == 0 ? a : Operation::template apply<T>(f, a, n);
    }
};
template <class Operation>
void select_shift(const DecodeInput& in, Op& op) {
    if (is_register(in.operands[1]))
        select_unary<Shift<Operation, CountCl>>(in, op);
    else
        select_unary<Shift<Operation, CountImmediate>>(in, op);
}

// --- double shifts ---------------------------------------------------------------------------------------------------

/// SHLD and SHRD. A 16-bit count above 16 is undefined: the 32-bit pattern first:second is rotated on, as processors
/// do.
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
    cpu.set<T>(op->reg, double_shift<Left, Count, T>(cpu.flags, cpu.get<T>(op->reg), cpu.get<T>(op->rm), cpu, op));
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
        op.fn =
            by_wide_width(in.operands[0].size, []<class T>() -> Handler { return double_shift_reg<Left, Count, T>; });
    } else {
        op.fn = by_wide_width(in.operands[0].size, [&]<class T>() -> Handler {
            return by_shape(in.shape, []<class Ea>() -> Handler { return double_shift_mem<Left, Count, T, Ea>; });
        });
    }
}

} // namespace

bool decode_shift(const DecodeInput& in, Op& op) {
    switch (in.instruction.mnemonic) {
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
    default:
        return false;
    }
}

} // namespace vtrace::soft
