// drcov, version 2: DynamoRIO's coverage file, which Lighthouse, Cartographer and others lay over a disassembly.
//
// A text header and a table of modules, then eight bytes a block: offset in its module, size, module.
#include <algorithm>
#include <tuple>

#include "decode/export/blocks.h"

namespace vtrace {
namespace {

constexpr uint64_t page = 4096;
constexpr uint64_t max_gap = 1ull << 28; // code farther apart is of two modules, so that offsets fit into 32 bits
constexpr uint64_t max_module = 1ull << 31;
constexpr size_t max_modules = 65535;
constexpr uint64_t max_size = 65535; // of a block

struct Module {
    uint64_t start, end;
    std::string name;
};

struct Entry { // as in the file
    uint32_t offset;
    uint16_t size, module;
};
static_assert(sizeof(Entry) == 8);

/// The kernel's own code, its modules' by name, each page table's user code.
std::string module_name(const CodeNames& names, const CodeBlock& block) {
    const CodeRange range = names.at(block.start, block.privilege);
    if (range.named())
        return block.privilege == Privilege::user ? "[program]" : names.module(range.id);
    if (block.privilege == Privilege::kernel)
        return "[kernel]";
    return fmt::format("[user {:#x}]", block.space);
}

/// Where a module begins: at its first symbol, if that lies near below the first block.
uint64_t base_of(const SymbolTable& symbols, const std::string& module, uint64_t first_block) {
    const std::string name = module == "vmlinux" ? "" : module;
    for (const Function& function : symbols.functions())
        if (function.module == name && function.address <= first_block && first_block - function.address < max_gap)
            return function.address;
    return first_block;
}

/// Blocks come in ascending order. Differences, not sums: kernels live at the end of the address space.
bool fits(const Module& module, const std::string& name, uint64_t start, uint64_t end) {
    return module.name == name && (start < module.end || start - module.end <= max_gap) &&
           end - module.start <= max_module;
}

} // namespace

Result<ExportNotes> export_drcov(const ExportSource& source, ExportSink& sink) {
    ExportNotes notes;
    uint64_t branches = 0;
    const CodeNames names(source.symbols, source.user_symbols);
    struct Placed {
        std::string module;
        uint64_t start, end;
        bool operator<(const Placed& other) const {
            return std::tie(module, start, end) < std::tie(other.module, other.start, other.end);
        }
        bool operator==(const Placed&) const = default;
    };
    std::vector<Placed> placed;
    for (const CodeBlock& block : count_blocks(source, notes, branches))
        for (uint64_t start = block.start; start < block.end; start += max_size)
            placed.push_back({module_name(names, block), start, std::min(block.end, start + max_size)});
    std::sort(placed.begin(), placed.end());
    placed.erase(std::unique(placed.begin(), placed.end()), placed.end());

    std::vector<Module> modules;
    std::vector<Entry> entries;
    uint64_t left_out = 0;
    for (const Placed& block : placed) {
        if (modules.empty() || !fits(modules.back(), block.module, block.start, block.end)) {
            if (modules.size() == max_modules) {
                ++left_out;
                continue;
            }
            modules.push_back(
                {base_of(source.symbols, block.module, block.start) / page * page, block.end, block.module});
        }
        Module& module = modules.back();
        module.end = std::max(module.end, block.end + (page - block.end % page) % page);
        entries.push_back({static_cast<uint32_t>(block.start - module.start),
                           static_cast<uint16_t>(block.end - block.start), static_cast<uint16_t>(modules.size() - 1)});
    }
    if (left_out)
        notes.push_back(fmt::format("more than {} modules: {} blocks of others were left out", max_modules, left_out));

    sink.write(fmt::format("DRCOV VERSION: 2\nDRCOV FLAVOR: vtrace\nModule Table: version 2, count {}\n"
                           "Columns: id, base, end, entry, path\n",
                           modules.size()));
    for (size_t i = 0; i < modules.size(); ++i)
        sink.write(fmt::format("{:3}, {:#018x}, {:#018x}, {:#018x}, {}\n", i, modules[i].start, modules[i].end, 0,
                               modules[i].name));
    sink.write(fmt::format("BB Table: {} bbs\n", entries.size()));
    sink.write({reinterpret_cast<const char*>(entries.data()), entries.size() * sizeof(Entry)});
    return notes;
}

} // namespace vtrace
