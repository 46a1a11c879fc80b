// The debug registers' bits (SDM vol. 3, 17.2) and what instructions need of them.
#pragma once

#include <cstdint>

#include "vmm/soft/cpu.h"

namespace vtrace::soft {

namespace Dr6 {
inline constexpr uint64_t b_mask = 15, bd = 1 << 13, bs = 1 << 14, bt = 1 << 15;
inline constexpr uint64_t fixed1 = 0xffff0ff0; // bits 11 and 16 too: there are neither bus-lock traps nor RTM
inline constexpr uint64_t writable = b_mask | bd | bs | bt;
} // namespace Dr6
namespace Dr7 {
inline constexpr uint64_t gd = 1 << 13, fixed1 = 1 << 10;
inline constexpr uint64_t writable = 0xffff'23ff; // L0..GE, GD, R/W and LEN fields
inline constexpr unsigned rw_shift = 16, len_shift = 18, field_width = 4;
inline constexpr unsigned rw_execute = 0, rw_write = 1, rw_io = 2, rw_read_write = 3;
} // namespace Dr7

/// I/O breakpoints (CR4.DE) that the port range meets, as DR6 bits.
uint64_t io_breakpoints(const Cpu& cpu, uint16_t port, unsigned size);

/// MOV from/to DRn without the privilege checks; `number` is 0..3, 6 or 7.
uint64_t read_debug_register(const Cpu& cpu, unsigned number);
bool write_debug_register(Cpu& cpu, unsigned number, uint64_t value); // false: #GP(0)

} // namespace vtrace::soft
