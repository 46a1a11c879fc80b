// Model-specific registers that only store what is written: the guest configures with them what has no effect here.
#pragma once

#include <array>
#include <cstdint>

namespace vtrace {

inline constexpr unsigned mtrr_variable_count = 8, mtrr_fixed_count = 11;

/// Reset values are those that a BIOS leaves behind, since there is none to set them: all of memory write-back, the
/// MTRRs on.
struct MsrStorage {
    static constexpr uint64_t mtrr_enable = 1 << 11, mtrr_fixed_enable = 1 << 10, write_back = 6;

    uint64_t mtrr_default = mtrr_enable | write_back;              // IA32_MTRR_DEF_TYPE
    std::array<uint64_t, mtrr_fixed_count> mtrr_fixed{};           // in the order of SDM vol. 3, table 11-9
    std::array<uint64_t, 2 * mtrr_variable_count> mtrr_variable{}; // base and mask in turn
    uint64_t tsc_adjust = 0;
    uint64_t mcg_status = 0;

    bool operator==(const MsrStorage&) const = default;
};

} // namespace vtrace
