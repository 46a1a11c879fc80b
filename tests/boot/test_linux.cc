#include <catch2/catch.hpp>

#include <asm/bootparam.h>

#include "tests/boot/builders.h"

using namespace vtrace;
using namespace vtrace::testing;
using Catch::Matchers::Contains;

namespace {

const Compression formats[] = {Compression::none, Compression::gzip, Compression::xz,
                               Compression::lzma, Compression::lz4,  Compression::zstd};

void check_small_vmlinux(const GuestMemory& memory) {
    const ElfFile file = small_vmlinux();
    for (const LoadSegment& segment : file.segments) {
        Bytes expected = segment.contents;
        expected.resize(segment.memory_size);
        CHECK((read_guest(memory, segment.physical, segment.memory_size) == expected));
    }
}

/// Walks the guest's page tables as the processor would (SDM vol. 3, 4.5); 2 MiB pages.
std::optional<Gpa> walk(const GuestMemory& memory, Gpa cr3, Gva address) {
    Gpa table = cr3;
    for (unsigned shift : {39u, 30u, 21u}) {
        const auto entry = value_at<uint64_t>(memory, table + (address >> shift & 511) * 8);
        if ((entry & 3) != 3) // present, writable
            return std::nullopt;
        table = entry & 0xf'ffff'ffff'f000;
        if (entry & 0x80)
            return table + (address & 0x1f'ffff);
    }
    return std::nullopt;
}

void check_linux_entry(const GuestMemory& memory, const LoadedGuest& guest) {
    const CpuState& state = guest.state;
    CHECK(state.rip == guest.entry);
    CHECK(state.rflags == 2);
    CHECK(state.cr0 == 0x8000'0031); // PG, NE, ET, PE
    CHECK(state.cr4 == 0x20);        // PAE
    CHECK(state.efer == 0x500);      // LMA, LME
    CHECK(state.cpl() == 0);
    CHECK(state.segments[CS] == Segment{0, 0xffff'ffff, 0x10, 0xa09b});
    for (Seg seg : {DS, ES, SS, FS, GS})
        CHECK(state.segments[seg] == Segment{0, 0xffff'ffff, 0x18, 0xc093});
    CHECK(state.gdtr.limit == 31);
    CHECK(value_at<uint64_t>(memory, state.gdtr.base) == 0);
    CHECK(value_at<uint64_t>(memory, state.gdtr.base + 0x10) == 0x00af'9b00'0000'ffff);
    CHECK(value_at<uint64_t>(memory, state.gdtr.base + 0x18) == 0x00cf'9300'0000'ffff);
    for (Gva address : {0ull, 0x7ull, 0x12'3456ull, 0x100'0000ull, 0xbfff'ffffull, 0xfee0'0020ull, 0xffff'ffffull})
        CHECK(walk(memory, state.cr3, address) == address);
    CHECK(walk(memory, state.cr3, 0x1'0000'0000) == std::nullopt);
    uint32_t mxcsr;
    std::memcpy(&mxcsr, &state.fpu.fxsave[24], 4);
    CHECK(mxcsr == 0x1f80);
}

boot_params params_of(const GuestMemory& memory, const LoadedGuest& guest) {
    return value_at<boot_params>(memory, guest.state.gpr[RSI]);
}

} // namespace

TEST_CASE("a bzImage's payload of any format ends up in memory, entered at its 64-bit entry") {
    for (Compression format : formats) {
        INFO(name_of(format));
        BzImageFile file{.payload = payload_of(small_vmlinux().build(), format)};
        GuestMemory memory = memory_of(64);
        BootOptions options;
        options.command_line = "console=ttyS0 quiet";
        const auto guest = load(memory, file.build(), options);
        if (!guest)
            FAIL(guest.error().message);
        CHECK(guest->kind == KernelKind::linux_payload);
        CHECK(guest->version == "6.1.0-test (tester) #1");
        CHECK(guest->compression == name_of(format));
        CHECK(guest->entry == 0x100'0040);
        CHECK(guest->kernel == MemoryRange{0x100'0000, 0x101'3000});
        check_small_vmlinux(memory);
        check_linux_entry(memory, *guest);

        const boot_params params = params_of(memory, *guest);
        CHECK(params.hdr.header == 0x53726448);
        CHECK(params.hdr.version == 0x20f);
        CHECK(params.hdr.type_of_loader == 0xff);
        CHECK((params.hdr.loadflags & (LOADED_HIGH | KASLR_FLAG)) == LOADED_HIGH);
        CHECK(string_at(memory, params.hdr.cmd_line_ptr) == "console=ttyS0 quiet");
        CHECK(params.hdr.ramdisk_size == 0);
        CHECK(uint64_t(params.acpi_rsdp_addr) == 0xe'0000);
        CHECK(params.sentinel == 0);
        CHECK(params.screen_info.orig_video_isVGA == 0);
        REQUIRE(params.e820_entries == 3);
        CHECK(uint64_t(params.e820_table[0].size) == 0x9'fc00);
        CHECK(uint64_t(params.e820_table[2].addr) == 0x10'0000);
        CHECK(uint64_t(params.e820_table[2].size) == (63 << 20));
        CHECK(params.e820_table[1].type == 2);
        // The BIOS data area agrees with the map.
        CHECK(value_at<uint16_t>(memory, 0x413) * 1024 == 0x9'fc00);
        CHECK(value_at<uint16_t>(memory, 0x40e) * 16 == 0x9'fc00);
    }
}

TEST_CASE("what follows the ELF file in the payload (KASLR relocations) is ignored") {
    Bytes elf = small_vmlinux().build();
    append(elf, mixed_data(5000, 3));
    GuestMemory memory = memory_of(64);
    const auto guest = load(memory, BzImageFile{.payload = payload_of(elf, Compression::xz)}.build());
    REQUIRE(guest);
    check_small_vmlinux(memory);
}

TEST_CASE("a bzImage as shipped: its own protected-mode part, its own 64-bit entry") {
    BzImageFile file{.payload = payload_of(small_vmlinux().build(), Compression::zstd)};
    const Bytes bytes = file.build();
    GuestMemory memory = memory_of(64);
    BootOptions options;
    options.as_shipped = true;
    const auto guest = load(memory, bytes, options);
    REQUIRE(guest);
    CHECK(guest->kind == KernelKind::linux_as_shipped);
    CHECK(guest->entry == 0x100'0200);
    CHECK(guest->kernel == MemoryRange{0x100'0000, 0x120'0000});
    CHECK(read_guest(memory, 0x100'0000, bytes.size() - 2048) == Bytes(bytes.begin() + 2048, bytes.end()));
    check_linux_entry(memory, *guest);
    CHECK(params_of(memory, *guest).hdr.code32_start == 0x100'0000);

    file.xloadflags = 0;
    CHECK_THAT(load(memory, file.build(), options).error().message, Contains("XLF_KERNEL_64"));
    file.xloadflags = 1;
    file.version = 0x20b;
    CHECK_THAT(load(memory, file.build(), options).error().message, Contains("XLF_KERNEL_64"));
    file.version = 0x20f;
    file.init_size = 100;
    CHECK_THAT(load(memory, file.build(), options).error().message, Contains("init_size 100 is smaller"));
    file.init_size = 60 << 20;
    CHECK_THAT(load(memory, file.build(), options).error().message,
               Contains("the guest has 64 MiB of memory: give it more than 76 MiB"));
    file.pref_address = ~0ull - 100;
    CHECK_THAT(load(memory, file.build(), options).error().message, Contains("wraps around"));
    CHECK_THAT(load(memory, small_vmlinux().build(), options).error().message, Contains("only a bzImage"));
}

TEST_CASE("the initrd lies high, on a page, within the kernel's reach") {
    BzImageFile file{.payload = payload_of(small_vmlinux().build(), Compression::gzip)};
    const Bytes initrd = mixed_data(10'001);
    for (bool as_shipped : {false, true}) {
        GuestMemory memory = memory_of(64);
        BootOptions options;
        options.as_shipped = as_shipped;
        const Bytes bytes = file.build();
        BootFiles files{{"k", bytes, {}}, BootFile{"i", initrd, {}}, {}};
        auto guest = load_guest(memory, files, options, 0);
        REQUIRE(guest);
        CHECK(guest->initrd == MemoryRange{0x3ff'd000, 0x3ff'd000 + 10'001});
        CHECK((read_guest(memory, guest->initrd.start, initrd.size()) == initrd));
        const auto params = params_of(memory, *guest);
        CHECK(params.hdr.ramdisk_image == 0x3ff'd000);
        CHECK(params.hdr.ramdisk_size == 10'001);
        CHECK(params.ext_ramdisk_image == 0);
        CHECK(uint64_t(params.acpi_rsdp_addr) == 0);

        BzImageFile near = file;
        near.initrd_addr_max = 0x180'0fff;
        const Bytes near_bytes = near.build();
        files.kernel.bytes = near_bytes;
        GuestMemory other = memory_of(64);
        guest = load_guest(other, files, options, 0);
        REQUIRE(guest);
        CHECK(guest->initrd.start == 0x17f'e000);
    }
    GuestMemory memory = memory_of(32);
    const Bytes bytes = file.build(), huge(30 << 20);
    BootFiles files{{"k", bytes, {}}, BootFile{"i", huge, {}}, {}};
    CHECK(load_guest(memory, files, {}, 0).error().message ==
          "cannot load the kernel 'k': the initrd 'i' (30 MiB) finds no room in guest memory (32 MiB): give it more");
    const Bytes empty;
    files.initrd->bytes = empty;
    CHECK(load_guest(memory, files, {}, 0).error().message == "cannot use the initrd 'i': it is empty");
    files.initrd.reset();
    files.modules.push_back({"m", bytes, {}});
    CHECK_THAT(load_guest(memory, files, {}, 0).error().message, Contains("no modules"));
}

TEST_CASE("command lines up to the kernel's limit") {
    BzImageFile file{.payload = payload_of(small_vmlinux().build(), Compression::gzip), .cmdline_size = 255};
    GuestMemory memory = memory_of(64);
    BootOptions options;
    options.command_line = std::string(255, 'x');
    REQUIRE(load(memory, file.build(), options));
    options.command_line += 'y';
    CHECK(load(memory, file.build(), options).error().message ==
          "cannot load the kernel 'k': the command line has 256 bytes, but this kernel takes at most 255");
    options.command_line = std::string("a\0b", 3);
    CHECK_THAT(load(memory, file.build(), options).error().message, Contains("NUL"));
    options.command_line = std::string(1 << 20, 'x');
    file.cmdline_size = 0xffff'ffff;
    CHECK_THAT(load(memory, file.build(), options).error().message, Contains("at most 16384"));
}

TEST_CASE("a vmlinux is entered like a payload, with a setup header of our own") {
    GuestMemory memory = memory_of(64);
    const auto guest = load(memory, small_vmlinux().build());
    REQUIRE(guest);
    CHECK(guest->kind == KernelKind::linux_elf);
    CHECK(guest->version == "9.8.7-test (a@b)");
    check_small_vmlinux(memory);
    check_linux_entry(memory, *guest);
    const auto params = params_of(memory, *guest);
    CHECK(params.hdr.boot_flag == 0xaa55);
    CHECK(params.hdr.header == 0x53726448);
    CHECK(params.hdr.cmdline_size == 2047);

    ElfFile by_virtual_entry = small_vmlinux();
    by_virtual_entry.entry = 0xffff'ffff'8100'0040;
    GuestMemory other = memory_of(64);
    CHECK(load(other, by_virtual_entry.build())->entry == 0x100'0040);
}

TEST_CASE("memory that held something is zeroed where the kernel expects zeros") {
    GuestMemory memory = memory_of(64);
    std::memset(memory.at(0x100'0000), 0xcc, 0x2'0000);
    REQUIRE(load(memory, small_vmlinux().build()));
    check_small_vmlinux(memory);
}

TEST_CASE("kernels in low memory push the loader's own tables aside") {
    ElfFile file = small_vmlinux();
    file.segments[0].physical = 0x1000;
    file.segments[0].memory_size = 0x4000;
    file.entry = 0x1000;
    GuestMemory memory = memory_of(64);
    const auto guest = load(memory, file.build());
    REQUIRE(guest);
    CHECK(guest->state.cr3 >= 0x5000);
    CHECK(guest->state.gpr[RSI] >= 0x5000);
    Bytes expected = file.segments[0].contents;
    expected.resize(0x4000);
    CHECK((read_guest(memory, 0x1000, 0x4000) == expected));
}

TEST_CASE("payloads that lie") {
    const Bytes elf = small_vmlinux().build();
    GuestMemory memory = memory_of(32);
    auto message = [&](const BzImageFile& file) {
        const auto guest = load(memory, file.build());
        REQUIRE_FALSE(guest);
        return guest.error().message;
    };
    for (Compression format : {Compression::xz, Compression::lzma, Compression::lz4, Compression::zstd}) {
        INFO(name_of(format));
        Bytes payload = compress(format, elf), shorter = payload, longer = payload, far = payload, beyond = payload;
        append(shorter, bytes_of(uint32_t(elf.size() - 1)));
        CHECK_THAT(message({.payload = shorter}), Contains("decompresses to more than the"));
        append(longer, bytes_of(uint32_t(elf.size() + 1)));
        CHECK_THAT(message({.payload = longer}), Contains("decompresses to less than the"));
        append(far, bytes_of(uint32_t(0x30'0000)));
        CHECK_THAT(message({.payload = far}), Contains("larger than its init_size"));
        append(beyond, bytes_of(uint32_t(0xffff'fff0)));
        CHECK_THAT(message({.payload = beyond, .init_size = 0xffff'ffff}),
                   Contains("decompressed, but the guest has 32 MiB of memory"));
    }
    CHECK_THAT(message({.payload = payload_of(text("no kernel at all"), Compression::xz)}), Contains("not an ELF"));
    CHECK_THAT(message({.payload = text("no kernel at all")}), Contains("no compression that is known"));
    CHECK_THAT(message({.payload = {}}), Contains("no compression that is known"));
    CHECK_THAT(message({.payload = text(std::string_view("BZh91AY&SY123456\1\0\0\0", 20))}),
               Contains("bzip2: not supported"));
    CHECK_THAT(message({.payload = payload_of(elf, Compression::xz), .version = 0x207}), Contains("2.08"));
    ElfFile arm = small_vmlinux();
    arm.machine = 183;
    CHECK_THAT(message({.payload = payload_of(arm.build(), Compression::xz)}), Contains("ARM64"));
    ElfFile old = small_vmlinux();
    old.is64 = false;
    old.machine = 3;
    CHECK_THAT(message({.payload = payload_of(old.build(), Compression::gzip)}), Contains("32-bit Linux kernel"));
    ElfFile overlapping = small_vmlinux();
    overlapping.segments[1].physical = 0x100'0800;
    CHECK_THAT(message({.payload = payload_of(overlapping.build(), Compression::gzip)}), Contains("overlaps"));
    ElfFile lost = small_vmlinux();
    lost.entry = 0x42;
    CHECK_THAT(message({.payload = payload_of(lost.build(), Compression::gzip)}), Contains("in none of its segments"));
}

TEST_CASE("too little memory says how much is needed") {
    GuestMemory memory = memory_of(16);
    CHECK(load(memory, BzImageFile{.payload = payload_of(small_vmlinux().build(), Compression::lz4)}.build())
              .error()
              .message == "cannot load the kernel 'k': the kernel's segment at 0x1010000 reaches up to 0x1013000, but "
                          "the guest has 16 MiB of memory: give it more than 17 MiB");
}
