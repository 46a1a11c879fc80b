// Which instruction set extensions the software engine can execute on this host.
#pragma once

#include "vmm/soft/cpuid.h"

namespace vtrace::soft {

/// False: the engine executes the extension by the host's own instructions and the host lacks them. decode_fp() then
/// makes the instructions #UD; a CPUID model should not offer them.
bool host_supports(Feature feature);

} // namespace vtrace::soft
