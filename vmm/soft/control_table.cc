// Descriptor-table registers, the task register, and TLB invalidation (SDM vol. 2, under the instructions' names).
#include "vmm/soft/descriptor.h"
#include "vmm/soft/system_handlers.h"
#include "vmm/soft/system_operand.h"

namespace vtrace::soft {
namespace {

/// SGDT, SIDT, SLDT, STR, SMSW outside of level 0: #GP(0) with CR4.UMIP.
bool umip_allows(Cpu& cpu, const Op* op) {
    if (!(cpu.cr4 & Cr4::umip) || cpu.cpl == 0)
        return true;
    cpu.raise(op, Vector::gp, 0);
    return false;
}

bool privileged(Cpu& cpu, const Op* op) {
    if (cpu.cpl == 0)
        return true;
    cpu.raise(op, Vector::gp, 0);
    return false;
}

/// The pseudo-descriptor: limit, then a base of 32 bits, 64 in 64-bit mode.
const Op* store_table(Cpu& cpu, const Op* op, const DescriptorTable& table) {
    const unsigned size = cpu.code64() ? 10 : 6;
    uint64_t linear;
    if (!umip_allows(cpu, op) || !EaAny::get(cpu, op, size, true, linear))
        return nullptr;
    uint8_t bytes[10];
    std::memcpy(bytes, &table.limit, 2);
    std::memcpy(bytes + 2, &table.base, 8);
    if (!cpu.store_bytes(op, linear, bytes, size))
        return nullptr;
    VTRACE_NEXT_BY_LOOP(cpu, op);
}

const Op* load_table(Cpu& cpu, const Op* op, DescriptorTable& table) {
    const unsigned size = cpu.code64() ? 10 : 6;
    uint64_t linear;
    uint8_t bytes[10] = {};
    if (!privileged(cpu, op) || !EaAny::get(cpu, op, size, false, linear) || !cpu.load_bytes(op, linear, bytes, size))
        return nullptr;
    DescriptorTable loaded;
    std::memcpy(&loaded.limit, bytes, 2);
    std::memcpy(&loaded.base, bytes + 2, 8);
    if (!cpu.code64())
        loaded.base &= operand_size(op) == 2 ? 0xff'ffff : 0xffff'ffff;
    else if (!cpu.is_canonical(loaded.base))
        return cpu.raise(op, Vector::gp, 0);
    table = loaded;
    return retire(cpu, op);
}

/// LLDT and LTR: the selector, after the checks on mode and privilege.
bool load_system_selector(Cpu& cpu, const Op* op, uint16_t& selector) {
    if (!(cpu.cr0 & Cr0::pe)) {
        cpu.raise(op, Vector::ud);
        return false;
    }
    uint64_t value;
    if (!privileged(cpu, op) || !load_operand(cpu, op, 2, value))
        return false;
    selector = static_cast<uint16_t>(value);
    return true;
}

/// LDT and TSS descriptors are in the GDT, 16 bytes long in IA-32e mode. Fault in Cpu::fault.
bool read_system_descriptor(Cpu& cpu, uint16_t selector, Descriptor& descriptor) {
    if (selector & 4)
        return set_fault(cpu, Vector::gp, selector_error(selector));
    if (!read_descriptor(cpu, selector, Vector::gp, 0, descriptor))
        return false;
    return !cpu.long_mode() || read_upper_half(cpu, selector, Vector::gp, 0, descriptor);
}

bool load_ldtr(Cpu& cpu, uint16_t selector) {
    if (is_null(selector)) {
        cpu.ldtr = Segment{0, 0, selector, 0};
        return true;
    }
    Descriptor descriptor;
    if (!read_system_descriptor(cpu, selector, descriptor))
        return false;
    if (descriptor.s() || descriptor.type() != SystemType::ldt)
        return set_fault(cpu, Vector::gp, selector_error(selector));
    if (!descriptor.present())
        return set_fault(cpu, Vector::np, selector_error(selector));
    if (cpu.long_mode() && !cpu.is_canonical(descriptor.base()))
        return set_fault(cpu, Vector::gp, selector_error(selector));
    cpu.ldtr = descriptor.segment(selector);
    return true;
}

bool load_tr(Cpu& cpu, uint16_t selector) {
    if (is_null(selector))
        return set_fault(cpu, Vector::gp, 0);
    Descriptor descriptor;
    if (!read_system_descriptor(cpu, selector, descriptor))
        return false;
    const bool available = descriptor.type() == SystemType::tss32_available ||
                           (!cpu.long_mode() && descriptor.type() == SystemType::tss16_available);
    if (descriptor.s() || !available)
        return set_fault(cpu, Vector::gp, selector_error(selector));
    if (!descriptor.present())
        return set_fault(cpu, Vector::np, selector_error(selector));
    if (cpu.long_mode() && !cpu.is_canonical(descriptor.base()))
        return set_fault(cpu, Vector::gp, selector_error(selector));
    constexpr uint64_t busy = 1ull << 41;
    descriptor.low |= busy;
    if (!cpu.system_write_value(descriptor.address + 5, static_cast<uint8_t>(descriptor.low >> 40)))
        return false;
    cpu.tr = descriptor.segment(selector);
    return true;
}

/// INVPCID's kinds (SDM vol. 2). The TLB has no PCIDs, so all flush everything, and only the checks differ.
enum InvpcidType : uint64_t { address = 0, single_context = 1, all_with_global = 2, all = 3 };

} // namespace

const Op* op_sgdt(Cpu& cpu, const Op* op) {
    return store_table(cpu, op, cpu.gdtr);
}
const Op* op_sidt(Cpu& cpu, const Op* op) {
    return store_table(cpu, op, cpu.idtr);
}
const Op* op_lgdt(Cpu& cpu, const Op* op) {
    return load_table(cpu, op, cpu.gdtr);
}
const Op* op_lidt(Cpu& cpu, const Op* op) {
    return load_table(cpu, op, cpu.idtr);
}

const Op* op_sldt(Cpu& cpu, const Op* op) {
    if (!(cpu.cr0 & Cr0::pe))
        return cpu.raise(op, Vector::ud);
    if (!umip_allows(cpu, op) || !store_operand(cpu, op, 2, cpu.ldtr.selector))
        return nullptr;
    VTRACE_NEXT_BY_LOOP(cpu, op);
}

const Op* op_str(Cpu& cpu, const Op* op) {
    if (!(cpu.cr0 & Cr0::pe))
        return cpu.raise(op, Vector::ud);
    if (!umip_allows(cpu, op) || !store_operand(cpu, op, 2, cpu.tr.selector))
        return nullptr;
    VTRACE_NEXT_BY_LOOP(cpu, op);
}

const Op* op_lldt(Cpu& cpu, const Op* op) {
    uint16_t selector;
    if (!load_system_selector(cpu, op, selector))
        return nullptr;
    begin_transfer(cpu);
    return load_ldtr(cpu, selector) ? retire(cpu, op) : failed_transfer(cpu, op);
}

const Op* op_ltr(Cpu& cpu, const Op* op) {
    uint16_t selector;
    if (!load_system_selector(cpu, op, selector))
        return nullptr;
    begin_transfer(cpu);
    return load_tr(cpu, selector) ? retire(cpu, op) : failed_transfer(cpu, op);
}

const Op* op_invlpg(Cpu& cpu, const Op* op) {
    if (!privileged(cpu, op))
        return nullptr;
    const auto seg = static_cast<Seg>(op->seg);
    const uint64_t offset = effective_offset(cpu, op);
    const uint64_t linear =
        cpu.code64() ? cpu.segment_base[seg] + offset : static_cast<uint32_t>(cpu.segment_base[seg] + offset);
    if (!cpu.code64() || cpu.is_canonical(linear)) // elsewhere a NOP
        cpu.flush_tlb_page(linear);
    return retire(cpu, op);
}

const Op* op_invpcid(Cpu& cpu, const Op* op) {
    if (!privileged(cpu, op))
        return nullptr;
    const uint64_t type = read_register(cpu, op->reg, cpu.code64() ? 8 : 4);
    uint64_t linear, descriptor[2];
    if (!EaAny::get(cpu, op, 16, false, linear) || !cpu.load_bytes(op, linear, descriptor, 16))
        return nullptr;
    const uint64_t pcid = descriptor[0];
    bool ok = type <= InvpcidType::all && !(pcid >> 12);
    if (type <= InvpcidType::single_context && !(cpu.cr4 & Cr4::pcide))
        ok = ok && pcid == 0;
    if (type == InvpcidType::address)
        ok = ok && cpu.is_canonical(descriptor[1]);
    if (!ok)
        return cpu.raise(op, Vector::gp, 0);
    cpu.flush_tlb();
    return retire(cpu, op);
}

} // namespace vtrace::soft
