// SymbolTable: from addresses to function names.
//
// Only code symbols answer: data, per-CPU and absolute symbols bound their neighbours but never match. An address that
// no function covers gets no made-up name.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "decode/trace_format.h"

namespace vtrace {

/// A function of the guest, under the best of its names; control characters in names are replaced.
struct Function {
    uint64_t address = 0;
    uint64_t size = 0; // bytes, up to the next symbol of whatever kind where the symbol itself does not say
    std::string name;
    std::string module; // empty: the kernel itself
};

/// Of two names at one address, which says more? The rule, first difference decides:
///  1. neither a compiler's preamble (__pfx_*, __cfi_*) nor a mark of the linker script (_text, *_start, *_end ...);
///  2. global or weak over local;
///  3. fewer leading underscores (memcpy over __memcpy);
///  4. shorter (__x64_sys_getpid over __ia32_sys_getpid), then first in the alphabet.
bool better_name(const TraceSymbol& a, const TraceSymbol& b);

/// Immutable once made: any thread may use it.
class SymbolTable {
  public:
    using Index = uint32_t;

    SymbolTable() = default;
    explicit SymbolTable(std::vector<TraceSymbol> symbols);

    /// The function that covers `address`, as an index into functions().
    std::optional<Index> find(uint64_t address) const;
    /// The function of that name. Of several with one name (static functions), the lowest address.
    std::optional<Index> find_name(std::string_view name) const;
    /// All functions of that name, ascending by address.
    std::vector<Index> find_all(std::string_view name) const;

    const std::vector<Function>& functions() const { return functions_; }
    const Function& operator[](Index index) const { return functions_[index]; }
    bool empty() const { return functions_.empty(); }

    /// "name+0x1f", "name" at its start, " [module]" behind where there is one; "0xffff..." where nothing covers it.
    std::string describe(uint64_t address) const;

  private:
    std::vector<Function> functions_; // ascending by address, no two at one
};

} // namespace vtrace
