// What Linux 6.1 and 6.12 access at boot on a processor of family 6, model 28, without being ready for #GP: PLATFORM_ID
// and BIOS_SIGN_ID (microcode), MISC_ENABLE (fast strings), APIC_BASE, the MTRRs and PAT, MCG_CAP, EFER, the system
// call and segment base registers, TSC_DEADLINE and x2APIC. FEAT_CTL, PLATFORM_INFO, MISC_FEATURES_ENABLES, PPIN and
// TSX_CTRL it only tries, and copes with #GP.
#include "vmm/common_msrs.h"

#include "vmm/msr_index.h"
#include "vmm/mtrr.h"

namespace vtrace {
namespace {

/// In bits 63:32 of BIOS_SIGN_ID; high enough for operating systems that look for a fix of some erratum.
constexpr uint64_t microcode_revision = 0xffff;

constexpr uint64_t misc_enable_read_only =
    MiscEnable::bts_unavailable | MiscEnable::pebs_unavailable | MiscEnable::perfmon_available;

/// What the processor says there of its counters and Debug Store.
uint64_t misc_enable_fixed(const ds::Facility* facility) {
    if (!facility)
        return MiscEnable::bts_unavailable | MiscEnable::pebs_unavailable;
    return (facility->pebs_available() ? 0 : MiscEnable::pebs_unavailable) |
           (facility->counters_available() ? MiscEnable::perfmon_available : 0);
}

/// What this processor does not suffer from: it doesn't speculate (SDM vol. 4, table 2-2). RDCL_NO, SKIP_L1DFL_VMENTRY,
/// SSB_NO, MDS_NO, IF_PSCHANGE_MC_NO, TAA_NO, SBDR_SSDP_NO, FBSDP_NO, PSDP_NO, BHI_NO, PBRSB_NO, GDS_NO, RFDS_NO.
constexpr uint64_t arch_capabilities = 1ull << 0 | 1 << 3 | 1 << 4 | 1 << 5 | 1 << 6 | 1 << 8 | 1 << 13 | 1 << 14 |
                                       1 << 15 | 1 << 20 | 1 << 24 | 1 << 26 | 1 << 27;

bool write_misc_enable(uint64_t& register_, uint64_t value) {
    if (value & ~(misc_enable_read_only | MiscEnable::fast_strings))
        return false;
    register_ = (register_ & ~MiscEnable::fast_strings) | (value & MiscEnable::fast_strings);
    return true;
}

} // namespace

bool CommonMsrs::is_apic(const CpuidModel& cpuid, uint32_t msr) {
    if (msr >= Msr::x2apic_first && msr <= Msr::x2apic_last)
        return cpuid.has(Feature::x2apic);
    if (msr == Msr::tsc_deadline)
        return cpuid.has(Feature::tsc_deadline);
    return msr == Msr::apic_base;
}

std::optional<uint64_t> CommonMsrs::read(uint32_t msr) const {
    if (is_apic(cpuid, msr))
        return pins.read_apic_msr(msr);
    if (is_mtrr(msr))
        return read_mtrr(storage, msr);
    switch (msr) {
    case Msr::platform_id:
        return 0;
    case Msr::bios_sign_id:
        return microcode_revision << 32;
    case Msr::mcg_cap: // no banks: nothing here can break
        return 0;
    case Msr::mcg_status:
        return storage.mcg_status;
    case Msr::misc_enable:
        return misc_enable | misc_enable_fixed(facility);
    case Msr::arch_capabilities:
        return cpuid.has(Feature::arch_capabilities) ? std::optional(arch_capabilities) : std::nullopt;
    case Msr::debugctl:
        if (!facility) // neither branch records nor Debug Store are offered to the guest
            return 0;
        [[fallthrough]];
    default:
        return facility ? facility->read_msr(msr) : std::nullopt;
    }
}

bool CommonMsrs::write(uint32_t msr, uint64_t value) const {
    if (is_apic(cpuid, msr))
        return pins.write_apic_msr(msr, value);
    if (is_mtrr(msr))
        return write_mtrr(storage, msr, value, cpuid.physical_address_bits());
    switch (msr) {
    case Msr::bios_update_trigger: // no update fits; BIOS_SIGN_ID then still shows the old revision
    case Msr::bios_sign_id:        // written with 0 before CPUID loads it
        return true;
    case Msr::mcg_status: // software may only clear it
        if (value)
            return false;
        storage.mcg_status = 0;
        return true;
    case Msr::misc_enable:
        return write_misc_enable(misc_enable, value);
    case Msr::debugctl:
        if (!facility)
            return value == 0;
        [[fallthrough]];
    default:
        return facility && facility->write_msr(msr, value);
    }
}

} // namespace vtrace
