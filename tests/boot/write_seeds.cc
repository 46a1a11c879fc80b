// Writes one small kernel of each kind into a folder: the fuzzer's starting points, each with its byte of options.
#include <cstdio>
#include <filesystem>
#include <fstream>

#include "tests/boot/builders.h"

using namespace vtrace;
using namespace vtrace::testing;

namespace {

void write_seed(const std::filesystem::path& folder, const std::string& name, uint8_t options, const Bytes& kernel) {
    std::ofstream file(folder / name, std::ios::binary);
    file.put(static_cast<char>(options));
    file.write(reinterpret_cast<const char*>(kernel.data()), static_cast<std::streamsize>(kernel.size()));
}

} // namespace

int main(int argc, char** argv) {
    if (argc != 2) {
        std::fprintf(stderr, "usage: %s FOLDER\n", argv[0]);
        return 2;
    }
    const std::filesystem::path folder = argv[1];
    std::filesystem::create_directories(folder);
    constexpr uint8_t plain = 0, as_shipped = 1, with_files = 0x60, flat = 0x80;

    ElfFile vmlinux = small_vmlinux();
    for (LoadSegment& segment : vmlinux.segments)
        segment.contents.resize(std::min<size_t>(segment.contents.size(), 200));
    for (Compression format : {Compression::none, Compression::gzip, Compression::xz, Compression::lzma,
                               Compression::lz4, Compression::zstd}) {
        const std::string name(name_of(format));
        const Bytes bzimage = BzImageFile{.payload = payload_of(vmlinux.build(), format)}.build();
        write_seed(folder, "bzimage-" + name, plain, bzimage);
        write_seed(folder, "shipped-" + name, as_shipped | with_files, bzimage);
        write_seed(folder, "compressed-" + name, plain, compress(format, vmlinux.build()));
    }
    write_seed(folder, "vmlinux", with_files, vmlinux.build());
    vmlinux.notes = pvh_note(0x100'0000);
    write_seed(folder, "pvh", with_files, vmlinux.build());
    Bytes code = multiboot_header(3);
    append(code, mixed_data(100));
    const ElfFile multiboot{
        .is64 = false, .machine = 3, .entry = 0x40'000c, .segments = {{0x40'0000, 0x40'0000, code, 0x1000}}};
    write_seed(folder, "multiboot", with_files, multiboot.build());
    Bytes kludge = multiboot_header(0x1'0000, {0x20'0000, 0x20'0000, 0, 0x20'1000, 0x20'0020});
    append(kludge, mixed_data(100));
    write_seed(folder, "multiboot-addresses", with_files, kludge);
    for (uint8_t mode : {0, 1, 2})
        write_seed(folder, "flat-" + std::to_string(mode), static_cast<uint8_t>(flat | mode << 3), mixed_data(100));
    write_seed(folder, "text", plain, text("#!/bin/sh\n"));
}
