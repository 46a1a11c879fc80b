// Reading little-endian structures out of bytes that nobody has checked, and making bytes of structures.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <type_traits>

namespace vtrace {

static_assert(std::endian::native == std::endian::little, "the host is x86-64");

/// The T at `offset`, or nullopt when it doesn't lie wholly inside.
template <class T>
requires std::is_trivially_copyable_v<T> std::optional<T> load_le(std::span<const uint8_t> bytes, uint64_t offset) {
    if (offset > bytes.size() || sizeof(T) > bytes.size() - offset)
        return std::nullopt;
    T value;
    std::memcpy(&value, bytes.data() + offset, sizeof value);
    return value;
}

/// [offset, offset+length) of `bytes`, or nullopt when any of it lies outside.
inline std::optional<std::span<const uint8_t>> slice(std::span<const uint8_t> bytes, uint64_t offset, uint64_t length) {
    if (offset > bytes.size() || length > bytes.size() - offset)
        return std::nullopt;
    return bytes.subspan(offset, length);
}

/// An object's own bytes.
template <class T>
requires std::is_trivially_copyable_v<T> std::span<const uint8_t> bytes_of(const T& object) {
    return {reinterpret_cast<const uint8_t*>(&object), sizeof object};
}

} // namespace vtrace
