// RDMSR and WRMSR (SDM vol. 4). A register that isn't here, or that CPUID doesn't offer, is #GP.
//
// What Linux 6.1 and 6.12 access at boot on a processor of family 6, model 28, without being ready for #GP: PLATFORM_ID
// and BIOS_SIGN_ID (microcode), MISC_ENABLE (fast strings), APIC_BASE, the MTRRs and PAT, MCG_CAP, EFER, the system
// call and segment base registers, TSC_DEADLINE and x2APIC. FEAT_CTL, PLATFORM_INFO, MISC_FEATURES_ENABLES, PPIN and
// TSX_CTRL it only tries, and copes with #GP.
#include "vmm/soft/msr_index.h"
#include "vmm/soft/msr_mtrr.h"
#include "vmm/soft/system.h"
#include "vmm/soft/system_operand.h"

namespace vtrace::soft {
namespace {

/// In bits 63:32 of BIOS_SIGN_ID; any number but 0, which means that no update was loaded.
constexpr uint64_t microcode_revision = 1;

/// RO here: what a processor without counters and Debug Store says.
constexpr uint64_t misc_enable_fixed = MiscEnable::bts_unavailable | MiscEnable::pebs_unavailable;
constexpr uint64_t misc_enable_read_only = misc_enable_fixed | MiscEnable::perfmon_available;

bool is_apic_msr(const Cpu& cpu, uint32_t msr) {
    if (msr >= Msr::x2apic_first && msr <= Msr::x2apic_last)
        return cpu.cpuid.has(Feature::x2apic);
    if (msr == Msr::tsc_deadline)
        return cpu.cpuid.has(Feature::tsc_deadline);
    return msr == Msr::apic_base;
}

uint64_t time_stamp(const Cpu& cpu, const Op* op) {
    return time_of(cpu, op) + cpu.tsc_offset;
}

bool write_efer(Cpu& cpu, uint64_t value) {
    uint64_t known = Efer::sce | Efer::lme | Efer::lma;
    if (cpu.cpuid.has(Feature::nx))
        known |= Efer::nxe;
    if (value & ~known)
        return false;
    const uint64_t updated = (value & ~Efer::lma) | (cpu.efer & Efer::lma); // LMA is the processor's own
    const uint64_t changed = updated ^ cpu.efer;
    if ((changed & Efer::lme) && (cpu.cr0 & Cr0::pg))
        return false;
    cpu.efer = updated;
    if (changed & Efer::nxe)
        cpu.flush_tlb();
    return true;
}

/// Each of eight bytes is UC, WC, WT, WP, WB or UC- (SDM vol. 3, 11.12.2).
bool write_pat(Cpu& cpu, uint64_t value) {
    for (unsigned i = 0; i < 8; ++i) {
        const uint64_t type = value >> (8 * i) & 0xff;
        if (type > 7 || type == 2 || type == 3)
            return false;
    }
    cpu.pat = value;
    return true;
}

bool write_misc_enable(Cpu& cpu, uint64_t value) {
    if (value & ~(misc_enable_read_only | MiscEnable::fast_strings))
        return false;
    cpu.misc_enable = (cpu.misc_enable & ~MiscEnable::fast_strings) | (value & MiscEnable::fast_strings);
    return true;
}

bool write_canonical(const Cpu& cpu, uint64_t& target, uint64_t value) {
    if (!cpu.is_canonical(value))
        return false;
    target = value;
    return true;
}

bool write_segment_base(Cpu& cpu, Seg seg, uint64_t value) {
    if (!write_canonical(cpu, cpu.segments[seg].base, value))
        return false;
    cpu.segment_base[seg] = value;
    return true;
}

void write_tsc(Cpu& cpu, const Op* op, uint64_t value) {
    const uint64_t delta = value - time_stamp(cpu, op);
    cpu.tsc_offset += delta;
    cpu.msrs.tsc_adjust += delta; // SDM vol. 3, 17.17.3
}

} // namespace

std::optional<uint64_t> read_msr(Cpu& cpu, const Op* op, uint32_t msr) {
    if (is_apic_msr(cpu, msr)) {
        cpu.sync_clock(op);
        return cpu.pins.read_apic_msr(msr);
    }
    if (is_mtrr(msr))
        return read_mtrr(cpu.msrs, msr);
    switch (msr) {
    case Msr::tsc:
        return time_stamp(cpu, op);
    case Msr::tsc_adjust:
        return cpu.cpuid.has(Feature::tsc_adjust) ? std::optional(cpu.msrs.tsc_adjust) : std::nullopt;
    case Msr::platform_id:
        return 0;
    case Msr::bios_sign_id:
        return microcode_revision << 32;
    case Msr::sysenter_cs:
        return cpu.sysenter_cs;
    case Msr::sysenter_esp:
        return cpu.sysenter_esp;
    case Msr::sysenter_eip:
        return cpu.sysenter_eip;
    case Msr::mcg_cap: // no banks: nothing here can break
        return 0;
    case Msr::mcg_status:
        return cpu.msrs.mcg_status;
    case Msr::misc_enable:
        return cpu.misc_enable | misc_enable_fixed;
    case Msr::debugctl:
        return cpu.debugctl;
    case Msr::pat:
        return cpu.pat;
    case Msr::efer:
        return cpu.efer;
    case Msr::star:
        return cpu.star;
    case Msr::lstar:
        return cpu.lstar;
    case Msr::cstar:
        return cpu.cstar;
    case Msr::sfmask:
        return cpu.sfmask;
    case Msr::fs_base:
        return cpu.segments[FS].base;
    case Msr::gs_base:
        return cpu.segments[GS].base;
    case Msr::kernel_gs_base:
        return cpu.kernel_gs_base;
    case Msr::tsc_aux:
        return cpu.cpuid.has(Feature::rdtscp) ? std::optional(cpu.tsc_aux) : std::nullopt;
    default:
        return std::nullopt;
    }
}

bool write_msr(Cpu& cpu, const Op* op, uint32_t msr, uint64_t value) {
    if (is_apic_msr(cpu, msr)) {
        cpu.sync_clock(op);
        return cpu.pins.write_apic_msr(msr, value);
    }
    if (is_mtrr(msr))
        return write_mtrr(cpu.msrs, msr, value, cpu.cpuid.physical_address_bits());
    switch (msr) {
    case Msr::tsc:
        write_tsc(cpu, op, value);
        return true;
    case Msr::tsc_adjust:
        if (!cpu.cpuid.has(Feature::tsc_adjust))
            return false;
        cpu.tsc_offset += value - cpu.msrs.tsc_adjust;
        cpu.msrs.tsc_adjust = value;
        return true;
    case Msr::bios_update_trigger: // no update fits; BIOS_SIGN_ID then still shows the old revision
    case Msr::bios_sign_id:        // written with 0 before CPUID loads it
        return true;
    case Msr::sysenter_cs:
        cpu.sysenter_cs = static_cast<uint32_t>(value);
        return true;
    case Msr::sysenter_esp:
        return write_canonical(cpu, cpu.sysenter_esp, value);
    case Msr::sysenter_eip:
        return write_canonical(cpu, cpu.sysenter_eip, value);
    case Msr::mcg_status: // software may only clear it
        if (value)
            return false;
        cpu.msrs.mcg_status = 0;
        return true;
    case Msr::misc_enable:
        return write_misc_enable(cpu, value);
    case Msr::debugctl: // neither branch records nor Debug Store are offered to the guest
        return value == 0;
    case Msr::pat:
        return write_pat(cpu, value);
    case Msr::efer:
        return write_efer(cpu, value);
    case Msr::star:
        cpu.star = value;
        return true;
    case Msr::lstar:
        return write_canonical(cpu, cpu.lstar, value);
    case Msr::cstar:
        return write_canonical(cpu, cpu.cstar, value);
    case Msr::sfmask:
        if (value >> 32)
            return false;
        cpu.sfmask = value;
        return true;
    case Msr::fs_base:
        return write_segment_base(cpu, FS, value);
    case Msr::gs_base:
        return write_segment_base(cpu, GS, value);
    case Msr::kernel_gs_base:
        return write_canonical(cpu, cpu.kernel_gs_base, value);
    case Msr::tsc_aux:
        if (!cpu.cpuid.has(Feature::rdtscp) || value >> 32)
            return false;
        cpu.tsc_aux = value;
        return true;
    default:
        return false;
    }
}

} // namespace vtrace::soft
