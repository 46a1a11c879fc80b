// PUSH, POP, PUSHA, POPA, ENTER, LEAVE, and their handlers.
#include "vmm/soft/select.h"
#include "vmm/soft/stack.h"

namespace vtrace::soft {
namespace {

unsigned stack_width(const DecodeInput& in) {
    for (unsigned i = 0; i < in.instruction.operand_count; ++i)
        if (is_memory(in.operands[i]) && in.operands[i].visibility == ZYDIS_OPERAND_VISIBILITY_HIDDEN)
            return in.operands[i].size;
    return in.instruction.operand_width;
}

template <class T, bool Flat, bool Fast = Flat>
const Op* push_reg(Cpu& cpu, const Op* op) {
    const T value = cpu.get<T>(op->reg);
    VTRACE_ACCESS(Stack<Flat>::try_push(cpu, value), Stack<Flat>::push(cpu, op, value), (push_reg<T, Flat, false>));
    VTRACE_NEXT(cpu, op);
}
template <class T, bool Flat>
const Op* push_imm(Cpu& cpu, const Op* op) {
    if (!Stack<Flat>::push(cpu, op, static_cast<T>(op->imm)))
        return nullptr;
    VTRACE_NEXT(cpu, op);
}
template <class T, bool Flat, class Ea>
const Op* push_mem(Cpu& cpu, const Op* op) {
    uint64_t address;
    T value;
    if (!Ea::get(cpu, op, sizeof(T), false, address) || !cpu.load(op, address, value) ||
        !Stack<Flat>::push(cpu, op, value))
        return nullptr;
    VTRACE_NEXT(cpu, op);
}
template <class T, bool Flat, bool Fast = Flat>
const Op* pop_reg(Cpu& cpu, const Op* op) {
    T value;
    VTRACE_ACCESS(Stack<Flat>::try_pop(cpu, value), Stack<Flat>::pop(cpu, op, value), (pop_reg<T, Flat, false>));
    cpu.set<T>(op->reg, value); // after the increment: POP RSP gives what was popped
    VTRACE_NEXT(cpu, op);
}
template <class T, bool Flat, class Ea>
const Op* pop_mem(Cpu& cpu, const Op* op) {
    // An address that uses RSP sees it incremented; a fault must see it as it was.
    const uint64_t before = cpu.gpr[RSP];
    uint64_t address;
    T value;
    if (!Stack<Flat>::pop(cpu, op, value))
        return nullptr;
    if (!Ea::get(cpu, op, sizeof(T), true, address) || !cpu.store(op, address, value)) {
        cpu.gpr[RSP] = before;
        return nullptr;
    }
    VTRACE_NEXT(cpu, op);
}
template <bool Flat>
void select_stack(const DecodeInput& in, Op& op, bool push) {
    const ZydisDecodedOperand& operand = in.operands[0];
    const unsigned width = stack_width(in);
    if (is_memory(operand)) {
        op.fn = by_wide_width(width, [&]<class T>() -> Handler {
            return by_shape(in.shape,
                            [&]<class Ea>() -> Handler { return push ? push_mem<T, Flat, Ea> : pop_mem<T, Flat, Ea>; });
        });
        return;
    }
    op.seg = SS;
    if (is_immediate(operand)) {
        op.fn = by_wide_width(width, []<class T>() -> Handler { return push_imm<T, Flat>; });
    } else {
        op.reg = gpr_offset(operand.reg.value);
        op.fn = by_wide_width(width, [&]<class T>() -> Handler { return push ? push_reg<T, Flat> : pop_reg<T, Flat>; });
    }
}

template <class T>
const Op* pusha(Cpu& cpu, const Op* op) {
    using S = Stack<false>;
    const uint64_t top = S::pointer(cpu);
    for (unsigned i = 0; i < 8; ++i)
        if (!S::store(cpu, op, top - (i + 1) * sizeof(T), cpu.get<T>(i * 8)))
            return nullptr;
    S::set_pointer(cpu, top - 8 * sizeof(T));
    VTRACE_NEXT(cpu, op);
}
template <class T>
const Op* popa(Cpu& cpu, const Op* op) {
    using S = Stack<false>;
    const uint64_t top = S::pointer(cpu);
    T values[8];
    for (unsigned i = 0; i < 8; ++i)
        if (!S::load(cpu, op, top + i * sizeof(T), values[i]))
            return nullptr;
    for (unsigned i = 0; i < 8; ++i)
        if (7 - i != RSP)
            cpu.set<T>((7 - i) * 8, values[i]);
    S::set_pointer(cpu, top + 8 * sizeof(T));
    VTRACE_NEXT(cpu, op);
}
template <class T, bool Flat>
const Op* leave(Cpu& cpu, const Op* op) {
    using S = Stack<Flat>;
    const uint64_t frame = cpu.gpr[RBP] & S::mask(cpu);
    T value;
    if (!S::load(cpu, op, frame, value))
        return nullptr;
    S::set_pointer(cpu, frame + sizeof(T));
    cpu.set<T>(RBP * 8, value);
    VTRACE_NEXT(cpu, op);
}
/// ENTER: `imm` is the size of the frame, `rm` the nesting level, 0..31.
template <class T, bool Flat>
const Op* enter(Cpu& cpu, const Op* op) {
    using S = Stack<Flat>;
    const unsigned level = op->rm;
    uint64_t stack = S::pointer(cpu) - sizeof(T);
    if (!S::store(cpu, op, stack, cpu.get<T>(RBP * 8)))
        return nullptr;
    const uint64_t frame = stack;
    uint64_t outer = cpu.gpr[RBP];
    for (unsigned i = 1; i < level; ++i) {
        T value;
        outer -= sizeof(T);
        stack -= sizeof(T);
        if (!S::load(cpu, op, outer & S::mask(cpu), value) || !S::store(cpu, op, stack, value))
            return nullptr;
    }
    if (level > 0) {
        stack -= sizeof(T);
        if (!S::store(cpu, op, stack, static_cast<T>(frame)))
            return nullptr;
    }
    stack -= static_cast<uint16_t>(op->imm);
    // The new top must be writable, though nothing is written there (SDM: "#PF if the final value would fault").
    T probe;
    uint64_t linear;
    if (!segment_linear(cpu, op, SS, stack & S::mask(cpu), sizeof(T), true, linear) ||
        !cpu.load_for_write(op, linear, probe))
        return nullptr;
    S::set_pointer(cpu, stack);
    cpu.set<T>(RBP * 8, static_cast<T>(frame));
    VTRACE_NEXT(cpu, op);
}

} // namespace

bool decode_stack(const DecodeInput& in, Op& op) {
    const bool flat = in.mode == CodeMode::bits64;
    switch (in.instruction.mnemonic) {
    case ZYDIS_MNEMONIC_PUSH:
    case ZYDIS_MNEMONIC_POP: {
        if (is_register(in.operands[0]) && !is_gpr(in.operands[0]))
            return false; // segment registers
        const bool push = in.instruction.mnemonic == ZYDIS_MNEMONIC_PUSH;
        flat ? select_stack<true>(in, op, push) : select_stack<false>(in, op, push);
        return true;
    }
    case ZYDIS_MNEMONIC_PUSHA:
        op.fn = pusha<uint16_t>;
        op.seg = SS;
        return true;
    case ZYDIS_MNEMONIC_PUSHAD:
        op.fn = pusha<uint32_t>;
        op.seg = SS;
        return true;
    case ZYDIS_MNEMONIC_POPA:
        op.fn = popa<uint16_t>;
        op.seg = SS;
        return true;
    case ZYDIS_MNEMONIC_POPAD:
        op.fn = popa<uint32_t>;
        op.seg = SS;
        return true;
    case ZYDIS_MNEMONIC_LEAVE:
        op.seg = SS;
        op.fn = by_wide_width(stack_width(in),
                              [&]<class T>() -> Handler { return flat ? leave<T, true> : leave<T, false>; });
        return true;
    case ZYDIS_MNEMONIC_ENTER:
        op.seg = SS;
        op.rm = static_cast<uint8_t>(in.operands[1].imm.value.u & 31);
        op.fn = by_wide_width(stack_width(in),
                              [&]<class T>() -> Handler { return flat ? enter<T, true> : enter<T, false>; });
        return true;
    default:
        return false;
    }
}

} // namespace vtrace::soft
