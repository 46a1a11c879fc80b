// Bits of the local APIC's registers (SDM vol. 3, chapter 10), shared by the files of its implementation.
#pragma once

#include <cstdint>

namespace vtrace::apic {

/// Vectors 0..15 are illegal in messages and local vectors.
inline constexpr unsigned first_legal_vector = 16;

/// Figure 10-8, Local Vector Table.
namespace LvtBit {
inline constexpr uint32_t vector = 0xff, delivery_mode = 7 << 8, delivery_status = 1 << 12, polarity = 1 << 13,
                          remote_irr = 1 << 14, level = 1 << 15, mask = 1 << 16, timer_mode = 3 << 17;
inline constexpr unsigned delivery_mode_shift = 8;
} // namespace LvtBit
namespace TimerMode {
inline constexpr uint32_t one_shot = 0 << 17, periodic = 1 << 17, tsc_deadline = 2 << 17;
}
/// Figure 10-23, Spurious-Interrupt Vector Register.
namespace SvrBit {
inline constexpr uint32_t vector = 0xff, enable = 1 << 8, focus = 1 << 9;
}
/// Figure 10-9, Error Status Register.
namespace EsrBit {
inline constexpr uint32_t send_illegal_vector = 1 << 5, receive_illegal_vector = 1 << 6, illegal_register = 1 << 7;
}
/// Figures 10-12 and 10-28, Interrupt Command Register.
namespace IcrBit {
inline constexpr uint64_t vector = 0xff, logical = 1 << 11, delivery_status = 1 << 12, assert_level = 1 << 14,
                          level_triggered = 1 << 15;
inline constexpr uint64_t low_writable = 0x000c'cfff, low_reserved_x2apic = 0xfff3'2000;
inline constexpr unsigned delivery_mode_shift = 8, shorthand_shift = 18, destination_shift = 32,
                          xapic_destination_shift = 56;
} // namespace IcrBit
enum class Shorthand : uint8_t { none = 0, self = 1, all_including_self = 2, all_excluding_self = 3 };

} // namespace vtrace::apic
