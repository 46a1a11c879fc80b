// RCPPS, RCPSS, RSQRTPS and RSQRTSS by rule: the SDM bounds their relative error (1.5 * 2^-12) and leaves the value to
// the processor, so a host's own result would make traces differ among hosts.
//
// The rule: the exact result, its significand cut to 12 bits after the leading one (error below 2^-12), towards zero.
// Denormal operands count as zeros of their sign, results below the normal range as zeros; NaNs become quiet; RSQRT of
// a negative number is the default NaN. MXCSR has no influence and isn't changed.
#pragma once

#include <cstdint>

namespace vtrace::soft {

/// Single-precision numbers as bits.
uint32_t approximate_reciprocal(uint32_t x);
uint32_t approximate_reciprocal_sqrt(uint32_t x);

} // namespace vtrace::soft
