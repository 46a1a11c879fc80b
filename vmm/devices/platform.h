// Where things are on this PC: I/O ports, physical addresses, interrupt lines. The ACPI tables say the same to the
// guest.
#pragma once

#include <cstdint>

#include "vmm/guest_memory.h"

namespace vtrace::platform {

namespace Port {
inline constexpr uint16_t pic_master = 0x20, pit = 0x40, i8042_data = 0x60, system_control_b = 0x61,
                          i8042_command = 0x64, cmos = 0x70, system_control_a = 0x92, pic_slave = 0xa0,
                          debug_exit = 0xf4, com1 = 0x3f8, pic_elcr = 0x4d0, pvpanic = 0x505, fw_cfg = 0x510,
                          acpi_pm1_event = 0x600, acpi_pm1_control = 0x604, acpi_pm_timer = 0x608,
                          pci_config_address = 0xcf8, reset_control = 0xcf9, pci_config_data = 0xcfc, marker = 0x5654;
}

/// ISA interrupt numbers; also the IOAPIC's inputs, except that the timer's is `timer_gsi` (MADT override).
namespace Irq {
inline constexpr unsigned timer = 0, keyboard = 1, cascade = 2, com1 = 4, rtc = 8, sci = 9;
inline constexpr unsigned isa_lines = 16;
inline constexpr unsigned timer_gsi = 2;
inline constexpr unsigned pci_first_gsi = 16, pci_gsis = 4; // INTA..INTD, swizzled by slot
} // namespace Irq

inline constexpr Gpa ioapic_base = 0xfec0'0000;
inline constexpr Gpa marker_base = 0xfed4'5000; // after the pages that PCs have for a TPM
inline constexpr Gpa lapic_base = 0xfee0'0000;  // the reset value of IA32_APIC_BASE
inline constexpr Gpa acpi_area_start = 0xe'0000, acpi_area_end = 0x10'0000;

/// The core crystal clock: what CPUID leaf 15H must tell (EAX 1, EBX 40, ECX 25,000,000) and what clocks the local
/// APICs' timers (SDM vol. 3, 10.5.4). One crystal period is 40 ns, which is 40 ticks of the TSC.
inline constexpr uint64_t crystal_hz = 25'000'000;

/// The IOAPIC and its messages have 8-bit destinations, of which 0xff is broadcast.
inline constexpr unsigned max_vcpus = 254;

} // namespace vtrace::platform
