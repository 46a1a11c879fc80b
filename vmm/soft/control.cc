// Control and debug registers (SDM vol. 3, 2.5 and 17.2; vol. 2, MOV to/from control registers).
#include "vmm/soft/debug_register.h"
#include "vmm/soft/descriptor.h"
#include "vmm/soft/system_handlers.h"
#include "vmm/soft/system_operand.h"

namespace vtrace::soft {
namespace {

constexpr uint64_t cr0_known =
    Cr0::pe | Cr0::mp | Cr0::em | Cr0::ts | Cr0::ne | Cr0::wp | Cr0::am | Cr0::nw | Cr0::cd | Cr0::pg;
constexpr uint64_t cr3_no_flush = 1ull << 63, cr3_pcid = 0xfff;

/// CR4 bits that this processor has; all others are reserved.
uint64_t cr4_offered(const CpuidModel& cpuid) {
    uint64_t bits = Cr4::tsd | Cr4::de | Cr4::pse | Cr4::pae | Cr4::mce | Cr4::pce | Cr4::osfxsr | Cr4::osxmmexcpt;
    const struct {
        Feature feature;
        uint64_t bit;
    } optional[] = {{Feature::pge, Cr4::pge},    {Feature::umip, Cr4::umip},     {Feature::fsgsbase, Cr4::fsgsbase},
                    {Feature::pcid, Cr4::pcide}, {Feature::xsave, Cr4::osxsave}, {Feature::smep, Cr4::smep},
                    {Feature::smap, Cr4::smap}};
    for (const auto& [feature, bit] : optional)
        if (cpuid.has(feature))
            bits |= bit;
    return bits;
}

bool pae_paging(const Cpu& cpu, uint64_t cr0, uint64_t cr4) {
    return (cr0 & Cr0::pg) && (cr4 & Cr4::pae) && !(cpu.efer & Efer::lme);
}

/// PAE paging loads its four top entries when CR3, CR0 or CR4 is written; reserved bits there are #GP (SDM vol.
/// 3, 4.4.1).
bool pdptes_valid(const Cpu& cpu, uint64_t cr3) {
    const uint8_t* table = cpu.memory.at(cr3 & 0xffff'ffe0, 32);
    if (!table)
        return true; // all ones or a device: as unpredictable as on hardware, and no reason to refuse
    const uint64_t reserved = 0x1e6 | ~((1ull << cpu.cpuid.physical_address_bits()) - 1);
    for (unsigned i = 0; i < 4; ++i) {
        uint64_t entry;
        std::memcpy(&entry, table + 8 * i, sizeof entry);
        if ((entry & 1) && (entry & reserved))
            return false;
    }
    return true;
}

/// The rules of SDM vol. 3, 2.5 and 9.8.5 on what CR0 may become.
bool cr0_valid(const Cpu& cpu, uint64_t value) {
    if (value >> 32)
        return false;
    if (((value & Cr0::pg) && !(value & Cr0::pe)) || ((value & Cr0::nw) && !(value & Cr0::cd)))
        return false;
    const bool sets_pg = (value & Cr0::pg) && !(cpu.cr0 & Cr0::pg);
    const bool clears_pg = !(value & Cr0::pg) && (cpu.cr0 & Cr0::pg);
    if (sets_pg && (cpu.efer & Efer::lme)) {
        const bool tss16 = (cpu.tr.attributes & SegAttr::p) && (cpu.tr.attributes & 15) == SystemType::tss16_busy;
        // At RESET, TR looks like a 16- or 32-bit TSS of no use; only one loaded by LTR counts.
        if (!(cpu.cr4 & Cr4::pae) || (cpu.segments[CS].attributes & SegAttr::l) || (tss16 && cpu.tr.selector))
            return false;
    }
    if (clears_pg && (cpu.code64() || (cpu.cr4 & Cr4::pcide)))
        return false;
    return true;
}

bool write_cr0(Cpu& cpu, uint64_t value) {
    if (!cr0_valid(cpu, value))
        return false;
    value = (value & cr0_known) | Cr0::et;
    const uint64_t changed = value ^ cpu.cr0;
    if ((changed & (Cr0::pg | Cr0::cd | Cr0::nw)) && pae_paging(cpu, value, cpu.cr4) && !pdptes_valid(cpu, cpu.cr3))
        return false;
    if (changed & Cr0::pg) {
        const bool lma = (value & Cr0::pg) && (cpu.efer & Efer::lme);
        cpu.efer = lma ? cpu.efer | Efer::lma : cpu.efer & ~Efer::lma;
    }
    if ((changed & Cr0::pe) && !(value & Cr0::pe))
        cpu.cpl = 0;
    cpu.cr0 = value;
    if (changed & (Cr0::pg | Cr0::wp | Cr0::pe))
        cpu.flush_tlb();
    cpu.update_mode();
    return true;
}

bool write_cr3(Cpu& cpu, uint64_t value) {
    if (!cpu.long_mode()) {
        value = static_cast<uint32_t>(value);
        if (pae_paging(cpu, cpu.cr0, cpu.cr4) && !pdptes_valid(cpu, value))
            return false;
    } else if (cpu.cr4 & Cr4::pcide) {
        value &= ~cr3_no_flush; // the TLB has no PCIDs: keeping nothing is always right
    }
    if (value >> cpu.cpuid.physical_address_bits())
        return false;
    cpu.cr3 = value;
    cpu.flush_tlb_not_global();
    return true;
}

bool write_cr4(Cpu& cpu, uint64_t value) {
    if (value & ~cr4_offered(cpu.cpuid))
        return false;
    const uint64_t changed = value ^ cpu.cr4;
    if (cpu.long_mode() && !(value & Cr4::pae))
        return false;
    if ((changed & value & Cr4::pcide) && (!cpu.long_mode() || (cpu.cr3 & cr3_pcid)))
        return false;
    constexpr uint64_t paging = Cr4::pse | Cr4::pae | Cr4::pge | Cr4::pcide | Cr4::smep | Cr4::smap;
    constexpr uint64_t reload = Cr4::pse | Cr4::pae | Cr4::pge | Cr4::smep;
    if ((changed & reload) && pae_paging(cpu, cpu.cr0, value) && !pdptes_valid(cpu, cpu.cr3))
        return false;
    cpu.cr4 = value;
    if (changed & paging)
        cpu.flush_tlb();
    cpu.update_mode();
    return true;
}

bool write_cr8(Cpu& cpu, const Op* op, uint64_t value) {
    if (value > 15)
        return false;
    cpu.sync_clock(op);
    cpu.pins.write_cr8(static_cast<uint8_t>(value));
    return true;
}

/// CR8 is there with REX only, i.e. in 64-bit mode.
bool cr_exists(unsigned number) {
    return number == 0 || (number >= 2 && number <= 4) || number == 8;
}

/// MOV DRn: the register that is meant, or none and raised (SDM vol. 3, 17.2.2 and 17.2.4).
bool debug_register_access(Cpu& cpu, const Op* op, unsigned& number) {
    number = register_number(op);
    const bool alias = number == 4 || number == 5;
    if (number > 7 || (alias && (cpu.cr4 & Cr4::de))) {
        cpu.raise(op, Vector::ud);
        return false;
    }
    if (cpu.cpl != 0) {
        cpu.raise(op, Vector::gp, 0);
        return false;
    }
    if (cpu.dr7 & Dr7::gd) {
        cpu.dr6 |= Dr6::bd;
        cpu.raise(op, Vector::db);
        return false;
    }
    if (alias)
        number += 2;
    return true;
}

bool store_status_word_allowed(Cpu& cpu, const Op* op) {
    if ((cpu.cr4 & Cr4::umip) && cpu.cpl != 0) {
        cpu.raise(op, Vector::gp, 0);
        return false;
    }
    return true;
}

} // namespace

const Op* op_read_cr(Cpu& cpu, const Op* op) {
    const unsigned number = register_number(op);
    if (!cr_exists(number))
        return cpu.raise(op, Vector::ud);
    if (cpu.cpl != 0)
        return cpu.raise(op, Vector::gp, 0);
    uint64_t value = 0;
    switch (number) {
    case 0:
        value = cpu.cr0;
        break;
    case 2:
        value = cpu.cr2;
        break;
    case 3:
        value = cpu.cr3;
        break;
    case 4:
        value = cpu.cr4;
        break;
    default:
        cpu.sync_clock(op);
        value = cpu.pins.read_cr8();
    }
    write_register(cpu, op->reg, cpu.code64() ? 8 : 4, value);
    VTRACE_NEXT_BY_LOOP(cpu, op);
}

const Op* op_write_cr(Cpu& cpu, const Op* op) {
    const unsigned number = register_number(op);
    if (!cr_exists(number))
        return cpu.raise(op, Vector::ud);
    if (cpu.cpl != 0)
        return cpu.raise(op, Vector::gp, 0);
    const uint64_t next = cpu.next_rip(op); // before the width of code may change
    const uint64_t value = read_register(cpu, op->reg, cpu.code64() ? 8 : 4);
    bool ok = true;
    switch (number) {
    case 0:
        ok = write_cr0(cpu, value);
        break;
    case 2:
        cpu.cr2 = value;
        break;
    case 3:
        ok = write_cr3(cpu, value);
        break;
    case 4:
        ok = write_cr4(cpu, value);
        break;
    default:
        ok = write_cr8(cpu, op, value);
    }
    if (!ok)
        return cpu.raise(op, Vector::gp, 0);
    return cpu.leave_at(next, Leave::boundary);
}

const Op* op_smsw(Cpu& cpu, const Op* op) {
    if (!store_status_word_allowed(cpu, op) || !store_operand(cpu, op, 2, cpu.cr0))
        return nullptr;
    VTRACE_NEXT_BY_LOOP(cpu, op);
}

/// PE, MP, EM and TS; PE can be set but not cleared.
const Op* op_lmsw(Cpu& cpu, const Op* op) {
    if (cpu.cpl != 0)
        return cpu.raise(op, Vector::gp, 0);
    uint64_t value;
    if (!load_operand(cpu, op, 2, value))
        return nullptr;
    constexpr uint64_t settable = Cr0::pe | Cr0::mp | Cr0::em | Cr0::ts;
    const uint64_t kept = cpu.cr0 & ~(Cr0::mp | Cr0::em | Cr0::ts);
    if (!write_cr0(cpu, kept | (value & settable)))
        return cpu.raise(op, Vector::gp, 0);
    return retire(cpu, op);
}

const Op* op_clts(Cpu& cpu, const Op* op) {
    if (cpu.cpl != 0)
        return cpu.raise(op, Vector::gp, 0);
    cpu.cr0 &= ~Cr0::ts;
    cpu.update_mode();
    return retire(cpu, op);
}

const Op* op_read_dr(Cpu& cpu, const Op* op) {
    unsigned number;
    if (!debug_register_access(cpu, op, number))
        return nullptr;
    write_register(cpu, op->reg, cpu.code64() ? 8 : 4, read_debug_register(cpu, number));
    VTRACE_NEXT_BY_LOOP(cpu, op);
}

const Op* op_write_dr(Cpu& cpu, const Op* op) {
    unsigned number;
    if (!debug_register_access(cpu, op, number))
        return nullptr;
    if (!write_debug_register(cpu, number, read_register(cpu, op->reg, cpu.code64() ? 8 : 4)))
        return cpu.raise(op, Vector::gp, 0);
    return retire(cpu, op);
}

} // namespace vtrace::soft
