#include "decode/elf_symbols.h"

#include <algorithm>
#include <memory>

#include <gelf.h>

namespace vtrace {
namespace {

struct ElfEnd {
    void operator()(Elf* elf) const { elf_end(elf); }
};

/// As nm(1) prints it; '?' for what has no place here (files, sections, undefined).
char type_letter(Elf* elf, const GElf_Sym& symbol) {
    const unsigned type = GELF_ST_TYPE(symbol.st_info);
    if (symbol.st_shndx == SHN_UNDEF || type == STT_FILE || type == STT_SECTION || type == STT_TLS)
        return '?';
    const bool local = GELF_ST_BIND(symbol.st_info) == STB_LOCAL;
    if (symbol.st_shndx == SHN_ABS)
        return local ? 'a' : 'A';
    GElf_Shdr header;
    Elf_Scn* section = elf_getscn(elf, symbol.st_shndx);
    if (!section || !gelf_getshdr(section, &header))
        return '?';
    if (header.sh_flags & SHF_EXECINSTR)
        return local ? 't' : 'T';
    return local ? 'd' : 'D';
}

} // namespace

Result<std::vector<TraceSymbol>> elf_symbols(std::span<const uint8_t> file) {
    elf_version(EV_CURRENT);
    // libelf doesn't write to memory that it was given, though its interface doesn't say so.
    const std::unique_ptr<Elf, ElfEnd> elf(
        elf_memory(const_cast<char*>(reinterpret_cast<const char*>(file.data())), file.size()));
    if (!elf || elf_kind(elf.get()) != ELF_K_ELF)
        return fail("cannot read symbols: the file is no ELF file");
    std::vector<TraceSymbol> symbols;
    for (Elf_Scn* section = nullptr; (section = elf_nextscn(elf.get(), section));) {
        GElf_Shdr header;
        if (!gelf_getshdr(section, &header) || header.sh_type != SHT_SYMTAB)
            continue;
        Elf_Data* data = elf_getdata(section, nullptr);
        const size_t entry = gelf_fsize(elf.get(), ELF_T_SYM, 1, EV_CURRENT);
        if (!data || entry == 0)
            continue;
        for (size_t i = 0; i < data->d_size / entry; ++i) {
            GElf_Sym symbol;
            if (!gelf_getsym(data, static_cast<int>(i), &symbol))
                break;
            const char type = type_letter(elf.get(), symbol);
            const char* name = elf_strptr(elf.get(), header.sh_link, symbol.st_name);
            if (type != '?' && name && *name)
                symbols.push_back({symbol.st_value, symbol.st_size, type, name, {}});
        }
    }
    if (symbols.empty())
        return fail("cannot read symbols: the ELF file has none");
    std::stable_sort(symbols.begin(), symbols.end(),
                     [](const TraceSymbol& a, const TraceSymbol& b) { return a.address < b.address; });
    return symbols;
}

} // namespace vtrace
