#include "vmm/boot/entry_state.h"

#include <algorithm>

#include "vmm/boot/bytes.h"

namespace vtrace {
namespace {

constexpr uint64_t gib = 1 << 30;

// Descriptors with base 0 and limit 4 GiB (SDM vol. 3, figure 3-8): bytes 5 and 6 are Segment::attributes.
constexpr uint16_t flat_common = SegAttr::s | SegAttr::p | SegAttr::g | SegAttr::accessed | SegAttr::write_or_read;
constexpr uint16_t code32 = flat_common | SegAttr::code | SegAttr::db;
constexpr uint16_t code64 = flat_common | SegAttr::code | SegAttr::l;
constexpr uint16_t data32 = flat_common | SegAttr::db;

constexpr uint64_t flat_descriptor(uint16_t attributes) {
    constexpr uint64_t limit_low = 0xffff, limit_high = 0xf;
    return limit_low | uint64_t(attributes) << 40 | limit_high << 48;
}

Segment flat_segment(uint16_t selector, uint16_t attributes) {
    return {0, 0xffff'ffff, selector, attributes};
}

/// What every state has in common: the x87 and SSE units as after FNINIT, with all exceptions masked.
CpuState quiet_state() {
    constexpr uint16_t fcw_after_fninit = 0x37f;
    constexpr uint32_t mxcsr_after_reset = 0x1f80;
    constexpr unsigned fxsave_fcw = 0, fxsave_mxcsr = 24;
    CpuState state;
    state.gpr.fill(0);
    state.cr0 = Cr0::et | Cr0::ne;
    std::memcpy(&state.fpu.fxsave[fxsave_fcw], &fcw_after_fninit, sizeof fcw_after_fninit);
    std::memcpy(&state.fpu.fxsave[fxsave_mxcsr], &mxcsr_after_reset, sizeof mxcsr_after_reset);
    // A processor in protected mode always has a busy TSS (VM entry checks it: SDM vol. 3, "Checks on Guest Segment
    // Registers").
    state.tr = {0, 0x67, 0, 0x8b};
    state.idtr = {0, 0}; // an exception before the kernel has its own table is a triple fault, not a wild jump
    return state;
}

/// Descriptor table with `code` at boot_cs and data at boot_ds, and the segment registers that go with it.
Result<> set_flat_segments(CpuState& state, uint16_t code, GuestMemory& memory, Placement& placement) {
    const uint64_t table[] = {0, 0, flat_descriptor(code), flat_descriptor(data32)};
    static_assert(boot_cs == 2 * sizeof table[0] && boot_ds == 3 * sizeof table[0]);
    auto at = placement.place_low(sizeof table, 8, low_memory, "the descriptor table");
    if (!at)
        return Unexpected(std::move(at.error()));
    VTRACE_TRY(memory.write(*at, bytes_of(table)));
    state.gdtr = {*at, sizeof table - 1};
    for (Segment& segment : state.segments)
        segment = flat_segment(boot_ds, data32);
    state.segments[CS] = flat_segment(boot_cs, code);
    return {};
}

/// Four-level tables with 2 MiB pages; returns the PML4's address.
Result<Gpa> identity_map(GuestMemory& memory, Placement& placement, Gpa reach) {
    constexpr uint64_t present = 1, writable = 2, large = 1 << 7;
    constexpr uint64_t large_page = 2 << 20, entries = 512;
    constexpr uint64_t most_gib = 64;
    const uint64_t gibs = std::max<uint64_t>(4, reach / gib + (reach % gib != 0));
    if (gibs > most_gib)
        return fail("it reaches up to {:#x}: above {} GiB nothing can be entered", reach, most_gib);

    const uint64_t pages = 2 + gibs; // PML4, one directory pointer table, a directory for each GiB
    auto pml4 = placement.place_low(pages * page_size, page_size, low_memory, "the page tables");
    if (!pml4)
        return pml4;
    const Gpa pdpt = *pml4 + page_size, directories = pdpt + page_size;
    auto put = [&memory](Gpa table, uint64_t index, uint64_t entry) {
        return memory.write(table + index * sizeof entry, bytes_of(entry));
    };
    VTRACE_TRY(put(*pml4, 0, pdpt | present | writable));
    for (uint64_t i = 0; i < gibs; i++)
        VTRACE_TRY(put(pdpt, i, (directories + i * page_size) | present | writable));
    for (uint64_t i = 0; i < gibs * entries; i++)
        VTRACE_TRY(put(directories, i, i * large_page | present | writable | large));
    return pml4;
}

} // namespace

CpuState real_mode_state(uint16_t cs, uint16_t ip, uint16_t stack) {
    constexpr uint16_t real_data = SegAttr::p | SegAttr::s | SegAttr::write_or_read | SegAttr::accessed;
    CpuState state = quiet_state();
    state.idtr = {0, 0x3ff}; // the real-mode vectors
    for (Segment& segment : state.segments)
        segment = {0, 0xffff, 0, real_data};
    state.segments[CS] = {uint64_t(cs) << 4, 0xffff, cs, real_data | SegAttr::code};
    state.rip = ip;
    state.gpr[RSP] = stack;
    return state;
}

Result<CpuState> protected_mode_state(GuestMemory& memory, Placement& placement, uint32_t entry) {
    CpuState state = quiet_state();
    VTRACE_TRY(set_flat_segments(state, code32, memory, placement));
    state.cr0 |= Cr0::pe;
    state.rip = entry;
    return state;
}

Result<CpuState> long_mode_state(GuestMemory& memory, Placement& placement, Gpa entry, Gpa reach) {
    CpuState state = quiet_state();
    VTRACE_TRY(set_flat_segments(state, code64, memory, placement));
    auto pml4 = identity_map(memory, placement, reach);
    if (!pml4)
        return Unexpected(std::move(pml4.error()));
    state.cr0 |= Cr0::pe | Cr0::pg;
    state.cr3 = *pml4;
    state.cr4 = Cr4::pae;
    state.efer = Efer::lme | Efer::lma;
    state.rip = entry;
    return state;
}

} // namespace vtrace
