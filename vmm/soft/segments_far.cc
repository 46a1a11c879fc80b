// Far jumps, calls and returns (SDM vol. 2, JMP, CALL, RET; vol. 3, 5.8).
#include <fmt/format.h>

#include "vmm/soft/descriptor.h"
#include "vmm/soft/segments_return.h"
#include "vmm/soft/stack_frame.h"
#include "vmm/soft/system.h"

namespace vtrace::soft {
namespace {

/// A far JMP or CALL: what it names, and, once resolved, where it goes.
struct FarTransfer {
    Cpu& cpu;
    const uint64_t return_rip;
    const bool call;
    uint16_t selector;
    uint64_t offset;
    unsigned operand_size; // of the pushes; a call gate has its own

    bool run();

  private:
    bool real_mode();
    bool direct(Descriptor& code);
    bool through_call_gate(Descriptor& gate);
    bool gate_to_inner(Descriptor& code, unsigned parameters);
    bool gate_to_same(Descriptor& code);
    bool push_return_address(StackFrame& frame);
    void enter(const Descriptor& code, unsigned level);
};

bool FarTransfer::run() {
    if (!(cpu.cr0 & Cr0::pe))
        return real_mode();
    if (is_null(selector))
        return set_fault(cpu, Vector::gp, 0);
    Descriptor descriptor;
    if (!read_descriptor(cpu, selector, Vector::gp, 0, descriptor))
        return false;
    if (descriptor.s())
        return direct(descriptor);

    const unsigned type = descriptor.type();
    const bool call_gate = type == SystemType::call_gate32 || (!cpu.long_mode() && type == SystemType::call_gate16);
    if (call_gate)
        return through_call_gate(descriptor);
    const bool task =
        type == SystemType::task_gate || type == SystemType::tss16_available || type == SystemType::tss32_available;
    if (cpu.long_mode() || !task)
        return set_fault(cpu, Vector::gp, selector_error(selector));
    if (descriptor.dpl() < cpu.cpl || descriptor.dpl() < rpl(selector))
        return set_fault(cpu, Vector::gp, selector_error(selector));
    if (!descriptor.present())
        return set_fault(cpu, Vector::np, selector_error(selector));
    return set_unsupported(cpu, fmt::format("far {} to task {:#x} before {:#x}:{:#x}; hardware task switches are not "
                                            "implemented",
                                            call ? "call" : "jump", selector, cpu.segments[CS].selector, return_rip));
}

bool FarTransfer::real_mode() {
    if (call) {
        StackFrame frame(cpu, false, cpu.segments[SS], cpu.gpr[RSP], 0, 0);
        if (!push_return_address(frame))
            return false;
        if (offset > cpu.segments[CS].limit)
            return set_fault(cpu, Vector::gp, 0);
        if (!frame.commit())
            return false;
        cpu.gpr[RSP] = frame.rsp();
    } else if (offset > cpu.segments[CS].limit) {
        return set_fault(cpu, Vector::gp, 0);
    }
    set_real_mode_code(cpu, selector);
    cpu.rip = offset;
    return true;
}

bool FarTransfer::push_return_address(StackFrame& frame) {
    return frame.push(cpu.segments[CS].selector, operand_size) && frame.push(return_rip, operand_size);
}

void FarTransfer::enter(const Descriptor& code, unsigned level) {
    cpu.rip = offset;
    set_code_segment(cpu, code.segment(static_cast<uint16_t>((selector & ~3u) | level)), level);
}

bool FarTransfer::direct(Descriptor& code) {
    if (!check_code_type(cpu, code, selector))
        return false;
    const bool allowed = code.conforming() ? code.dpl() <= cpu.cpl : rpl(selector) <= cpu.cpl && code.dpl() == cpu.cpl;
    if (!allowed)
        return set_fault(cpu, Vector::gp, selector_error(selector));
    if (!code.present())
        return set_fault(cpu, Vector::np, selector_error(selector));
    if (!call) {
        if (!check_code_offset(cpu, code, offset) || !mark_accessed(cpu, code))
            return false;
        enter(code, cpu.cpl);
        return true;
    }
    StackFrame frame(cpu, cpu.code64(), cpu.segments[SS], cpu.gpr[RSP], cpu.cpl, 0);
    if (!push_return_address(frame) || !check_code_offset(cpu, code, offset) || !mark_accessed(cpu, code) ||
        !frame.commit())
        return false;
    cpu.gpr[RSP] = frame.rsp();
    enter(code, cpu.cpl);
    return true;
}

/// SDM vol. 3, 5.8.3: the gate has the target; the offset in the instruction counts for nothing.
bool FarTransfer::through_call_gate(Descriptor& gate) {
    if (gate.dpl() < cpu.cpl || gate.dpl() < rpl(selector))
        return set_fault(cpu, Vector::gp, selector_error(selector));
    if (!gate.present())
        return set_fault(cpu, Vector::np, selector_error(selector));
    if (cpu.long_mode() && !read_upper_half(cpu, selector, Vector::gp, 0, gate))
        return false;
    const bool wide = gate.type() == SystemType::call_gate32;
    operand_size = cpu.long_mode() ? 8 : wide ? 4 : 2;
    offset = wide ? gate.gate_offset() : gate.gate_offset() & 0xffff;
    selector = gate.gate_selector();

    Descriptor code;
    if (is_null(selector))
        return set_fault(cpu, Vector::gp, 0);
    if (!read_descriptor(cpu, selector, Vector::gp, 0, code))
        return false;
    const bool type_ok = code.is_code() && (!cpu.long_mode() || (code.l() && !code.db()));
    const bool inner = call && !code.conforming() && code.dpl() < cpu.cpl;
    const bool level_ok = call || code.conforming() ? code.dpl() <= cpu.cpl : code.dpl() == cpu.cpl;
    if (!type_ok || !level_ok)
        return set_fault(cpu, Vector::gp, selector_error(selector));
    if (!code.present())
        return set_fault(cpu, Vector::np, selector_error(selector));
    return inner ? gate_to_inner(code, gate.gate_parameters()) : gate_to_same(code);
}

bool FarTransfer::gate_to_same(Descriptor& code) {
    if (call) {
        StackFrame frame(cpu, cpu.long_mode(), cpu.segments[SS], cpu.gpr[RSP], cpu.cpl, 0);
        if (!push_return_address(frame) || !check_code_offset(cpu, code, offset) || !mark_accessed(cpu, code) ||
            !frame.commit())
            return false;
        cpu.gpr[RSP] = frame.rsp();
    } else if (!check_code_offset(cpu, code, offset) || !mark_accessed(cpu, code)) {
        return false;
    }
    enter(code, cpu.cpl);
    return true;
}

bool FarTransfer::gate_to_inner(Descriptor& code, unsigned parameters) {
    const unsigned level = code.dpl();
    Segment stack_segment = null_stack_segment(level);
    Descriptor stack;
    uint64_t rsp = 0;
    uint32_t stack_code = 0;
    if (cpu.long_mode()) {
        if (!read_tss64_pointer(cpu, tss64_rsp_offset(level), 0, rsp))
            return false;
        parameters = 0;
    } else {
        uint16_t ss = 0;
        uint32_t esp = 0;
        if (!read_tss_stack(cpu, level, 0, ss, esp) || !read_inner_stack_segment(cpu, ss, level, 0, stack))
            return false;
        stack_segment = stack.segment(ss);
        stack_code = selector_error(ss);
        rsp = esp;
    }
    uint64_t values[31];
    StackReader outer(cpu);
    for (unsigned i = 0; i < parameters; ++i)
        if (!outer.pop(operand_size, values[i]))
            return false;

    StackFrame frame(cpu, cpu.long_mode(), stack_segment, rsp, level, stack_code);
    if (!frame.push(cpu.segments[SS].selector, operand_size) || !frame.push(cpu.gpr[RSP], operand_size))
        return false;
    for (unsigned i = parameters; i-- > 0;)
        if (!frame.push(values[i], operand_size))
            return false;
    if (!push_return_address(frame) || !check_code_offset(cpu, code, offset) || !mark_accessed(cpu, code))
        return false;
    if (!cpu.long_mode() && !mark_accessed(cpu, stack))
        return false;
    if (!frame.commit())
        return false;
    if (!cpu.long_mode())
        stack_segment.attributes |= SegAttr::accessed;
    cpu.segments[SS] = stack_segment;
    cpu.gpr[RSP] = frame.rsp();
    enter(code, level);
    return true;
}

const Op* far_transfer(Cpu& cpu, const Op* op, FarTransfer transfer) {
    const uint64_t from = cpu.code_linear(cpu.op_rip(op));
    begin_transfer(cpu);
    if (!transfer.run())
        return failed_transfer(cpu, op);
    cpu.record(from, cpu.code_linear(cpu.rip));
    return cpu.leave_at(cpu.rip, Leave::boundary);
}

} // namespace

void set_real_mode_code(Cpu& cpu, uint16_t selector) {
    // A real-mode load makes CS a writable, present segment of level 0 whose limit stays (SDM vol. 3, 20.1.1).
    Segment code = cpu.segments[CS];
    code.selector = selector;
    code.base = uint64_t{selector} << 4;
    set_code_segment(cpu, code, 0);
}

const Op* far_jump(Cpu& cpu, const Op* op, uint16_t selector, uint64_t offset) {
    return far_transfer(cpu, op, {cpu, cpu.next_rip(op), false, selector, offset, 0});
}

const Op* far_call(Cpu& cpu, const Op* op, uint16_t selector, uint64_t offset, unsigned operand_size) {
    return far_transfer(cpu, op, {cpu, cpu.next_rip(op), true, selector, offset, operand_size});
}

} // namespace vtrace::soft
