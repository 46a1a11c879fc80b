// Placement: which guest memory a boot has given away already, so that nothing is laid over anything else.
#pragma once

#include <string>
#include <vector>

#include "vmm/boot/boot.h"

namespace vtrace {

/// The legacy area of a PC, from the EBDA to 1 MiB: not RAM for the guest.
inline constexpr Gpa base_memory_end = 0x9'fc00; // 639 KiB, as the BIOS data area says too
inline constexpr Gpa extended_memory_start = 0x10'0000;
/// Real-mode interrupt vectors and the BIOS data area.
inline constexpr Gpa bios_data_end = 0x500;
/// Where a protocol's small structures go.
inline constexpr MemoryRange low_memory{bios_data_end, base_memory_end};

/// Ranges are kept sorted; each call costs O(log n) to find and O(n) to insert.
class Placement {
  public:
    /// Starts with the BIOS data area and the legacy area taken. `memory` is borrowed.
    explicit Placement(const GuestMemory& memory);

    /// Takes [start, start+size) for `what` ("the kernel's segment 2"). Fails, saying why and naming who has it, when
    /// any of it is not RAM (then with the memory that would do, if any) or taken. Size 0 takes nothing.
    Result<> claim(Gpa start, uint64_t size, std::string what);

    /// Takes `size` bytes at a multiple of `alignment` (a power of two) within `within`: the lowest or the highest
    /// place.
    Result<Gpa> place_low(uint64_t size, uint64_t alignment, MemoryRange within, std::string what);
    Result<Gpa> place_high(uint64_t size, uint64_t alignment, MemoryRange within, std::string what);

  private:
    struct Taken {
        MemoryRange range;
        std::string what;
    };
    std::vector<MemoryRange> gaps(MemoryRange within) const; // free, ascending
    void take(MemoryRange range, std::string what);

    const GuestMemory& memory_;
    std::vector<Taken> taken_;
};

/// "17 KiB", "64 MiB", "3 bytes": exact, or rounded up.
std::string size_text(uint64_t bytes);

} // namespace vtrace
