// What both processors are given and what they answer: the user-visible state, and the fenced memory it may touch.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>

#include "vmm/cpu_state.h"

namespace vtrace::oracle {

/// Linear addresses, the same in this process and in the guest. Everything around the arena is unmapped for `guard`
/// bytes.
namespace Arena {
inline constexpr uint64_t code = 0x2000'0000, code_size = 16 << 20;   // fenced: 0xcc wherever no case lies
inline constexpr uint64_t exits = 0x2800'0000, exits_size = 64 << 10; // all 0xcc: targets of branches
inline constexpr uint64_t data = 0x3000'0000, writable = 2 * 4096, size = 3 * 4096; // the last page is read-only
inline constexpr uint64_t guard = 1 << 20;
inline constexpr uint64_t gs_base = 0x0123'4567'8000; // any canonical value
} // namespace Arena

enum class Mode : uint8_t { bits32, bits64 };

/// Selectors of 64-bit Linux's user mode.
inline constexpr uint16_t user_cs64 = 0x33, user_cs32 = 0x23, user_ds = 0x2b;

struct UserState {
    std::array<uint64_t, 16> gpr{};
    uint64_t rip = 0;
    uint64_t rflags = 0;
    FpuImage fpu;
};

/// Bytes of the arena's three data pages.
using Data = std::array<uint8_t, Arena::size>;

inline constexpr int completed = -1;

struct Answer {
    int vector = completed; // or the exception's vector
    uint32_t error_code = 0;
    uint64_t cr2 = 0; // when vector is #PF
    UserState state;
};

namespace Fxsave { // offsets, SDM vol. 1, table 10-2
inline constexpr unsigned fcw = 0, fsw = 2, ftw = 4, fop = 6, fip = 8, fdp = 16, mxcsr = 24, mxcsr_mask = 28, st = 32,
                          xmm = 160, end = 416;
}

} // namespace vtrace::oracle
