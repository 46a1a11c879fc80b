// What a retired instruction is to the performance counters, and what each event counts.
#pragma once

#include <cstdint>

#include "ds/cpu_model.h"

namespace vtrace::ds {

/// Properties of one retired instruction, as bits. Those below `taken` follow from the instruction alone.
using InstructionEvents = uint16_t;
namespace Retired {
inline constexpr InstructionEvents branch = 1 << 0, // of any kind, taken or not
    conditional = 1 << 1,                           // Jcc, LOOPcc, JrCXZ
    near_call = 1 << 2, near_return = 1 << 3,
    indirect = 1 << 4, // near JMP or CALL through a register or memory
    far = 1 << 5,      // far JMP, CALL, RET, INT n, IRET, SYSCALL and the like
    load = 1 << 6, store = 1 << 7,
    taken = 1 << 8,        // a branch that was taken
    mispredicted = 1 << 9; // a branch that the predictor (ds/predictor.h) had wrong
}

/// Which instructions an event counts: those with all of `required` and none of `forbidden`.
struct Event {
    InstructionEvents required = 0, forbidden = 0;
    bool modelled = false; // else it counts nothing
    bool precise_load = false;  // its PEBS records have a data address, that of a load
    bool precise_store = false; // of a store
    bool load_latency = false;  // counts loads whose latency is MSR_PEBS_LD_LAT_THRESHOLD or more

    constexpr bool matches(InstructionEvents events) const {
        return (events & required) == required && !(events & forbidden);
    }
};

/// The event of IA32_PERFEVTSELx's low 16 bits (event select, unit mask) on this family.
Event find_event(EventFamily family, uint16_t select);

/// All cycles, all instructions: a cycle is a retired instruction (docs/debug-store.md).
inline constexpr Event every_instruction = {.modelled = true};

/// Every load takes that long, in cycles: it hits the first-level cache.
inline constexpr uint64_t load_latency_cycles = 5;

} // namespace vtrace::ds
