#include "decode/export/code_image.h"

#include <algorithm>

#include <elf.h>

#include "decode/export/file_sink.h"

namespace vtrace {
namespace {

template <class T>
std::string_view bytes_of(const T& object) {
    return {reinterpret_cast<const char*>(&object), sizeof object};
}

/// Strings behind each other, as ELF's string tables have them.
class StringTable {
  public:
    uint32_t add(const std::string& text) {
        const auto at = static_cast<uint32_t>(bytes_.size());
        bytes_ += text;
        bytes_ += '\0';
        return at;
    }
    const std::string& bytes() const { return bytes_; }

  private:
    std::string bytes_ = std::string(1, '\0');
};

} // namespace

void CodeImage::add(uint64_t address, std::span<const uint8_t> code) {
    while (!code.empty()) {
        auto [page, fresh] = pages_.try_emplace(address & ~(page_bytes - 1));
        if (fresh)
            page->second.fill(0);
        const uint64_t at = address % page_bytes;
        const size_t count = std::min<size_t>(code.size(), page_bytes - at);
        for (size_t i = 0; i < count; ++i)
            if (page->second[at + i] == 0)
                page->second[at + i] = code[i];
        address += count;
        code = code.subspan(count);
    }
}

std::vector<CodeImage::Section> CodeImage::sections(uint64_t gap) const {
    std::vector<Section> runs;
    for (const auto& [address, page] : pages_) {
        if (!runs.empty() && address - (runs.back().start + runs.back().size) < std::max(gap, uint64_t{1}))
            runs.back().size = address + page_bytes - runs.back().start;
        else
            runs.push_back({address, page_bytes});
    }
    return runs;
}

Result<> CodeImage::write(const std::string& path, std::vector<Section>& sections,
                          const std::vector<Symbol>& symbols) const {
    auto file = FileSink::create(path);
    if (!file)
        return Unexpected(std::move(file.error()));
    StringTable names, section_names;
    std::vector<Elf64_Shdr> headers(1);
    std::vector<Elf64_Phdr> segments;
    uint64_t offset = page_bytes; // the ELF header has the first page
    const size_t header_room = page_bytes - sizeof(Elf64_Ehdr);
    const bool with_segments = sections.size() * sizeof(Elf64_Phdr) <= header_room;
    for (Section& section : sections) {
        section.offset = offset;
        const std::string name = headers.size() == 1 ? ".text" : fmt::format(".text.{}", headers.size() - 1);
        headers.push_back({.sh_name = section_names.add(name),
                           .sh_type = SHT_PROGBITS,
                           .sh_flags = SHF_ALLOC | SHF_EXECINSTR,
                           .sh_addr = section.start,
                           .sh_offset = offset,
                           .sh_size = section.size,
                           .sh_link = 0,
                           .sh_info = 0,
                           .sh_addralign = page_bytes,
                           .sh_entsize = 0});
        if (with_segments)
            segments.push_back({.p_type = PT_LOAD,
                                .p_flags = PF_R | PF_X,
                                .p_offset = offset,
                                .p_vaddr = section.start,
                                .p_paddr = section.start,
                                .p_filesz = section.size,
                                .p_memsz = section.size,
                                .p_align = page_bytes});
        auto page = pages_.lower_bound(section.start);
        for (; page != pages_.end() && page->first - section.start < section.size; ++page) {
            file->seek(offset + (page->first - section.start));
            file->write({reinterpret_cast<const char*>(page->second.data()), page_bytes});
        }
        offset += section.size;
    }
    std::string table(sizeof(Elf64_Sym), '\0');
    for (const Symbol& symbol : symbols) {
        const auto after =
            std::upper_bound(sections.begin(), sections.end(), symbol.address,
                             [](uint64_t value, const Section& section) { return value < section.start; });
        if (after == sections.begin() || symbol.address - (after - 1)->start >= (after - 1)->size)
            continue;
        const auto index = static_cast<Elf64_Half>(after - sections.begin()); // headers[0] is the null section
        table += bytes_of(Elf64_Sym{.st_name = names.add(symbol.name),
                                    .st_info = ELF64_ST_INFO(STB_GLOBAL, STT_FUNC),
                                    .st_other = STV_DEFAULT,
                                    .st_shndx = index,
                                    .st_value = symbol.address,
                                    .st_size = symbol.size});
    }
    file->seek(offset);
    const auto append = [&](const char* name, uint32_t type, const std::string& bytes, uint64_t entry) {
        Elf64_Shdr header{};
        header.sh_name = section_names.add(name);
        header.sh_type = type;
        header.sh_offset = file->offset();
        header.sh_addralign = 8;
        header.sh_entsize = entry;
        const std::string& content = type == SHT_STRTAB && bytes.empty() ? section_names.bytes() : bytes;
        header.sh_size = content.size();
        file->write(content);
        file->write(std::string(-content.size() % 8, '\0'));
        headers.push_back(header);
    };
    append(".symtab", SHT_SYMTAB, table, sizeof(Elf64_Sym));
    headers.back().sh_link = static_cast<Elf64_Word>(headers.size()); // .strtab
    headers.back().sh_info = 1;                                       // the first that is not local
    append(".strtab", SHT_STRTAB, names.bytes(), 0);
    append(".shstrtab", SHT_STRTAB, {}, 0);
    const uint64_t header_offset = file->offset();
    for (const Elf64_Shdr& header : headers)
        file->write(bytes_of(header));

    Elf64_Ehdr elf{};
    std::copy_n(ELFMAG, SELFMAG, elf.e_ident);
    elf.e_ident[EI_CLASS] = ELFCLASS64;
    elf.e_ident[EI_DATA] = ELFDATA2LSB;
    elf.e_ident[EI_VERSION] = EV_CURRENT;
    elf.e_type = ET_EXEC;
    elf.e_machine = EM_X86_64;
    elf.e_version = EV_CURRENT;
    elf.e_phoff = segments.empty() ? 0 : sizeof elf;
    elf.e_shoff = header_offset;
    elf.e_ehsize = sizeof elf;
    elf.e_phentsize = sizeof(Elf64_Phdr);
    elf.e_phnum = static_cast<Elf64_Half>(segments.size());
    elf.e_shentsize = sizeof(Elf64_Shdr);
    elf.e_shnum = static_cast<Elf64_Half>(headers.size());
    elf.e_shstrndx = static_cast<Elf64_Half>(headers.size() - 1);
    file->seek(0);
    file->write(bytes_of(elf));
    for (const Elf64_Phdr& segment : segments)
        file->write(bytes_of(segment));
    return file->finish();
}

} // namespace vtrace
