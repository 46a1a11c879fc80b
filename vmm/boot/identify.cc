#include "vmm/boot/identify.h"

#include <algorithm>
#include <array>
#include <elf.h>

#include "vmm/boot/bytes.h"
#include "vmm/boot/decompress.h"
#include "vmm/boot/protocols.h"

namespace vtrace {
namespace {

bool has(std::span<const uint8_t> bytes, uint64_t offset, std::string_view magic) {
    const auto part = slice(bytes, offset, magic.size());
    return part && std::equal(part->begin(), part->end(), magic.begin(), magic.end(),
                              [](uint8_t byte, char c) { return byte == static_cast<uint8_t>(c); });
}

bool is_text(std::span<const uint8_t> bytes) {
    constexpr uint64_t enough = 4096;
    const auto head = bytes.first(std::min<uint64_t>(bytes.size(), enough));
    return !head.empty() && std::all_of(head.begin(), head.end(), [](uint8_t byte) {
        return byte >= 0x80 || (byte >= ' ' && byte < 0x7f) || (byte >= '\t' && byte <= '\r') || byte == 0x1b;
    });
}

/// Portable Executables: what UEFI firmware runs, and what vtrace, having none, can't.
std::string identify_pe(std::span<const uint8_t> bytes) {
    constexpr uint64_t pe_offset_at = 0x3c;
    if (has(bytes, 4, "zimg"))
        return "a compressed EFI image (zboot), which only UEFI firmware can start: give it the kernel inside";
    const auto pe_offset = load_le<uint32_t>(bytes, pe_offset_at);
    if (!pe_offset || !has(bytes, *pe_offset, std::string_view("PE\0\0", 4)))
        return "a DOS program, not a kernel";
    constexpr uint16_t pe_x86_64 = 0x8664, pe_i386 = 0x14c;
    const auto machine = load_le<uint16_t>(bytes, uint64_t(*pe_offset) + 4);
    const bool x86 = machine == pe_x86_64 || machine == pe_i386;
    // The section table of a unified kernel image names a section ".linux"; it lies within the first few KiB.
    constexpr std::string_view linux_section(".linux\0\0", 8);
    const auto head = bytes.first(std::min<uint64_t>(bytes.size(), 4096));
    if (std::search(head.begin(), head.end(), linux_section.begin(), linux_section.end()) != head.end())
        return "a unified kernel image for UEFI: give it the kernel inside (objcopy -O binary --only-section=.linux)";
    return x86 ? "an EFI program, which only UEFI firmware can start: not a bzImage"
               : "an EFI program for another processor, not a kernel for x86";
}

std::string identify_plain(std::span<const uint8_t> bytes) {
    constexpr uint64_t image_magic_at = 0x38; // of the ARM64 and RISC-V Linux images
    if (has(bytes, image_magic_at, "ARM\x64"))
        return "an ARM64 Linux Image, not a kernel for x86";
    if (has(bytes, image_magic_at, "RSC\x05"))
        return "a RISC-V Linux Image, not a kernel for x86";
    constexpr uint64_t zimage_magic_at = 0x24;
    if (has(bytes, zimage_magic_at, "\x18\x28\x6f\x01"))
        return "a 32-bit ARM Linux zImage, not a kernel for x86";
    if (has(bytes, 0, "MZ"))
        return identify_pe(bytes);
    if (is_elf(bytes)) {
        const auto image = parse_elf(bytes);
        const std::string foreign = image ? identify_foreign_elf(*image) : std::string();
        return foreign.empty() ? "an ELF file" : foreign;
    }
    if (is_bzimage(bytes))
        return "a bzImage";
    if (has(bytes, 0, "070701") || has(bytes, 0, "070702") || has(bytes, 0, "\xc7\x71"))
        return "a cpio archive: an initrd, not a kernel";
    constexpr uint64_t tar_magic_at = 257;
    if (has(bytes, tar_magic_at, "ustar"))
        return "a tar archive, not a kernel";
    if (has(bytes, 0, "!<arch>\ndebian-binary"))
        return "a Debian package: unpack it first (dpkg -x)";
    if (has(bytes, 0, "\x27\x05\x19\x56"))
        return "a U-Boot image, not a kernel for x86";
    if (has(bytes, 0, "hsqs"))
        return "a squashfs file system, not a kernel";
    if (has(bytes, 0, "QFI\xfb"))
        return "a qcow2 disk image, not a kernel";
    constexpr uint64_t iso_magic_at = 0x8001;
    if (has(bytes, iso_magic_at, "CD001"))
        return "a CD image, not a kernel: give it the kernel inside";
    constexpr uint64_t boot_signature_at = 0x1fe;
    if (has(bytes, boot_signature_at, "\x55\xaa"))
        return "a disk image or boot sector, not a kernel: vtrace starts kernels without firmware";
    if (is_text(bytes))
        return "text, not a kernel";
    if (std::all_of(bytes.begin(), bytes.end(), [](uint8_t byte) { return byte == 0; }))
        return "nothing but zeros";
    return "of no kind that is known here: not a bzImage, not ELF, not Multiboot; a flat binary must be asked for "
           "explicitly, with its mode";
}

std::string_view unpacker(Compression compression) {
    switch (compression) {
    case Compression::gzip:
        return "gunzip";
    case Compression::zstd:
        return "unzstd";
    case Compression::lz4:
        return "unlz4";
    case Compression::bzip2:
        return "bunzip2";
    case Compression::lzo:
        return "lzop -d";
    default:
        return "unxz";
    }
}

} // namespace

std::string identify_foreign_elf(const ElfImage& image) {
    if (!image.is_x86()) // an ELF32 file for x86-64 is the x32 ABI's
        return fmt::format("an ELF file for {}{}, not a kernel for x86", machine_name(image.machine),
                           image.machine == EM_X86_64 ? " in a 32-bit container" : "");
    if (image.type == ET_REL)
        return "an object file or kernel module, not a kernel";
    if (image.type == ET_CORE)
        return "a core dump, not a kernel";
    if (image.has_interpreter)
        return "a program that needs an operating system, not a kernel";
    return {};
}

std::string identify_foreign(std::span<const uint8_t> bytes) {
    const auto compression = compression_of(bytes);
    if (compression == Compression::none)
        return identify_plain(bytes);
    // A glance inside: whether to unpack it, or to look for another file.
    std::array<uint8_t, 16 << 10> head;
    const auto inside = decompress(compression, bytes, head);
    if (!inside || inside->size == 0)
        return fmt::format("{}-compressed data, not a kernel: unpack it first ({})", name_of(compression),
                           unpacker(compression));
    const std::span<const uint8_t> contents(head.data(), inside->size);
    if (is_elf(contents)) // its segments lie beyond the glance
        return fmt::format("a {}-compressed ELF file: unpack it first ({})", name_of(compression),
                           unpacker(compression));
    if (is_bzimage(contents))
        return fmt::format("a {}-compressed bzImage: unpack it first ({})", name_of(compression),
                           unpacker(compression));
    if (compression_of(contents) != Compression::none)
        return fmt::format("{}-compressed data in {}-compressed data, not a kernel", name_of(compression_of(contents)),
                           name_of(compression));
    return fmt::format("{}-compressed data, and what is inside is {}", name_of(compression), identify_plain(contents));
}

} // namespace vtrace
