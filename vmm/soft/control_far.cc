// Operands of far transfers and software interrupts; the transfers themselves are in segments_*.cc and exceptions.cc.
#include "vmm/soft/system.h"
#include "vmm/soft/system_handlers.h"
#include "vmm/soft/system_operand.h"

namespace vtrace::soft {
namespace {

/// m16:16, m16:32, m16:64.
bool load_far_pointer(Cpu& cpu, const Op* op, uint16_t& selector, uint64_t& offset) {
    const unsigned size = operand_size(op);
    uint64_t linear;
    uint8_t bytes[10];
    if (!EaAny::get(cpu, op, size + 2, false, linear) || !cpu.load_bytes(op, linear, bytes, size + 2))
        return false;
    offset = 0;
    std::memcpy(&offset, bytes, size);
    std::memcpy(&selector, bytes + size, 2);
    return true;
}

uint16_t immediate_selector(const Op* op) {
    return static_cast<uint16_t>(op->rm | op->reg << 8);
}

int64_t sign_extend(uint64_t value, unsigned size) {
    return size == 2 ? static_cast<int16_t>(value) : static_cast<int32_t>(value);
}

} // namespace

const Op* op_far_jump_memory(Cpu& cpu, const Op* op) {
    uint16_t selector;
    uint64_t offset;
    return load_far_pointer(cpu, op, selector, offset) ? far_jump(cpu, op, selector, offset) : nullptr;
}

const Op* op_far_jump_immediate(Cpu& cpu, const Op* op) {
    return far_jump(cpu, op, immediate_selector(op), static_cast<uint32_t>(op->imm));
}

const Op* op_far_call_memory(Cpu& cpu, const Op* op) {
    uint16_t selector;
    uint64_t offset;
    return load_far_pointer(cpu, op, selector, offset) ? far_call(cpu, op, selector, offset, operand_size(op))
                                                       : nullptr;
}

const Op* op_far_call_immediate(Cpu& cpu, const Op* op) {
    return far_call(cpu, op, immediate_selector(op), static_cast<uint32_t>(op->imm), operand_size(op));
}

const Op* op_far_return(Cpu& cpu, const Op* op) {
    return far_return(cpu, op, operand_size(op), static_cast<uint16_t>(op->imm));
}

const Op* op_iret(Cpu& cpu, const Op* op) {
    return interrupt_return(cpu, op, operand_size(op));
}

const Op* op_int(Cpu& cpu, const Op* op) {
    return software_interrupt(cpu, op, static_cast<uint8_t>(op->imm), EventKind::software_interrupt);
}
const Op* op_int1(Cpu& cpu, const Op* op) {
    return software_interrupt(cpu, op, Vector::db, EventKind::privileged_software_exception);
}
const Op* op_int3(Cpu& cpu, const Op* op) {
    return software_interrupt(cpu, op, Vector::bp, EventKind::software_interrupt);
}
const Op* op_into(Cpu& cpu, const Op* op) {
    if (cpu.flags.of())
        return software_interrupt(cpu, op, Vector::of, EventKind::software_interrupt);
    return retire(cpu, op);
}

/// Bounds are signed and both inclusive; the fault is #BR, not a software interrupt.
const Op* op_bound(Cpu& cpu, const Op* op) {
    const unsigned size = operand_size(op);
    uint64_t linear, lower = 0, upper = 0; // two accesses, each with its own alignment
    if (!EaAny::get(cpu, op, 2 * size, false, linear) || !cpu.load_bytes(op, linear, &lower, size) ||
        !cpu.load_bytes(op, uint32_t(linear + size), &upper, size))
        return nullptr;
    const int64_t index = sign_extend(read_register(cpu, op->reg, size), size);
    if (index < sign_extend(lower, size) || index > sign_extend(upper, size))
        return cpu.raise(op, Vector::br);
    VTRACE_NEXT_BY_LOOP(cpu, op);
}

} // namespace vtrace::soft
