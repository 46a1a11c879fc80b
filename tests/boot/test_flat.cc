#include <catch2/catch.hpp>

#include "tests/boot/builders.h"

using namespace vtrace;
using namespace vtrace::testing;
using Catch::Matchers::Contains;
using Mode = FlatOptions::Mode;

namespace {

Result<LoadedGuest> load_flat(GuestMemory& memory, const Bytes& bytes, FlatOptions flat) {
    BootOptions options;
    options.flat = flat;
    return load(memory, bytes, options);
}

} // namespace

TEST_CASE("a flat binary in real mode") {
    GuestMemory memory = memory_of(1);
    const Bytes code = mixed_data(512);
    auto guest = load_flat(memory, code, {Mode::real16, {}, {}});
    REQUIRE(guest);
    CHECK(guest->kind == KernelKind::flat);
    CHECK((read_guest(memory, 0x7c00, 512) == code));
    CHECK(guest->state.segments[CS] == Segment{0, 0xffff, 0, 0x9b});
    CHECK(guest->state.rip == 0x7c00);
    CHECK((guest->state.cr0 & (Cr0::pe | Cr0::pg)) == 0);
    CHECK(guest->state.segments[DS] == Segment{0, 0xffff, 0, 0x93});
    // The stack is RAM, below 64 KiB and not over the code.
    CHECK(guest->state.gpr[RSP] <= 0x1'0000 - 16);
    CHECK(guest->state.gpr[RSP] >= 0x7c00 + 512 + 1024);
    CHECK(guest->state.idtr == DescriptorTable{0, 0x3ff});

    guest = load_flat(memory, code, {Mode::real16, 0x2'0000, 0x2'0013});
    REQUIRE(guest);
    CHECK(guest->state.segments[CS].selector == 0x2001);
    CHECK(guest->state.segments[CS].base == 0x2'0010);
    CHECK(guest->state.rip == 3);
    GuestMemory large = memory_of(16);
    CHECK_THAT(load_flat(large, code, {Mode::real16, 0x10'0000, {}}).error().message, Contains("real mode's reach"));
}

TEST_CASE("a flat binary in protected and in long mode") {
    const Bytes code = mixed_data(5000);
    for (Mode mode : {Mode::protected32, Mode::long64}) {
        GuestMemory memory = memory_of(16);
        auto guest = load_flat(memory, code, {mode, {}, {}});
        REQUIRE(guest);
        CHECK(guest->entry == 0x10'0000);
        CHECK(guest->state.rip == 0x10'0000);
        CHECK(guest->state.long_mode() == (mode == Mode::long64));
        CHECK((read_guest(memory, 0x10'0000, code.size()) == code));
        CHECK(guest->state.gpr[RSP] == 0x9'fc00);
        guest = load_flat(memory, code, {mode, 0x1000, 0x1234});
        REQUIRE(guest);
        CHECK(guest->state.rip == 0x1234);
    }
    GuestMemory memory = memory_of(5 << 10);
    CHECK_THAT(load_flat(memory, code, {Mode::protected32, 0x1'0000'0000, {}}).error().message, Contains("32-bit"));
    const auto high = load_flat(memory, code, {Mode::long64, 0x1'0000'0000, {}});
    REQUIRE(high);
    CHECK(high->entry == 0x1'0000'0000); // and mapped: the directory of the fifth GiB is there
    CHECK((value_at<uint64_t>(memory, high->state.cr3 + 4096 + 4 * 8) & 3) == 3);
}

TEST_CASE("flat binaries: what doesn't go together") {
    GuestMemory memory = memory_of(16);
    const Bytes code = mixed_data(5000);
    CHECK_THAT(load_flat(memory, code, {Mode::long64, 0x10'0000, 0x20'0000}).error().message, Contains("its entry"));
    CHECK_THAT(load_flat(memory, code, {Mode::long64, 0xff'f000, {}}).error().message, Contains("give it more"));
    CHECK_THAT(load_flat(memory, code, {Mode::long64, 0xe'0000, {}}).error().message, Contains("reserved area"));
    CHECK_THAT(load_flat(memory, code, {Mode::long64, ~0ull, {}}).error().message, Contains("wraps"));
    BootOptions options;
    options.flat = FlatOptions{};
    options.command_line = "x";
    CHECK_THAT(load(memory, code, options).error().message, Contains("no command line"));
    options.command_line.clear();
    options.as_shipped = true;
    CHECK_THAT(load(memory, code, options).error().message, Contains("choose no other"));
    // Never guessed: the same bytes without being asked for.
    CHECK_THAT(load(memory, code).error().message, Contains("must be asked for explicitly"));
}
