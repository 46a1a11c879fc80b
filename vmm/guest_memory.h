// Guest physical memory: the one place where guest addresses are bounds-checked.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "ds/result.h"

namespace vtrace {

using Gpa = uint64_t; // guest physical address
using Gva = uint64_t; // guest virtual (linear) address

inline constexpr uint64_t page_size = 4096;
inline constexpr uint64_t page_mask = page_size - 1;

/// RAM of one machine: [0, low_size) and, when there is more than the PCI hole leaves room for, [4 GiB, 4 GiB + rest).
/// Host memory is anonymous, zeroed, and touched lazily. Not copyable; pointers stay valid for its lifetime.
/// No locking: guests race on their memory as they do on hardware.
class GuestMemory {
  public:
    static constexpr Gpa pci_hole_start = 0xc000'0000; // 3 GiB
    static constexpr Gpa high_start = 0x1'0000'0000;   // 4 GiB

    /// `size` bytes, a multiple of 4 KiB, at least 1 MiB. Fails when the host can't reserve it.
    static Result<GuestMemory> create(uint64_t size);
    GuestMemory(GuestMemory&& other) noexcept;
    GuestMemory& operator=(GuestMemory&& other) noexcept;
    GuestMemory(const GuestMemory&) = delete;
    GuestMemory& operator=(const GuestMemory&) = delete;
    ~GuestMemory();

    uint64_t size() const { return size_; }
    uint64_t low_size() const { return low_size_; }
    uint64_t high_size() const { return size_ - low_size_; }

    /// Host address of guest RAM at `gpa` with at least `length` contiguous bytes, or nullptr if any of it isn't RAM.
    uint8_t* at(Gpa gpa, uint64_t length = 1) const {
        if (gpa < low_size_ && length <= low_size_ - gpa)
            return base_ + gpa;
        if (gpa >= high_start && gpa - high_start < high_size() && length <= high_size() - (gpa - high_start))
            return base_ + low_size_ + (gpa - high_start);
        return nullptr;
    }

    /// Dense index of the RAM page at `gpa` (0 .. pages()-1); `gpa` must be RAM.
    uint64_t page_index(Gpa gpa) const { return (gpa < low_size_ ? gpa : gpa - high_start + low_size_) / page_size; }
    uint64_t pages() const { return size_ / page_size; }

    /// Copies in or out; fails, naming the range, if it isn't all RAM.
    Result<> write(Gpa gpa, std::span<const uint8_t> bytes);
    Result<> read(Gpa gpa, std::span<uint8_t> bytes) const;

  private:
    GuestMemory(uint8_t* base, uint64_t size, uint64_t low_size) : base_(base), size_(size), low_size_(low_size) {}

    uint8_t* base_ = nullptr;
    uint64_t size_ = 0;
    uint64_t low_size_ = 0;
};

} // namespace vtrace
