// SourceLines: which line of which source file an address of an ELF file belongs to, by its DWARF.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "ds/result.h"

namespace vtrace {

/// Immutable once read.
struct SourceLines {
    /// Code from `address` on belongs to this line, up to the next row.
    struct Row {
        uint64_t address = 0;
        uint32_t file = 0; // index into files; of no meaning where `line` is 0
        uint32_t line = 0; // from 1; 0: no line, or the end of a stretch of code
    };
    struct Function {
        uint64_t address = 0;
        std::string name;
        uint32_t file = 0, line = 0; // where it is declared
    };
    std::vector<std::string> files;  // absolute where DWARF knows the directory
    std::vector<Row> rows;           // ascending by address
    std::vector<Function> functions; // with code of their own, ascending by address

    /// Errors: not readable, no ELF file, no DWARF in it.
    static Result<SourceLines> read(const std::string& path);
};

} // namespace vtrace
