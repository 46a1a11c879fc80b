// The x87 environment and state as FNSTENV, FLDENV, FNSAVE and FRSTOR lay it out (SDM vol. 1, figures 8-9 to 8-12).
#pragma once

#include "vmm/soft/fp_image.h"

namespace vtrace::soft {

struct EnvironmentLayout {
    bool wide;       // 32-bit operand size
    bool protected_; // protected mode's form of the pointers; else that of real and virtual-8086 mode
    unsigned size() const { return wide ? 28 : 14; }
};
inline constexpr unsigned environment_max = 28, x87_state_max = environment_max + 8 * Fx::st_size;

/// Writes layout.size() bytes.
void store_environment(const FpuImage& image, EnvironmentLayout layout, uint8_t* out);
/// The registers' contents stay in their physical places.
void load_environment(FpuImage& image, EnvironmentLayout layout, const uint8_t* in);

/// Two bits for each physical register: 0 valid, 1 zero, 2 special, 3 empty.
uint16_t full_tag_word(const FpuImage& image);

} // namespace vtrace::soft
