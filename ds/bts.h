// The Branch Trace Store record, and what a VMM-owned BTS area carries beside branches.
//
// Layout: SDM vol. 3, 17.4.9 "BTS and DS Save Area", 64-bit format: from, to, flags of eight bytes each. Addresses are
// linear. Hardware defines flag bit 4 only; a VMM-owned area also uses the reserved bits, so that one stream carries all
// that a reader must know in its order. A guest-owned area never sees those bits.
#pragma once

#include <cstdint>

namespace vtrace::ds {

struct BtsRecord {
    uint64_t from;  // linear address of the branch; interrupted RIP for an interrupt; faulting RIP for a fault
    uint64_t to;    // linear address of the first instruction executed next
    uint64_t flags; // see BtsFlags
};
static_assert(sizeof(BtsRecord) == 24);

/// What a record in a VMM-owned area is.
enum class BtsKind : uint8_t {
    branch = 0,    // a taken branch; its class follows from the instruction at `from` (INT n and SYSCALL included)
    interrupt = 1, // external interrupt or NMI; vector in the flags
    exception = 2, // fault, trap or abort delivered through the IDT (not INT n); vector in the flags
    // Events: not branches, never counted as such.
    time = 0x10,   // from = virtual time in ns, to = instructions retired by this vCPU, both at this place of the stream
    cr3 = 0x11,    // from = the new CR3 (address of the top page table and PCID); precedes the first branch under it
    // Where a recording is of parts of a run: between an end and the next begin the guest went on unrecorded, so that no
    // code runs from the one record to the other. from = linear address of the next instruction, to = the window's number.
    window_begin = 0x12,
    window_end = 0x13,
};

namespace BtsFlags {
inline constexpr uint64_t predicted = 1ull << 4; // SDM: 1 = branch was predicted
inline constexpr unsigned kind_shift = 8;        // bits 15:8, a BtsKind
inline constexpr unsigned vector_shift = 16;     // bits 23:16, interrupt or exception vector
inline constexpr unsigned error_code_shift = 32; // bits 63:32, exception error code where there is one

constexpr uint64_t make(BtsKind kind, uint8_t vector = 0, uint32_t error_code = 0) {
    return uint64_t{static_cast<uint8_t>(kind)} << kind_shift | uint64_t{vector} << vector_shift |
           uint64_t{error_code} << error_code_shift;
}
constexpr BtsKind kind(uint64_t flags) { return static_cast<BtsKind>(flags >> kind_shift & 0xff); }
constexpr uint8_t vector(uint64_t flags) { return flags >> vector_shift & 0xff; }
constexpr uint32_t error_code(uint64_t flags) { return flags >> error_code_shift; }
constexpr bool is_event(uint64_t flags) { return (flags >> kind_shift & 0xff) >= 0x10; }
} // namespace BtsFlags

/// The registers of the BTS part of a DS management area, as a vCPU engine's fast path holds them: append is three
/// stores, an add and a compare. The engine alone touches it while it runs; not thread-safe.
///
/// While recording is off (DEBUGCTL.TR or BTS clear, or this CPL filtered), `stride` is 0: records land in a scratch slot
/// and no threshold is ever met, so that the fast path needs no test.
struct BtsCursor {
    BtsRecord* index;     // where the next record goes
    BtsRecord* threshold; // drain when index >= threshold after a record
    uintptr_t stride;     // sizeof(BtsRecord), or 0 while recording is off

    /// Returns true when the area must be drained before the next record.
    bool append(uint64_t from, uint64_t to, uint64_t flags) {
        BtsRecord* record = index;
        record->from = from;
        record->to = to;
        record->flags = flags;
        index = reinterpret_cast<BtsRecord*>(reinterpret_cast<uintptr_t>(record) + stride);
        return index >= threshold;
    }
};

} // namespace vtrace::ds
