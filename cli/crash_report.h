// What a person wants to see of a guest that crashed: its registers, and how it came there.
#pragma once

#include <string>

#include "vmm/cpu_state.h"
#include "vmm/machine.h"

namespace vtrace::cli {

/// All registers, as lines.
std::string registers_text(const CpuState& state);

/// The bytes at a vCPU's RIP, as many as an instruction can have, in hexadecimal: "0f 0b ..."; fewer or none where they
/// cannot be read.
std::string code_text(Machine& machine, unsigned vcpu);

/// The last branches of a vCPU in a finished trace, with symbols, as lines; or one line that says why there are none.
std::string last_branches_text(const std::string& trace_path, unsigned vcpu);

} // namespace vtrace::cli
