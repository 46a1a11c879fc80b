// Handlers that read a place, change it and write it back: one operand, a register or memory.
#pragma once

#include "vmm/soft/select.h"

namespace vtrace::soft {

/// Replaces a T in memory by `change(flags, old)`. Fast: false where the fast path doesn't do, with nothing changed.
/// Else: false when the handler must leave; flags are committed only after the store.
template <bool Fast, class T, class Change>
[[gnu::always_inline]] inline bool modify(Cpu& cpu, const Op* op, uint64_t address, Change change) {
    T value;
    if constexpr (Fast) {
        uint8_t* host = cpu.try_write<T>(address);
        if (VTRACE_UNLIKELY(!host))
            return false;
        std::memcpy(&value, host, sizeof value);
        value = change(cpu.flags, value);
        std::memcpy(host, &value, sizeof value);
        return true;
    } else {
        if (!cpu.load_for_write(op, address, value))
            return false;
        LazyFlags flags = cpu.flags;
        value = change(flags, value);
        if (!cpu.store(op, address, value))
            return false;
        cpu.flags = flags;
        return true;
    }
}
template <bool Fast>
[[gnu::always_inline]] inline const Op* slow_or_leave(Cpu& cpu, const Op* op, Handler slow) {
    if constexpr (Fast)
        return slow(cpu, op);
    return nullptr;
}

/// `Operation::run<T>(flags, old, cpu, op)` gives the new value.
template <class Operation, class T>
const Op* unary_reg(Cpu& cpu, const Op* op) {
    cpu.set<T>(op->reg, Operation::template run<T>(cpu.flags, cpu.get<T>(op->reg), cpu, op));
    VTRACE_NEXT(cpu, op);
}
template <class Operation, class T, class Ea, bool Fast = has_fast_path<Ea>>
const Op* unary_mem(Cpu& cpu, const Op* op) {
    uint64_t address;
    if (!Ea::get(cpu, op, sizeof(T), true, address))
        return nullptr;
    if (!modify<Fast, T>(cpu, op, address,
                         [&](LazyFlags& flags, T old) { return Operation::template run<T>(flags, old, cpu, op); }))
        return slow_or_leave<Fast>(cpu, op, unary_mem<Operation, T, Ea, false>);
    VTRACE_NEXT(cpu, op);
}
template <class Operation>
void select_unary(const DecodeInput& in, Op& op) {
    const unsigned width = in.operands[0].size;
    if (is_register(in.operands[0])) {
        op.reg = gpr_offset(in.operands[0].reg.value);
        op.fn = by_width(width, []<class T>() -> Handler { return unary_reg<Operation, T>; });
    } else {
        op.fn = by_width(width, [&]<class T>() -> Handler {
            return by_shape(in.shape, []<class Ea>() -> Handler { return unary_mem<Operation, T, Ea>; });
        });
    }
}

} // namespace vtrace::soft
