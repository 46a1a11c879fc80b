// PVH: Xen's direct boot protocol (docs/misc/pvh.pandoc; public/arch-x86/hvm/start_info.h), entered in 32-bit mode.
#include "vmm/boot/bytes.h"
#include "vmm/boot/entry_state.h"
#include "vmm/boot/protocols.h"

namespace vtrace {
namespace {

constexpr uint32_t start_info_magic = 0x336ec578; // XEN_HVM_START_MAGIC_VALUE
constexpr uint32_t start_info_version = 1;        // the first with a memory map

struct hvm_start_info {
    uint32_t magic;
    uint32_t version;
    uint32_t flags;
    uint32_t nr_modules;
    uint64_t modlist_paddr;
    uint64_t cmdline_paddr;
    uint64_t rsdp_paddr;
    uint64_t memmap_paddr;
    uint32_t memmap_entries;
    uint32_t reserved;
};
static_assert(sizeof(hvm_start_info) == 56);

struct hvm_modlist_entry {
    uint64_t paddr;
    uint64_t size;
    uint64_t cmdline_paddr;
    uint64_t reserved;
};

struct hvm_memmap_table_entry {
    uint64_t addr;
    uint64_t size;
    uint32_t type; // as in E820
    uint32_t reserved;
};

template <class T>
std::span<const uint8_t> table_bytes(const std::vector<T>& table) {
    return {reinterpret_cast<const uint8_t*>(table.data()), table.size() * sizeof(T)};
}

} // namespace

Result<LoadedGuest> boot_pvh(Boot& boot, const ElfImage& image) {
    if (!image.pvh_entry)
        return fail("the kernel has no PVH entry point (XEN_ELFNOTE_PHYS32_ENTRY)");
    auto range = place_elf(image, boot.memory, boot.placement);
    if (!range)
        return Unexpected(std::move(range.error()));
    if (*image.pvh_entry < range->start || *image.pvh_entry >= range->end)
        return fail("its PVH entry point {:#x} is outside of the kernel", *image.pvh_entry);

    LoadedGuest guest;
    guest.kind = KernelKind::pvh;
    guest.version = linux_banner(image.bytes);
    guest.entry = *image.pvh_entry;
    guest.kernel = *range;
    guest.memory_map = memory_map(boot.memory);

    auto modules = place_modules(boot, range->end);
    if (!modules)
        return Unexpected(std::move(modules.error()));
    if (boot.files.initrd)
        guest.initrd = modules->front().range;
    std::vector<hvm_modlist_entry> module_list;
    for (const PlacedModule& module : *modules) {
        auto command_line = put_string(boot, module.command_line, "a module's command line");
        if (!command_line)
            return Unexpected(std::move(command_line.error()));
        module_list.push_back({module.range.start, module.range.size(), *command_line, 0});
    }
    std::vector<hvm_memmap_table_entry> map;
    for (const MemoryMapEntry& entry : guest.memory_map)
        map.push_back({entry.start, entry.size, entry.type, 0});

    auto command_line = put_string(boot, boot.options.command_line, "the command line");
    auto list_at = put_low(boot, table_bytes(module_list), alignof(hvm_modlist_entry), "the module list");
    auto map_at = put_low(boot, table_bytes(map), alignof(hvm_memmap_table_entry), "the memory map");
    for (auto* placed : {&command_line, &list_at, &map_at})
        if (!*placed)
            return Unexpected(std::move(placed->error()));
    const hvm_start_info info{
        .magic = start_info_magic,
        .version = start_info_version,
        .flags = 0,
        .nr_modules = static_cast<uint32_t>(module_list.size()),
        .modlist_paddr = module_list.empty() ? 0 : *list_at,
        .cmdline_paddr = *command_line,
        .rsdp_paddr = boot.acpi_rsdp,
        .memmap_paddr = *map_at,
        .memmap_entries = static_cast<uint32_t>(map.size()),
        .reserved = 0,
    };
    auto info_at = put_low(boot, bytes_of(info), alignof(hvm_start_info), "the PVH start info");
    if (!info_at)
        return Unexpected(std::move(info_at.error()));
    auto state = protected_mode_state(boot.memory, boot.placement, *image.pvh_entry);
    if (!state)
        return Unexpected(std::move(state.error()));
    guest.state = *state;
    guest.state.gpr[RBX] = *info_at;
    return guest;
}

} // namespace vtrace
