// Linux: the x86 boot protocol (Documentation/arch/x86/boot.rst, "64-bit Boot Protocol"), into a bzImage's payload,
// into the bzImage itself, or into a vmlinux.
#include <algorithm>
#include <cstddef>
#include <memory>

#include <asm/bootparam.h>

#include "vmm/boot/bytes.h"
#include "vmm/boot/decompress.h"
#include "vmm/boot/entry_state.h"
#include "vmm/boot/protocols.h"

namespace vtrace {
namespace {

constexpr uint64_t header_offset = offsetof(boot_params, hdr);
constexpr uint64_t sector = 512;
constexpr uint16_t boot_signature = 0xaa55;
constexpr uint32_t header_magic = 0x53726448; // "HdrS"
constexpr uint64_t entry64_offset = 0x200;    // of startup_64 in the protected-mode part
constexpr uint8_t loader_without_id = 0xff;
constexpr uint16_t normal_video_mode = 0xffff;
// The protocol versions that brought what we need.
constexpr uint16_t version_with_payload = 0x208, version_with_init_size = 0x20a, version_with_xloadflags = 0x20c;

struct BzImage {
    setup_header header{}; // fields that this protocol version lacks are 0
    std::string version;
    std::span<const uint8_t> protected_mode; // all that follows the setup sectors
    std::span<const uint8_t> payload;        // with the uncompressed size in its last 4 bytes
};

Result<BzImage> parse_bzimage(std::span<const uint8_t> bytes) {
    constexpr uint64_t jump_offset = 0x200, jump_length = 2; // a short jump over the header: it says where that ends
    const auto jump = load_le<uint8_t>(bytes, jump_offset + 1);
    if (!jump)
        return fail("the bzImage is truncated: {} bytes", bytes.size());
    const uint64_t header_size = std::min(jump_offset + jump_length + *jump - header_offset, sizeof(setup_header));
    const auto raw = slice(bytes, header_offset, header_size);
    if (!raw)
        return fail("the bzImage is truncated: {} bytes don't hold its header", bytes.size());
    BzImage image;
    setup_header& header = image.header;
    std::memcpy(&header, raw->data(), raw->size());
    if (header.version < version_with_payload)
        return fail("the bzImage speaks boot protocol {}.{:02}: 2.08 (Linux 2.6.26) is needed", header.version >> 8,
                    header.version & 0xff);

    constexpr uint8_t sectors_when_zero = 4;
    const uint64_t setup_size = (1 + (header.setup_sects ? header.setup_sects : sectors_when_zero)) * sector;
    constexpr uint64_t paragraph = 16;
    const uint64_t system_size = header.syssize * paragraph;
    // The last paragraph may be cut short; signatures may follow it.
    if (bytes.size() <= setup_size || bytes.size() - setup_size + paragraph <= system_size)
        return fail("the bzImage is truncated: {} bytes of {}", bytes.size(), setup_size + system_size);
    image.protected_mode = bytes.subspan(setup_size);
    const auto payload = slice(image.protected_mode, header.payload_offset, header.payload_length);
    if (!payload)
        return fail("the bzImage is truncated or damaged: its payload ({} bytes at {}) reaches beyond its end",
                    uint32_t(header.payload_length), setup_size + header.payload_offset);
    image.payload = *payload;

    if (header.kernel_version != 0 && header.kernel_version + sector < setup_size) {
        const auto text = bytes.subspan(header.kernel_version + sector, setup_size - header.kernel_version - sector);
        image.version = kernel_text({reinterpret_cast<const char*>(text.data()), text.size()});
    }
    return image;
}

struct Payload {
    std::unique_ptr<uint8_t[]> storage;
    std::span<const uint8_t> elf;
    Compression compression;
};

/// The kernel's build appends the uncompressed size to each payload (gzip has it anyway): it bounds what we give a
/// bomb.
Result<Payload> unpack(const BzImage& image, const GuestMemory& memory) {
    const auto compression = compression_of(image.payload);
    if (compression == Compression::none) {
        if (is_elf(image.payload))
            return Payload{nullptr, image.payload, compression};
        return fail("the bzImage's payload has no compression that is known: the file is damaged");
    }
    const auto size = load_le<uint32_t>(image.payload, image.payload.size() - sizeof(uint32_t));
    if (!size || *size == 0)
        return fail("the bzImage is damaged: its payload is empty");
    if (image.header.version >= version_with_init_size && *size > image.header.init_size)
        return fail("the bzImage is damaged: its payload of {} bytes is larger than its init_size {}", *size,
                    uint32_t(image.header.init_size));
    if (*size > memory.low_size())
        return fail("the kernel is {} decompressed, but the guest has {} of memory: give it more than {}",
                    size_text(*size), size_text(memory.size()),
                    size_text(std::min<Gpa>(image.header.pref_address, GuestMemory::pci_hole_start) + *size));

    auto stream = image.payload;
    if (compression != Compression::gzip)
        stream = stream.first(stream.size() - sizeof(uint32_t));
    Payload payload{std::make_unique_for_overwrite<uint8_t[]>(*size), {}, compression};
    const auto done = decompress(compression, stream, {payload.storage.get(), *size});
    if (!done)
        return fail("the bzImage's payload can't be decompressed: {}", done.error().message);
    if (!done->complete || done->size != *size)
        return fail("the bzImage is damaged: its payload decompresses to {} than the {} bytes it promises",
                    done->complete ? "less" : "more", *size);
    payload.elf = {payload.storage.get(), *size};
    return payload;
}

struct LinuxEntry {
    KernelKind kind;
    MemoryRange kernel;
    Gpa entry;
    setup_header header; // as the kernel's file has it
    std::string version;
    std::string compression;
};

/// Places initrd, command line and boot_params for the kernel that is in memory already.
Result<LoadedGuest> enter(Boot& boot, LinuxEntry kernel) {
    if (!boot.files.modules.empty())
        return fail("Linux takes an initrd but no modules: modules are for Multiboot and PVH kernels");
    setup_header& header = kernel.header;
    if (boot.options.command_line.size() > header.cmdline_size)
        return fail("the command line has {} bytes, but this kernel takes at most {}", boot.options.command_line.size(),
                    uint32_t(header.cmdline_size));

    LoadedGuest guest;
    guest.kind = kernel.kind;
    guest.version = std::move(kernel.version);
    guest.compression = std::move(kernel.compression);
    guest.entry = kernel.entry;
    guest.kernel = kernel.kernel;
    guest.memory_map = memory_map(boot.memory);

    boot_params params{};
    if (boot.files.initrd) {
        const auto& initrd = *boot.files.initrd;
        const Gpa limit = std::min<Gpa>(boot.memory.low_size(), Gpa(header.initrd_addr_max) + 1);
        auto at = boot.placement.place_high(initrd.bytes.size(), page_size, {extended_memory_start, limit},
                                            fmt::format("the initrd '{}'", initrd.name));
        if (!at)
            return Unexpected(std::move(at.error()));
        VTRACE_TRY(boot.memory.write(*at, initrd.bytes));
        guest.initrd = {*at, *at + initrd.bytes.size()};
        header.ramdisk_image = static_cast<uint32_t>(*at); // below 4 GiB, as initrd_addr_max is; the ext_ fields stay 0
        header.ramdisk_size = static_cast<uint32_t>(initrd.bytes.size());
    }
    auto command_line = put_string(boot, boot.options.command_line, "the command line");
    if (!command_line)
        return Unexpected(std::move(command_line.error()));

    header.cmd_line_ptr = static_cast<uint32_t>(*command_line);
    header.type_of_loader = loader_without_id;
    header.vid_mode = normal_video_mode;
    header.setup_data = 0;
    params.hdr = header;
    params.acpi_rsdp_addr = boot.acpi_rsdp;
    // screen_info stays zero: there is no VGA.
    for (const MemoryMapEntry& entry : guest.memory_map)
        params.e820_table[params.e820_entries++] = {entry.start, entry.size, entry.type};
    auto zero_page = put_low(boot, bytes_of(params), page_size, "boot_params");
    if (!zero_page)
        return Unexpected(std::move(zero_page.error()));

    auto state = long_mode_state(boot.memory, boot.placement, kernel.entry, kernel.kernel.end);
    if (!state)
        return Unexpected(std::move(state.error()));
    guest.state = *state;
    guest.state.gpr[RSI] = *zero_page;
    return guest;
}

Result<LoadedGuest> boot_as_shipped(Boot& boot, BzImage& image) {
    const setup_header& header = image.header;
    if (header.version < version_with_xloadflags || !(header.xloadflags & XLF_KERNEL_64))
        return fail("the bzImage has no 64-bit entry point (XLF_KERNEL_64), so it can't be entered as shipped: it is a "
                    "32-bit kernel or older than Linux 3.8");
    if (!(header.loadflags & LOADED_HIGH))
        return fail("the bzImage is a zImage, which loads below 1 MiB: not supported");
    if (header.init_size < image.protected_mode.size())
        return fail("the bzImage is damaged: its init_size {} is smaller than its {} bytes", uint32_t(header.init_size),
                    image.protected_mode.size());
    const Gpa load = header.pref_address;
    VTRACE_TRY(boot.placement.claim(load, header.init_size, "the room that the kernel needs to decompress itself"));
    VTRACE_TRY(boot.memory.write(load, image.protected_mode));
    const Gpa entry = load + entry64_offset;
    if (image.protected_mode.size() <= entry64_offset)
        return fail("the bzImage is truncated: its 64-bit entry point is behind its end");
    if (load + header.init_size > GuestMemory::high_start)
        return fail("the bzImage wants to be loaded at {:#x}: above 4 GiB that is not supported", load);

    image.header.code32_start = static_cast<uint32_t>(load);
    return enter(boot, {KernelKind::linux_as_shipped,
                        {load, load + header.init_size},
                        entry,
                        image.header,
                        std::move(image.version),
                        std::string(name_of(compression_of(image.payload)))});
}

/// Checks that `elf` is a kernel for this processor, and loads it.
Result<LinuxEntry> place_linux(Boot& boot, const ElfImage& elf, const setup_header& header) {
    auto range = place_elf(elf, boot.memory, boot.placement);
    if (!range)
        return Unexpected(std::move(range.error()));
    auto entry = physical_entry(elf);
    if (!entry)
        return Unexpected(std::move(entry.error()));
    return LinuxEntry{KernelKind::linux_elf, *range, *entry, header, {}, {}};
}

} // namespace

bool is_bzimage(std::span<const uint8_t> bytes) {
    const auto signature = load_le<uint16_t>(bytes, header_offset + offsetof(setup_header, boot_flag));
    const auto magic = load_le<uint32_t>(bytes, header_offset + offsetof(setup_header, header));
    return signature == boot_signature && magic == header_magic;
}

std::string linux_banner(std::span<const uint8_t> bytes) {
    constexpr std::string_view words = "Linux version ";
    const std::string_view text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
    for (size_t at = text.find(words); at != text.npos; at = text.find(words, at + 1)) {
        const auto rest = text.substr(at + words.size());
        if (!rest.empty() && rest[0] >= '0' && rest[0] <= '9') // a printf format stands elsewhere in the image
            return kernel_text(rest.substr(0, rest.find('\n')));
    }
    return {};
}

Result<LoadedGuest> boot_bzimage(Boot& boot) {
    auto image = parse_bzimage(boot.files.kernel.bytes);
    if (!image)
        return Unexpected(std::move(image.error()));
    if (boot.options.as_shipped)
        return boot_as_shipped(boot, *image);

    auto payload = unpack(*image, boot.memory);
    if (!payload)
        return Unexpected(std::move(payload.error()));
    if (!is_elf(payload->elf))
        return fail("the bzImage's payload is not an ELF file: the bzImage is damaged");
    auto elf = parse_elf(payload->elf);
    if (!elf)
        return fail("in the bzImage's payload, {}", elf.error().message);
    if (!elf->is64 || !elf->is_x86())
        return fail("it is a {} Linux kernel: an x86-64 one is needed",
                    elf->is64 ? machine_name(elf->machine) : "32-bit");
    const std::string compression(name_of(payload->compression));
    if (boot.options.protocol == BootProtocol::pvh) {
        auto guest = boot_pvh(boot, *elf);
        if (guest) {
            guest->version = std::move(image->version);
            guest->compression = compression;
        }
        return guest;
    }

    // The kernel's own decompressor would clear this flag, then set it again if it randomizes addresses.
    image->header.loadflags &= ~KASLR_FLAG;
    auto entry = place_linux(boot, *elf, image->header);
    if (!entry)
        return Unexpected(std::move(entry.error()));
    entry->kind = KernelKind::linux_payload;
    entry->version = std::move(image->version);
    entry->compression = compression;
    payload->storage.reset(); // the kernel is in guest memory now; `elf` isn't used any more
    return enter(boot, std::move(*entry));
}

Result<LoadedGuest> boot_linux_elf(Boot& boot, const ElfImage& image) {
    // A vmlinux has no setup header; what the protocol asks a loader to know of the kernel is the same for all of them.
    setup_header header{};
    header.boot_flag = boot_signature;
    header.header = header_magic;
    header.version = 0x20f;
    header.loadflags = LOADED_HIGH;
    header.initrd_addr_max = 0x7fff'ffff;
    header.cmdline_size = 2047; // COMMAND_LINE_SIZE without the NUL
    header.kernel_alignment = 0x20'0000;
    header.xloadflags = XLF_KERNEL_64;
    auto entry = place_linux(boot, image, header);
    if (!entry)
        return Unexpected(std::move(entry.error()));
    entry->version = linux_banner(image.bytes);
    return enter(boot, std::move(*entry));
}

} // namespace vtrace
