// Segment register loads outside of far transfers (SDM vol. 2, MOV and POP; vol. 3, 3.4.3 and 5.4-5.6).
#include "vmm/soft/descriptor.h"
#include "vmm/soft/system.h"

namespace vtrace::soft {
namespace {

/// Real mode: the base follows from the selector, limit and D/B stay what they were (SDM vol. 3, 20.1.1).
void load_real_mode(Cpu& cpu, Seg seg, uint16_t selector) {
    Segment& segment = cpu.segments[seg];
    segment.selector = selector;
    segment.base = uint64_t{selector} << 4;
    segment.attributes = (segment.attributes & (SegAttr::db | SegAttr::g)) | SegAttr::p | SegAttr::s |
                         SegAttr::write_or_read | SegAttr::accessed;
}

bool load_stack_segment(Cpu& cpu, uint16_t selector, Segment& loaded) {
    if (is_null(selector)) {
        if (!cpu.code64() || cpu.cpl == 3 || rpl(selector) != cpu.cpl)
            return set_fault(cpu, Vector::gp, 0);
        loaded = null_stack_segment(cpu.cpl);
        return true;
    }
    Descriptor descriptor;
    if (!read_descriptor(cpu, selector, Vector::gp, 0, descriptor))
        return false;
    if (rpl(selector) != cpu.cpl || !descriptor.writable() || descriptor.dpl() != cpu.cpl)
        return set_fault(cpu, Vector::gp, selector_error(selector));
    if (!descriptor.present())
        return set_fault(cpu, Vector::ss, selector_error(selector));
    if (!mark_accessed(cpu, descriptor))
        return false;
    loaded = descriptor.segment(selector);
    return true;
}

bool load_data_segment(Cpu& cpu, uint16_t selector, Segment& loaded) {
    if (is_null(selector)) {
        loaded = Segment{0, 0, selector, 0};
        return true;
    }
    Descriptor descriptor;
    if (!read_descriptor(cpu, selector, Vector::gp, 0, descriptor))
        return false;
    if (!descriptor.readable())
        return set_fault(cpu, Vector::gp, selector_error(selector));
    if (!descriptor.conforming() && (rpl(selector) > descriptor.dpl() || cpu.cpl > descriptor.dpl()))
        return set_fault(cpu, Vector::gp, selector_error(selector));
    if (!descriptor.present())
        return set_fault(cpu, Vector::np, selector_error(selector));
    if (!mark_accessed(cpu, descriptor))
        return false;
    loaded = descriptor.segment(selector);
    return true;
}

} // namespace

bool load_segment(Cpu& cpu, const Op* op, Seg seg, uint16_t selector) {
    if (!(cpu.cr0 & Cr0::pe)) {
        load_real_mode(cpu, seg, selector);
        cpu.update_mode();
        return true;
    }
    begin_transfer(cpu);
    Segment loaded;
    if (!(seg == SS ? load_stack_segment(cpu, selector, loaded) : load_data_segment(cpu, selector, loaded))) {
        failed_transfer(cpu, op);
        return false;
    }
    cpu.segments[seg] = loaded;
    cpu.update_mode();
    return true;
}

void set_code_segment(Cpu& cpu, const Segment& cs, unsigned cpl) {
    cpu.segments[CS] = cs;
    cpu.cpl = static_cast<uint8_t>(cpl);
    cpu.update_mode();
}

} // namespace vtrace::soft
