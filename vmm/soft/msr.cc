// RDMSR and WRMSR (SDM vol. 4). A register that isn't here, or that CPUID doesn't offer, is #GP.
// Those that are not the processor's alone: vmm/common_msrs.cc.
#include "vmm/common_msrs.h"
#include "vmm/msr_index.h"
#include "vmm/soft/monitor.h"
#include "vmm/soft/system.h"
#include "vmm/soft/system_operand.h"

namespace vtrace::soft {
namespace {

CommonMsrs common(Cpu& cpu) {
    return {cpu.msrs, cpu.misc_enable, cpu.pins, cpu.cpuid, cpu.monitor ? &cpu.monitor->facility() : nullptr};
}

bool write_efer(Cpu& cpu, uint64_t value) {
    uint64_t known = Efer::sce;
    if (cpu.cpuid.has(Feature::lm))
        known |= Efer::lme | Efer::lma;
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
    const uint64_t delta = value - cpu.tsc(op);
    cpu.tsc_offset += delta;
    cpu.msrs.tsc_adjust += delta; // SDM vol. 3, 17.17.3
}

} // namespace

std::optional<uint64_t> read_msr(Cpu& cpu, const Op* op, uint32_t msr) {
    if (CommonMsrs::is_apic(cpu.cpuid, msr))
        cpu.sync_clock(op);
    switch (msr) {
    case Msr::tsc:
        return cpu.tsc(op);
    case Msr::tsc_adjust:
        return cpu.cpuid.has(Feature::tsc_adjust) ? std::optional(cpu.msrs.tsc_adjust) : std::nullopt;
    case Msr::sysenter_cs:
        return cpu.sysenter_cs;
    case Msr::sysenter_esp:
        return cpu.sysenter_esp;
    case Msr::sysenter_eip:
        return cpu.sysenter_eip;
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
        return common(cpu).read(msr);
    }
}

bool write_msr(Cpu& cpu, const Op* op, uint32_t msr, uint64_t value) {
    if (CommonMsrs::is_apic(cpu.cpuid, msr))
        cpu.sync_clock(op);
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
    case Msr::sysenter_cs:
        cpu.sysenter_cs = static_cast<uint32_t>(value);
        return true;
    case Msr::sysenter_esp:
        return write_canonical(cpu, cpu.sysenter_esp, value);
    case Msr::sysenter_eip:
        return write_canonical(cpu, cpu.sysenter_eip, value);
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
        return common(cpu).write(msr, value);
    }
}

} // namespace vtrace::soft
