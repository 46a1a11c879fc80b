#include "vmm/mtrr.h"

#include "vmm/msr_index.h"

namespace vtrace {
namespace {

/// VCNT 8, fixed ranges (FIX), write-combining (WC).
constexpr uint64_t capability = mtrr_variable_count | 1 << 8 | 1 << 10;
constexpr uint64_t mask_valid = 1 << 11;

/// UC, WC, WT, WP, WB.
bool is_type(uint64_t value) {
    return value <= 6 && value != 2 && value != 3;
}

bool is_variable(uint32_t msr) {
    return msr >= Msr::mtrr_variable_first && msr < Msr::mtrr_variable_first + 2 * mtrr_variable_count;
}

/// One register of 64 KiB ranges, two of 16 KiB, eight of 4 KiB.
std::optional<unsigned> fixed_index(uint32_t msr) {
    if (msr == Msr::mtrr_fix64k)
        return 0;
    if (msr - Msr::mtrr_fix16k_first < 2)
        return 1 + (msr - Msr::mtrr_fix16k_first);
    if (msr - Msr::mtrr_fix4k_first < 8)
        return 3 + (msr - Msr::mtrr_fix4k_first);
    return std::nullopt;
}

bool write_default(MsrStorage& storage, uint64_t value) {
    constexpr uint64_t known = 0xff | MsrStorage::mtrr_enable | MsrStorage::mtrr_fixed_enable;
    if ((value & ~known) || !is_type(value & 0xff))
        return false;
    storage.mtrr_default = value;
    return true;
}

bool write_variable(MsrStorage& storage, uint32_t msr, uint64_t value, unsigned physical_address_bits) {
    const bool mask = msr & 1;
    const uint64_t address = ((1ull << physical_address_bits) - 1) & ~0xfffull;
    if (value & ~(address | (mask ? mask_valid : 0xff)))
        return false;
    if (!mask && !is_type(value & 0xff))
        return false;
    storage.mtrr_variable[msr - Msr::mtrr_variable_first] = value;
    return true;
}

bool write_fixed(MsrStorage& storage, unsigned index, uint64_t value) {
    for (unsigned i = 0; i < 8; ++i)
        if (!is_type(value >> (8 * i) & 0xff))
            return false;
    storage.mtrr_fixed[index] = value;
    return true;
}

} // namespace

bool is_mtrr(uint32_t msr) {
    return msr == Msr::mtrr_cap || msr == Msr::mtrr_default || is_variable(msr) || fixed_index(msr);
}

uint64_t read_mtrr(const MsrStorage& storage, uint32_t msr) {
    if (msr == Msr::mtrr_cap)
        return capability;
    if (msr == Msr::mtrr_default)
        return storage.mtrr_default;
    if (is_variable(msr))
        return storage.mtrr_variable[msr - Msr::mtrr_variable_first];
    return storage.mtrr_fixed[*fixed_index(msr)];
}

bool write_mtrr(MsrStorage& storage, uint32_t msr, uint64_t value, unsigned physical_address_bits) {
    if (msr == Msr::mtrr_cap)
        return false;
    if (msr == Msr::mtrr_default)
        return write_default(storage, value);
    if (is_variable(msr))
        return write_variable(storage, msr, value, physical_address_bits);
    return write_fixed(storage, *fixed_index(msr), value);
}

} // namespace vtrace
