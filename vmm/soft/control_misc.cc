// CPUID, MSRs, time stamps, caches, random numbers (SDM vol. 2, under these names).
#include "vmm/soft/monitor.h"
#include "vmm/soft/system.h"
#include "vmm/soft/system_handlers.h"
#include "vmm/soft/system_operand.h"

namespace vtrace::soft {
namespace {

constexpr uint32_t msr_apic_base = 0x1b, msr_x2apic_id = 0x802;
constexpr uint64_t apic_base_enable = 1 << 11, apic_base_x2apic = 1 << 10, apic_base_address = 0xf'ffff'f000;
constexpr unsigned xapic_id_offset = 0x20, xapic_id_shift = 24;

constexpr uint32_t cpuid1_edx_apic = 1 << 9, cpuid1_ecx_osxsave = 1 << 27;
constexpr unsigned cpuid1_ebx_apic_id_shift = 24;

/// RDX:RAX, as RDMSR and RDTSC give a value: upper halves cleared.
void set_edx_eax(Cpu& cpu, uint64_t value) {
    cpu.gpr[RAX] = static_cast<uint32_t>(value);
    cpu.gpr[RDX] = value >> 32;
}

uint32_t apic_id(Cpu& cpu, uint64_t apic_base) {
    if (!(apic_base & apic_base_enable))
        return 0;
    if (apic_base & apic_base_x2apic)
        return static_cast<uint32_t>(cpu.pins.read_apic_msr(msr_x2apic_id).value_or(0));
    return static_cast<uint32_t>(cpu.pins.mmio_read((apic_base & apic_base_address) + xapic_id_offset, 4)) >>
           xapic_id_shift;
}

/// What CPUID's leaves show of the processor's state.
CpuidResult live_leaf(Cpu& cpu, uint32_t leaf, uint32_t subleaf) {
    CpuidResult result = cpu.cpuid.leaf(leaf, subleaf);
    switch (leaf) {
    case 1: {
        const uint64_t base = cpu.pins.read_apic_msr(msr_apic_base).value_or(0);
        result.ebx |= apic_id(cpu, base) << cpuid1_ebx_apic_id_shift;
        if (!(base & apic_base_enable))
            result.edx &= ~cpuid1_edx_apic;
        if (cpu.cr4 & Cr4::osxsave)
            result.ecx |= cpuid1_ecx_osxsave;
        break;
    }
    case 0xb:
        result.edx = apic_id(cpu, cpu.pins.read_apic_msr(msr_apic_base).value_or(0));
        break;
    default:
        break;
    }
    return result;
}

bool time_stamp_allowed(Cpu& cpu, const Op* op) {
    if (!(cpu.cr4 & Cr4::tsd) || cpu.cpl == 0)
        return true;
    cpu.raise(op, Vector::gp, 0);
    return false;
}

/// Numbers that look random and are the same in every run: a mix of the instruction's own time. No state to save.
uint64_t random_at(uint64_t time) {
    uint64_t x = time + 0x9e3779b97f4a7c15; // the finalizer of SplitMix64
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
    x = (x ^ x >> 27) * 0x94d049bb133111eb;
    return x ^ x >> 31;
}

/// Counters are exact at an instruction that is executed alone.
bool counted_up_to_here(Cpu& cpu, const Op* op) {
    if (cpu.single)
        return true;
    cpu.leave_before(op, Leave::restart_single);
    return false;
}

bool reads_counters(const Cpu& cpu) {
    return cpu.monitor && cpu.monitor->facility().owns(static_cast<uint32_t>(cpu.gpr[RCX]));
}

} // namespace

const Op* op_cpuid(Cpu& cpu, const Op* op) {
    const CpuidResult result = live_leaf(cpu, static_cast<uint32_t>(cpu.gpr[RAX]), static_cast<uint32_t>(cpu.gpr[RCX]));
    cpu.gpr[RAX] = result.eax;
    cpu.gpr[RBX] = result.ebx;
    cpu.gpr[RCX] = result.ecx;
    cpu.gpr[RDX] = result.edx;
    VTRACE_NEXT_BY_LOOP(cpu, op);
}

const Op* op_rdmsr(Cpu& cpu, const Op* op) {
    if (cpu.cpl != 0)
        return cpu.raise(op, Vector::gp, 0);
    if (reads_counters(cpu) && !counted_up_to_here(cpu, op))
        return nullptr;
    const std::optional<uint64_t> value = read_msr(cpu, op, static_cast<uint32_t>(cpu.gpr[RCX]));
    if (!value)
        return cpu.raise(op, Vector::gp, 0);
    set_edx_eax(cpu, *value);
    return retire(cpu, op);
}

const Op* op_wrmsr(Cpu& cpu, const Op* op) {
    if (cpu.cpl != 0)
        return cpu.raise(op, Vector::gp, 0);
    if (reads_counters(cpu) && !counted_up_to_here(cpu, op))
        return nullptr;
    const uint64_t value = cpu.gpr[RDX] << 32 | static_cast<uint32_t>(cpu.gpr[RAX]);
    if (!write_msr(cpu, op, static_cast<uint32_t>(cpu.gpr[RCX]), value))
        return cpu.raise(op, Vector::gp, 0);
    return retire(cpu, op);
}

const Op* op_rdtsc(Cpu& cpu, const Op* op) {
    if (!time_stamp_allowed(cpu, op))
        return nullptr;
    set_edx_eax(cpu, cpu.tsc(op));
    VTRACE_NEXT_BY_LOOP(cpu, op);
}

const Op* op_rdtscp(Cpu& cpu, const Op* op) {
    if (!time_stamp_allowed(cpu, op))
        return nullptr;
    set_edx_eax(cpu, cpu.tsc(op));
    cpu.gpr[RCX] = static_cast<uint32_t>(cpu.tsc_aux);
    VTRACE_NEXT_BY_LOOP(cpu, op);
}

const Op* op_rdpmc(Cpu& cpu, const Op* op) {
    const bool allowed = cpu.cpl == 0 || (cpu.cr4 & Cr4::pce) || !(cpu.cr0 & Cr0::pe);
    if (!allowed || !cpu.monitor)
        return cpu.raise(op, Vector::gp, 0);
    if (!counted_up_to_here(cpu, op))
        return nullptr;
    const auto value = cpu.monitor->facility().read_pmc(static_cast<uint32_t>(cpu.gpr[RCX]));
    if (!value)
        return cpu.raise(op, Vector::gp, 0);
    set_edx_eax(cpu, *value);
    return retire(cpu, op);
}

const Op* op_wbinvd(Cpu& cpu, const Op* op) {
    if (cpu.cpl != 0)
        return cpu.raise(op, Vector::gp, 0);
    VTRACE_NEXT_BY_LOOP(cpu, op); // no caches that a guest could see
}

const Op* op_random(Cpu& cpu, const Op* op) {
    write_register(cpu, op->rm, operand_size(op), random_at(cpu.time_of(op)));
    cpu.flags.set(Rflags::cf); // a number was there; OF SF ZF AF PF are cleared
    VTRACE_NEXT_BY_LOOP(cpu, op);
}

} // namespace vtrace::soft
