// Near branches: Jcc, JMP, CALL, RET, LOOPcc, JrCXZ. Each taken one is recorded as it retires.
//
// A Jcc that isn't taken goes on in its block; one that is leaves it and gives back the budget of what follows.
#include "vmm/soft/fuse.h"
#include "vmm/soft/select.h"
#include "vmm/soft/stack.h"

namespace vtrace::soft {
namespace {

template <bool Flat>
bool valid_target(Cpu& cpu, const Op* op, uint64_t to) {
    if (Flat ? cpu.is_canonical(to) : to <= cpu.segments[CS].limit)
        return true;
    cpu.raise(op, Vector::gp, 0);
    return false;
}

/// In 64-bit code, where the run loop has to find the block.
[[gnu::noinline]] const Op* branch_to_unknown(Cpu& cpu, const Op* op, uint64_t to, bool linkable) {
    if (!valid_target<true>(cpu, op, to))
        return nullptr;
    cpu.budget += op->left - 1;
    const uint64_t from = cpu.op_rip(op);
    cpu.record(from, to);
    if (linkable && !((from ^ to) & ~page_mask))
        cpu.link_request = op;
    return cpu.leave_at(to, Leave::lookup);
}

/// Near branch to `to`, an offset in CS. `Flat`: 64-bit code, where RIP is the linear address. The checks come first: a
/// branch that faults has not retired.
template <bool Flat>
const Op* take_branch(Cpu& cpu, const Op* op, uint64_t to, bool linkable) {
    if constexpr (Flat) {
        const JumpEntry& entry = cpu.jumps[jump_slot(to)];
        if (VTRACE_UNLIKELY(entry.address != to || !entry.block))
            return branch_to_unknown(cpu, op, to, linkable);
        const uint64_t from = cpu.op_rip(op);
        if (linkable && !((from ^ to) & ~page_mask))
            set_link(op, entry.block);
        cpu.budget += op->left - 1; // what follows in the block will not run now
        return record_and_enter(cpu, from, to, entry.block, to);
    } else {
        if (!valid_target<Flat>(cpu, op, to))
            return nullptr;
        cpu.budget += op->left - 1;
        cpu.record(cpu.code_linear(cpu.op_rip(op)), cpu.code_linear(to));
        if (VTRACE_UNLIKELY(needs_run_loop(cpu)))
            return cpu.leave_at(to, Leave::boundary);
        return continue_at(cpu, to);
    }
}

/// Where a relative branch goes; T is the operand size (64-bit code: always 64).
template <class T>
uint64_t relative_target(const Cpu& cpu, const Op* op) {
    return static_cast<T>(cpu.op_rip(op) + op->len + static_cast<int64_t>(op->disp));
}

template <bool Flat, class T>
const Op* take_relative(Cpu& cpu, const Op* op) {
    const uint64_t to = relative_target<T>(cpu, op);
    if constexpr (Flat) {
        if (Block* linked = link_of(op)) {
            cpu.budget += op->left - 1;
            return record_and_enter(cpu, cpu.op_rip(op), to, linked, to);
        }
    }
    return take_branch<Flat>(cpu, op, to, true);
}

template <bool Flat, class T>
const Op* jmp_relative(Cpu& cpu, const Op* op) {
    return take_relative<Flat, T>(cpu, op);
}
template <unsigned Code, bool Flat, class T>
const Op* jcc(Cpu& cpu, const Op* op) {
    if (condition<Code>(cpu.flags))
        return take_relative<Flat, T>(cpu, op);
    VTRACE_NEXT(cpu, op);
}

/// LOOP, LOOPE, LOOPNE and JrCXZ; the counter's width is the address size.
enum class CounterTest : uint8_t { loop, loope, loopne, zero };
template <CounterTest Test, class Counter, bool Flat, class T>
const Op* counter_branch(Cpu& cpu, const Op* op) {
    Counter counter = cpu.get<Counter>(RCX * 8);
    bool taken;
    if constexpr (Test == CounterTest::zero) {
        taken = counter == 0;
    } else {
        --counter;
        taken = counter != 0;
        if constexpr (Test == CounterTest::loope)
            taken = taken && cpu.flags.zf();
        else if constexpr (Test == CounterTest::loopne)
            taken = taken && !cpu.flags.zf();
    }
    if (taken && !link_of(op) && !valid_target<Flat>(cpu, op, relative_target<T>(cpu, op)))
        return nullptr;
    if constexpr (Test != CounterTest::zero)
        cpu.set<Counter>(RCX * 8, counter);
    if (taken)
        return take_relative<Flat, T>(cpu, op);
    VTRACE_NEXT(cpu, op);
}

// --- indirect targets, calls, returns --------------------------------------------------------------------------------

template <bool Flat, class T, bool Fast = Flat>
const Op* call_relative(Cpu& cpu, const Op* op) {
    const uint64_t to = relative_target<T>(cpu, op);
    if (!link_of(op) && !valid_target<Flat>(cpu, op, to))
        return nullptr;
    const T next = static_cast<T>(cpu.next_rip(op));
    VTRACE_ACCESS(Stack<Flat>::try_push(cpu, next), Stack<Flat>::push(cpu, op, next), (call_relative<Flat, T, false>));
    return take_relative<Flat, T>(cpu, op);
}

struct TargetRegister {
    template <class T>
    static bool get(Cpu& cpu, const Op* op, T& to) {
        to = cpu.get<T>(op->reg);
        return true;
    }
};
template <class Ea>
struct TargetMemory {
    template <class T>
    static bool get(Cpu& cpu, const Op* op, T& to) {
        uint64_t address;
        return Ea::get(cpu, op, sizeof(T), false, address) && cpu.load(op, address, to);
    }
};
template <bool Flat, class T, class Target>
const Op* jmp_indirect(Cpu& cpu, const Op* op) {
    T to;
    if (!Target::get(cpu, op, to))
        return nullptr;
    return take_branch<Flat>(cpu, op, to, false);
}
template <bool Flat, class T, class Target>
const Op* call_indirect(Cpu& cpu, const Op* op) {
    T to;
    if (!Target::get(cpu, op, to) || !valid_target<Flat>(cpu, op, to) ||
        !Stack<Flat>::push(cpu, op, static_cast<T>(cpu.next_rip(op))))
        return nullptr;
    return take_branch<Flat>(cpu, op, to, false);
}
/// RET, with `imm` bytes of arguments to release.
template <bool Flat, class T, bool Fast = Flat>
const Op* ret(Cpu& cpu, const Op* op) {
    using S = Stack<Flat>;
    const uint64_t stack = S::pointer(cpu);
    T to;
    VTRACE_ACCESS(cpu.try_load(stack, to), S::load(cpu, op, stack, to), (ret<Flat, T, false>));
    if (!valid_target<Flat>(cpu, op, to))
        return nullptr;
    S::set_pointer(cpu, stack + sizeof(T) + static_cast<uint16_t>(op->imm));
    return take_branch<Flat>(cpu, op, to, false);
}

// --- selection -------------------------------------------------------------------------------------------------------

/// Calls `make.template operator()<Flat, T>()`: the mode and the width of RIP as this branch writes it.
template <class Make>
Handler by_target_width(const DecodeInput& in, Make make) {
    if (in.mode == CodeMode::bits64)
        return make.template operator()<true, uint64_t>();
    if (in.instruction.operand_width == 16)
        return make.template operator()<false, uint16_t>();
    return make.template operator()<false, uint32_t>();
}

bool relative_operand(const DecodeInput& in, Op& op) {
    if (!is_immediate(in.operands[0]) || !in.operands[0].imm.is_relative)
        return false;
    op.disp = static_cast<int32_t>(in.operands[0].imm.value.s);
    op.imm = 0; // no link yet
    return true;
}

void select_jcc(const DecodeInput& in, Op& op) {
    relative_operand(in, op);
    op.fn = by_condition(in.instruction.opcode & 15, [&]<unsigned Code>() -> Handler {
        return by_target_width(in, []<bool Flat, class T>() -> Handler { return jcc<Code, Flat, T>; });
    });
}

template <CounterTest Test>
void select_counter(const DecodeInput& in, Op& op) {
    relative_operand(in, op);
    op.fn = by_wide_width(in.instruction.address_width, [&]<class Counter>() -> Handler {
        return by_target_width(in,
                               []<bool Flat, class T>() -> Handler { return counter_branch<Test, Counter, Flat, T>; });
    });
}

/// Near JMP and CALL; false for the far forms.
bool select_transfer(const DecodeInput& in, Op& op, bool call) {
    if (in.instruction.meta.branch_type == ZYDIS_BRANCH_TYPE_FAR)
        return false;
    const ZydisDecodedOperand& target = in.operands[0];
    if (relative_operand(in, op)) {
        op.seg = SS; // the only memory that a relative CALL touches
        op.fn = by_target_width(
            in, [&]<bool Flat, class T>() -> Handler { return call ? call_relative<Flat, T> : jmp_relative<Flat, T>; });
    } else if (is_register(target)) {
        op.seg = SS;
        op.reg = gpr_offset(target.reg.value);
        op.fn = by_target_width(in, [&]<bool Flat, class T>() -> Handler {
            return call ? call_indirect<Flat, T, TargetRegister> : jmp_indirect<Flat, T, TargetRegister>;
        });
    } else {
        op.fn = by_target_width(in, [&]<bool Flat, class T>() -> Handler {
            return by_shape(in.shape, [&]<class Ea>() -> Handler {
                return call ? call_indirect<Flat, T, TargetMemory<Ea>> : jmp_indirect<Flat, T, TargetMemory<Ea>>;
            });
        });
    }
    return true;
}

} // namespace

const Op* take_jcc64(Cpu& cpu, const Op* op) {
    return take_relative<true, uint64_t>(cpu, op);
}

bool decode_branch(const DecodeInput& in, Op& op, bool& ends_block) {
    switch (in.instruction.mnemonic) {
    case ZYDIS_MNEMONIC_JB:
    case ZYDIS_MNEMONIC_JBE:
    case ZYDIS_MNEMONIC_JL:
    case ZYDIS_MNEMONIC_JLE:
    case ZYDIS_MNEMONIC_JNB:
    case ZYDIS_MNEMONIC_JNBE:
    case ZYDIS_MNEMONIC_JNL:
    case ZYDIS_MNEMONIC_JNLE:
    case ZYDIS_MNEMONIC_JNO:
    case ZYDIS_MNEMONIC_JNP:
    case ZYDIS_MNEMONIC_JNS:
    case ZYDIS_MNEMONIC_JNZ:
    case ZYDIS_MNEMONIC_JO:
    case ZYDIS_MNEMONIC_JP:
    case ZYDIS_MNEMONIC_JS:
    case ZYDIS_MNEMONIC_JZ:
        select_jcc(in, op);
        return true;
    case ZYDIS_MNEMONIC_JCXZ:
    case ZYDIS_MNEMONIC_JECXZ:
    case ZYDIS_MNEMONIC_JRCXZ:
        select_counter<CounterTest::zero>(in, op);
        return true;
    case ZYDIS_MNEMONIC_LOOP:
        select_counter<CounterTest::loop>(in, op);
        return true;
    case ZYDIS_MNEMONIC_LOOPE:
        select_counter<CounterTest::loope>(in, op);
        return true;
    case ZYDIS_MNEMONIC_LOOPNE:
        select_counter<CounterTest::loopne>(in, op);
        return true;
    case ZYDIS_MNEMONIC_JMP:
        if (!select_transfer(in, op, false))
            return false;
        break;
    case ZYDIS_MNEMONIC_CALL:
        if (!select_transfer(in, op, true))
            return false;
        break;
    case ZYDIS_MNEMONIC_RET:
        if (in.instruction.meta.branch_type == ZYDIS_BRANCH_TYPE_FAR)
            return false;
        op.seg = SS;
        op.fn = by_target_width(in, []<bool Flat, class T>() -> Handler { return ret<Flat, T>; });
        break;
    default:
        return false;
    }
    ends_block = true;
    return true;
}

} // namespace vtrace::soft
