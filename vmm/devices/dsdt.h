// The DSDT's definition block: sleep state S5 and the devices that can't be found by probing.
#pragma once

#include <cstdint>

#include "vmm/devices/aml.h"

namespace vtrace {

/// AML of the definition block, without the table's header. PCI memory is from `pci_memory_start` up to the IOAPIC.
aml::Term dsdt_definition_block(uint32_t pci_memory_start);

} // namespace vtrace
