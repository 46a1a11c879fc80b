// The symbols of an ELF file: for guests that carry no kallsyms.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "decode/trace_format.h"
#include "ds/result.h"

namespace vtrace {

/// Named functions, labels in code and data of the file's .symtab, ascending by address; addresses as the file has them.
/// `file` is hostile; the number of symbols is bounded by its size. Errors: no ELF file, or one without symbols.
Result<std::vector<TraceSymbol>> elf_symbols(std::span<const uint8_t> file);

} // namespace vtrace
