// Processor states at a kernel's first instruction, as the boot protocols prescribe them. Interrupts are off in all.
#pragma once

#include "vmm/boot/boot.h"
#include "vmm/boot/placement.h"

namespace vtrace {

/// Selectors of the descriptor table that the 32- and 64-bit states come with; Linux names them __BOOT_CS and
/// __BOOT_DS.
inline constexpr uint16_t boot_cs = 0x10, boot_ds = 0x18;

/// Real mode at CS:IP, other segments 0, the stack at 0:`stack`.
CpuState real_mode_state(uint16_t cs, uint16_t ip, uint16_t stack);

/// 32-bit protected mode, paging off, flat 4 GiB segments. Puts a descriptor table into low memory.
Result<CpuState> protected_mode_state(GuestMemory& memory, Placement& placement, uint32_t entry);

/// 64-bit mode; puts a descriptor table and page tables into low memory that map addresses one to one, writable, from 0
/// to 4 GiB and on to the GiB that holds `reach` - 1. Fails when that is above 64 GiB.
Result<CpuState> long_mode_state(GuestMemory& memory, Placement& placement, Gpa entry, Gpa reach);

} // namespace vtrace
