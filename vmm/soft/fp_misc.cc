// Instructions of the SSE families that are plain C++ here: hints, non-temporal and masked stores, approximations,
// POPCNT, CRC32.
#include "vmm/soft/fp_approximate.h"
#include "vmm/soft/fp_guard.h"
#include "vmm/soft/fp_handlers.h"

namespace vtrace::soft {
namespace {

unsigned size_of(const Op* op) {
    return op->aux >> misc_size_shift;
}

const Op* run_hint(Cpu& cpu, const Op* op) {
    VTRACE_NEXT_BY_LOOP(cpu, op);
}

template <class Ea>
const Op* run_movnti(Cpu& cpu, const Op* op) {
    uint64_t linear;
    auto value = cpu.get<uint64_t>(op->reg);
    if (!Ea::get(cpu, op, size_of(op), true, linear) || !fp_store(cpu, op, linear, &value, size_of(op)))
        return nullptr;
    VTRACE_NEXT_BY_LOOP(cpu, op);
}

/// Stores the bytes of `source` whose mask byte has its top bit set. Without any, memory isn't touched; else all from
/// the first to the last must be writable before one is written.
template <FpGroup Group>
const Op* masked_store(Cpu& cpu, const Op* op, const uint8_t* source, const uint8_t* mask, unsigned size) {
    auto selected = [&](unsigned i) { return mask[i] >> 7; };
    unsigned first = 0, last = size;
    while (first < size && !selected(first))
        first++;
    while (last > first && !selected(last - 1))
        last--;
    if (first < last) {
        uint64_t linear;
        uint8_t before[16];
        if (!EaAny::get(cpu, op, size, true, linear) ||
            !cpu.load_for_write_slow(op, linear + first, before, last - first))
            return nullptr;
        for (unsigned i = first; i < last;) {
            unsigned end = i;
            while (end < last && selected(end))
                end++;
            if (end > i && !cpu.store_bytes(op, linear + i, source + i, end - i))
                return nullptr;
            i = std::max(end, i + 1);
        }
    }
    if constexpr (Group == FpGroup::mmx)
        fx_enter_mmx(cpu.fpu);
    VTRACE_NEXT_BY_LOOP(cpu, op);
}

const Op* run_maskmovq(Cpu& cpu, const Op* op) {
    if (!fp_may_run<FpGroup::mmx>(cpu, op))
        return nullptr;
    const uint8_t* image = cpu.fpu.fxsave.data();
    return masked_store<FpGroup::mmx>(cpu, op, image + fx_mmx_offset(cpu.fpu, op->reg / Fx::slot_size),
                                      image + fx_mmx_offset(cpu.fpu, op->rm / Fx::slot_size), sizeof(uint64_t));
}
const Op* run_maskmovdqu(Cpu& cpu, const Op* op) {
    if (!fp_may_run<FpGroup::sse>(cpu, op))
        return nullptr;
    const uint8_t* xmm = cpu.fpu.fxsave.data() + Fx::xmm;
    return masked_store<FpGroup::sse>(cpu, op, xmm + op->reg, xmm + op->rm, Fx::slot_size);
}

/// RCPPS etc.: `Count` lanes.
template <class Ea, uint32_t (*Function)(uint32_t), unsigned Count>
const Op* approximate(Cpu& cpu, const Op* op) {
    if (!fp_may_run<FpGroup::sse>(cpu, op))
        return nullptr;
    uint8_t* xmm = cpu.fpu.fxsave.data() + Fx::xmm;
    uint32_t lanes[4];
    constexpr unsigned size = Count * sizeof lanes[0];
    if constexpr (std::is_same_v<Ea, EaNone>) {
        std::memcpy(lanes, xmm + op->rm, size);
    } else {
        uint64_t linear;
        constexpr uint64_t alignment_mask = Count == 4 ? 15 : 0;
        if (!Ea::get(cpu, op, size, false, linear))
            return nullptr;
        if (linear & alignment_mask)
            return cpu.raise(op, Vector::gp, 0);
        if (!fp_load(cpu, op, linear, lanes, size))
            return nullptr;
    }
    for (unsigned i = 0; i < Count; i++)
        lanes[i] = Function(lanes[i]);
    std::memcpy(xmm + op->reg, lanes, size);
    VTRACE_NEXT_BY_LOOP(cpu, op);
}
template <class Ea>
const Op* run_rcpps(Cpu& cpu, const Op* op) {
    return approximate<Ea, approximate_reciprocal, 4>(cpu, op);
}
template <class Ea>
const Op* run_rcpss(Cpu& cpu, const Op* op) {
    return approximate<Ea, approximate_reciprocal, 1>(cpu, op);
}
template <class Ea>
const Op* run_rsqrtps(Cpu& cpu, const Op* op) {
    return approximate<Ea, approximate_reciprocal_sqrt, 4>(cpu, op);
}
template <class Ea>
const Op* run_rsqrtss(Cpu& cpu, const Op* op) {
    return approximate<Ea, approximate_reciprocal_sqrt, 1>(cpu, op);
}

/// Source operand of POPCNT and CRC32, zero-extended.
template <class Ea>
bool integer_source(Cpu& cpu, const Op* op, uint64_t& value) {
    value = 0;
    if constexpr (std::is_same_v<Ea, EaNone>) {
        switch (size_of(op)) {
        case 1:
            value = cpu.get<uint8_t>(op->rm);
            break;
        case 2:
            value = cpu.get<uint16_t>(op->rm);
            break;
        case 4:
            value = cpu.get<uint32_t>(op->rm);
            break;
        default:
            value = cpu.get<uint64_t>(op->rm);
        }
        return true;
    } else {
        uint64_t linear;
        return Ea::get(cpu, op, size_of(op), false, linear) && fp_load(cpu, op, linear, &value, size_of(op));
    }
}

template <class Ea>
const Op* run_popcnt(Cpu& cpu, const Op* op) {
    uint64_t value;
    if (!integer_source<Ea>(cpu, op, value))
        return nullptr;
    if (size_of(op) == sizeof(uint16_t))
        cpu.set<uint16_t>(op->reg, static_cast<uint16_t>(std::popcount(value)));
    else
        cpu.set<uint64_t>(op->reg, static_cast<uint64_t>(std::popcount(value)));
    cpu.flags.set(value == 0 ? Rflags::zf : 0);
    VTRACE_NEXT_BY_LOOP(cpu, op);
}

/// CRC-32C, bits reflected (SDM vol. 2, CRC32).
constexpr std::array<uint32_t, 256> crc32c_table = [] {
    constexpr uint32_t reflected_polynomial = 0x82f63b78;
    std::array<uint32_t, 256> table{};
    for (uint32_t i = 0; i < table.size(); i++) {
        uint32_t crc = i;
        for (unsigned bit = 0; bit < 8; bit++)
            crc = crc >> 1 ^ (crc & 1 ? reflected_polynomial : 0);
        table[i] = crc;
    }
    return table;
}();

template <class Ea>
const Op* run_crc32(Cpu& cpu, const Op* op) {
    uint64_t value;
    if (!integer_source<Ea>(cpu, op, value))
        return nullptr;
    auto crc = cpu.get<uint32_t>(op->reg);
    for (unsigned i = 0; i < size_of(op); i++, value >>= 8)
        crc = crc >> 8 ^ crc32c_table[(crc ^ value) & 0xff];
    cpu.set<uint32_t>(op->reg, crc); // upper half clear in the 64-bit form too
    VTRACE_NEXT_BY_LOOP(cpu, op);
}

} // namespace

#define VTRACE_MEMORY_OR_REGISTER(shape, handler)                                                                      \
    ((shape) == EaShape::none ? handler<EaNone> : VTRACE_BY_SHAPE(shape, handler))

Handler fp_misc_handler(FpMisc misc, EaShape shape) {
    switch (misc) {
    case FpMisc::hint:
        return run_hint;
    case FpMisc::movnti:
        return VTRACE_BY_SHAPE(shape, run_movnti);
    case FpMisc::maskmovq:
        return run_maskmovq;
    case FpMisc::maskmovdqu:
        return run_maskmovdqu;
    case FpMisc::rcpps:
        return VTRACE_MEMORY_OR_REGISTER(shape, run_rcpps);
    case FpMisc::rcpss:
        return VTRACE_MEMORY_OR_REGISTER(shape, run_rcpss);
    case FpMisc::rsqrtps:
        return VTRACE_MEMORY_OR_REGISTER(shape, run_rsqrtps);
    case FpMisc::rsqrtss:
        return VTRACE_MEMORY_OR_REGISTER(shape, run_rsqrtss);
    case FpMisc::popcnt:
        return VTRACE_MEMORY_OR_REGISTER(shape, run_popcnt);
    case FpMisc::crc32:
        return VTRACE_MEMORY_OR_REGISTER(shape, run_crc32);
    }
    return nullptr;
}

} // namespace vtrace::soft
