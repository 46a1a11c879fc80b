// Lazy flags: each arithmetic handler stores what the six status flags can be computed from, three words, no branches.
//
//   result  sign-extended to 64 bits:        ZF = (result == 0), SF = sign (xor sign_delta), PF = parity of the low
//   byte carry   bit 63 is CF; OF = bit 63 xor bit 62 aux     bit 4 is AF; bits 15:8 are xored into the parity byte,
//   bit 16 into SF (only an explicit set uses them)
#pragma once

#include <bit>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "vmm/cpu_state.h"

namespace vtrace::soft {

template <class T>
constexpr unsigned bits_of = sizeof(T) * 8;
template <class T>
bool top_bit(T value) {
    return value >> (bits_of<T> - 1) & 1;
}

struct LazyFlags {
    int64_t result = 1;
    uint64_t carry = 0;
    uint64_t aux = 0;

    static constexpr uint64_t aux_af = 1 << 4, aux_sign_delta = 1 << 16;
    static constexpr unsigned aux_parity_shift = 8;

    bool zf() const { return result == 0; }
    bool sf() const { return (static_cast<uint64_t>(result) >> 63 ^ aux >> 16) & 1; }
    bool cf() const { return carry >> 63; }
    bool of() const { return (carry ^ carry << 1) >> 63; }
    bool pf() const { return !(std::popcount(static_cast<uint8_t>(result ^ aux >> aux_parity_shift)) & 1); }
    bool af() const { return aux & aux_af; }

    /// The six status flags at their places in RFLAGS.
    uint64_t get() const {
        return (cf() ? Rflags::cf : 0) | (pf() ? Rflags::pf : 0) | (af() ? Rflags::af : 0) | (zf() ? Rflags::zf : 0) |
               (sf() ? Rflags::sf : 0) | (of() ? Rflags::of : 0);
    }
    void set(uint64_t rflags) {
        bool zero = rflags & Rflags::zf;
        result = zero ? 0 : 1; // parity of 0 is even, of 1 odd
        aux = (rflags & Rflags::af) | (rflags & Rflags::sf ? aux_sign_delta : 0);
        bool parity_now = zero;
        if (parity_now != bool(rflags & Rflags::pf))
            aux |= 1ull << aux_parity_shift;
        set_cf_of(rflags & Rflags::cf, rflags & Rflags::of);
    }
    [[gnu::always_inline]] void set_cf_of(bool c, bool o) { carry = uint64_t{c} << 63 | uint64_t{c != o} << 62; }
    /// CF becomes c, all other flags stay: for BT and the like.
    [[gnu::always_inline]] void set_cf(bool c) { set_cf_of(c, of()); }

    template <class T>
    [[gnu::always_inline]] void logic(T value) { // AND, OR, XOR, TEST: CF = OF = 0; AF undefined, cleared here
        result = static_cast<std::make_signed_t<T>>(value);
        carry = 0;
        aux = 0;
    }
    /// `carries`: for each bit the carry or borrow into it, and above the operand's top bit the one out of it.
    template <class T>
    [[gnu::always_inline]] void arithmetic(T value, uint64_t carries, bool carry_out) {
        constexpr unsigned bits = sizeof(T) * 8;
        result = static_cast<std::make_signed_t<T>>(value);
        aux = carries & aux_af;
        if constexpr (bits == 64)
            carry = carries >> 1 | uint64_t{carry_out} << 63;
        else
            carry = carries << (63 - bits);
    }
    template <class T>
    [[gnu::always_inline]] T add(T a, T b, bool carry_in = false) {
        if constexpr (sizeof(T) == 8) {
            T sum = a + b + carry_in;
            arithmetic(sum, a ^ b ^ sum, carry_in ? sum <= a : sum < a);
            return sum;
        } else {
            uint64_t sum = uint64_t{a} + b + carry_in;
            arithmetic(static_cast<T>(sum), uint64_t{a} ^ b ^ sum, false);
            return static_cast<T>(sum);
        }
    }
    template <class T>
    [[gnu::always_inline]] T sub(T a, T b, bool borrow_in = false) {
        if constexpr (sizeof(T) == 8) {
            T difference = a - b - borrow_in;
            arithmetic(difference, a ^ b ^ difference, borrow_in ? a <= b : a < b);
            return difference;
        } else {
            uint64_t difference = uint64_t{a} - b - borrow_in;
            arithmetic(static_cast<T>(difference), uint64_t{a} ^ b ^ difference, false);
            return static_cast<T>(difference);
        }
    }
    template <class T>
    [[gnu::always_inline]] T inc(T a) { // as add, CF stays
        bool c = cf();
        T sum = static_cast<T>(a + 1);
        constexpr T least = static_cast<T>(T{1} << (sizeof(T) * 8 - 1));
        result = static_cast<std::make_signed_t<T>>(sum);
        aux = (a ^ sum) & aux_af;
        set_cf_of(c, sum == least);
        return sum;
    }
    template <class T>
    [[gnu::always_inline]] T dec(T a) {
        bool c = cf();
        T difference = static_cast<T>(a - 1);
        constexpr T least = static_cast<T>(T{1} << (sizeof(T) * 8 - 1));
        result = static_cast<std::make_signed_t<T>>(difference);
        aux = (a ^ difference) & aux_af;
        set_cf_of(c, a == least);
        return difference;
    }
    /// Flags of a shift or multiply: result's, with CF and OF given; AF cleared.
    template <class T>
    [[gnu::always_inline]] void shifted(T value, bool c, bool o) {
        result = static_cast<std::make_signed_t<T>>(value);
        aux = 0;
        set_cf_of(c, o);
    }
};

/// Condition codes as encoded in Jcc, SETcc, CMOVcc (SDM vol. 1, appendix B).
template <unsigned Code>
bool condition(const LazyFlags& flags) {
    bool value;
    if constexpr ((Code & 14) == 0)
        value = flags.of();
    else if constexpr ((Code & 14) == 2)
        value = flags.cf();
    else if constexpr ((Code & 14) == 4)
        value = flags.zf();
    else if constexpr ((Code & 14) == 6)
        value = flags.cf() || flags.zf();
    else if constexpr ((Code & 14) == 8)
        value = flags.sf();
    else if constexpr ((Code & 14) == 10)
        value = flags.pf();
    else if constexpr ((Code & 14) == 12)
        value = flags.sf() != flags.of();
    else
        value = flags.zf() || flags.sf() != flags.of();
    return value != (Code & 1);
}

} // namespace vtrace::soft
