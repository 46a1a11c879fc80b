// Memory type range registers (SDM vol. 3, 11.11): stored and checked, without effect on accesses.
#pragma once

#include <cstdint>
#include <optional>

#include "vmm/msr_storage.h"

namespace vtrace {

/// IA32_MTRRCAP, IA32_MTRR_DEF_TYPE, fixed and variable ranges.
bool is_mtrr(uint32_t msr);
uint64_t read_mtrr(const MsrStorage& storage, uint32_t msr);
/// False: #GP, for a read-only register, an unknown type or a reserved bit.
bool write_mtrr(MsrStorage& storage, uint32_t msr, uint64_t value, unsigned physical_address_bits);

} // namespace vtrace
