#include "decode/symbols.h"

#include <algorithm>
#include <array>
#include <limits>
#include <tuple>

#include <fmt/format.h>

#include "decode/text.h"

namespace vtrace {
namespace {

bool is_code(char type) {
    return type == 't' || type == 'T' || type == 'w' || type == 'W';
}

/// Absolute and undefined symbols are no places in memory: they bound nothing either.
bool is_place(char type) {
    return type != 'A' && type != 'a' && type != 'U' && type != 'u' && type != '?';
}

/// 0: a function's own name; 1: a mark that the linker script sets; 2: what compilers put before a function.
unsigned artificial(std::string_view name) {
    constexpr std::array<std::string_view, 5> marks = {"_text", "_stext", "_etext", "_sinittext", "_einittext"};
    if (name.starts_with("__pfx_") || name.starts_with("__cfi_"))
        return 2;
    bool mark = std::find(marks.begin(), marks.end(), name) != marks.end() || name.ends_with("_start") ||
                name.ends_with("_end") || name.ends_with("_begin");
    return mark ? 1 : 0;
}

auto rank(const TraceSymbol& symbol) {
    size_t underscores = std::min(symbol.name.find_first_not_of('_'), symbol.name.size());
    bool local = symbol.type == 't' || symbol.type == 'w';
    return std::tuple(artificial(symbol.name), local, underscores, symbol.name.size(), std::string_view(symbol.name));
}

} // namespace

bool better_name(const TraceSymbol& a, const TraceSymbol& b) {
    return rank(a) < rank(b);
}

SymbolTable::SymbolTable(std::vector<TraceSymbol> symbols) {
    std::erase_if(symbols, [](const TraceSymbol& symbol) { return !is_place(symbol.type) || symbol.name.empty(); });
    std::stable_sort(symbols.begin(), symbols.end(),
                     [](const TraceSymbol& a, const TraceSymbol& b) { return a.address < b.address; });
    // The function that the code before here belongs to ends here at the latest.
    bool open = false;
    for (size_t begin = 0; begin < symbols.size();) {
        uint64_t address = symbols[begin].address;
        TraceSymbol* best = nullptr;
        size_t end = begin;
        for (; end < symbols.size() && symbols[end].address == address; ++end)
            if (is_code(symbols[end].type) && (!best || better_name(symbols[end], *best)))
                best = &symbols[end];
        begin = end;
        if (open && (functions_.back().size == 0 || functions_.back().size > address - functions_.back().address))
            functions_.back().size = address - functions_.back().address;
        open = best != nullptr;
        if (best)
            functions_.push_back({address, best->size, printable(best->name), printable(best->module)});
    }
    // Nothing bounds the last one: it can't be larger than what is left of its page.
    if (open && functions_.back().size == 0)
        functions_.back().size = 4096 - functions_.back().address % 4096;
}

std::optional<SymbolTable::Index> SymbolTable::find(uint64_t address) const {
    auto after = std::upper_bound(functions_.begin(), functions_.end(), address,
                                  [](uint64_t value, const Function& function) { return value < function.address; });
    if (after == functions_.begin())
        return std::nullopt;
    auto function = after - 1;
    if (address - function->address >= function->size)
        return std::nullopt;
    return static_cast<Index>(function - functions_.begin());
}

std::optional<SymbolTable::Index> SymbolTable::find_name(std::string_view name) const {
    auto function = std::find_if(functions_.begin(), functions_.end(),
                                 [&](const Function& candidate) { return candidate.name == name; });
    if (function == functions_.end())
        return std::nullopt;
    return static_cast<Index>(function - functions_.begin());
}

std::vector<SymbolTable::Index> SymbolTable::find_all(std::string_view name) const {
    std::vector<Index> found;
    for (Index index = 0; index < functions_.size(); ++index)
        if (functions_[index].name == name)
            found.push_back(index);
    return found;
}

std::string SymbolTable::describe(uint64_t address) const {
    auto index = find(address);
    if (!index)
        return fmt::format("{:#x}", address);
    const Function& function = functions_[*index];
    std::string text = function.name;
    if (address != function.address)
        text += fmt::format("+{:#x}", address - function.address);
    if (!function.module.empty())
        text += " [" + function.module + "]";
    return text;
}

} // namespace vtrace
