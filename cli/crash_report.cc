#include "cli/crash_report.h"

#include <fmt/format.h>

#include "decode/branch_line.h"
#include "decode/symbols.h"
#include "decode/trace_reader.h"

namespace vtrace::cli {
namespace {

constexpr unsigned branches_shown = 32;

std::string segment_text(const char* name, const Segment& segment) {
    return fmt::format("{:<4} {:04x}  base {:016x}  limit {:08x}  attributes {:04x}\n", name, segment.selector,
                       segment.base, segment.limit, segment.attributes);
}

} // namespace

std::string registers_text(const CpuState& state) {
    static constexpr const char* names[] = {"RAX", "RCX", "RDX", "RBX", "RSP", "RBP", "RSI", "RDI",
                                            "R8",  "R9",  "R10", "R11", "R12", "R13", "R14", "R15"};
    static constexpr const char* segment_names[] = {"ES", "CS", "SS", "DS", "FS", "GS"};
    std::string text = fmt::format("RIP {:016x}  RFLAGS {:08x}  CPL {}\n", state.rip, state.rflags, state.cpl());
    for (unsigned i = 0; i < 16; ++i)
        text += fmt::format("{:<3} {:016x}{}", names[i], state.gpr[i], i % 4 == 3 ? "\n" : "  ");
    text += fmt::format("CR0 {:08x}  CR2 {:016x}  CR3 {:016x}  CR4 {:08x}  EFER {:04x}\n", state.cr0, state.cr2,
                        state.cr3, state.cr4, state.efer);
    for (unsigned i = 0; i < 6; ++i)
        text += segment_text(segment_names[i], state.segments[i]);
    text += segment_text("TR", state.tr);
    text += fmt::format("GDT {:016x}+{:04x}  IDT {:016x}+{:04x}\n", state.gdtr.base, state.gdtr.limit, state.idtr.base,
                        state.idtr.limit);
    return text;
}

std::string code_text(Machine& machine, unsigned vcpu) {
    constexpr unsigned longest_instruction = 15; // SDM vol. 2, 2.3.11
    const CpuState state = machine.vcpu(vcpu).state();
    const bool long_mode = state.segments[CS].attributes & SegAttr::l;
    std::string text;
    for (unsigned i = 0; i < longest_instruction; ++i) {
        const Gva address = long_mode ? state.rip + i : static_cast<uint32_t>(state.segments[CS].base + state.rip + i);
        const auto gpa = machine.vcpu(vcpu).translate(address);
        const uint8_t* host = gpa ? machine.memory().at(*gpa) : nullptr;
        if (!host)
            break;
        text += fmt::format("{}{:02x}", text.empty() ? "" : " ", *host);
    }
    return text;
}

std::string last_branches_text(const std::string& trace_path, unsigned vcpu) {
    auto reader = TraceReader::open(trace_path);
    if (!reader)
        return reader.error().message + "\n";
    auto symbols = reader->symbols();
    const SymbolTable table(symbols ? std::move(*symbols) : std::vector<TraceSymbol>());
    auto lines = last_branches(*reader, table, vcpu, branches_shown);
    if (!lines)
        return lines.error().message + "\n";
    if (lines->empty())
        return "No branches were recorded.\n";
    std::string text = fmt::format("The last {} branches:\n", lines->size());
    for (const std::string& line : *lines)
        text += line + "\n";
    return text;
}

} // namespace vtrace::cli
