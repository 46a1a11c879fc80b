#include "vmm/bus.h"

#include <algorithm>

namespace vtrace {

Result<> Bus::attach(uint64_t start, uint64_t length, Device& device, std::string name) {
    for (const Range& range : ranges_)
        if (start < range.start + range.length && range.start < start + length)
            return fail("cannot attach {} at {:#x}+{:#x}: {} is there", name, start, length, range.name);
    Range range{start, length, &device, std::move(name)};
    auto place = std::upper_bound(ranges_.begin(), ranges_.end(), start,
                                  [](uint64_t address, const Range& other) { return address < other.start; });
    ranges_.insert(place, std::move(range));
    return {};
}

Bus::Range* Bus::find(uint64_t address, unsigned size) {
    auto after = std::upper_bound(ranges_.begin(), ranges_.end(), address,
                                  [](uint64_t value, const Range& range) { return value < range.start; });
    if (after == ranges_.begin())
        return nullptr;
    Range& range = *--after;
    return address - range.start + size <= range.length ? &range : nullptr;
}

uint64_t Bus::read(uint64_t address, unsigned size) {
    if (Range* range = find(address, size))
        return range->device->read(address - range->start, size);
    ++unclaimed_;
    return ~0ull;
}

void Bus::write(uint64_t address, unsigned size, uint64_t value) {
    if (Range* range = find(address, size))
        range->device->write(address - range->start, size, value);
    else
        ++unclaimed_;
}

} // namespace vtrace
