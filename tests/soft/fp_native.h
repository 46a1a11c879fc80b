// The host's own processor as the judge: executes an instruction as it is, with all registers given.
#pragma once

#include <array>
#include <cstdint>
#include <span>

#include "vmm/cpu_state.h"

namespace vtrace::soft {

struct NativeState {
    std::array<uint64_t, 16> gpr{}; // RSP is neither loaded nor stored
    uint64_t rflags = 0;
    FpuImage fpu;
};

/// Signal that ended it (SIGFPE, SIGSEGV, SIGILL), or 0. After a signal only `fpu` is updated, to what the handler saw.
int run_native(NativeState& state, std::span<const uint8_t> bytes);

} // namespace vtrace::soft
