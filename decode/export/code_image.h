// CodeImage: the code that a trace holds, as an ELF file from which other tools read instructions and symbols.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "ds/result.h"

namespace vtrace {

/// One address space's code. Not thread-safe. Memory: 4 KiB a page of code executed.
class CodeImage {
  public:
    static constexpr uint64_t page_bytes = 4096;

    struct Symbol {
        uint64_t address, size;
        std::string name;
    };
    struct Section {
        uint64_t start, size; // page-aligned
        uint64_t offset = 0;  // in the file that write() makes
    };

    /// Code at an address. What was added first stays: code that changed later is not in the image.
    void add(uint64_t address, std::span<const uint8_t> code);
    bool empty() const { return pages_.empty(); }
    /// Runs of pages, ascending, those less than `gap` bytes apart joined. Zeros lie between.
    std::vector<Section> sections(uint64_t gap) const;

    /// Writes an ET_EXEC ELF64 file for x86-64: these sections, named .text, .text.1 ..., mapped where they run, and
    /// those of the symbols that lie in them. Holes of the file stay holes. Errors: cannot be written.
    Result<> write(const std::string& path, std::vector<Section>& sections, const std::vector<Symbol>& symbols) const;

  private:
    std::map<uint64_t, std::array<uint8_t, page_bytes>> pages_; // by page address
};

} // namespace vtrace
