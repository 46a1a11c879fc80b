// Makes small files of every kind that the loaders know, byte by byte, for the tests to spoil.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "vmm/boot/boot.h"
#include "vmm/boot/bytes.h"
#include "vmm/boot/decompress.h"

namespace vtrace::testing {

using Bytes = std::vector<uint8_t>;

Bytes text(std::string_view characters);
/// Neither repetitive nor random: compresses, but not to nothing. The same for the same arguments.
Bytes mixed_data(size_t size, uint32_t seed = 1);
void append(Bytes& bytes, std::span<const uint8_t> more);
template <class T>
void put(Bytes& bytes, size_t offset, T value) {
    if (bytes.size() < offset + sizeof value)
        bytes.resize(offset + sizeof value);
    std::memcpy(bytes.data() + offset, &value, sizeof value);
}

Bytes compress(Compression compression, std::span<const uint8_t> plain);

struct LoadSegment {
    uint64_t physical;
    uint64_t virtual_;
    Bytes contents;
    uint64_t memory_size;
};

struct ElfFile {
    bool is64 = true;
    uint16_t machine = 62; // EM_X86_64
    uint16_t type = 2;     // ET_EXEC
    uint64_t entry = 0;
    std::vector<LoadSegment> segments = {};
    Bytes notes = {}; // of a PT_NOTE segment, if not empty
    bool interpreter = false;
    Bytes after_headers = {}; // between the program headers and the first segment's bytes; 4-byte aligned
    Bytes build() const;
};

/// A Xen note with a value of `size` bytes.
Bytes pvh_note(uint32_t entry, unsigned size = 4);

/// A kernel as vmlinux: two segments (one with zeroed data behind it) at 16 MiB, linked high, entered in the first.
ElfFile small_vmlinux();

struct BzImageFile {
    Bytes payload = {}; // with the size appended
    uint16_t version = 0x20f;
    uint16_t xloadflags = 1; // XLF_KERNEL_64
    uint32_t cmdline_size = 2047;
    uint32_t init_size = 0x20'0000;
    uint32_t initrd_addr_max = 0x7fff'ffff;
    uint64_t pref_address = 0x100'0000;
    std::string name = "6.1.0-test (tester) #1";
    Bytes build() const;
};

/// `elf` compressed, with its size behind it as the kernel's build puts it (gzip has its own).
Bytes payload_of(const Bytes& elf, Compression compression);

/// A Multiboot header of three words, or of eight with the five addresses.
Bytes multiboot_header(uint32_t flags, std::vector<uint32_t> addresses = {});

GuestMemory memory_of(uint64_t mib);

/// Loads with `kernel` under the name "k" and without files.
Result<LoadedGuest> load(GuestMemory& memory, const Bytes& kernel, const BootOptions& options = {});

Bytes read_guest(const GuestMemory& memory, Gpa gpa, uint64_t size);
std::string string_at(const GuestMemory& memory, Gpa gpa);
template <class T>
T value_at(const GuestMemory& memory, Gpa gpa) {
    return *load_le<T>(read_guest(memory, gpa, sizeof(T)), 0);
}

} // namespace vtrace::testing
