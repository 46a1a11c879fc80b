// Do the two processors agree, as far as the manuals define the answer?
#pragma once

#include <string>

#include "tests/oracle/native/operands.h"

namespace vtrace::oracle {

/// What is left to the processor, for one instruction and its inputs.
struct Undefined {
    uint64_t rflags = Rflags::rf; // RF: what a fault pushes is not seen by the program
    uint16_t fsw = 0;
    bool destination = false; // the whole result
    // Of an instruction with several accesses, which one faults first, and what came of those before.
    bool fault_address = false, fault_registers = false;
    bool x87 = false;   // all of x87 and MMX
    uint32_t mxcsr = 0; // bits
};
Undefined undefined_by(const Instruction& instruction, const UserState& in, const Answer& host);

/// Clears in both memories what the instruction stores and leaves undefined (addresses of the last x87 instruction).
void blank_undefined_memory(const Case& c, uint64_t fs_base, uint8_t* data);

/// Empty if they agree; else what differs, expected (host) and got (vtrace), a line each.
std::string differences(const Undefined& undefined, const UserState& in, const Answer& host, const Answer& got);
/// The same for data memory.
std::string memory_differences(const uint8_t* before, const uint8_t* host, const uint8_t* got);

/// For approximating instructions: accepts, by copying it from `host`, a destination within the documented error.
void accept_approximation(const Instruction& instruction, const Answer& host, Answer& got);

} // namespace vtrace::oracle
