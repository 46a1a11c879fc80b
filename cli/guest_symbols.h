// The symbols of the guest that has just run: from its own memory, or from its ELF file.
#pragma once

#include <vector>

#include "decode/trace_format.h"
#include "vmm/machine.h"

namespace vtrace::cli {

/// A Linux kernel's own kallsyms, right under any KASLR; else the symbols of the kernel's ELF file, if it is one. `why_none`:
/// one line, where there are none.
std::vector<TraceSymbol> guest_symbols(Machine& machine, const std::string& kernel_path, std::string& why_none);

} // namespace vtrace::cli
