#include <catch2/catch.hpp>

#include "tests/boot/builders.h"

using namespace vtrace;
using namespace vtrace::testing;
using Catch::Matchers::Contains;

namespace {

void check_32bit_entry(const GuestMemory& memory, const LoadedGuest& guest) {
    const CpuState& state = guest.state;
    CHECK(state.rip == guest.entry);
    CHECK(state.rflags == 2);
    CHECK(state.cr0 == 0x31); // NE, ET, PE; paging off
    CHECK(state.cr4 == 0);
    CHECK(state.efer == 0);
    CHECK(state.segments[CS] == Segment{0, 0xffff'ffff, 0x10, 0xc09b});
    for (Seg seg : {DS, ES, SS, FS, GS})
        CHECK(state.segments[seg] == Segment{0, 0xffff'ffff, 0x18, 0xc093});
    CHECK(state.tr.base == 0);
    CHECK(state.tr.limit == 0x67);
    CHECK(value_at<uint64_t>(memory, state.gdtr.base + 0x10) == 0x00cf'9b00'0000'ffff);
}

/// As kvm-unit-tests' guests: ELF32, header at the segment's start, linked at 4 MiB one to one.
ElfFile multiboot_elf(uint32_t flags = 0) {
    Bytes code = multiboot_header(flags);
    append(code, mixed_data(2000));
    ElfFile file;
    file.is64 = false;
    file.machine = 3;
    file.entry = 0x40'000c;
    file.segments = {{0x40'0000, 0x40'0000, code, 0x1'0000}};
    return file;
}

} // namespace

TEST_CASE("a Multiboot ELF kernel with modules") {
    GuestMemory memory = memory_of(64);
    const Bytes kernel = multiboot_elf(3).build(), env = text("NR_CPUS=1\n"), module = mixed_data(5000);
    BootOptions options;
    options.command_line = "-a -b";
    const BootFiles files{
        {"some/dir/test.flat", kernel, {}}, BootFile{"/tmp/env", env, {}}, {BootFile{"mod.bin", module, "x=1 y"}}};
    const auto guest = load_guest(memory, files, options, 0xe'0000);
    if (!guest)
        FAIL(guest.error().message);
    CHECK(guest->kind == KernelKind::multiboot);
    CHECK(guest->entry == 0x40'000c);
    CHECK(guest->kernel == MemoryRange{0x40'0000, 0x41'0000});
    CHECK(guest->initrd == MemoryRange{0x41'0000, 0x41'0000 + env.size()});
    check_32bit_entry(memory, *guest);
    CHECK(guest->state.gpr[RAX] == 0x2bad'b002);

    // The information structure, by the specification's table in section 3.3.
    const Gpa info = guest->state.gpr[RBX];
    auto word = [&](Gpa at) { return value_at<uint32_t>(memory, at); };
    CHECK(word(info) == 0x24d); // memory, command line, modules, memory map, loader's name
    CHECK(word(info + 4) == 639);
    CHECK(word(info + 8) == 63 * 1024);
    CHECK(string_at(memory, word(info + 16)) == "test.flat -a -b");
    REQUIRE(word(info + 20) == 2);
    const Gpa modules = word(info + 24);
    CHECK(word(modules) == 0x41'0000);
    CHECK(word(modules + 4) == 0x41'0000 + env.size());
    CHECK(string_at(memory, word(modules + 8)) == "env");
    CHECK(word(modules + 16) == 0x41'1000);
    CHECK(word(modules + 20) == 0x41'1000 + module.size());
    CHECK(string_at(memory, word(modules + 24)) == "mod.bin x=1 y");
    CHECK((read_guest(memory, 0x41'0000, env.size()) == env));
    CHECK((read_guest(memory, 0x41'1000, module.size()) == module));
    CHECK(word(info + 44) == 3 * 24);
    const Gpa map = word(info + 48);
    CHECK(word(map) == 20);
    CHECK(value_at<uint64_t>(memory, map + 4) == 0);
    CHECK(value_at<uint64_t>(memory, map + 12) == 0x9'fc00);
    CHECK(word(map + 20) == 1);
    CHECK(value_at<uint64_t>(memory, map + 2 * 24 + 4) == 0x10'0000);
    CHECK(value_at<uint64_t>(memory, map + 2 * 24 + 12) == 63 << 20);
    CHECK(string_at(memory, word(info + 64)) == "vtrace");
}

TEST_CASE("Multiboot by ELF64, and by a virtual entry address") {
    ElfFile file = multiboot_elf();
    file.is64 = true;
    file.machine = 62;
    file.segments[0].virtual_ = 0xc040'0000;
    file.entry = 0xc040'000c;
    GuestMemory memory = memory_of(16);
    const auto guest = load(memory, file.build());
    REQUIRE(guest);
    CHECK(guest->entry == 0x40'000c);
    check_32bit_entry(memory, *guest);
}

TEST_CASE("Multiboot by the addresses in its header") {
    constexpr uint32_t kludge = 0x1'0000;
    const Bytes rest = mixed_data(1000);
    auto file = [&](std::vector<uint32_t> addresses) {
        Bytes bytes = mixed_data(64, 5);
        append(bytes, multiboot_header(kludge, addresses));
        append(bytes, rest);
        return bytes;
    };
    // header_addr, load_addr, load_end_addr, bss_end_addr, entry_addr; the header is at 64.
    {
        GuestMemory memory = memory_of(16);
        const Bytes bytes = file({0x20'0040, 0x20'0000, 0, 0x20'2000, 0x20'0060});
        std::memset(memory.at(0x20'0000), 0xcc, 0x2000);
        const auto guest = load(memory, bytes);
        REQUIRE(guest);
        CHECK(guest->entry == 0x20'0060);
        CHECK(guest->kernel == MemoryRange{0x20'0000, 0x20'2000});
        Bytes expected = bytes;
        expected.resize(0x2000);
        CHECK((read_guest(memory, 0x20'0000, 0x2000) == expected));
    }
    {
        GuestMemory memory = memory_of(16);
        const Bytes bytes = file({0x20'0000, 0x20'0000, 0x20'0100, 0, 0x20'0020});
        const auto guest = load(memory, bytes);
        REQUIRE(guest);
        CHECK(guest->kernel == MemoryRange{0x20'0000, 0x20'0100});
        CHECK(read_guest(memory, 0x20'0000, 0x100) == Bytes(bytes.begin() + 64, bytes.begin() + 64 + 0x100));
        CHECK(value_at<uint8_t>(memory, 0x20'0100) == 0);
    }
    GuestMemory memory = memory_of(16);
    auto message = [&](std::vector<uint32_t> addresses) {
        const auto guest = load(memory, file(std::move(addresses)));
        REQUIRE_FALSE(guest);
        return guest.error().message;
    };
    CHECK_THAT(message({0x20'0041, 0x20'0000, 0, 0, 0x20'0000}), Contains("load_addr"));
    CHECK_THAT(message({0x20'0000, 0x20'0001, 0, 0, 0x20'0000}), Contains("load_addr"));
    CHECK_THAT(message({0x20'0000, 0x20'0000, 0x1f'ffff, 0, 0x20'0000}), Contains("load_end_addr"));
    CHECK_THAT(message({0x20'0000, 0x20'0000, 0x30'0000, 0, 0x20'0000}), Contains("truncated"));
    CHECK_THAT(message({0x20'0000, 0x20'0000, 0, 0xffff'ffff, 0x20'0000}), Contains("outside of guest memory"));
    CHECK_THAT(message({0x20'0000, 0x20'0000, 0, 0, 0x1f'ffff}), Contains("outside of the kernel"));
    CHECK_THAT(message({}), Contains("load_addr") || Contains("outside") || Contains("load_end_addr"));
    Bytes cut = file({});
    cut.resize(64 + 20);
    CHECK_THAT(load(memory, cut).error().message, Contains("truncated"));
}

TEST_CASE("a Multiboot header is looked for as the specification says") {
    GuestMemory memory = memory_of(64);
    ElfFile file = multiboot_elf();
    const Bytes code = file.segments[0].contents;
    // Its last possible place: it must lie within the first 8 KiB.
    const size_t headers = ElfFile{.is64 = false, .segments = file.segments}.build().size() - code.size();
    file.after_headers = Bytes(8192 - 12 - headers);
    REQUIRE(load(memory, file.build())->kind == KernelKind::multiboot);
    file.after_headers.resize(file.after_headers.size() + 4);
    CHECK(load(memory, file.build()).error().message ==
          "cannot load the kernel 'k': it is a 32-bit ELF file with neither a Multiboot header nor a PVH entry point");
    BootOptions options;
    options.protocol = BootProtocol::multiboot;
    CHECK_THAT(load(memory, file.build(), options).error().message, Contains("no Multiboot header"));
    file = multiboot_elf();
    file.segments[0].contents[8] ^= 1; // its checksum
    CHECK_THAT(load(memory, file.build()).error().message, Contains("neither a Multiboot"));
    CHECK_THAT(load(memory, multiboot_elf(4).build()).error().message, Contains("flags 0x4: a video mode"));
    CHECK_THAT(load(memory, multiboot_elf(0x8000).build()).error().message, Contains("flags 0x8000"));
    CHECK_THAT(load(memory, multiboot_header(0)).error().message, Contains("neither an ELF file"));
}

TEST_CASE("a PVH kernel of either class and either size of note") {
    for (bool is64 : {false, true}) {
        for (unsigned size : {4u, 8u}) {
            ElfFile file = small_vmlinux();
            file.is64 = is64;
            file.machine = is64 ? 62 : 3;
            file.notes = pvh_note(0x100'0123, size);
            // Others in front, among them one with a name and a value that need padding, and Xen's of another type.
            Bytes others;
            append(others, bytes_of(std::array<uint32_t, 3>{5, 3, 18}));
            append(others, text(std::string_view("Linu\0\0\0\0abc\0", 12)));
            append(others, bytes_of(std::array<uint32_t, 3>{4, 4, 6}));
            append(others, text(std::string_view("Xen\0linu", 8)));
            file.notes.insert(file.notes.begin(), others.begin(), others.end());

            GuestMemory memory = memory_of(64);
            const Bytes kernel = file.build(), initrd = mixed_data(7777);
            BootOptions options;
            options.command_line = "panic=-1";
            const auto guest =
                load_guest(memory, {{"k", kernel, {}}, BootFile{"d/i", initrd, {}}, {}}, options, 0xe'0010);
            if (!guest)
                FAIL(guest.error().message);
            CHECK(guest->kind == KernelKind::pvh);
            CHECK(guest->entry == 0x100'0123);
            CHECK(guest->version == "9.8.7-test (a@b)");
            check_32bit_entry(memory, *guest);

            // struct hvm_start_info, by its description in Xen's start_info.h.
            const Gpa info = guest->state.gpr[RBX];
            auto quad = [&](Gpa at) { return value_at<uint64_t>(memory, at); };
            CHECK(value_at<uint32_t>(memory, info) == 0x336e'c578);
            CHECK(value_at<uint32_t>(memory, info + 4) == 1);
            REQUIRE(value_at<uint32_t>(memory, info + 12) == 1);
            const Gpa modules = quad(info + 16);
            CHECK(quad(modules) == guest->initrd.start);
            CHECK(quad(modules + 8) == initrd.size());
            CHECK(string_at(memory, quad(modules + 16)) == "i");
            CHECK((read_guest(memory, guest->initrd.start, initrd.size()) == initrd));
            CHECK(string_at(memory, quad(info + 24)) == "panic=-1");
            CHECK(quad(info + 32) == 0xe'0010);
            REQUIRE(value_at<uint32_t>(memory, info + 48) == 3);
            const Gpa map = quad(info + 40);
            CHECK(quad(map + 2 * 24) == 0x10'0000);
            CHECK(quad(map + 2 * 24 + 8) == 63 << 20);
            CHECK(value_at<uint32_t>(memory, map + 24 + 16) == 2);
        }
    }
}

TEST_CASE("the protocol can be chosen, where the kernel has it") {
    ElfFile file = small_vmlinux();
    GuestMemory memory = memory_of(64);
    BootOptions pvh, linux64;
    pvh.protocol = BootProtocol::pvh;
    linux64.protocol = BootProtocol::linux64;
    CHECK_THAT(load(memory, file.build(), pvh).error().message, Contains("no PVH entry point"));
    file.notes = pvh_note(0x100'0000);
    CHECK(load(memory, file.build())->kind == KernelKind::pvh);
    CHECK(load(memory, file.build(), linux64)->kind == KernelKind::linux_elf);
    const Bytes bzimage = BzImageFile{.payload = payload_of(file.build(), Compression::zstd)}.build();
    CHECK(load(memory, bzimage)->kind == KernelKind::linux_payload);
    const auto guest = load(memory, bzimage, pvh);
    CHECK(guest->kind == KernelKind::pvh);
    CHECK(guest->version == "6.1.0-test (tester) #1");
    BootOptions multiboot, both = pvh;
    multiboot.protocol = BootProtocol::multiboot;
    both.as_shipped = true;
    CHECK_THAT(load(memory, bzimage, multiboot).error().message, Contains("not a Multiboot kernel"));
    CHECK_THAT(load(memory, bzimage, both).error().message, Contains("choose one"));
    file.notes = pvh_note(0x42);
    CHECK_THAT(load(memory, file.build()).error().message, Contains("PVH entry point 0x42 is outside"));
    file.notes = pvh_note(0x100'0000, 2); // too small a value: no entry
    CHECK(load(memory, file.build())->kind == KernelKind::linux_elf);
}
