// Byte streams of the trace file's payloads: LEB128 varints, zigzag for signed differences, bounds-checked reading.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string_view>
#include <vector>

namespace vtrace {

inline constexpr size_t max_varint_bytes = 10;

constexpr uint64_t zigzag(uint64_t difference) {
    return difference << 1 ^ static_cast<uint64_t>(static_cast<int64_t>(difference) >> 63);
}
constexpr uint64_t unzigzag(uint64_t value) {
    return value >> 1 ^ (0 - (value & 1));
}

/// Grows by doubling without clearing; a varint costs one capacity test.
class ByteWriter {
  public:
    void varint(uint64_t value) {
        if (used_ + max_varint_bytes > bytes_.size())
            grow(max_varint_bytes);
        uint8_t* out = bytes_.data() + used_;
        while (value >= 0x80) {
            *out++ = static_cast<uint8_t>(value) | 0x80;
            value >>= 7;
        }
        *out++ = static_cast<uint8_t>(value);
        used_ = out - bytes_.data();
    }
    void byte(uint8_t value) {
        if (used_ == bytes_.size())
            grow(1);
        bytes_[used_++] = value;
    }
    void bytes(std::span<const uint8_t> data) {
        if (data.empty())
            return;
        if (used_ + data.size() > bytes_.size())
            grow(data.size());
        std::memcpy(bytes_.data() + used_, data.data(), data.size());
        used_ += data.size();
    }
    void text(std::string_view data) { bytes({reinterpret_cast<const uint8_t*>(data.data()), data.size()}); }
    /// A little-endian object of fixed layout.
    template <class T>
    void object(const T& value) {
        bytes({reinterpret_cast<const uint8_t*>(&value), sizeof value});
    }

    size_t size() const { return used_; }
    std::span<const uint8_t> view() const { return {bytes_.data(), used_}; }
    void clear() { used_ = 0; } // keeps the memory

  private:
    void grow(size_t more) { bytes_.resize(bytes_.size() * 2 + more + 256); }

    std::vector<uint8_t> bytes_;
    size_t used_ = 0;
};

/// Reading past the end, or a varint above 64 bits, yields 0 and sets failed(): checked once at the end.
class ByteReader {
  public:
    ByteReader() = default;
    explicit ByteReader(std::span<const uint8_t> data) : next_(data.data()), end_(data.data() + data.size()) {}

    uint64_t varint() {
        uint64_t value = 0;
        for (unsigned shift = 0; shift < 64; shift += 7) {
            if (next_ == end_)
                return fail();
            const uint8_t byte = *next_++;
            if (shift == 63 && byte > 1)
                return fail();
            value |= uint64_t{byte & 0x7fu} << shift;
            if (byte < 0x80)
                return value;
        }
        return fail();
    }
    uint8_t byte() { return next_ == end_ ? static_cast<uint8_t>(fail()) : *next_++; }
    /// Empty where fewer are left.
    std::span<const uint8_t> bytes(uint64_t count) {
        if (count > left()) {
            fail();
            return {};
        }
        const uint8_t* first = next_;
        next_ += count;
        return {first, static_cast<size_t>(count)};
    }
    template <class T>
    T object() {
        T value{};
        if (const auto data = bytes(sizeof value); !data.empty())
            std::memcpy(&value, data.data(), sizeof value);
        return value;
    }

    size_t left() const { return end_ - next_; }
    bool failed() const { return failed_; }

  private:
    uint64_t fail() {
        failed_ = true;
        next_ = end_;
        return 0;
    }

    const uint8_t* next_ = nullptr;
    const uint8_t* end_ = nullptr;
    bool failed_ = false;
};

} // namespace vtrace
