// The FXSAVE image that holds the guest's x87, MMX, XMM and MXCSR state, field by field (SDM vol. 1, table 10-2, 64-bit
// form), and the rules by which instructions change it as a whole.
//
// Slot i of the image is ST(i), not physical register Ri: whoever changes TOP in C++ must turn the slots with
// set_top().
//
// FIP, FDP, FOP, FCS and FDS are not tracked: every x87 instruction that isn't a control instruction leaves them zero,
// so that a trace doesn't depend on the host (docs/undefined.md, "FPU"). What FXRSTOR, FLDENV, ... load stays until
// then.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "vmm/cpu_state.h"

namespace vtrace::soft {

namespace Fx { // byte offsets
inline constexpr unsigned fcw = 0, fsw = 2, ftw = 4, fop = 6, fip = 8, fcs = 12, fdp = 16, fds = 20, mxcsr = 24,
                          mxcsr_mask = 28, st = 32, xmm = 160, slot_size = 16, st_size = 10;
inline constexpr unsigned xmm_end = xmm + 16 * slot_size, xmm_end32 = xmm + 8 * slot_size;
} // namespace Fx

/// x87 status and control word (SDM vol. 1, 8.1.3 and 8.1.5).
namespace Fsw {
inline constexpr uint16_t ie = 1, de = 2, ze = 4, oe = 8, ue = 16, pe = 32, sf = 64, es = 128, b = 1 << 15;
inline constexpr uint16_t exceptions = ie | de | ze | oe | ue | pe;
inline constexpr unsigned top_shift = 11;
} // namespace Fsw
namespace Fcw {
inline constexpr uint16_t masks = 0x3f, reserved_one = 0x40, reserved_zero = 0xe080, initial = 0x37f;
}
/// SIMD control and status (SDM vol. 1, 10.2.3); the six flags are in the order of Fsw's.
namespace Mxcsr {
inline constexpr uint32_t ie = 1, de = 2, ze = 4, oe = 8, ue = 16, pe = 32, flags = 0x3f, daz = 1 << 6,
                          masks = 0x3f << 7, ftz = 1 << 15, initial = 0x1f80;
inline constexpr unsigned masks_shift = 7;
/// Bits that the processor has (MXCSR_MASK in the FXSAVE image); setting another raises #GP.
inline constexpr uint32_t supported = 0xffff;
} // namespace Mxcsr

template <class T>
T fx_get(const FpuImage& image, unsigned offset) {
    T value;
    std::memcpy(&value, image.fxsave.data() + offset, sizeof value);
    return value;
}
template <class T>
void fx_set(FpuImage& image, unsigned offset, T value) {
    std::memcpy(image.fxsave.data() + offset, &value, sizeof value);
}

inline unsigned fx_top(const FpuImage& image) {
    return fx_get<uint16_t>(image, Fx::fsw) >> Fsw::top_shift & 7;
}

/// Changes TOP; the contents of the physical registers stay.
inline void fx_set_top(FpuImage& image, unsigned top) {
    unsigned old = fx_top(image);
    if (old == top)
        return;
    auto first = image.fxsave.begin() + Fx::st;
    std::rotate(first, first + ((top - old) & 7) * Fx::slot_size, first + 8 * Fx::slot_size);
    uint16_t fsw = fx_get<uint16_t>(image, Fx::fsw);
    fx_set<uint16_t>(image, Fx::fsw, (fsw & ~(7 << Fsw::top_shift)) | top << Fsw::top_shift);
}

/// Exceptions that are flagged and not masked: the next waiting instruction takes them.
inline uint16_t fx_pending(const FpuImage& image) {
    return fx_get<uint16_t>(image, Fx::fsw) & ~fx_get<uint16_t>(image, Fx::fcw) & Fsw::exceptions;
}
/// ES and B follow the flags and masks, whatever was loaded.
inline void fx_update_summary(FpuImage& image) {
    uint16_t fsw = fx_get<uint16_t>(image, Fx::fsw) & ~(Fsw::es | Fsw::b);
    if (fx_pending(image))
        fsw |= Fsw::es | Fsw::b;
    fx_set(image, Fx::fsw, fsw);
}
inline void fx_set_fcw(FpuImage& image, uint16_t fcw) {
    fx_set<uint16_t>(image, Fx::fcw, (fcw & ~Fcw::reserved_zero) | Fcw::reserved_one);
    fx_update_summary(image);
}
inline void fx_clear_pointers(FpuImage& image) {
    fx_set<uint16_t>(image, Fx::fop, 0);
    fx_set<uint64_t>(image, Fx::fip, 0);
    fx_set<uint64_t>(image, Fx::fdp, 0);
}

/// FNINIT: the registers' contents stay.
inline void fx_init_x87(FpuImage& image) {
    fx_set_top(image, 0);
    fx_set<uint16_t>(image, Fx::fcw, Fcw::initial);
    fx_set<uint16_t>(image, Fx::fsw, 0);
    fx_set<uint16_t>(image, Fx::ftw, 0);
    fx_clear_pointers(image);
}

/// What every MMX instruction but EMMS does to the x87 state (SDM vol. 3, 13.2): TOP 0, all registers valid.
inline void fx_enter_mmx(FpuImage& image) {
    fx_set_top(image, 0);
    fx_set<uint8_t>(image, Fx::ftw, 0xff);
}
/// Offset of MMi = Ri in the image as it is now.
inline unsigned fx_mmx_offset(const FpuImage& image, unsigned i) {
    return Fx::st + ((i - fx_top(image)) & 7) * Fx::slot_size;
}

} // namespace vtrace::soft
