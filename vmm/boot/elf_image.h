// ELF executables as boot loaders see them: what to put where in physical memory, and the notes that say how to enter.
#pragma once

#include <optional>
#include <vector>

#include "vmm/boot/boot.h"
#include "vmm/boot/placement.h"

namespace vtrace {

struct ElfSegment { // of type PT_LOAD, with a size
    Gpa physical = 0;
    Gva virtual_ = 0;
    uint64_t file_offset = 0;
    uint64_t file_size = 0;
    uint64_t memory_size = 0; // at least file_size; the rest is zeroed
};

/// ELF32 and ELF64 in one shape.
struct ElfImage {
    std::span<const uint8_t> bytes; // borrowed
    bool is64 = false;
    uint16_t machine = 0; // EM_*
    uint16_t type = 0;    // ET_*
    uint64_t entry = 0;   // as in the header: virtual or physical
    bool has_interpreter = false;
    std::vector<ElfSegment> segments;
    std::optional<uint32_t> pvh_entry; // physical, of XEN_ELFNOTE_PHYS32_ENTRY

    bool is_x86() const;
};

bool is_elf(std::span<const uint8_t> bytes);
/// "x86-64", "ARM64", ..., or "machine 123".
std::string machine_name(uint16_t machine);

/// Fails when the file is truncated, of the other byte order, or contradicts itself. Any machine and type is parsed.
Result<ElfImage> parse_elf(std::span<const uint8_t> bytes);

/// Claims and fills the image's physical memory. Returns from the lowest to the highest byte of it.
Result<MemoryRange> place_elf(const ElfImage& image, GuestMemory& memory, Placement& placement);

/// The header's entry as a physical address: kernels may give a virtual one. Fails when it is in no segment.
Result<Gpa> physical_entry(const ElfImage& image);

} // namespace vtrace
