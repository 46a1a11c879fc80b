// What an instruction is to performance counters (ds/events.h), and where its data lies.
#pragma once

#include <cstdint>

#include <Zydis/Zydis.h>

#include "ds/events.h"

namespace vtrace::soft {

struct Cpu;

/// `operands`: all of them, hidden ones too.
ds::InstructionEvents instruction_events(const ZydisDecodedInstruction& instruction, const ZydisDecodedOperand* operands);

/// Linear addresses; 0: it does no such access. Where there are several of a kind, the first.
struct DataAddresses {
    uint64_t load = 0, store = 0;
};
/// Of the instruction at the current boundary, before it is executed.
DataAddresses data_addresses(const Cpu& cpu);

} // namespace vtrace::soft
