#include "cli/guest_symbols.h"

#include <algorithm>
#include <fstream>
#include <iterator>

#include <sys/mman.h>

#include "decode/elf_symbols.h"
#include "decode/kallsyms.h"

namespace vtrace::cli {
namespace {

// Where x86-64 Linux maps its image, whatever its KASLR offset (Documentation/arch/x86/x86_64/mm.rst).
constexpr Gva image_start = 0xffff'ffff'8000'0000, image_end = 0xffff'ffff'c000'0000;

/// Adds a page, merged with the one before it where they are adjacent.
void add_page(std::vector<RamRange>& ranges, Gpa gpa, const uint8_t* host) {
    if (!ranges.empty() && ranges.back().gpa + ranges.back().bytes.size() == gpa &&
        ranges.back().bytes.data() + ranges.back().bytes.size() == host)
        ranges.back().bytes = {ranges.back().bytes.data(), ranges.back().bytes.size() + page_size};
    else
        ranges.push_back({gpa, {host, page_size}});
}

/// The kernel's image as the first processor's page tables map it; empty where they do not.
std::vector<RamRange> mapped_image(Machine& machine) {
    std::vector<RamRange> ranges;
    for (Gva address = image_start; address < image_end; address += page_size)
        if (auto gpa = machine.vcpu(0).translate(address))
            if (const uint8_t* host = machine.memory().at(*gpa, page_size))
                add_page(ranges, *gpa, host);
    return ranges;
}

/// Memory that has ever been touched: the rest of a large guest would be read for nothing, and take host memory.
void add_touched(std::vector<RamRange>& ranges, GuestMemory& memory, Gpa start, uint64_t size) {
    constexpr uint64_t step = 1ull << 30;
    std::vector<unsigned char> resident(step / page_size);
    for (uint64_t done = 0; done < size; done += step) {
        const uint64_t part = std::min(step, size - done);
        uint8_t* host = memory.at(start + done, part);
        if (!host || mincore(host, part, resident.data()) != 0)
            continue;
        for (uint64_t page = 0; page < part / page_size; ++page)
            if (resident[page] & 1)
                add_page(ranges, start + done + page * page_size, host + page * page_size);
    }
}

std::vector<uint8_t> bytes_of(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

} // namespace

std::vector<TraceSymbol> guest_symbols(Machine& machine, const std::string& kernel_path, std::string& why_none) {
    MemoryView view;
    view.translate = [&](uint64_t linear) { return machine.vcpu(0).translate(linear); };
    view.ram = mapped_image(machine);
    if (!view.ram.empty())
        if (auto symbols = find_kallsyms(view))
            return std::move(*symbols);
    // Early in the boot, or in user space under page-table isolation.
    GuestMemory& memory = machine.memory();
    view.ram.clear();
    add_touched(view.ram, memory, 0, memory.low_size());
    add_touched(view.ram, memory, GuestMemory::high_start, memory.high_size());
    auto symbols = find_kallsyms(view);
    if (symbols)
        return std::move(*symbols);
    why_none = symbols.error().message;
    const bool elf = machine.guest().kind != KernelKind::linux_payload &&
                     machine.guest().kind != KernelKind::linux_as_shipped;
    if (elf)
        if (auto from_file = elf_symbols(bytes_of(kernel_path)))
            return std::move(*from_file);
    return {};
}

} // namespace vtrace::cli
