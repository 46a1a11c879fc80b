// Boot: brings a kernel and what belongs to it into guest memory and says with which processor state it starts.
//
// What a file is, its content tells, never its name:
//
//   bzImage      Linux/x86 boot protocol 2.08 and newer (Documentation/arch/x86/boot.rst). Its payload is decompressed
//                here and entered at its 64-bit entry; `as_shipped` enters the bzImage itself, so that the kernel
//                decompresses itself and applies its own KASLR.
//   vmlinux      ELF64 x86-64: by its PVH note where it has one, else as Linux at its 64-bit entry.
//   PVH          any x86 ELF with a XEN_ELFNOTE_PHYS32_ENTRY note (Xen's docs/misc/pvh.pandoc).
//   Multiboot    Multiboot 1 (specification 0.6.96), ELF32, ELF64 or with the addresses in its header; with modules.
//   flat binary  only when asked for: nothing in it says what it is.
//
// Files are hostile: damaged, truncated or lying ones give an Error, whatever they hold.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "ds/result.h"
#include "vmm/cpu_state.h"
#include "vmm/guest_memory.h"

namespace vtrace {

/// How a kernel is entered. `automatic`: bzImage by linux64; else Multiboot where there is a Multiboot 1 header; else
/// PVH where there is its note; else linux64. The others insist, and fail on a kernel that doesn't offer it.
enum class BootProtocol : uint8_t { automatic, linux64, pvh, multiboot };

/// A raw binary, copied to `load_address` and entered at `entry` with interrupts off and a stack of its own in low
/// memory.
struct FlatOptions {
    /// real16: entry below 1 MiB, as CS:IP = 0:entry below 64 KiB and entry>>4 : entry&15 above; data segments 0.
    /// protected32: flat 4 GiB segments, no paging. long64: the first 4 GiB identity-mapped.
    enum class Mode : uint8_t { real16, protected32, long64 };
    Mode mode = Mode::long64;
    std::optional<Gpa> load_address; // default 0x7c00 in real16, else 0x100000
    std::optional<Gpa> entry;        // default: the load address
};

struct BootOptions {
    std::string kernel_path;
    std::string initrd_path;          // empty: none. For Multiboot and PVH it is the first module
    std::string command_line;         // without the program's name, which Multiboot kernels get in front of it
    std::vector<std::string> modules; // "PATH" or "PATH ARGUMENTS"; Multiboot and PVH only
    bool as_shipped = false;          // bzImage only
    BootProtocol protocol = BootProtocol::automatic;
    std::optional<FlatOptions> flat; // set: the kernel file is a flat binary, whatever it looks like
};

/// A file's bytes, borrowed. `name` stands in messages and, without its directories, in Multiboot command lines.
struct BootFile {
    std::string name;
    std::span<const uint8_t> bytes;
    std::string arguments; // of a module
};

/// All files of one boot. Only needed during load_guest().
struct BootFiles {
    BootFile kernel;
    std::optional<BootFile> initrd;
    std::vector<BootFile> modules;
};

/// Guest physical addresses [start, end).
struct MemoryRange {
    Gpa start = 0;
    Gpa end = 0;
    uint64_t size() const { return end - start; }
    bool operator==(const MemoryRange&) const = default;
};

/// One range of the memory map that the guest is told, in E820's types (ACPI 6.5, table 15.4).
struct MemoryMapEntry {
    enum Type : uint32_t { ram = 1, reserved = 2 };
    Gpa start;
    uint64_t size;
    Type type;
    bool operator==(const MemoryMapEntry&) const = default;
};

enum class KernelKind : uint8_t { linux_payload, linux_as_shipped, linux_elf, pvh, multiboot, flat };

/// What was loaded: for the processor, the log and the trace's configuration.
struct LoadedGuest {
    CpuState state; // at the first instruction; tsc and the debug MSRs as after reset
    KernelKind kind = KernelKind::flat;
    std::string version;     // "6.1.0-57-cloud-amd64 (...) #1 SMP ..."; empty where the kernel has none; printable
    std::string compression; // of a bzImage's payload: "xz", ...; "none"; empty for others
    Gpa entry = 0;           // of the first instruction
    MemoryRange kernel;      // what the kernel's image occupies, its zeroed data included
    MemoryRange initrd;      // empty without one
    std::vector<MemoryMapEntry> memory_map;
};

/// "Linux bzImage, payload entered directly", ...
std::string_view describe(KernelKind kind);

/// Where RAM and the legacy area of a PC are; also for a fw_cfg device. Everything from 639 KiB to 1 MiB is reserved:
/// ACPI tables are there, where a guest that was told no RSDP finds them.
std::vector<MemoryMapEntry> memory_map(const GuestMemory& memory);

/// Reads the files and loads the guest into `memory`, which must be fresh (zeroed) but for what lies in the reserved
/// area. `acpi_rsdp` is what the guest is told, 0 for none. A failure leaves memory in no particular state.
/// Errors: a file that is missing, not regular, empty, too large, damaged or no kernel that can be booted this way; too
/// little memory, with what is needed; options that don't fit the kernel.
Result<LoadedGuest> load_guest(GuestMemory& memory, const BootOptions& options, Gpa acpi_rsdp);

/// The same with the files' bytes at hand; the paths in `options` are not read.
Result<LoadedGuest> load_guest(GuestMemory& memory, const BootFiles& files, const BootOptions& options, Gpa acpi_rsdp);

} // namespace vtrace
