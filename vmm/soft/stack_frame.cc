#include "vmm/soft/stack_frame.h"

#include "vmm/soft/descriptor.h"
#include "vmm/soft/stack.h"

namespace vtrace::soft {
namespace {

uint64_t replace_low(uint64_t whole, uint64_t part, uint64_t mask) {
    // A 32-bit stack pointer is a 32-bit register write, which clears the upper half; a 16-bit one leaves the rest.
    return mask == 0xffff ? (whole & ~mask) | (part & mask) : part & mask;
}

uint64_t current_mask(const Cpu& cpu) {
    return stack_pointer_mask(cpu.code64(), cpu.segments[SS]);
}

} // namespace

bool stack_has(const Segment& ss, uint64_t offset, unsigned size) {
    const uint64_t last = offset + size - 1;
    if (!(ss.attributes & SegAttr::p) || !(ss.attributes & SegAttr::write_or_read))
        return false;
    if (ss.attributes & SegAttr::conforming_or_down)
        return offset > ss.limit && last <= (ss.attributes & SegAttr::db ? 0xffff'ffff : 0xffff);
    return last <= ss.limit;
}

StackFrame::StackFrame(Cpu& cpu, bool stack64, const Segment& ss, uint64_t rsp, unsigned level, uint32_t fault_code)
    : cpu_(cpu), stack64_(stack64), ss_(ss), rsp_(rsp), mask_(stack_pointer_mask(stack64, ss)),
      context_(stack_context(cpu, level)), level3_aligned_(level == 3 && cpu.alignment_checked()),
      fault_code_(fault_code) {}

bool StackFrame::push(uint64_t value, unsigned size) {
    const uint64_t offset = (rsp_ - size) & mask_;
    uint64_t address = offset;
    if (stack64_) {
        if (!cpu_.is_canonical(offset) || !cpu_.is_canonical(offset + size - 1))
            return set_fault(cpu_, Vector::ss, fault_code_);
    } else {
        if (!stack_has(ss_, offset, size))
            return set_fault(cpu_, Vector::ss, fault_code_);
        address = static_cast<uint32_t>(ss_.base + offset);
    }
    if (level3_aligned_ && address % size)
        return set_fault(cpu_, Vector::ac, 0);
    rsp_ = replace_low(rsp_, offset, mask_);
    values_[count_++] = {address, value, size};
    return true;
}

bool StackFrame::commit() {
    // All or nothing, and a fault is that of the first push that meets it: so each is tried in its order, then written.
    for (unsigned i = 0; i < count_; ++i) {
        const Value& value = values_[i];
        const uint64_t last = value.address + value.size - 1;
        Translation where;
        if (!cpu_.translate(value.address, Access::write, context_, where))
            return false;
        if (((value.address ^ last) & ~page_mask) && !cpu_.translate(last & ~page_mask, Access::write, context_, where))
            return false;
    }
    for (unsigned i = 0; i < count_; ++i)
        if (!cpu_.system_write(values_[i].address, &values_[i].value, values_[i].size, context_))
            return false;
    return true;
}

// ---------------------------------------------------------------------------------------------------------------------

StackReader::StackReader(Cpu& cpu) : cpu_(cpu), rsp_(cpu.gpr[RSP]), mask_(current_mask(cpu)) {}

bool StackReader::pop(unsigned size, uint64_t& value) {
    const uint64_t offset = rsp_ & mask_;
    uint64_t address = offset;
    if (cpu_.code64()) {
        if (!cpu_.is_canonical(offset) || !cpu_.is_canonical(offset + size - 1))
            return set_fault(cpu_, Vector::ss, 0);
    } else {
        if (!stack_has(cpu_.segments[SS], offset, size))
            return set_fault(cpu_, Vector::ss, 0);
        address = static_cast<uint32_t>(cpu_.segments[SS].base + offset);
    }
    if (cpu_.alignment_checked() && address % size)
        return set_fault(cpu_, Vector::ac, 0);
    value = 0;
    if (!cpu_.system_read(address, &value, size, stack_context(cpu_, cpu_.cpl)))
        return false;
    skip(size);
    return true;
}

void StackReader::skip(uint64_t bytes) {
    rsp_ = replace_low(rsp_, rsp_ + bytes, mask_);
}

// ---------------------------------------------------------------------------------------------------------------------

namespace {

template <bool Flat>
bool push_sized(Cpu& cpu, const Op* op, uint64_t value, unsigned size) {
    using S = Stack<Flat>;
    return size == 8   ? S::push(cpu, op, value)
           : size == 4 ? S::push(cpu, op, static_cast<uint32_t>(value))
                       : S::push(cpu, op, static_cast<uint16_t>(value));
}

template <bool Flat, class T>
bool peek_as(Cpu& cpu, const Op* op, uint64_t& value) {
    T narrow;
    if (!Stack<Flat>::load(cpu, op, Stack<Flat>::pointer(cpu), narrow))
        return false;
    value = narrow;
    return true;
}

template <bool Flat>
bool peek_sized(Cpu& cpu, const Op* op, unsigned size, uint64_t& value) {
    return size == 8   ? peek_as<Flat, uint64_t>(cpu, op, value)
           : size == 4 ? peek_as<Flat, uint32_t>(cpu, op, value)
                       : peek_as<Flat, uint16_t>(cpu, op, value);
}

} // namespace

bool push_value(Cpu& cpu, const Op* op, uint64_t value, unsigned size) {
    return cpu.code64() ? push_sized<true>(cpu, op, value, size) : push_sized<false>(cpu, op, value, size);
}

bool peek_value(Cpu& cpu, const Op* op, unsigned size, uint64_t& value) {
    return cpu.code64() ? peek_sized<true>(cpu, op, size, value) : peek_sized<false>(cpu, op, size, value);
}

uint64_t rsp_after_pop(const Cpu& cpu, unsigned size) {
    return replace_low(cpu.gpr[RSP], cpu.gpr[RSP] + size, current_mask(cpu));
}

void drop_value(Cpu& cpu, unsigned size) {
    cpu.gpr[RSP] = rsp_after_pop(cpu, size);
}

bool push_low_half(Cpu& cpu, const Op* op, uint16_t value) {
    const uint64_t mask = current_mask(cpu);
    const uint64_t offset = (cpu.gpr[RSP] - 4) & mask;
    uint64_t linear;
    if (!segment_linear(cpu, op, SS, offset, 4, true, linear) || !cpu.store(op, linear, value))
        return false;
    cpu.gpr[RSP] = replace_low(cpu.gpr[RSP], offset, mask);
    return true;
}

} // namespace vtrace::soft
