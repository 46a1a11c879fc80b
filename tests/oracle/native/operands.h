// Inputs for one instruction: registers, flags and memory at random, but such that it reaches nothing outside of the
// arena.
#pragma once

#include "tests/oracle/native/random.h"
#include "tests/oracle/native/scope.h"

namespace vtrace::oracle {

struct Case {
    Instruction instruction;
    UserState in;
    Data data;
};

/// Value of a general-purpose register of any width, or RIP after the instruction.
uint64_t register_value(const UserState& state, const Instruction& instruction, ZydisRegister reg);
/// Number 0..15 of the full register that `reg` is part of, or -1.
int register_number(ZydisRegister reg);

/// Random everything, for the instruction at `rip`; may change its displacement and immediate. False when no safe
/// inputs were found with these dice: throw again.
bool prepare(Case& c, uint64_t rip, uint64_t fs_base, const Data& background, Random& random);

/// Random FPU state: consistent (ES and B follow from the rest).
void randomize_fpu(FpuImage& fpu, Random& random);
uint64_t random_flags(Random& random);

/// True if [address, +size) is either in the arena, or certain to fault.
bool is_safe(uint64_t address, uint64_t size, Mode mode);

} // namespace vtrace::oracle
