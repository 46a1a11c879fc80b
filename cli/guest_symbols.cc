#include "cli/guest_symbols.h"

#include "decode/kallsyms.h"

namespace vtrace::cli {

std::vector<TraceSymbol> guest_symbols(Machine& machine, std::string& why_none) {
    const GuestMemory& memory = machine.memory();
    MemoryView view;
    view.ram.push_back({0, {memory.at(0, memory.low_size()), memory.low_size()}});
    if (memory.high_size() > 0)
        view.ram.push_back(
            {GuestMemory::high_start, {memory.at(GuestMemory::high_start, memory.high_size()), memory.high_size()}});
    view.translate = [&](uint64_t linear) { return machine.vcpu(0).translate(linear); };
    auto symbols = find_kallsyms(view);
    if (!symbols) {
        why_none = symbols.error().message;
        return {};
    }
    return std::move(*symbols);
}

} // namespace vtrace::cli
