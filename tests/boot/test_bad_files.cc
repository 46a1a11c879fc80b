// Wrong, damaged and truncated files: one clear line each, never a crash.
#include <catch2/catch.hpp>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sys/stat.h>
#include <unistd.h>

#include "tests/boot/builders.h"

using namespace vtrace;
using namespace vtrace::testing;
using Catch::Matchers::Contains;
namespace stdfs = std::filesystem;

namespace {

struct TemporaryDirectory {
    std::string path;
    TemporaryDirectory() {
        std::string pattern = (stdfs::temp_directory_path() / "vtrace-boot-XXXXXX").string();
        if (!mkdtemp(pattern.data()))
            FAIL("mkdtemp");
        path = pattern;
    }
    ~TemporaryDirectory() { stdfs::remove_all(path); }
    std::string file(const std::string& name, const Bytes& bytes) const {
        std::ofstream(path + "/" + name, std::ios::binary)
            .write(reinterpret_cast<const char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
        return path + "/" + name;
    }
};

std::string message_of(GuestMemory& memory, const BootOptions& options) {
    const auto guest = load_guest(memory, options, 0);
    REQUIRE_FALSE(guest);
    CHECK(guest.error().message.find('\n') == std::string::npos);
    return guest.error().message;
}

std::string rejected(const Bytes& bytes) {
    GuestMemory memory = memory_of(32);
    const auto guest = load(memory, bytes);
    REQUIRE_FALSE(guest);
    const std::string prefix = "cannot load the kernel 'k': it is ";
    const std::string message = guest.error().message;
    CHECK(message.substr(0, prefix.size()) == prefix);
    return message.size() > prefix.size() ? message.substr(prefix.size()) : message;
}

/// Loads `kernel` cut to each length: always an error, except with the lengths from `whole` on.
void cut_at_every_byte(const Bytes& kernel, size_t whole, const BootOptions& options = {}) {
    GuestMemory memory = memory_of(32);
    for (size_t size = 0; size <= kernel.size(); size++) {
        // A copy of exactly this size: an access behind it is one that the address sanitizer sees.
        const Bytes cut(kernel.begin(), kernel.begin() + size);
        const auto guest = load(memory, cut, options);
        if (guest.has_value() != (size >= whole))
            FAIL("cut to " << size << " of " << kernel.size() << ": "
                           << (guest ? "loaded" : guest.error().message.c_str()));
    }
}

/// Loads `kernel` with each byte, one at a time, replaced: any outcome is right that comes back.
void damage_every_byte(const Bytes& kernel, const BootOptions& options = {}) {
    GuestMemory memory = memory_of(32);
    for (size_t at = 0; at < kernel.size(); at++) {
        for (uint8_t value : {0x00, 0x7f, 0xff}) {
            Bytes bad = kernel;
            bad[at] = value;
            const auto guest = load(memory, bad, options);
            if (!guest)
                CHECK_FALSE(guest.error().message.empty());
            else
                CHECK(memory.at(guest->kernel.start, guest->kernel.size()));
        }
    }
}

ElfFile tiny(ElfFile file) {
    for (LoadSegment& segment : file.segments)
        segment.contents.resize(std::min<size_t>(segment.contents.size(), 150));
    return file;
}

ElfFile tiny_multiboot() {
    Bytes code = multiboot_header(0);
    append(code, mixed_data(100));
    return {.is64 = false, .machine = 3, .entry = 0x40'000c, .segments = {{0x40'0000, 0x40'0000, code, 0x1000}}};
}

} // namespace

TEST_CASE("files that can't be read") {
    const TemporaryDirectory directory;
    GuestMemory memory = memory_of(32);
    BootOptions options;
    CHECK(message_of(memory, options) == "no kernel is given");
    options.kernel_path = directory.path + "/none";
    CHECK(message_of(memory, options) ==
          "cannot open the kernel '" + options.kernel_path + "': No such file or directory");
    options.kernel_path = directory.path;
    CHECK(message_of(memory, options) ==
          "cannot read the kernel '" + directory.path + "': it is a directory, not a file");
    options.kernel_path = directory.file("empty", {});
    CHECK_THAT(message_of(memory, options), Contains("the file is empty"));
    options.kernel_path = "/dev/zero";
    CHECK_THAT(message_of(memory, options), Contains("it is a device"));
    options.kernel_path = directory.path + "/pipe";
    REQUIRE(mkfifo(options.kernel_path.c_str(), 0600) == 0);
    CHECK_THAT(message_of(memory, options), Contains("it is a pipe"));

    options.kernel_path = directory.file("huge", {1});
    REQUIRE(truncate(options.kernel_path.c_str(), 5ll << 30) == 0); // sparse
    CHECK_THAT(message_of(memory, options), Contains("it is 5120 MiB, more than any kernel has (2048 MiB)"));

    options.kernel_path = directory.file("kernel", small_vmlinux().build());
    REQUIRE(load_guest(memory, options, 0));
    options.initrd_path = directory.path + "/none";
    CHECK_THAT(message_of(memory, options), Contains("cannot open the initrd"));
    options.initrd_path = directory.file("empty", {});
    CHECK_THAT(message_of(memory, options), Contains("cannot use the initrd"));
    options.initrd_path = directory.file("large", {1});
    REQUIRE(truncate(options.initrd_path.c_str(), 100ll << 20) == 0);
    CHECK_THAT(message_of(memory, options), Contains("it is 100 MiB, larger than the guest's memory (32 MiB)"));
    if (geteuid() != 0) {
        options.initrd_path = directory.file("secret", {1});
        chmod(options.initrd_path.c_str(), 0);
        CHECK_THAT(message_of(memory, options), Contains("Permission denied"));
    }
}

TEST_CASE("modules are a path, a space and arguments") {
    const TemporaryDirectory directory;
    GuestMemory memory = memory_of(32);
    BootOptions options;
    options.kernel_path = directory.file("kernel", tiny_multiboot().build());
    options.modules = {directory.file("mod", text("module")) + " a b"};
    const auto guest = load_guest(memory, options, 0);
    REQUIRE(guest);
    const auto modules = value_at<uint32_t>(memory, guest->state.gpr[RBX] + 24);
    CHECK(string_at(memory, value_at<uint32_t>(memory, modules + 8)) == "mod a b");
    options.modules = {directory.path + "/none x"};
    CHECK_THAT(message_of(memory, options), Contains("cannot open the module '" + directory.path + "/none'"));
}

TEST_CASE("files of other kinds are named") {
    auto with = [](size_t size, size_t at, std::string_view magic) {
        Bytes bytes(size);
        std::copy(magic.begin(), magic.end(), bytes.begin() + at);
        return bytes;
    };
    auto elf = [](bool is64, uint16_t machine, uint16_t type) {
        ElfFile file = small_vmlinux();
        file.is64 = is64;
        file.machine = machine;
        file.type = type;
        return file;
    };
    Bytes arm64 = with(4096, 0x38, "ARM\x64");
    put(arm64, 0, uint16_t(0x5a4d)); // its EFI stub makes it look like a PE file too
    CHECK(rejected(arm64) == "an ARM64 Linux Image, not a kernel for x86");
    CHECK(rejected(with(4096, 0x38, "RSC\x05")) == "a RISC-V Linux Image, not a kernel for x86");
    CHECK(rejected(with(4096, 0x24, "\x18\x28\x6f\x01")) == "a 32-bit ARM Linux zImage, not a kernel for x86");
    CHECK(rejected(elf(true, 183, 2).build()) == "an ELF file for ARM64, not a kernel for x86");
    CHECK(rejected(elf(true, 62, 1).build()) == "an object file or kernel module, not a kernel");
    CHECK(rejected(elf(true, 62, 4).build()) == "a core dump, not a kernel");
    CHECK(rejected(elf(true, 62, 3).build()) == "a shared library or position-independent program, not a kernel");
    CHECK(rejected(elf(false, 3, 2).build()) ==
          "a 32-bit ELF file with neither a Multiboot header nor a PVH entry point");
    CHECK(rejected(elf(false, 62, 2).build()) == "an ELF file for x86-64 in a 32-bit container, not a kernel for x86");
    ElfFile program = small_vmlinux();
    program.interpreter = true;
    CHECK(rejected(program.build()) == "a program that needs an operating system, not a kernel");
    Bytes big_endian = small_vmlinux().build();
    big_endian[5] = 2;
    CHECK(rejected(big_endian) == "a big-endian ELF file, not one for x86");

    CHECK(rejected(text("#!/bin/sh\nexit 0\n")) == "text, not a kernel");
    CHECK(rejected(compress(Compression::gzip, text("just some text\n"))) ==
          "gzip-compressed data, and what is inside is text, not a kernel");
    CHECK(rejected(compress(Compression::gzip, arm64)) ==
          "gzip-compressed data, and what is inside is an ARM64 Linux Image, not a kernel for x86");
    CHECK(rejected(compress(Compression::xz, small_vmlinux().build())) ==
          "a xz-compressed ELF file: unpack it first (unxz)");
    CHECK(rejected(compress(Compression::zstd, BzImageFile{}.build())) ==
          "a zstd-compressed bzImage: unpack it first (unzstd)");
    CHECK(rejected(compress(Compression::gzip, compress(Compression::gzip, text("a")))) ==
          "gzip-compressed data in gzip-compressed data, not a kernel");
    CHECK(rejected(text("BZh91AY&SY")) == "bzip2-compressed data, not a kernel: unpack it first (bunzip2)");
    CHECK(rejected(with(4096, 0, "070701")) == "a cpio archive: an initrd, not a kernel");
    CHECK(rejected(with(4096, 257, "ustar")) == "a tar archive, not a kernel");
    CHECK(rejected(with(4096, 0x1fe, "\x55\xaa")) ==
          "a disk image or boot sector, not a kernel: vtrace starts kernels without firmware");
    CHECK(rejected(Bytes(4096)) == "nothing but zeros");
    CHECK_THAT(rejected(mixed_data(4096)), Contains("a flat binary must be asked for explicitly"));

    Bytes efi = with(4096, 0, "MZ");
    CHECK(rejected(efi) == "a DOS program, not a kernel");
    put(efi, 0x3c, uint32_t(0x80));
    put(efi, 0x80, uint32_t(0x4550));
    put(efi, 0x84, uint16_t(0x8664));
    CHECK(rejected(efi) == "an EFI program, which only UEFI firmware can start: not a bzImage");
    put(efi, 0x84, uint16_t(0xaa64));
    CHECK(rejected(efi) == "an EFI program for another processor, not a kernel for x86");
    std::copy_n(".linux", 6, efi.begin() + 0x200);
    CHECK_THAT(rejected(efi), Contains("a unified kernel image"));
    put(efi, 0x3c, uint32_t(0xffff'ffff));
    CHECK(rejected(efi) == "a DOS program, not a kernel");
    CHECK_THAT(rejected(with(4096, 0, std::string_view("MZ\0\0zimg", 8))), Contains("zboot"));
}

TEST_CASE("kernels cut at every byte are errors") {
    for (Compression format :
         {Compression::gzip, Compression::xz, Compression::lzma, Compression::lz4, Compression::zstd}) {
        const Bytes payload = payload_of(tiny(small_vmlinux()).build(), format);
        const Bytes kernel = BzImageFile{.payload = payload}.build();
        // The last paragraph's padding may be missing.
        const size_t setup_and_payload_offset = 4 * 512 + 0x300;
        const size_t whole = std::max(setup_and_payload_offset + payload.size(), kernel.size() - 15);
        cut_at_every_byte(kernel, whole);
        BootOptions as_shipped;
        as_shipped.as_shipped = true;
        cut_at_every_byte(kernel, whole, as_shipped);
    }
    ElfFile vmlinux = tiny(small_vmlinux());
    cut_at_every_byte(vmlinux.build(), vmlinux.build().size());
    vmlinux.notes = pvh_note(0x100'0000);
    cut_at_every_byte(vmlinux.build(), vmlinux.build().size());
    cut_at_every_byte(tiny_multiboot().build(), tiny_multiboot().build().size());
}

TEST_CASE("kernels with any byte replaced come back") {
    damage_every_byte(BzImageFile{.payload = payload_of(tiny(small_vmlinux()).build(), Compression::lz4)}.build());
    BootOptions as_shipped;
    as_shipped.as_shipped = true;
    damage_every_byte(BzImageFile{.payload = payload_of(tiny(small_vmlinux()).build(), Compression::gzip)}.build(),
                      as_shipped);
    ElfFile vmlinux = tiny(small_vmlinux());
    vmlinux.notes = pvh_note(0x100'0000);
    damage_every_byte(vmlinux.build());
    damage_every_byte(tiny_multiboot().build());
}

TEST_CASE("ELF files that contradict themselves") {
    auto damaged = [](size_t at, auto value) {
        Bytes bytes = small_vmlinux().build();
        put(bytes, at, value);
        GuestMemory memory = memory_of(32);
        const auto guest = load(memory, bytes);
        REQUIRE_FALSE(guest);
        return guest.error().message;
    };
    constexpr size_t phoff = 32, phentsize = 54, phnum = 56, first = 64, p_offset = 8, p_paddr = 24, p_filesz = 32,
                     p_memsz = 40;
    CHECK_THAT(damaged(phoff, ~0ull - 10), Contains("program headers are behind its end"));
    CHECK_THAT(damaged(phnum, uint16_t(0xfffe)), Contains("program headers are behind its end"));
    CHECK_THAT(damaged(phnum, uint16_t(0xffff)), Contains("no kernel has"));
    CHECK_THAT(damaged(phnum, uint16_t(0)), Contains("nothing to load"));
    CHECK_THAT(damaged(phentsize, uint16_t(1)), Contains("program headers of 1 bytes"));
    CHECK_THAT(damaged(first + p_offset, ~0ull), Contains("truncated: segment 0"));
    CHECK_THAT(damaged(first + p_filesz, ~0ull), Contains("truncated: segment 0"));
    CHECK_THAT(damaged(first + p_memsz, uint64_t(10)), Contains("in the file but 10 in memory"));
    CHECK_THAT(damaged(first + p_memsz, ~0ull), Contains("wraps around"));
    CHECK_THAT(damaged(first + p_memsz, uint64_t(1) << 40), Contains("outside of guest memory"));
    CHECK_THAT(damaged(first + p_paddr, ~0ull - 100), Contains("wraps around"));
    CHECK_THAT(damaged(first + p_paddr, uint64_t(0xa'0000)), Contains("overlaps the reserved area below 1 MiB"));
    CHECK_THAT(damaged(first + p_paddr, uint64_t(0)), Contains("overlaps the BIOS data area"));
}
