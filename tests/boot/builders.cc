#include "tests/boot/builders.h"

#include <algorithm>
#include <cstdlib>
#include <elf.h>
#include <stdexcept>

#include <asm/bootparam.h>
#include <lz4hc.h>
#include <lzma.h>
#include <zlib.h>
#include <zstd.h>

namespace vtrace::testing {
namespace {

void check(bool worked, const char* what) {
    if (!worked)
        throw std::runtime_error(what);
}

Bytes gzip(std::span<const uint8_t> plain) {
    Bytes out(plain.size() + plain.size() / 100 + 1024);
    z_stream stream{};
    check(deflateInit2(&stream, 9, Z_DEFLATED, 16 + MAX_WBITS, 9, Z_DEFAULT_STRATEGY) == Z_OK, "deflateInit2");
    stream.next_in = const_cast<Bytef*>(plain.data());
    stream.avail_in = static_cast<uInt>(plain.size());
    stream.next_out = out.data();
    stream.avail_out = static_cast<uInt>(out.size());
    check(deflate(&stream, Z_FINISH) == Z_STREAM_END, "deflate");
    out.resize(stream.total_out);
    deflateEnd(&stream);
    return out;
}

/// As the kernel's xz_wrap.sh makes it: CRC32, a BCJ filter for x86 in front of LZMA2.
Bytes xz(std::span<const uint8_t> plain) {
    lzma_options_lzma options;
    lzma_lzma_preset(&options, 6);
    const lzma_filter filters[] = {
        {LZMA_FILTER_X86, nullptr}, {LZMA_FILTER_LZMA2, &options}, {LZMA_VLI_UNKNOWN, nullptr}};
    Bytes out(lzma_stream_buffer_bound(plain.size()));
    size_t size = 0;
    check(lzma_stream_buffer_encode(const_cast<lzma_filter*>(filters), LZMA_CHECK_CRC32, nullptr, plain.data(),
                                    plain.size(), out.data(), &size, out.size()) == LZMA_OK,
          "lzma_stream_buffer_encode");
    out.resize(size);
    return out;
}

Bytes lzma(std::span<const uint8_t> plain) {
    lzma_options_lzma options;
    lzma_lzma_preset(&options, 6);
    lzma_stream stream = LZMA_STREAM_INIT;
    check(lzma_alone_encoder(&stream, &options) == LZMA_OK, "lzma_alone_encoder");
    Bytes out(plain.size() + plain.size() / 3 + 1024);
    stream.next_in = plain.data();
    stream.avail_in = plain.size();
    stream.next_out = out.data();
    stream.avail_out = out.size();
    check(lzma_code(&stream, LZMA_FINISH) == LZMA_STREAM_END, "lzma_code");
    out.resize(stream.total_out);
    lzma_end(&stream);
    return out;
}

Bytes lz4_legacy(std::span<const uint8_t> plain) {
    constexpr size_t block = 8 << 20;
    Bytes out{0x02, 0x21, 0x4c, 0x18};
    for (size_t at = 0; at < plain.size(); at += block) {
        const auto part = plain.subspan(at, std::min(block, plain.size() - at));
        Bytes packed(LZ4_compressBound(static_cast<int>(part.size())));
        const int size =
            LZ4_compress_HC(reinterpret_cast<const char*>(part.data()), reinterpret_cast<char*>(packed.data()),
                            static_cast<int>(part.size()), static_cast<int>(packed.size()), 9);
        check(size > 0, "LZ4_compress_HC");
        append(out, bytes_of(static_cast<uint32_t>(size)));
        append(out, std::span(packed).first(size));
    }
    return out;
}

Bytes zstd(std::span<const uint8_t> plain) {
    Bytes out(ZSTD_compressBound(plain.size()));
    const size_t size = ZSTD_compress(out.data(), out.size(), plain.data(), plain.size(), 19);
    check(!ZSTD_isError(size), "ZSTD_compress");
    out.resize(size);
    return out;
}

template <class Ehdr, class Phdr>
Bytes build_elf(const ElfFile& file) {
    const size_t programs = file.segments.size() + !file.notes.empty() + file.interpreter;
    Bytes out(sizeof(Ehdr) + programs * sizeof(Phdr));
    append(out, file.after_headers);
    Ehdr header{};
    std::memcpy(header.e_ident, ELFMAG, SELFMAG);
    header.e_ident[EI_CLASS] = file.is64 ? ELFCLASS64 : ELFCLASS32;
    header.e_ident[EI_DATA] = ELFDATA2LSB;
    header.e_ident[EI_VERSION] = EV_CURRENT;
    header.e_type = file.type;
    header.e_machine = file.machine;
    header.e_version = EV_CURRENT;
    header.e_entry = static_cast<decltype(header.e_entry)>(file.entry);
    header.e_phoff = sizeof(Ehdr);
    header.e_ehsize = sizeof(Ehdr);
    header.e_phentsize = sizeof(Phdr);
    header.e_phnum = static_cast<uint16_t>(programs);
    put(out, 0, header);

    size_t program_at = sizeof(Ehdr);
    auto add = [&](uint32_t type, uint64_t physical, uint64_t virtual_, const Bytes& contents, uint64_t memory_size) {
        Phdr program{};
        program.p_type = type;
        program.p_offset = static_cast<decltype(program.p_offset)>(out.size());
        program.p_paddr = static_cast<decltype(program.p_paddr)>(physical);
        program.p_vaddr = static_cast<decltype(program.p_vaddr)>(virtual_);
        program.p_filesz = static_cast<decltype(program.p_filesz)>(contents.size());
        program.p_memsz = static_cast<decltype(program.p_memsz)>(memory_size);
        program.p_align = 4;
        append(out, contents);
        put(out, program_at, program);
        program_at += sizeof(Phdr);
    };
    if (file.interpreter)
        add(PT_INTERP, 0, 0, text("/lib/ld.so"), 0);
    for (const LoadSegment& segment : file.segments)
        add(PT_LOAD, segment.physical, segment.virtual_, segment.contents, segment.memory_size);
    if (!file.notes.empty())
        add(PT_NOTE, 0, 0, file.notes, file.notes.size());
    return out;
}

} // namespace

Bytes text(std::string_view characters) {
    return Bytes(characters.begin(), characters.end());
}

Bytes mixed_data(size_t size, uint32_t seed) {
    Bytes data(size);
    uint32_t state = seed;
    for (uint8_t& byte : data) {
        state = state * 1664525 + 1013904223;
        byte = static_cast<uint8_t>(state >> 28); // four random bits
    }
    return data;
}

void append(Bytes& bytes, std::span<const uint8_t> more) {
    const size_t before = bytes.size();
    bytes.resize(before + more.size());
    std::copy(more.begin(), more.end(), bytes.begin() + before);
}

Bytes compress(Compression compression, std::span<const uint8_t> plain) {
    switch (compression) {
    case Compression::gzip:
        return gzip(plain);
    case Compression::xz:
        return xz(plain);
    case Compression::lzma:
        return lzma(plain);
    case Compression::lz4:
        return lz4_legacy(plain);
    case Compression::zstd:
        return zstd(plain);
    default:
        return Bytes(plain.begin(), plain.end());
    }
}

Bytes ElfFile::build() const {
    return is64 ? build_elf<Elf64_Ehdr, Elf64_Phdr>(*this) : build_elf<Elf32_Ehdr, Elf32_Phdr>(*this);
}

Bytes pvh_note(uint32_t entry, unsigned size) {
    Bytes note;
    append(note, bytes_of(Elf64_Nhdr{4, size, 18}));
    append(note, text(std::string_view("Xen\0", 4)));
    append(note, bytes_of(uint64_t(entry)));
    note.resize(note.size() - 8 + size);
    return note;
}

ElfFile small_vmlinux() {
    constexpr uint64_t base = 0xffff'ffff'8000'0000;
    Bytes code = mixed_data(3000, 7);
    append(code, text(std::string_view("Linux version %s\0Linux version 9.8.7-test (a@b)\n\0", 50)));
    ElfFile file;
    file.entry = 0x100'0040;
    file.segments = {{0x100'0000, base + 0x100'0000, code, code.size()},
                     {0x101'0000, base + 0x101'0000, mixed_data(500, 9), 0x3000}};
    return file;
}

Bytes BzImageFile::build() const {
    constexpr size_t setup_sectors = 3, sector = 512, payload_offset = 0x300, name_at = 0x300;
    constexpr size_t header_at = 0x1f1;
    Bytes out((setup_sectors + 1) * sector + payload_offset);
    append(out, payload);
    out.resize((out.size() + 15) / 16 * 16);
    setup_header header{};
    header.setup_sects = setup_sectors;
    header.syssize = static_cast<uint32_t>((out.size() - (setup_sectors + 1) * sector) / 16);
    header.boot_flag = 0xaa55;
    header.jump = static_cast<uint16_t>(0xeb | (header_at + sizeof header - 0x202) << 8);
    header.header = 0x53726448;
    header.version = version;
    header.kernel_version = name_at - 0x200;
    header.loadflags = LOADED_HIGH;
    header.code32_start = 0x10'0000;
    header.initrd_addr_max = initrd_addr_max;
    header.kernel_alignment = 0x20'0000;
    header.relocatable_kernel = 1;
    header.xloadflags = xloadflags;
    header.cmdline_size = cmdline_size;
    header.payload_offset = payload_offset;
    header.payload_length = static_cast<uint32_t>(payload.size());
    header.pref_address = pref_address;
    header.init_size = init_size;
    put(out, header_at, header);
    std::copy(name.begin(), name.end(), out.begin() + name_at);
    return out;
}

Bytes payload_of(const Bytes& elf, Compression compression) {
    Bytes payload = compress(compression, elf);
    if (compression != Compression::gzip && compression != Compression::none)
        append(payload, bytes_of(static_cast<uint32_t>(elf.size())));
    return payload;
}

Bytes multiboot_header(uint32_t flags, std::vector<uint32_t> addresses) {
    constexpr uint32_t magic = 0x1badb002;
    Bytes header;
    append(header, bytes_of(magic));
    append(header, bytes_of(flags));
    append(header, bytes_of(static_cast<uint32_t>(0u - magic - flags)));
    for (uint32_t address : addresses)
        append(header, bytes_of(address));
    return header;
}

GuestMemory memory_of(uint64_t mib) {
    auto memory = GuestMemory::create(mib << 20);
    check(memory.has_value(), "GuestMemory::create");
    return std::move(*memory);
}

Result<LoadedGuest> load(GuestMemory& memory, const Bytes& kernel, const BootOptions& options) {
    return load_guest(memory, BootFiles{{"k", kernel, {}}, {}, {}}, options, 0xe'0000);
}

Bytes read_guest(const GuestMemory& memory, Gpa gpa, uint64_t size) {
    Bytes bytes(size);
    check(memory.read(gpa, bytes).has_value(), "GuestMemory::read");
    return bytes;
}

std::string string_at(const GuestMemory& memory, Gpa gpa) {
    std::string out;
    for (uint8_t byte; (byte = value_at<uint8_t>(memory, gpa)) != 0; gpa++)
        out += static_cast<char>(byte);
    return out;
}

} // namespace vtrace::testing
