// When an x87, MMX or SSE instruction may execute at all (SDM vol. 3, tables 2-1, 12-1 and 13-1; vol. 2, 2.4).
#pragma once

#include "vmm/soft/cpu.h"
#include "vmm/soft/fp_image.h"

namespace vtrace::soft {

/// Who else takes part beside CR0.EM and CR0.TS. Instructions on XMM registers or MXCSR are `sse`; those on MMX
/// registers alone don't need CR4.OSFXSR.
enum class FpGroup : uint8_t { sse, mmx, sse_mmx, x87, x87_no_wait };

template <FpGroup Group>
inline bool fp_may_run_slow(Cpu& cpu, const Op* op) {
    constexpr bool simd = Group == FpGroup::sse || Group == FpGroup::mmx || Group == FpGroup::sse_mmx;
    constexpr bool fxsr = Group == FpGroup::sse || Group == FpGroup::sse_mmx;
    if (simd && (cpu.fp_blocked & (FpBlock::em | (fxsr ? FpBlock::no_fxsr : 0)))) {
        cpu.raise(op, Vector::ud);
        return false;
    }
    if (cpu.fp_blocked & (FpBlock::em | FpBlock::ts)) {
        cpu.raise(op, Vector::nm);
        return false;
    }
    return true;
}

/// False: #UD, #NM or #MF was raised. With CR0.NE clear an x87 exception goes out of the processor by FERR#, which
/// leads nowhere here: the instruction executes, as with IGNNE# asserted.
template <FpGroup Group>
inline bool fp_may_run(Cpu& cpu, const Op* op) {
    if (VTRACE_UNLIKELY(cpu.fp_blocked != 0) && !fp_may_run_slow<Group>(cpu, op))
        return false;
    if constexpr (Group == FpGroup::mmx || Group == FpGroup::sse_mmx || Group == FpGroup::x87) {
        if (VTRACE_UNLIKELY(fx_pending(cpu.fpu) != 0) && (cpu.cr0 & Cr0::ne)) {
            cpu.raise(op, Vector::mf);
            return false;
        }
    }
    return true;
}

/// Calls `fixed` with a value as large as an access of `size` bytes, for the sizes that the fast path serves; else `other`.
template <class Fixed, class Other>
bool fp_by_size(unsigned size, Fixed fixed, Other other) {
    switch (size) {
    case 1:
        return fixed(uint8_t{});
    case 2:
        return fixed(uint16_t{});
    case 4:
        return fixed(uint32_t{});
    case 8:
        return fixed(uint64_t{});
    case 10:
        return fixed(std::array<uint8_t, 10>{});
    case 16:
        return fixed(std::array<uint8_t, 16>{});
    default:
        return other();
    }
}
inline bool fp_load(Cpu& cpu, const Op* op, uint64_t linear, void* bytes, unsigned size) {
    return fp_by_size(
        size,
        [&](auto value) {
            if (!cpu.load(op, linear, value))
                return false;
            std::memcpy(bytes, &value, sizeof value);
            return true;
        },
        [&] { return cpu.load_bytes(op, linear, bytes, size); });
}
inline bool fp_store(Cpu& cpu, const Op* op, uint64_t linear, const void* bytes, unsigned size) {
    return fp_by_size(
        size,
        [&](auto value) {
            std::memcpy(&value, bytes, sizeof value);
            return cpu.store(op, linear, value);
        },
        [&] { return cpu.store_bytes(op, linear, bytes, size); });
}

} // namespace vtrace::soft
