// Multiboot 1 (specification 0.6.96), entered in 32-bit mode.
#include <algorithm>

#include "vmm/boot/bytes.h"
#include "vmm/boot/entry_state.h"
#include "vmm/boot/protocols.h"

namespace vtrace {
namespace {

constexpr uint32_t header_magic = 0x1badb002, loader_magic = 0x2badb002;
constexpr uint64_t header_search = 8192; // the header lies wholly within the file's first 8 KiB, 4-byte aligned

// Section 3.1.2: of bits 0..15 an unknown one must make the loader refuse the image.
enum HeaderFlag : uint32_t {
    page_align = 1 << 0,
    memory_info = 1 << 1,
    video_mode = 1 << 2,
    address_fields = 1 << 16, // the "a.out kludge"
};
constexpr uint32_t required_flags = 0xffff;

struct Header {
    uint32_t magic;
    uint32_t flags;
    uint32_t checksum;
    uint32_t header_addr; // these five are valid with address_fields
    uint32_t load_addr;
    uint32_t load_end_addr;
    uint32_t bss_end_addr;
    uint32_t entry_addr;
};
constexpr uint64_t short_header_size = 12;

// Section 3.3.
enum InfoFlag : uint32_t {
    info_memory = 1 << 0,
    info_command_line = 1 << 2,
    info_modules = 1 << 3,
    info_memory_map = 1 << 6,
    info_loader_name = 1 << 9,
};

struct Info {
    uint32_t flags;
    uint32_t mem_lower; // KiB
    uint32_t mem_upper; // KiB from 1 MiB
    uint32_t boot_device;
    uint32_t cmdline;
    uint32_t mods_count;
    uint32_t mods_addr;
    uint32_t syms[4];
    uint32_t mmap_length;
    uint32_t mmap_addr;
    uint32_t drives_length;
    uint32_t drives_addr;
    uint32_t config_table;
    uint32_t boot_loader_name;
    uint32_t apm_table;
    uint32_t vbe[4];
    uint8_t framebuffer[28];
};
static_assert(sizeof(Info) == 116);

struct ModuleEntry {
    uint32_t mod_start;
    uint32_t mod_end;
    uint32_t string;
    uint32_t reserved;
};

struct [[gnu::packed]] MapEntry {
    uint32_t size; // of what follows
    uint64_t addr;
    uint64_t len;
    uint32_t type; // as in E820
};

struct Placed {
    MemoryRange range;
    Gpa entry;
};

/// Loads by the addresses in the header itself.
Result<Placed> place_by_header(Boot& boot, const Header& header, uint64_t header_at) {
    const auto bytes = boot.files.kernel.bytes;
    if (header.load_addr > header.header_addr || header.header_addr - header.load_addr > header_at)
        return fail("its Multiboot header is damaged: load_addr {:#x} doesn't fit header_addr {:#x}", header.load_addr,
                    header.header_addr);
    const uint64_t offset = header_at - (header.header_addr - header.load_addr);
    uint64_t file_size = bytes.size() - offset;
    if (header.load_end_addr != 0) {
        if (header.load_end_addr < header.load_addr)
            return fail("its Multiboot header is damaged: load_end_addr {:#x} is below load_addr {:#x}",
                        header.load_end_addr, header.load_addr);
        file_size = header.load_end_addr - header.load_addr;
    }
    const auto contents = slice(bytes, offset, file_size);
    if (!contents)
        return fail("the Multiboot kernel is truncated: {} bytes at offset {} are to be loaded, the file has {}",
                    file_size, offset, bytes.size());
    uint64_t memory_size = file_size;
    if (header.bss_end_addr > header.load_addr)
        memory_size = std::max<uint64_t>(file_size, header.bss_end_addr - header.load_addr);
    VTRACE_TRY(boot.placement.claim(header.load_addr, memory_size, "the kernel"));
    VTRACE_TRY(boot.memory.write(header.load_addr, *contents));
    if (const uint64_t rest = memory_size - file_size)
        std::memset(boot.memory.at(header.load_addr + file_size, rest), 0, rest);
    return Placed{{header.load_addr, header.load_addr + memory_size}, header.entry_addr};
}

Result<Placed> place_by_elf(Boot& boot) {
    if (!is_elf(boot.files.kernel.bytes))
        return fail("it has a Multiboot header, but is neither an ELF file nor are there load addresses in the header");
    auto image = parse_elf(boot.files.kernel.bytes);
    if (!image)
        return Unexpected(std::move(image.error()));
    if (!image->is_x86())
        return fail("it is a Multiboot kernel for {}, not for x86", machine_name(image->machine));
    auto range = place_elf(*image, boot.memory, boot.placement);
    if (!range)
        return Unexpected(std::move(range.error()));
    auto entry = physical_entry(*image);
    if (!entry)
        return Unexpected(std::move(entry.error()));
    return Placed{*range, *entry};
}

/// The kernel's name, then the command line: Multiboot kernels take the first word for their own name.
std::string command_line(const Boot& boot) {
    std::string text = base_name(boot.files.kernel.name);
    if (!boot.options.command_line.empty())
        text += " " + boot.options.command_line;
    return text;
}

uint32_t kib_of_memory_map(const std::vector<MemoryMapEntry>& map, Gpa start) {
    for (const MemoryMapEntry& entry : map)
        if (entry.start == start && entry.type == MemoryMapEntry::ram)
            return static_cast<uint32_t>(entry.size >> 10);
    return 0;
}

} // namespace

std::optional<uint64_t> find_multiboot_header(std::span<const uint8_t> bytes) {
    const uint64_t end = std::min<uint64_t>(bytes.size(), header_search);
    for (uint64_t at = 0; at + short_header_size <= end; at += 4) {
        if (*load_le<uint32_t>(bytes, at) != header_magic)
            continue;
        const uint32_t flags = *load_le<uint32_t>(bytes, at + 4), checksum = *load_le<uint32_t>(bytes, at + 8);
        if (header_magic + flags + checksum == 0)
            return at;
    }
    return std::nullopt;
}

Result<LoadedGuest> boot_multiboot(Boot& boot) {
    const auto bytes = boot.files.kernel.bytes;
    const auto header_at = find_multiboot_header(bytes);
    if (!header_at)
        return fail("the kernel has no Multiboot header in its first 8 KiB");
    Header header{};
    header.flags = *load_le<uint32_t>(bytes, *header_at + offsetof(Header, flags));
    if (const uint32_t unknown = header.flags & required_flags & ~(page_align | memory_info))
        return fail("its Multiboot header demands what is not offered here (flags {:#x}{})", unknown,
                    unknown & video_mode ? ": a video mode" : "");
    Result<Placed> placed;
    if (header.flags & address_fields) {
        const auto whole = load_le<Header>(bytes, *header_at);
        if (!whole)
            return fail("the Multiboot kernel is truncated: {} bytes don't hold its header", bytes.size());
        placed = place_by_header(boot, *whole, *header_at);
    } else {
        placed = place_by_elf(boot);
    }
    if (!placed)
        return Unexpected(std::move(placed.error()));
    if (placed->range.end > GuestMemory::high_start)
        return fail("it reaches up to {:#x}: a Multiboot kernel is entered below 4 GiB", placed->range.end);
    if (placed->entry < placed->range.start || placed->entry >= placed->range.end)
        return fail("its entry {:#x} is outside of the kernel", placed->entry);

    LoadedGuest guest;
    guest.kind = KernelKind::multiboot;
    guest.entry = placed->entry;
    guest.kernel = placed->range;
    guest.memory_map = memory_map(boot.memory);

    auto modules = place_modules(boot, placed->range.end);
    if (!modules)
        return Unexpected(std::move(modules.error()));
    if (boot.files.initrd)
        guest.initrd = modules->front().range;
    std::vector<ModuleEntry> module_list;
    for (const PlacedModule& module : *modules) {
        auto string = put_string(boot, module.command_line, "a module's command line");
        if (!string)
            return Unexpected(std::move(string.error()));
        module_list.push_back({static_cast<uint32_t>(module.range.start), static_cast<uint32_t>(module.range.end),
                               static_cast<uint32_t>(*string), 0});
    }
    std::vector<MapEntry> map;
    for (const MemoryMapEntry& entry : guest.memory_map)
        map.push_back({sizeof(MapEntry) - sizeof(MapEntry::size), entry.start, entry.size, entry.type});
    const std::span<const uint8_t> module_bytes(reinterpret_cast<const uint8_t*>(module_list.data()),
                                                module_list.size() * sizeof(ModuleEntry));
    const std::span<const uint8_t> map_bytes(reinterpret_cast<const uint8_t*>(map.data()),
                                             map.size() * sizeof(MapEntry));

    auto list_at = put_low(boot, module_bytes, alignof(ModuleEntry), "the module list");
    auto map_at = put_low(boot, map_bytes, 8, "the memory map");
    auto command_line_at = put_string(boot, command_line(boot), "the command line");
    auto name_at = put_string(boot, "vtrace", "the boot loader's name");
    for (auto* result : {&list_at, &map_at, &command_line_at, &name_at})
        if (!*result)
            return Unexpected(std::move(result->error()));

    Info info{};
    info.flags = info_memory | info_command_line | info_modules | info_memory_map | info_loader_name;
    info.mem_lower = kib_of_memory_map(guest.memory_map, 0);
    info.mem_upper = kib_of_memory_map(guest.memory_map, extended_memory_start);
    info.cmdline = static_cast<uint32_t>(*command_line_at);
    info.mods_count = static_cast<uint32_t>(module_list.size());
    info.mods_addr = static_cast<uint32_t>(*list_at);
    info.mmap_length = static_cast<uint32_t>(map_bytes.size());
    info.mmap_addr = static_cast<uint32_t>(*map_at);
    info.boot_loader_name = static_cast<uint32_t>(*name_at);
    auto info_at = put_low(boot, bytes_of(info), alignof(Info), "the Multiboot information");
    if (!info_at)
        return Unexpected(std::move(info_at.error()));

    auto state = protected_mode_state(boot.memory, boot.placement, static_cast<uint32_t>(placed->entry));
    if (!state)
        return Unexpected(std::move(state.error()));
    guest.state = *state;
    guest.state.gpr[RAX] = loader_magic;
    guest.state.gpr[RBX] = *info_at;
    return guest;
}

} // namespace vtrace
