// MUL, IMUL, DIV, IDIV and the decimal adjustments, and their handlers.
//
// Flags that the manuals leave undefined are chosen once; docs/undefined.md lists the choices.
#include "vmm/soft/select.h"

namespace vtrace::soft {
namespace {

// --- multiply and divide ---------------------------------------------------------------------------------------------

template <class T>
using Wide = std::conditional_t<
    sizeof(T) == 1, uint16_t,
    std::conditional_t<sizeof(T) == 2, uint32_t, std::conditional_t<sizeof(T) == 4, uint64_t, unsigned __int128>>>;
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
        Div::set_results<T>(
            cpu, static_cast<T>(quotient_negative ? T{0} - static_cast<T>(quotient) : static_cast<T>(quotient)),
            static_cast<T>(negative ? T{0} - remainder : remainder));
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

bool decode_multiply(const DecodeInput& in, Op& op) {
    switch (in.instruction.mnemonic) {
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
