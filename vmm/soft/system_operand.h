// How the system instructions' handlers read their operands off an op. These are slow paths: what the integer handlers
// have in template parameters is here in Op::aux, and memory operands of any shape go through EaAny.
#pragma once

#include <cstdint>
#include <cstring>

#include "vmm/soft/cpu.h"

namespace vtrace::soft {

/// Op::aux: 1:0 address size (cpu.h), 3:2 log2(operand size) - 1, 4 r/m is memory, 5 special, 15:8 register number.
namespace SystemAux {
inline constexpr unsigned size_shift = 2, number_shift = 8;
inline constexpr uint16_t memory = 1 << 4, special = 1 << 5;
} // namespace SystemAux

/// 2, 4 or 8 bytes.
inline unsigned operand_size(const Op* op) {
    return 2u << (op->aux >> SystemAux::size_shift & 3);
}
inline bool is_memory(const Op* op) {
    return op->aux & SystemAux::memory;
}
/// Of a segment, control or debug register.
inline unsigned register_number(const Op* op) {
    return op->aux >> SystemAux::number_shift;
}

inline uint64_t read_register(const Cpu& cpu, unsigned offset, unsigned size) {
    uint64_t value = 0;
    std::memcpy(&value, reinterpret_cast<const char*>(cpu.gpr) + offset, size);
    return value;
}
inline void write_register(Cpu& cpu, unsigned offset, unsigned size, uint64_t value) {
    if (size == 4) {
        value = static_cast<uint32_t>(value);
        size = 8;
    }
    std::memcpy(reinterpret_cast<char*>(cpu.gpr) + offset, &value, size);
}

// False as for Cpu::load(): raised on `op`. Size 2, 4, 8.
template <class T>
bool load_as(Cpu& cpu, const Op* op, uint64_t linear, uint64_t& value) {
    T narrow;
    if (!cpu.load(op, linear, narrow))
        return false;
    value = narrow;
    return true;
}
inline bool load_sized(Cpu& cpu, const Op* op, uint64_t linear, uint64_t& value, unsigned size) {
    return size == 8   ? load_as<uint64_t>(cpu, op, linear, value)
           : size == 4 ? load_as<uint32_t>(cpu, op, linear, value)
                       : load_as<uint16_t>(cpu, op, linear, value);
}
inline bool store_sized(Cpu& cpu, const Op* op, uint64_t linear, uint64_t value, unsigned size) {
    return size == 8   ? cpu.store(op, linear, value)
           : size == 4 ? cpu.store(op, linear, static_cast<uint32_t>(value))
                       : cpu.store(op, linear, static_cast<uint16_t>(value));
}
/// The r/m operand: memory, or the register in Op::rm.
inline bool load_operand(Cpu& cpu, const Op* op, unsigned size, uint64_t& value) {
    uint64_t linear;
    if (is_memory(op))
        return EaAny::get(cpu, op, size, false, linear) && load_sized(cpu, op, linear, value, size);
    value = read_register(cpu, op->rm, size);
    return true;
}
/// Selectors and the like go to memory in `memory_size` bytes, to a register in the operand size.
inline bool store_operand(Cpu& cpu, const Op* op, unsigned memory_size, uint64_t value) {
    uint64_t linear;
    if (is_memory(op))
        return EaAny::get(cpu, op, memory_size, true, linear) && store_sized(cpu, op, linear, value, memory_size);
    write_register(cpu, op->rm, operand_size(op), value);
    return true;
}

/// The end of a block-ending handler whose instruction has retired without a branch.
inline const Op* retire(Cpu& cpu, const Op* op) {
    return cpu.leave_at(cpu.next_rip(op), Leave::boundary);
}

} // namespace vtrace::soft
