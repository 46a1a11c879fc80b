// lcov's tracefile: how often each line and each function ran, for genhtml.
#include <algorithm>
#include <map>

#include "decode/export/blocks.h"
#include "decode/export/source_lines.h"

namespace vtrace {
namespace {

/// How often each address was executed: blocks that overlap add up.
class ExecutionCounts {
  public:
    explicit ExecutionCounts(const std::vector<CodeBlock>& blocks) {
        std::map<uint64_t, int64_t> steps;
        for (const CodeBlock& block : blocks) {
            steps[block.start] += static_cast<int64_t>(block.count);
            steps[block.end] -= static_cast<int64_t>(block.count);
        }
        int64_t count = 0;
        for (const auto& [address, step] : steps)
            counts_.emplace_back(address, static_cast<uint64_t>(count += step));
    }
    uint64_t at(uint64_t address) const {
        const auto after = std::upper_bound(counts_.begin(), counts_.end(), std::pair(address, UINT64_MAX));
        return after == counts_.begin() ? 0 : (after - 1)->second;
    }

  private:
    std::vector<std::pair<uint64_t, uint64_t>> counts_; // from this address on
};

struct FileCoverage {
    std::map<uint32_t, uint64_t> lines;
    std::vector<const SourceLines::Function*> functions;
};

/// What the guest added to the file's addresses (KASLR): told by a function that both have.
uint64_t load_bias(const SourceLines& lines, const SymbolTable& symbols) {
    for (const SourceLines::Function& function : lines.functions)
        if (upper_half(function.address) && (function.name == "start_kernel" || function.name == "do_one_initcall"))
            if (auto index = symbols.find_name(function.name))
                return symbols[*index].address - function.address;
    return 0;
}

} // namespace

Result<ExportNotes> export_lcov(const ExportSource& source, const std::string& elf, ExportSink& sink) {
    auto lines = SourceLines::read(elf);
    if (!lines)
        return Unexpected(std::move(lines.error()));
    ExportNotes notes;
    uint64_t branches = 0;
    const ExecutionCounts counts(count_blocks(source, notes, branches));
    const uint64_t bias = load_bias(*lines, source.symbols);

    std::vector<FileCoverage> files(lines->files.size());
    for (size_t i = 0; i < lines->rows.size(); ++i) {
        const SourceLines::Row& row = lines->rows[i];
        if (row.line == 0 || (i + 1 < lines->rows.size() && lines->rows[i + 1].address == row.address))
            continue; // no line, or no code
        // A line may lie in several places: it ran as often as the busiest of them.
        uint64_t& count = files[row.file].lines[row.line];
        count = std::max(count, counts.at(row.address + bias));
    }
    for (const SourceLines::Function& function : lines->functions)
        files[function.file].functions.push_back(&function);

    bool any = false;
    for (size_t i = 0; i < files.size(); ++i) {
        const FileCoverage& file = files[i];
        if (file.lines.empty() || sink.closed())
            continue;
        std::string text = fmt::format("TN:\nSF:{}\n", lines->files[i]);
        // genhtml wants one entry a name: of inline functions' several bodies, the sum.
        std::map<std::string, std::pair<uint32_t, uint64_t>> functions;
        for (const auto* function : file.functions) {
            auto [known, fresh] = functions.try_emplace(function->name, function->line, 0);
            known->second.second += counts.at(function->address + bias);
        }
        size_t hit = 0;
        for (const auto& [name, function] : functions)
            text += fmt::format("FN:{},{}\n", function.first, name);
        for (const auto& [name, function] : functions) {
            text += fmt::format("FNDA:{},{}\n", function.second, name);
            hit += function.second != 0;
        }
        text += fmt::format("FNF:{}\nFNH:{}\n", functions.size(), hit);
        hit = 0;
        for (const auto& [line, count] : file.lines) {
            text += fmt::format("DA:{},{}\n", line, count);
            hit += count != 0;
        }
        any = any || hit != 0;
        sink.write(text + fmt::format("LF:{}\nLH:{}\nend_of_record\n", file.lines.size(), hit));
    }
    if (!any)
        notes.push_back(fmt::format("no code of '{}' ran: is it the program that was recorded, and linked to the "
                                    "addresses at which it ran?",
                                    elf));
    return notes;
}

} // namespace vtrace
