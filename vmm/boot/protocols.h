// The boot protocols, one function each, and what they have in common. Internal to vmm/boot.
#pragma once

#include "vmm/boot/elf_image.h"

namespace vtrace {

/// One boot under way. Borrowed parts outlive it.
struct Boot {
    GuestMemory& memory;
    const BootFiles& files;
    const BootOptions& options;
    Gpa acpi_rsdp;
    Placement placement{memory};
};

// Each loads the kernel in boot.files.kernel, which is known to be of the named kind, and all that belongs to it.
// Messages begin with the reason: the caller puts the kernel's name in front.

Result<LoadedGuest> boot_bzimage(Boot& boot);
Result<LoadedGuest> boot_linux_elf(Boot& boot, const ElfImage& image);
Result<LoadedGuest> boot_pvh(Boot& boot, const ElfImage& image);
Result<LoadedGuest> boot_multiboot(Boot& boot);
Result<LoadedGuest> boot_flat(Boot& boot, const FlatOptions& options);

/// Has a bzImage's boot signature and setup header ("HdrS").
bool is_bzimage(std::span<const uint8_t> bytes);
/// Offset of a valid Multiboot 1 header, nullopt without one.
std::optional<uint64_t> find_multiboot_header(std::span<const uint8_t> bytes);
/// "Linux version ..." as found in a Linux kernel's image, without these two words; empty if there is none.
std::string linux_banner(std::span<const uint8_t> bytes);

/// `text` with everything unprintable left out, cut at a sane length: from a hostile file to a log.
std::string kernel_text(std::string_view text);
/// Without its directories.
std::string base_name(std::string_view path);

/// The initrd or a module in guest memory.
struct PlacedModule {
    MemoryRange range;
    std::string command_line; // its name, then its arguments
};
/// The initrd, if any, then the modules: each on pages of its own, in this order upwards from `lowest`.
Result<std::vector<PlacedModule>> place_modules(Boot& boot, Gpa lowest);

/// Copies `bytes` into low memory and returns where.
Result<Gpa> put_low(Boot& boot, std::span<const uint8_t> bytes, uint64_t alignment, std::string what);
/// The same with a string and its NUL.
Result<Gpa> put_string(Boot& boot, const std::string& text, std::string what);

} // namespace vtrace
