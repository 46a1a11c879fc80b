#include "vmm/boot/elf_image.h"

#include <algorithm>
#include <elf.h>
#include <limits>

#include "vmm/boot/bytes.h"

namespace vtrace {
namespace {

constexpr std::string_view xen_note_name("Xen\0", 4);
constexpr uint32_t xen_note_phys32_entry = 18; // XEN_ELFNOTE_PHYS32_ENTRY in Xen's public/elfnote.h

struct Elf32 {
    using Ehdr = Elf32_Ehdr;
    using Phdr = Elf32_Phdr;
};
struct Elf64 {
    using Ehdr = Elf64_Ehdr;
    using Phdr = Elf64_Phdr;
};

/// Entry address of the PVH note among the notes in `notes`, whose names and values are padded to `alignment`.
std::optional<uint32_t> find_pvh_entry(std::span<const uint8_t> notes, uint64_t alignment) {
    auto padded = [alignment](uint64_t size) { return (size + alignment - 1) & ~(alignment - 1); };
    uint64_t at = 0;
    while (auto header = load_le<Elf64_Nhdr>(notes, at)) {
        const uint64_t name_at = at + sizeof(Elf64_Nhdr);
        const uint64_t value_at = name_at + padded(header->n_namesz);
        const auto name = slice(notes, name_at, header->n_namesz);
        if (!name || !slice(notes, value_at, header->n_descsz))
            return std::nullopt;
        if (header->n_type == xen_note_phys32_entry && header->n_descsz >= sizeof(uint32_t) &&
            std::equal(name->begin(), name->end(), xen_note_name.begin(), xen_note_name.end()))
            return load_le<uint32_t>(notes, value_at);
        at = value_at + padded(header->n_descsz);
    }
    return std::nullopt;
}

template <class Elf>
Result<ElfImage> parse(std::span<const uint8_t> bytes) {
    const auto header = load_le<typename Elf::Ehdr>(bytes, 0);
    if (!header)
        return fail("the ELF file is truncated: {} bytes don't hold its header", bytes.size());
    ElfImage image;
    image.bytes = bytes;
    image.is64 = std::is_same_v<Elf, Elf64>;
    image.machine = header->e_machine;
    image.type = header->e_type;
    image.entry = header->e_entry;
    if (header->e_phnum == 0)
        return image;
    if (header->e_phnum == PN_XNUM)
        return fail("the ELF file has {} program headers or more: no kernel has", PN_XNUM);
    if (header->e_phentsize != sizeof(typename Elf::Phdr))
        return fail("the ELF file is damaged: program headers of {} bytes", header->e_phentsize);
    if (!slice(bytes, header->e_phoff, uint64_t(header->e_phnum) * sizeof(typename Elf::Phdr)))
        return fail("the ELF file is truncated: its program headers are behind its end ({} bytes)", bytes.size());

    for (unsigned i = 0; i < header->e_phnum; i++) {
        const auto program = *load_le<typename Elf::Phdr>(bytes, header->e_phoff + i * sizeof(typename Elf::Phdr));
        if (program.p_type == PT_INTERP)
            image.has_interpreter = true;
        if (program.p_type != PT_LOAD && program.p_type != PT_NOTE)
            continue;
        const auto contents = slice(bytes, program.p_offset, program.p_filesz);
        if (!contents)
            return fail("the ELF file is truncated: segment {} is {} bytes at offset {}, the file has {}", i,
                        program.p_filesz, program.p_offset, bytes.size());
        if (program.p_type == PT_NOTE) {
            if (!image.pvh_entry)
                image.pvh_entry = find_pvh_entry(*contents, program.p_align == 8 ? 8 : 4);
            continue;
        }
        if (program.p_filesz > program.p_memsz)
            return fail("the ELF file is damaged: segment {} has {} bytes in the file but {} in memory", i,
                        program.p_filesz, program.p_memsz);
        if (program.p_memsz != 0)
            image.segments.push_back(
                {program.p_paddr, program.p_vaddr, program.p_offset, program.p_filesz, program.p_memsz});
    }
    return image;
}

} // namespace

bool ElfImage::is_x86() const {
    return machine == (is64 ? EM_X86_64 : EM_386);
}

bool is_elf(std::span<const uint8_t> bytes) {
    return bytes.size() >= SELFMAG && std::memcmp(bytes.data(), ELFMAG, SELFMAG) == 0;
}

std::string machine_name(uint16_t machine) {
    switch (machine) {
    case EM_386:
        return "32-bit x86";
    case EM_X86_64:
        return "x86-64";
    case EM_ARM:
        return "32-bit ARM";
    case EM_AARCH64:
        return "ARM64";
    case EM_RISCV:
        return "RISC-V";
    case EM_PPC:
    case EM_PPC64:
        return "PowerPC";
    case EM_S390:
        return "s390";
    case EM_MIPS:
        return "MIPS";
    case EM_IA_64:
        return "Itanium";
    default:
        return fmt::format("machine {}", machine);
    }
}

Result<ElfImage> parse_elf(std::span<const uint8_t> bytes) {
    const auto ident = slice(bytes, 0, EI_NIDENT);
    if (!ident)
        return fail("the ELF file is truncated: {} bytes don't hold its header", bytes.size());
    if ((*ident)[EI_DATA] == ELFDATA2MSB)
        return fail("it is a big-endian ELF file, not one for x86");
    if ((*ident)[EI_DATA] != ELFDATA2LSB)
        return fail("the ELF file is damaged: byte order {}", (*ident)[EI_DATA]);
    switch ((*ident)[EI_CLASS]) {
    case ELFCLASS32:
        return parse<Elf32>(bytes);
    case ELFCLASS64:
        return parse<Elf64>(bytes);
    default:
        return fail("the ELF file is damaged: class {}", (*ident)[EI_CLASS]);
    }
}

Result<MemoryRange> place_elf(const ElfImage& image, GuestMemory& memory, Placement& placement) {
    if (image.segments.empty())
        return fail("the ELF file has nothing to load");
    MemoryRange range{std::numeric_limits<Gpa>::max(), 0};
    // The highest first: should memory be too small, the message then says how much the whole kernel needs.
    std::vector<const ElfSegment*> from_the_top;
    for (const ElfSegment& segment : image.segments)
        from_the_top.push_back(&segment);
    std::stable_sort(from_the_top.begin(), from_the_top.end(),
                     [](const ElfSegment* a, const ElfSegment* b) { return a->physical > b->physical; });
    for (const ElfSegment* segment : from_the_top) {
        VTRACE_TRY(placement.claim(segment->physical, segment->memory_size,
                                   fmt::format("the kernel's segment at {:#x}", segment->physical)));
        range.start = std::min(range.start, segment->physical);
        range.end = std::max(range.end, segment->physical + segment->memory_size);
    }
    for (const ElfSegment& segment : image.segments) {
        VTRACE_TRY(memory.write(segment.physical, image.bytes.subspan(segment.file_offset, segment.file_size)));
        if (const uint64_t rest = segment.memory_size - segment.file_size)
            std::memset(memory.at(segment.physical + segment.file_size, rest), 0, rest);
    }
    return range;
}

Result<Gpa> physical_entry(const ElfImage& image) {
    for (const ElfSegment& segment : image.segments)
        if (image.entry >= segment.physical && image.entry - segment.physical < segment.memory_size)
            return image.entry;
    for (const ElfSegment& segment : image.segments)
        if (image.entry >= segment.virtual_ && image.entry - segment.virtual_ < segment.memory_size)
            return segment.physical + (image.entry - segment.virtual_);
    return fail("its entry {:#x} is in none of its segments", image.entry);
}

} // namespace vtrace
