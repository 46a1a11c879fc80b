#include "vmm/soft/fp_approximate.h"

#include <bit>
#include <cmath>

namespace vtrace::soft {
namespace {

constexpr uint32_t sign_bit = 1u << 31, exponent_mask = 0xff << 23, quiet_bit = 1 << 22,
                   infinity = exponent_mask, default_nan = 0xffc00000;
constexpr unsigned fraction_bits = 23, double_fraction_bits = 52, kept_bits = 12;
constexpr int double_bias = 1023, single_bias = 127;

bool is_nan(uint32_t x) {
    return (x & ~sign_bit) > infinity;
}
bool is_zero_or_denormal(uint32_t x) {
    return (x & exponent_mask) == 0;
}

/// A positive normal double, cut; zero if it is too small for a normal single. Never too large here.
uint32_t cut(double value) {
    auto bits = std::bit_cast<uint64_t>(value);
    int exponent = static_cast<int>(bits >> double_fraction_bits) - double_bias + single_bias;
    if (exponent <= 0)
        return 0;
    auto kept = static_cast<uint32_t>(bits >> (double_fraction_bits - kept_bits)) & ((1u << kept_bits) - 1);
    return static_cast<uint32_t>(exponent) << fraction_bits | kept << (fraction_bits - kept_bits);
}

} // namespace

// In double precision neither the quotient of a 24-bit number nor its square root's reciprocal rounds across a 12-bit
// boundary: unless it is one exactly (then it is exact), it is at least 2^-37, or 2^-51, of itself away.

uint32_t approximate_reciprocal(uint32_t x) {
    uint32_t sign = x & sign_bit;
    if (is_nan(x))
        return x | quiet_bit;
    if (is_zero_or_denormal(x))
        return sign | infinity;
    if ((x & ~sign_bit) == infinity)
        return sign;
    return sign | cut(1.0 / static_cast<double>(std::bit_cast<float>(x & ~sign_bit)));
}

uint32_t approximate_reciprocal_sqrt(uint32_t x) {
    if (is_nan(x))
        return x | quiet_bit;
    if (is_zero_or_denormal(x))
        return (x & sign_bit) | infinity;
    if (x & sign_bit)
        return default_nan;
    if (x == infinity)
        return 0;
    return cut(1.0 / std::sqrt(static_cast<double>(std::bit_cast<float>(x))));
}

} // namespace vtrace::soft
