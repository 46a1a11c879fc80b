#include "vmm/boot/boot.h"

#include <elf.h>

#include "vmm/boot/boot_file.h"
#include "vmm/boot/bytes.h"
#include "vmm/boot/identify.h"
#include "vmm/boot/protocols.h"

namespace vtrace {
namespace {

constexpr uint64_t largest_kernel_file = 2ull << 30; // a vmlinux with all its debug information has 1 GiB at most
constexpr uint64_t longest_command_line = 16 << 10;  // where the protocol itself has no limit
constexpr uint64_t most_modules = 1000;              // their names must fit into low memory

/// As on a PC, for guests that look there: the EBDA's segment and the size of base memory (in KiB).
Result<> write_bios_data(GuestMemory& memory) {
    constexpr Gpa ebda_segment_at = 0x40e, base_memory_at = 0x413;
    constexpr uint16_t ebda_segment = base_memory_end >> 4, base_memory_kib = base_memory_end >> 10;
    VTRACE_TRY(memory.write(ebda_segment_at, bytes_of(ebda_segment)));
    return memory.write(base_memory_at, bytes_of(base_memory_kib));
}

Result<LoadedGuest> boot_elf(Boot& boot) {
    const auto bytes = boot.files.kernel.bytes;
    const auto protocol = boot.options.protocol;
    auto image = parse_elf(bytes);
    if (!image)
        return Unexpected(std::move(image.error()));
    if (const std::string foreign = identify_foreign_elf(*image); !foreign.empty())
        return fail("it is {}", foreign);
    if (protocol == BootProtocol::pvh || (protocol == BootProtocol::automatic && image->pvh_entry))
        return boot_pvh(boot, *image);
    if (!image->is64)
        return fail("it is a 32-bit ELF file with neither a Multiboot header nor a PVH entry point");
    if (image->type != ET_EXEC)
        return fail("it is a shared library or position-independent program, not a kernel");
    return boot_linux_elf(boot, *image);
}

Result<LoadedGuest> boot_by_contents(Boot& boot) {
    const auto bytes = boot.files.kernel.bytes;
    const auto protocol = boot.options.protocol;
    if (boot.options.flat) {
        if (boot.options.as_shipped || protocol != BootProtocol::automatic)
            return fail("a flat binary is entered as it is: choose no other boot protocol with it");
        return boot_flat(boot, *boot.options.flat);
    }
    if (is_bzimage(bytes)) {
        if (protocol == BootProtocol::multiboot)
            return fail("it is a bzImage, not a Multiboot kernel");
        if (boot.options.as_shipped && protocol == BootProtocol::pvh)
            return fail("a bzImage as shipped has no PVH entry point: choose one of both");
        return boot_bzimage(boot);
    }
    if (boot.options.as_shipped)
        return fail("only a bzImage can be entered as shipped, but it is {}", identify_foreign(bytes));
    if (protocol == BootProtocol::multiboot ||
        (protocol == BootProtocol::automatic && find_multiboot_header(bytes).has_value()))
        return boot_multiboot(boot);
    if (is_elf(bytes))
        return boot_elf(boot);
    return fail("it is {}", identify_foreign(bytes));
}

/// "PATH ARGUMENTS" at its first space.
std::pair<std::string, std::string> split_module(const std::string& module) {
    const auto space = module.find(' ');
    if (space == module.npos)
        return {module, {}};
    return {module.substr(0, space), module.substr(space + 1)};
}

} // namespace

std::string_view describe(KernelKind kind) {
    switch (kind) {
    case KernelKind::linux_payload:
        return "Linux bzImage, payload entered directly";
    case KernelKind::linux_as_shipped:
        return "Linux bzImage, entered as shipped";
    case KernelKind::linux_elf:
        return "Linux vmlinux, entered in 64-bit mode";
    case KernelKind::pvh:
        return "PVH kernel";
    case KernelKind::multiboot:
        return "Multiboot kernel";
    case KernelKind::flat:
        return "flat binary";
    }
    return "unknown";
}

std::string kernel_text(std::string_view text) {
    constexpr size_t longest = 256;
    std::string clean;
    for (const char c : text.substr(0, longest)) {
        if (c == '\0')
            break;
        if (c >= ' ' && c <= '~')
            clean += c;
    }
    return clean;
}

std::string base_name(std::string_view path) {
    return std::string(path.substr(path.rfind('/') + 1));
}

Result<std::vector<PlacedModule>> place_modules(Boot& boot, Gpa lowest) {
    std::vector<PlacedModule> placed;
    auto place = [&](const BootFile& file, std::string what) -> Result<> {
        auto at = boot.placement.place_low(file.bytes.size(), page_size,
                                           {std::max(lowest, extended_memory_start), boot.memory.low_size()},
                                           std::move(what));
        if (!at)
            return Unexpected(std::move(at.error()));
        VTRACE_TRY(boot.memory.write(*at, file.bytes));
        std::string command_line = base_name(file.name);
        if (!file.arguments.empty())
            command_line += " " + file.arguments;
        placed.push_back({{*at, *at + file.bytes.size()}, std::move(command_line)});
        return {};
    };
    if (boot.files.initrd)
        VTRACE_TRY(place(*boot.files.initrd, fmt::format("the initrd '{}'", boot.files.initrd->name)));
    for (const BootFile& module : boot.files.modules)
        VTRACE_TRY(place(module, fmt::format("the module '{}'", module.name)));
    return placed;
}

Result<Gpa> put_low(Boot& boot, std::span<const uint8_t> bytes, uint64_t alignment, std::string what) {
    auto at = boot.placement.place_low(bytes.size(), alignment, low_memory, std::move(what));
    if (at)
        VTRACE_TRY(boot.memory.write(*at, bytes));
    return at;
}

Result<Gpa> put_string(Boot& boot, const std::string& text, std::string what) {
    return put_low(boot, {reinterpret_cast<const uint8_t*>(text.c_str()), text.size() + 1}, 1, std::move(what));
}

Result<LoadedGuest> load_guest(GuestMemory& memory, const BootFiles& files, const BootOptions& options, Gpa acpi_rsdp) {
    const auto& command_line = options.command_line;
    if (files.kernel.bytes.empty())
        return fail("cannot load the kernel '{}': it is empty", files.kernel.name);
    if (files.initrd && files.initrd->bytes.empty())
        return fail("cannot use the initrd '{}': it is empty", files.initrd->name);
    if (command_line.find('\0') != command_line.npos)
        return fail("cannot load the kernel '{}': the command line has a NUL inside", files.kernel.name);
    if (command_line.size() > longest_command_line)
        return fail("cannot load the kernel '{}': the command line has {} bytes, at most {} can be passed",
                    files.kernel.name, command_line.size(), longest_command_line);
    if (files.modules.size() > most_modules)
        return fail("cannot load the kernel '{}': {} modules are too many (at most {})", files.kernel.name,
                    files.modules.size(), most_modules);
    for (const BootFile& module : files.modules)
        if (module.bytes.empty())
            return fail("cannot use the module '{}': it is empty", module.name);

    VTRACE_TRY(write_bios_data(memory));
    Boot boot{memory, files, options, acpi_rsdp};
    auto guest = boot_by_contents(boot);
    if (!guest)
        return fail("cannot load the kernel '{}': {}", files.kernel.name, guest.error().message);
    return guest;
}

Result<LoadedGuest> load_guest(GuestMemory& memory, const BootOptions& options, Gpa acpi_rsdp) {
    auto kernel = read_boot_file(options.kernel_path, "kernel", largest_kernel_file, "more than any kernel has");
    if (!kernel)
        return Unexpected(std::move(kernel.error()));
    BootFiles files{{options.kernel_path, kernel->bytes(), {}}, {}, {}};
    std::vector<FileContents> keep;
    auto add = [&](const std::string& path, std::string_view role, std::string arguments) -> Result<BootFile> {
        auto contents = read_boot_file(path, role, memory.size(), "larger than the guest's memory");
        if (!contents)
            return Unexpected(std::move(contents.error()));
        keep.push_back(std::move(*contents));
        return BootFile{path, keep.back().bytes(), std::move(arguments)};
    };
    if (!options.initrd_path.empty()) {
        auto initrd = add(options.initrd_path, "initrd", {});
        if (!initrd)
            return Unexpected(std::move(initrd.error()));
        files.initrd = std::move(*initrd);
    }
    for (const std::string& text : options.modules) {
        const auto [path, arguments] = split_module(text);
        auto module = add(path, "module", arguments);
        if (!module)
            return Unexpected(std::move(module.error()));
        files.modules.push_back(std::move(*module));
    }
    return load_guest(memory, files, options, acpi_rsdp);
}

} // namespace vtrace
