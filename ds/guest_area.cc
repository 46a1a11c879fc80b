#include "ds/guest_area.h"

#include <array>
#include <cstring>

#include "ds/msr.h"

namespace vtrace::ds {
namespace {

constexpr unsigned fields_of_buffer = 4; // base, index, absolute maximum, interrupt threshold
constexpr unsigned index_field = 1;
constexpr unsigned reset_field = 2 * fields_of_buffer;
/// Adaptive PEBS: the fixed counters' reset values follow those of eight general-purpose ones.
constexpr unsigned fixed_reset_slot = 8;

} // namespace

unsigned GuestArea::first_field(Part part) { return part == Part::bts ? 0 : fields_of_buffer; }

uint64_t GuestArea::field_address(unsigned number) const {
    const uint64_t address = address_ + number * field_;
    return field_ == 4 ? static_cast<uint32_t>(address) : address;
}

bool GuestArea::read_buffer(Part part, Buffer& buffer) {
    const unsigned first = first_field(part);
    if (field_ == 8)
        return memory_.read(field_address(first), &buffer, sizeof buffer);
    std::array<uint32_t, fields_of_buffer> narrow;
    if (!memory_.read(field_address(first), narrow.data(), sizeof narrow))
        return false;
    buffer = {narrow[0], narrow[1], narrow[2], narrow[3]};
    return true;
}

bool GuestArea::write_index(Part part, uint64_t index) {
    return memory_.write(field_address(first_field(part) + index_field), &index, field_);
}

template <size_t Size>
Stored GuestArea::store(Part part, const uint8_t* record, bool circular, size_t size) {
    Buffer buffer;
    uint8_t* fields = field_ == 8 ? memory_.fast(field_address(first_field(part)), sizeof buffer) : nullptr;
    if (fields)
        std::memcpy(&buffer, fields, sizeof buffer);
    else if (!read_buffer(part, buffer))
        return Stored::unusable;
    // A record fits iff it ends at or before the absolute maximum: right for both ways to set that, the manual's ("a
    // multiple of the record size plus 1") and that of operating systems, which set it to the exact end.
    const auto fits = [&](uint64_t at) {
        return at >= buffer.base && at <= buffer.absolute_maximum && buffer.absolute_maximum - at >= size;
    };
    uint64_t at = buffer.index;
    if (part == Part::pebs)
        pebs_index_wild_ = at < buffer.base || at > buffer.absolute_maximum;
    if (!fits(at)) {
        if (!circular)
            return at >= buffer.base && at <= buffer.absolute_maximum ? Stored::full : Stored::unusable;
        at = buffer.base;
        if (!fits(at))
            return Stored::unusable;
    }
    const uint64_t after = at + size;
    const uint64_t index = circular && !fits(after) ? buffer.base : after;
    uint8_t* place = fields ? memory_.fast(at, size) : nullptr;
    if (place) {
        std::memcpy(fields + index_field * sizeof index, &index, sizeof index);
        std::memcpy(place, record, Size ? Size : size);
    } else {
        // The index goes first: where it can't be written, no record is either. Where the record can't, the index is put
        // back.
        if (!write_index(part, index))
            return Stored::unusable;
        if (!memory_.write(at, record, size)) {
            write_index(part, buffer.index);
            return Stored::unusable;
        }
    }
    return after >= buffer.threshold ? Stored::threshold : Stored::written;
}

Stored GuestArea::store_branch(uint64_t from, uint64_t to, uint64_t flags, bool circular) {
    Stored stored;
    if (field_ == 8) {
        const std::array<uint64_t, 3> wide = {from, to, flags};
        stored = store<sizeof wide>(Part::bts, reinterpret_cast<const uint8_t*>(wide.data()), circular);
    } else {
        const std::array<uint32_t, 3> narrow = {static_cast<uint32_t>(from), static_cast<uint32_t>(to),
                                                static_cast<uint32_t>(flags)};
        stored = store<sizeof narrow>(Part::bts, reinterpret_cast<const uint8_t*>(narrow.data()), circular);
    }
    ++(stored <= Stored::threshold ? branches_.written : branches_.dropped);
    return stored;
}

Stored GuestArea::store_pebs(std::span<const uint8_t> record) {
    const Stored stored = store<0>(Part::pebs, record.data(), false, record.size());
    ++(stored <= Stored::threshold ? pebs_.written : pebs_.dropped);
    return stored;
}

bool GuestArea::read_reset(unsigned global_status_bit, uint64_t& value) {
    const unsigned slot = global_status_bit >= msr::first_fixed ? fixed_reset_slot + global_status_bit - msr::first_fixed
                                                                : global_status_bit;
    // Eight bytes each in both layouts.
    const uint64_t address = field_address(reset_field) + slot * sizeof value;
    return memory_.read(address, &value, sizeof value);
}

} // namespace vtrace::ds
