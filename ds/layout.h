// Layouts and register bits of the Debug Store facility, by the manuals' names.
#pragma once

#include <cstdint>

namespace vtrace::ds {

/// DS buffer management area, 64-bit format: SDM vol. 3, 17.4.9 and figure "IA-32e Mode DS Save Area". Addresses are
/// linear; in a VMM-owned area they are the host's.
struct DsManagementArea64 {
    uint64_t bts_buffer_base;
    uint64_t bts_index;               // where the next record goes
    uint64_t bts_absolute_maximum;    // one past the last record
    uint64_t bts_interrupt_threshold; // an interrupt once the index is here or above
    uint64_t pebs_buffer_base;
    uint64_t pebs_index;
    uint64_t pebs_absolute_maximum;
    uint64_t pebs_interrupt_threshold;
    uint64_t pebs_counter_reset[4];
};
static_assert(sizeof(DsManagementArea64) == 0x60);

/// IA32_DEBUGCTL (MSR 0x1d9): SDM vol. 3, 17.4.1, from Core 2 on.
namespace DebugCtl {
inline constexpr uint64_t tr = 1ull << 6;           // TR: branch trace messages enabled
inline constexpr uint64_t bts = 1ull << 7;          // BTS: they go to the BTS buffer
inline constexpr uint64_t btint = 1ull << 8;        // BTINT: interrupt at the threshold; clear: the buffer is circular
inline constexpr uint64_t bts_off_os = 1ull << 9;   // BTS_OFF_OS: nothing at CPL 0
inline constexpr uint64_t bts_off_usr = 1ull << 10; // BTS_OFF_USR: nothing at CPL above 0
} // namespace DebugCtl

} // namespace vtrace::ds
