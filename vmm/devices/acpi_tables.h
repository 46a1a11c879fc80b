// The ACPI tables that describe this PC to the guest (ACPI Specification 6.4, chapter 5).
#pragma once

#include "ds/result.h"
#include "vmm/guest_memory.h"

namespace vtrace {

/// Writes RSDP, XSDT, FADT, FACS, MADT and DSDT into [platform::acpi_area_start, platform::acpi_area_end), the RSDP
/// first, where a guest that scans the BIOS area finds it; returns its address. The guest's memory map must keep that
/// area reserved. `vcpus`: 1..platform::max_vcpus; APIC IDs are 0..vcpus-1. Fails when the tables don't fit.
Result<Gpa> write_acpi_tables(GuestMemory& memory, unsigned vcpus);

} // namespace vtrace
