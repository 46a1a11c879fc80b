#include "vmm/soft/descriptor.h"

#include <utility>

namespace vtrace::soft {

bool set_unsupported(Cpu& cpu, std::string detail) {
    cpu.leave = Leave::unsupported;
    cpu.detail = std::move(detail);
    return false;
}

namespace {

/// Base and limit of the table that the selector's TI bit names; an unusable LDT has room for nothing.
bool within_table(const Cpu& cpu, uint16_t selector, unsigned size, uint64_t& address) {
    const bool local = selector & 4;
    if (local && !(cpu.ldtr.attributes & SegAttr::p))
        return false;
    const uint64_t base = local ? cpu.ldtr.base : cpu.gdtr.base;
    const uint32_t limit = local ? cpu.ldtr.limit : cpu.gdtr.limit;
    const uint32_t offset = selector & 0xfff8;
    address = linear_address(cpu, base, offset);
    return offset + size - 1 <= limit;
}

} // namespace

bool read_descriptor(Cpu& cpu, uint16_t selector, uint8_t vector, uint32_t ext, Descriptor& descriptor) {
    descriptor = {};
    if (!within_table(cpu, selector, 8, descriptor.address))
        return set_fault(cpu, vector, selector_error(selector, ext));
    return cpu.system_read(descriptor.address, descriptor.low);
}

bool read_upper_half(Cpu& cpu, uint16_t selector, uint8_t vector, uint32_t ext, Descriptor& descriptor) {
    if (!within_table(cpu, selector, 16, descriptor.address))
        return set_fault(cpu, vector, selector_error(selector, ext));
    if (!cpu.system_read(descriptor.address + 8, descriptor.high))
        return false;
    if (descriptor.high >> 40 & 31) // a type there would make it look like another descriptor
        return set_fault(cpu, vector, selector_error(selector, ext));
    return true;
}

bool mark_accessed(Cpu& cpu, Descriptor& descriptor) {
    if (!descriptor.s() || descriptor.accessed())
        return true;
    const uint64_t marked = descriptor.low | uint64_t{SegAttr::accessed} << 40;
    const auto type_byte = static_cast<uint8_t>(marked >> 40);
    if (!cpu.system_write_value(descriptor.address + 5, type_byte))
        return false;
    descriptor.low = marked;
    return true;
}

bool check_code_type(Cpu& cpu, const Descriptor& code, uint16_t selector, uint32_t ext) {
    if (!code.is_code() || (cpu.long_mode() && code.l() && code.db()))
        return set_fault(cpu, Vector::gp, selector_error(selector, ext));
    return true;
}

bool check_code_offset(Cpu& cpu, const Descriptor& code, uint64_t offset, uint32_t ext) {
    const bool ok = is_code64(cpu, code) ? cpu.is_canonical(offset) : offset <= code.limit();
    return ok || set_fault(cpu, Vector::gp, ext);
}

bool read_tss_stack(Cpu& cpu, unsigned level, uint32_t ext, uint16_t& ss, uint32_t& esp) {
    const bool wide = cpu.tr.attributes & 8; // type 9 or 11, not 1 or 3
    const unsigned offset = wide ? 4 + 8 * level : 2 + 4 * level;
    const unsigned size = wide ? 6 : 4;
    if (!(cpu.tr.attributes & SegAttr::p) || offset + size - 1 > cpu.tr.limit)
        return set_fault(cpu, Vector::ts, selector_error(cpu.tr.selector, ext));
    const uint64_t address = linear_address(cpu, cpu.tr.base, offset);
    if (wide)
        return cpu.system_read(address, esp) && cpu.system_read(address + 4, ss);
    uint16_t sp = 0;
    if (!cpu.system_read(address, sp) || !cpu.system_read(address + 2, ss))
        return false;
    esp = sp;
    return true;
}

bool read_tss64_pointer(Cpu& cpu, unsigned offset, uint32_t ext, uint64_t& rsp) {
    if (!(cpu.tr.attributes & SegAttr::p) || offset + 7 > cpu.tr.limit)
        return set_fault(cpu, Vector::ts, selector_error(cpu.tr.selector, ext));
    return cpu.system_read(cpu.tr.base + offset, rsp);
}

bool read_inner_stack_segment(Cpu& cpu, uint16_t selector, unsigned level, uint32_t ext, Descriptor& descriptor) {
    if (is_null(selector))
        return set_fault(cpu, Vector::ts, ext);
    if (!read_descriptor(cpu, selector, Vector::ts, ext, descriptor))
        return false;
    if (rpl(selector) != level || descriptor.dpl() != level || !descriptor.writable())
        return set_fault(cpu, Vector::ts, selector_error(selector, ext));
    if (!descriptor.present())
        return set_fault(cpu, Vector::ss, selector_error(selector, ext));
    return true;
}

} // namespace vtrace::soft
