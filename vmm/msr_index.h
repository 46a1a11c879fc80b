// Numbers of the model-specific registers that guests have (SDM vol. 4, chapter 2).
#pragma once

#include <cstdint>

namespace vtrace::Msr {

inline constexpr uint32_t tsc = 0x10, platform_id = 0x17, apic_base = 0x1b, tsc_adjust = 0x3b,
                          bios_update_trigger = 0x79, bios_sign_id = 0x8b, mtrr_cap = 0xfe, arch_capabilities = 0x10a, sysenter_cs = 0x174,
                          sysenter_esp = 0x175, sysenter_eip = 0x176, mcg_cap = 0x179, mcg_status = 0x17a,
                          misc_enable = 0x1a0, debugctl = 0x1d9, mtrr_variable_first = 0x200, mtrr_fix64k = 0x250,
                          mtrr_fix16k_first = 0x258, mtrr_fix4k_first = 0x268, pat = 0x277, mtrr_default = 0x2ff,
                          tsc_deadline = 0x6e0, x2apic_first = 0x800, x2apic_last = 0x8ff, efer = 0xc000'0080,
                          star = 0xc000'0081, lstar = 0xc000'0082, cstar = 0xc000'0083, sfmask = 0xc000'0084,
                          fs_base = 0xc000'0100, gs_base = 0xc000'0101, kernel_gs_base = 0xc000'0102,
                          tsc_aux = 0xc000'0103;

} // namespace vtrace::Msr

namespace vtrace {

/// Bits of IA32_MISC_ENABLE (SDM vol. 4, table 2-2).
namespace MiscEnable {
inline constexpr uint64_t fast_strings = 1 << 0, perfmon_available = 1 << 7, bts_unavailable = 1 << 11,
                          pebs_unavailable = 1 << 12;
}

} // namespace vtrace
