#include "vmm/boot/placement.h"

#include <algorithm>
#include <limits>

namespace vtrace {

std::string size_text(uint64_t bytes) {
    constexpr uint64_t kib = 1 << 10, mib = 1 << 20, gib = 1 << 30;
    auto up = [bytes](uint64_t unit) { return bytes / unit + (bytes % unit != 0); };
    if (bytes < kib)
        return fmt::format("{} bytes", bytes);
    if (bytes < mib)
        return fmt::format("{} KiB", up(kib));
    if (bytes < 16 * gib)
        return fmt::format("{} MiB", up(mib));
    return fmt::format("{} GiB", up(gib));
}

std::vector<MemoryMapEntry> memory_map(const GuestMemory& memory) {
    using Entry = MemoryMapEntry;
    std::vector<Entry> map = {{0, base_memory_end, Entry::ram},
                              {base_memory_end, extended_memory_start - base_memory_end, Entry::reserved}};
    if (memory.low_size() > extended_memory_start)
        map.push_back({extended_memory_start, memory.low_size() - extended_memory_start, Entry::ram});
    if (memory.high_size() != 0)
        map.push_back({GuestMemory::high_start, memory.high_size(), Entry::ram});
    return map;
}

Placement::Placement(const GuestMemory& memory) : memory_(memory) {
    take({0, bios_data_end}, "the BIOS data area");
    take({base_memory_end, extended_memory_start}, "the reserved area below 1 MiB");
}

void Placement::take(MemoryRange range, std::string what) {
    auto after = std::upper_bound(taken_.begin(), taken_.end(), range.start,
                                  [](Gpa start, const Taken& taken) { return start < taken.range.start; });
    taken_.insert(after, {range, std::move(what)});
}

Result<> Placement::claim(Gpa start, uint64_t size, std::string what) {
    if (size == 0)
        return {};
    if (size > std::numeric_limits<Gpa>::max() - start)
        return fail("{} ({} at {:#x}) wraps around the end of the address space", what, size_text(size), start);
    const Gpa end = start + size;
    if (!memory_.at(start, size)) {
        if (end <= GuestMemory::pci_hole_start)
            return fail("{} reaches up to {:#x}, but the guest has {} of memory: give it more than {}", what, end,
                        size_text(memory_.size()), size_text(end));
        return fail("{} ({} at {:#x}) lies outside of guest memory ({})", what, size_text(size), start,
                    size_text(memory_.size()));
    }
    // The first range that ends after our start is the only one to look at: those behind it start even later.
    auto next = std::lower_bound(taken_.begin(), taken_.end(), start,
                                 [](const Taken& taken, Gpa gpa) { return taken.range.end <= gpa; });
    if (next != taken_.end() && next->range.start < end)
        return fail("{} ({} at {:#x}) overlaps {} ({:#x}-{:#x})", what, size_text(size), start, next->what,
                    next->range.start, next->range.end);
    take({start, end}, std::move(what));
    return {};
}

std::vector<MemoryRange> Placement::gaps(MemoryRange within) const {
    std::vector<MemoryRange> free;
    const MemoryRange ram[] = {{0, memory_.low_size()},
                               {GuestMemory::high_start, GuestMemory::high_start + memory_.high_size()}};
    for (const MemoryRange& block : ram) {
        Gpa cursor = std::max(block.start, within.start);
        const Gpa end = std::min(block.end, within.end);
        for (const Taken& taken : taken_) {
            if (taken.range.end <= cursor)
                continue;
            if (taken.range.start >= end)
                break;
            if (taken.range.start > cursor)
                free.push_back({cursor, taken.range.start});
            cursor = taken.range.end;
        }
        if (cursor < end)
            free.push_back({cursor, end});
    }
    return free;
}

Result<Gpa> Placement::place_low(uint64_t size, uint64_t alignment, MemoryRange within, std::string what) {
    for (const MemoryRange& gap : gaps(within)) {
        const Gpa start = (gap.start + alignment - 1) & ~(alignment - 1);
        if (start < gap.end && size <= gap.end - start) {
            take({start, start + size}, std::move(what));
            return start;
        }
    }
    return fail("{} ({}) finds no room in guest memory ({}): give it more", what, size_text(size),
                size_text(memory_.size()));
}

Result<Gpa> Placement::place_high(uint64_t size, uint64_t alignment, MemoryRange within, std::string what) {
    const auto free = gaps(within);
    for (auto gap = free.rbegin(); gap != free.rend(); ++gap) {
        if (size > gap->size())
            continue;
        const Gpa start = (gap->end - size) & ~(alignment - 1);
        if (start >= gap->start) {
            take({start, start + size}, std::move(what));
            return start;
        }
    }
    return fail("{} ({}) finds no room in guest memory ({}): give it more", what, size_text(size),
                size_text(memory_.size()));
}

} // namespace vtrace
