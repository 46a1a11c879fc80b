// The stack as PUSH, POP, CALL and RET use it, in every mode.
#pragma once

#include "vmm/soft/cpu.h"

namespace vtrace::soft {

/// Flat: 64-bit code, where SS has neither base nor limit. Otherwise SS.B says whether SP or ESP is used.
template <bool Flat>
struct Stack {
    static uint64_t mask(const Cpu& cpu) {
        return Flat ? ~0ull : cpu.segments[SS].attributes & SegAttr::db ? 0xffff'ffff : 0xffff;
    }
    static uint64_t pointer(const Cpu& cpu) { return cpu.gpr[RSP] & mask(cpu); }
    static void set_pointer(Cpu& cpu, uint64_t value) {
        if (Flat)
            cpu.gpr[RSP] = value;
        else if (cpu.segments[SS].attributes & SegAttr::db)
            cpu.gpr[RSP] = static_cast<uint32_t>(value);
        else
            cpu.set<uint16_t>(RSP * 8, static_cast<uint16_t>(value));
    }

    /// A non-canonical stack address is #SS even where the op's own memory operand is in another segment.
    static bool failed(Cpu& cpu) {
        if (Flat && cpu.leave == Leave::fault && cpu.fault.vector == Vector::gp)
            cpu.fault.vector = Vector::ss;
        return false;
    }
    template <class T>
    static bool load(Cpu& cpu, const Op* op, uint64_t offset, T& value) {
        if constexpr (Flat) {
            return cpu.load(op, offset, value) || failed(cpu);
        } else {
            uint64_t linear;
            return segment_linear(cpu, op, SS, offset & mask(cpu), sizeof(T), false, linear) &&
                   cpu.load(op, linear, value);
        }
    }
    template <class T>
    static bool store(Cpu& cpu, const Op* op, uint64_t offset, T value) {
        if constexpr (Flat) {
            return cpu.store(op, offset, value) || failed(cpu);
        } else {
            uint64_t linear;
            return segment_linear(cpu, op, SS, offset & mask(cpu), sizeof(T), true, linear) &&
                   cpu.store(op, linear, value);
        }
    }
    /// The fast path alone, in 64-bit code.
    template <class T>
    static bool try_push(Cpu& cpu, T value) {
        const uint64_t offset = cpu.gpr[RSP] - sizeof(T);
        if (!cpu.try_store(offset, value))
            return false;
        cpu.gpr[RSP] = offset;
        return true;
    }
    template <class T>
    static bool try_pop(Cpu& cpu, T& value) {
        if (!cpu.try_load(cpu.gpr[RSP], value))
            return false;
        cpu.gpr[RSP] += sizeof(T);
        return true;
    }
    /// Both move the stack pointer only on success. False as for Cpu::load().
    template <class T>
    static bool push(Cpu& cpu, const Op* op, T value) {
        uint64_t offset = pointer(cpu) - sizeof(T);
        if (!store(cpu, op, offset, value))
            return false;
        set_pointer(cpu, offset);
        return true;
    }
    template <class T>
    static bool pop(Cpu& cpu, const Op* op, T& value) {
        uint64_t offset = pointer(cpu);
        if (!load(cpu, op, offset, value))
            return false;
        set_pointer(cpu, offset + sizeof(T));
        return true;
    }
};

} // namespace vtrace::soft
