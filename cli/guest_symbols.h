// The symbols of the guest that has just run: from its own memory, or from its ELF file.
#pragma once

#include <vector>

#include "decode/trace_format.h"
#include "vmm/machine.h"

namespace vtrace::cli {

/// A Linux kernel's own kallsyms, right under any KASLR; none for a guest that isn't Linux. `why_none`: one line.
std::vector<TraceSymbol> guest_symbols(Machine& machine, std::string& why_none);

} // namespace vtrace::cli
