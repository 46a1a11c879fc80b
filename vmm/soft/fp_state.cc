// Whole-state instructions: FXSAVE, FXRSTOR, XSAVE and its kin, MXCSR, EMMS.
//
// Memory has the layout of the image, but for: reserved bytes, the 32-bit form of the pointers (FCS and FDS are always
// saved as 0 and not loaded), and XMM8..15, which exist in 64-bit mode only.
#include "vmm/soft/fp_guard.h"
#include "vmm/soft/fp_handlers.h"

namespace vtrace::soft {
namespace {

namespace Xcr0 {
constexpr uint64_t x87 = 1, sse = 2, supported = x87 | sse;
}
/// XSAVE header (SDM vol. 1, 13.4.2).
constexpr unsigned xsave_header = 512, xsave_header_size = 64, xstate_bv = 512, xcomp_bv = 520, xcomp_reserved = 528;
constexpr unsigned xsave_area = xsave_header + xsave_header_size;
constexpr uint64_t fxsave_alignment_mask = 15, xsave_alignment_mask = 63;

bool is_w(const Op* op) {
    return op->reg;
}
unsigned xmm_end_of(const Op* op) {
    return op->rm ? Fx::xmm_end : Fx::xmm_end32;
}

/// x87 part as the instruction's form stores it: bytes 0..23 and 32..159.
void x87_to_memory(const FpuImage& image, const Op* op, uint8_t* memory) {
    std::memcpy(memory, image.fxsave.data(), Fx::mxcsr);
    std::memcpy(memory + Fx::st, image.fxsave.data() + Fx::st, Fx::xmm - Fx::st);
    if (!is_w(op)) {
        std::memset(memory + Fx::fcs, 0, sizeof(uint32_t));
        std::memset(memory + Fx::fds, 0, sizeof(uint32_t));
    }
}
void x87_from_memory(FpuImage& image, const Op* op, const uint8_t* memory) {
    uint8_t* bytes = image.fxsave.data();
    std::memcpy(bytes, memory, Fx::mxcsr);
    if (!is_w(op)) {
        std::memset(bytes + Fx::fcs, 0, sizeof(uint32_t));
        std::memset(bytes + Fx::fds, 0, sizeof(uint32_t));
    }
    constexpr uint16_t fop_mask = 0x7ff;
    fx_set<uint16_t>(image, Fx::ftw, fx_get<uint8_t>(image, Fx::ftw)); // byte 5 is reserved
    fx_set<uint16_t>(image, Fx::fop, fx_get<uint16_t>(image, Fx::fop) & fop_mask);
    for (unsigned i = 0; i < 8; i++) {
        uint8_t* slot = bytes + Fx::st + i * Fx::slot_size;
        std::memcpy(slot, memory + Fx::st + i * Fx::slot_size, Fx::st_size);
        std::memset(slot + Fx::st_size, 0, Fx::slot_size - Fx::st_size);
    }
    fx_set_fcw(image, fx_get<uint16_t>(image, Fx::fcw));
}
void x87_reset(FpuImage& image) {
    fx_init_x87(image);
    std::memset(image.fxsave.data() + Fx::st, 0, Fx::xmm - Fx::st);
}
bool x87_in_use(const FpuImage& image) {
    FpuImage initial{};
    fx_set<uint16_t>(initial, Fx::fcw, Fcw::initial);
    return std::memcmp(image.fxsave.data(), initial.fxsave.data(), Fx::mxcsr) != 0 ||
           std::memcmp(image.fxsave.data() + Fx::st, initial.fxsave.data() + Fx::st, Fx::xmm - Fx::st) != 0;
}

uint32_t mxcsr_of(const FpuImage& image) {
    return fx_get<uint32_t>(image, Fx::mxcsr) & Mxcsr::supported;
}
bool sse_in_use(const FpuImage& image) {
    auto begin = image.fxsave.begin() + Fx::xmm, end = image.fxsave.begin() + Fx::xmm_end;
    return mxcsr_of(image) != Mxcsr::initial || std::any_of(begin, end, [](uint8_t byte) { return byte != 0; });
}
template <class T>
T get(const uint8_t* memory, unsigned offset) {
    T value;
    std::memcpy(&value, memory + offset, sizeof value);
    return value;
}

bool state_may_run(Cpu& cpu, const Op* op) { // SDM: #NM for EM and TS alike
    if (VTRACE_UNLIKELY(cpu.fp_blocked & (FpBlock::em | FpBlock::ts))) {
        cpu.raise(op, Vector::nm);
        return false;
    }
    return true;
}

template <class Ea>
bool locate(Cpu& cpu, const Op* op, unsigned size, bool write, uint64_t alignment_mask, uint64_t& linear) {
    if (!Ea::get(cpu, op, size, write, linear))
        return false;
    if (linear & alignment_mask) { // unlike that of an SSE operand, after the check for a canonical address
        cpu.raise(op, op->seg == SS && !cpu.is_canonical(linear) ? Vector::ss : Vector::gp, 0);
        return false;
    }
    return true;
}

template <class Ea>
const Op* run_fxsave(Cpu& cpu, const Op* op) {
    uint64_t linear;
    uint8_t memory[sizeof cpu.fpu.fxsave]; // all 512 bytes are accessed, those that stay as they are too
    unsigned size = xmm_end_of(op);
    if (!state_may_run(cpu, op) || !locate<Ea>(cpu, op, sizeof memory, true, fxsave_alignment_mask, linear) ||
        !cpu.load_for_write_slow(op, linear, memory, sizeof memory))
        return nullptr;
    x87_to_memory(cpu.fpu, op, memory);
    uint32_t mxcsr[2] = {mxcsr_of(cpu.fpu), Mxcsr::supported};
    std::memcpy(memory + Fx::mxcsr, mxcsr, sizeof mxcsr);
    std::memcpy(memory + Fx::xmm, cpu.fpu.fxsave.data() + Fx::xmm, size - Fx::xmm);
    if (!cpu.store_bytes(op, linear, memory, sizeof memory))
        return nullptr;
    VTRACE_NEXT_BY_LOOP(cpu, op);
}

template <class Ea>
const Op* run_fxrstor(Cpu& cpu, const Op* op) {
    uint64_t linear;
    uint8_t memory[sizeof cpu.fpu.fxsave];
    unsigned size = xmm_end_of(op);
    if (!state_may_run(cpu, op) || !locate<Ea>(cpu, op, sizeof memory, false, fxsave_alignment_mask, linear) ||
        !cpu.load_bytes(op, linear, memory, sizeof memory))
        return nullptr;
    auto mxcsr = get<uint32_t>(memory, Fx::mxcsr);
    if (mxcsr & ~Mxcsr::supported)
        return cpu.raise(op, Vector::gp, 0);
    x87_from_memory(cpu.fpu, op, memory);
    fx_set(cpu.fpu, Fx::mxcsr, mxcsr);
    std::memcpy(cpu.fpu.fxsave.data() + Fx::xmm, memory + Fx::xmm, size - Fx::xmm);
    VTRACE_NEXT_BY_LOOP(cpu, op);
}

uint64_t edx_eax(const Cpu& cpu) {
    return uint64_t{cpu.get<uint32_t>(RDX * sizeof(uint64_t))} << 32 | cpu.get<uint32_t>(RAX * sizeof(uint64_t));
}

bool xsave_may_run(Cpu& cpu, const Op* op) {
    if (!(cpu.cr4 & Cr4::osxsave)) {
        cpu.raise(op, Vector::ud);
        return false;
    }
    if (VTRACE_UNLIKELY(cpu.fp_blocked & FpBlock::ts)) {
        cpu.raise(op, Vector::nm);
        return false;
    }
    return true;
}

/// SDM vol. 1, 13.7 and 13.9. XINUSE is exact: a component is in use if it isn't in its initial configuration; the
/// modified optimisation of XSAVEOPT isn't used.
template <class Ea, bool Optimised>
const Op* save_extended(Cpu& cpu, const Op* op) {
    uint64_t linear, header;
    if (!xsave_may_run(cpu, op) || !locate<Ea>(cpu, op, xsave_area, true, xsave_alignment_mask, linear) ||
        !cpu.load_for_write(op, linear + xstate_bv, header))
        return nullptr;
    uint64_t requested = edx_eax(cpu) & cpu.xcr0;
    uint64_t in_use = (x87_in_use(cpu.fpu) ? Xcr0::x87 : 0) | (sse_in_use(cpu.fpu) ? Xcr0::sse : 0);
    uint64_t written = Optimised ? requested & in_use : requested;
    // What isn't written stays: the area is read, changed and written back as a whole, so that a fault leaves it alone.
    uint8_t memory[xstate_bv + sizeof header];
    unsigned xmm_end = xmm_end_of(op);
    if (!cpu.load_for_write_slow(op, linear, memory, sizeof memory))
        return nullptr;
    if (written & Xcr0::x87)
        x87_to_memory(cpu.fpu, op, memory);
    if (requested & Xcr0::sse) {
        uint32_t mxcsr[2] = {mxcsr_of(cpu.fpu), Mxcsr::supported};
        std::memcpy(memory + Fx::mxcsr, mxcsr, sizeof mxcsr);
    }
    if (written & Xcr0::sse)
        std::memcpy(memory + Fx::xmm, cpu.fpu.fxsave.data() + Fx::xmm, xmm_end - Fx::xmm);
    header = (header & ~requested) | (requested & in_use);
    std::memcpy(memory + xstate_bv, &header, sizeof header);
    if (!cpu.store_bytes(op, linear, memory, sizeof memory))
        return nullptr;
    VTRACE_NEXT_BY_LOOP(cpu, op);
}
template <class Ea>
const Op* run_xsave(Cpu& cpu, const Op* op) {
    return save_extended<Ea, false>(cpu, op);
}
template <class Ea>
const Op* run_xsaveopt(Cpu& cpu, const Op* op) {
    return save_extended<Ea, true>(cpu, op);
}

/// SDM vol. 1, 13.8, standard form: there is no XSAVEC, so a compacted header is an error.
template <class Ea>
const Op* run_xrstor(Cpu& cpu, const Op* op) {
    uint64_t linear;
    uint8_t memory[xsave_area];
    if (!xsave_may_run(cpu, op) || !locate<Ea>(cpu, op, xsave_area, false, xsave_alignment_mask, linear) ||
        !cpu.load_bytes(op, linear, memory, sizeof memory))
        return nullptr;
    uint64_t requested = edx_eax(cpu) & cpu.xcr0;
    auto present = get<uint64_t>(memory, xstate_bv);
    if ((present & ~cpu.xcr0) || get<uint64_t>(memory, xcomp_bv) || get<uint64_t>(memory, xcomp_reserved))
        return cpu.raise(op, Vector::gp, 0);
    auto mxcsr = get<uint32_t>(memory, Fx::mxcsr);
    if ((requested & Xcr0::sse) && (mxcsr & ~Mxcsr::supported))
        return cpu.raise(op, Vector::gp, 0);
    if (requested & Xcr0::x87)
        present& Xcr0::x87 ? x87_from_memory(cpu.fpu, op, memory) : x87_reset(cpu.fpu);
    if (requested & Xcr0::sse) {
        fx_set(cpu.fpu, Fx::mxcsr, mxcsr); // whether or not XSTATE_BV has SSE
        uint8_t* xmm = cpu.fpu.fxsave.data() + Fx::xmm;
        unsigned size = xmm_end_of(op) - Fx::xmm;
        if (present & Xcr0::sse)
            std::memcpy(xmm, memory + Fx::xmm, size);
        else
            std::memset(xmm, 0, size);
    }
    VTRACE_NEXT_BY_LOOP(cpu, op);
}

const Op* run_xgetbv(Cpu& cpu, const Op* op) {
    if (!(cpu.cr4 & Cr4::osxsave))
        return cpu.raise(op, Vector::ud);
    if (cpu.get<uint32_t>(RCX * sizeof(uint64_t)) != 0)
        return cpu.raise(op, Vector::gp, 0);
    cpu.set<uint32_t>(RAX * sizeof(uint64_t), static_cast<uint32_t>(cpu.xcr0));
    cpu.set<uint32_t>(RDX * sizeof(uint64_t), static_cast<uint32_t>(cpu.xcr0 >> 32));
    VTRACE_NEXT_BY_LOOP(cpu, op);
}

const Op* run_xsetbv(Cpu& cpu, const Op* op) {
    if (!(cpu.cr4 & Cr4::osxsave))
        return cpu.raise(op, Vector::ud);
    uint64_t value = edx_eax(cpu);
    if (cpu.cpl != 0 || cpu.get<uint32_t>(RCX * sizeof(uint64_t)) != 0 || !(value & Xcr0::x87) ||
        (value & ~Xcr0::supported))
        return cpu.raise(op, Vector::gp, 0);
    cpu.xcr0 = value;
    VTRACE_NEXT_BY_LOOP(cpu, op);
}

template <class Ea>
const Op* run_ldmxcsr(Cpu& cpu, const Op* op) {
    uint64_t linear;
    uint32_t mxcsr;
    if (!fp_may_run<FpGroup::sse>(cpu, op) || !Ea::get(cpu, op, sizeof mxcsr, false, linear) ||
        !cpu.load(op, linear, mxcsr))
        return nullptr;
    if (mxcsr & ~Mxcsr::supported)
        return cpu.raise(op, Vector::gp, 0);
    fx_set(cpu.fpu, Fx::mxcsr, mxcsr);
    VTRACE_NEXT_BY_LOOP(cpu, op);
}

template <class Ea>
const Op* run_stmxcsr(Cpu& cpu, const Op* op) {
    uint64_t linear;
    if (!fp_may_run<FpGroup::sse>(cpu, op) || !Ea::get(cpu, op, sizeof(uint32_t), true, linear) ||
        !cpu.store(op, linear, mxcsr_of(cpu.fpu)))
        return nullptr;
    VTRACE_NEXT_BY_LOOP(cpu, op);
}

const Op* run_emms(Cpu& cpu, const Op* op) {
    if (!fp_may_run<FpGroup::mmx>(cpu, op))
        return nullptr;
    fx_set_top(cpu.fpu, 0);
    fx_set<uint8_t>(cpu.fpu, Fx::ftw, 0);
    VTRACE_NEXT_BY_LOOP(cpu, op);
}

} // namespace

Handler fp_state_handler(FpState state, EaShape shape) {
    switch (state) {
    case FpState::fxsave:
        return VTRACE_BY_SHAPE(shape, run_fxsave);
    case FpState::fxrstor:
        return VTRACE_BY_SHAPE(shape, run_fxrstor);
    case FpState::xsave:
        return VTRACE_BY_SHAPE(shape, run_xsave);
    case FpState::xsaveopt:
        return VTRACE_BY_SHAPE(shape, run_xsaveopt);
    case FpState::xrstor:
        return VTRACE_BY_SHAPE(shape, run_xrstor);
    case FpState::xgetbv:
        return run_xgetbv;
    case FpState::xsetbv:
        return run_xsetbv;
    case FpState::ldmxcsr:
        return VTRACE_BY_SHAPE(shape, run_ldmxcsr);
    case FpState::stmxcsr:
        return VTRACE_BY_SHAPE(shape, run_stmxcsr);
    case FpState::emms:
        return run_emms;
    }
    return nullptr;
}

} // namespace vtrace::soft
