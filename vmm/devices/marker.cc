#include "vmm/devices/marker.h"

namespace vtrace {

Marker::Marker(MarkerHandler handler) : handler_(std::move(handler)) {}

uint64_t Marker::Register::read(uint64_t offset, unsigned size) {
    uint64_t value = 0;
    for (unsigned i = 0; i < size; ++i)
        if (const uint64_t byte = offset + i - offset_; byte < sizeof magic)
            value |= uint64_t{magic >> 8 * byte & 0xff} << 8 * i;
    return value;
}

void Marker::Register::write(uint64_t offset, unsigned size, uint64_t value) {
    if (offset == offset_ && size <= sizeof(uint32_t) && handler_)
        handler_(static_cast<uint32_t>(value));
}

} // namespace vtrace
