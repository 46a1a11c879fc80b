#include <catch2/catch.hpp>

#include "tests/boot/builders.h"
#include "vmm/boot/placement.h"

using namespace vtrace;
using namespace vtrace::testing;
using Catch::Matchers::Contains;

TEST_CASE("claims exclude each other, and touch") {
    GuestMemory memory = memory_of(16);
    Placement placement(memory);
    REQUIRE(placement.claim(0x20'0000, 0x1000, "a"));
    REQUIRE(placement.claim(0x20'1000, 0x1000, "b"));
    REQUIRE(placement.claim(0x1f'f000, 0x1000, "c"));
    REQUIRE(placement.claim(0x20'0800, 0, "nothing"));
    for (auto [start, size] : {std::pair<Gpa, uint64_t>{0x20'0fff, 1},
                               {0x20'1fff, 0x1000},
                               {0x1f'0000, 0x1'0000},
                               {0x10'0000, 0x80'0000},
                               {0x20'0800, 1}}) {
        const auto claimed = placement.claim(start, size, "d");
        REQUIRE_FALSE(claimed);
        CHECK_THAT(claimed.error().message, Contains("overlaps"));
    }
    CHECK_FALSE(placement.claim(0x400, 16, "vectors"));
    CHECK_FALSE(placement.claim(0xe'0000, 16, "acpi"));
    CHECK_FALSE(placement.claim(0x9'fbff, 2, "ebda"));
    CHECK(placement.claim(0x500, 0x9'fc00 - 0x500, "all base memory"));
}

TEST_CASE("claims outside of RAM say what is needed; none wraps") {
    GuestMemory memory = memory_of(16);
    Placement placement(memory);
    CHECK(placement.claim(0xff'f000, 0x1000, "the last page"));
    CHECK(placement.claim(0xff'0000, 0x1'0001, "x").error().message ==
          "x reaches up to 0x1000001, but the guest has 16 MiB of memory: give it more than 17 MiB");
    CHECK_THAT(placement.claim(0xd000'0000, 1, "x").error().message, Contains("outside of guest memory"));
    CHECK_THAT(placement.claim(0x1'0000'0000, 1, "x").error().message, Contains("outside of guest memory"));
    CHECK_THAT(placement.claim(~0ull, 2, "x").error().message, Contains("wraps around"));
    CHECK_THAT(placement.claim(0x1000, ~0ull, "x").error().message, Contains("wraps around"));
    CHECK_THAT(placement.claim(~0ull, 1, "x").error().message, Contains("wraps around") || Contains("outside"));
}

TEST_CASE("places are the lowest and the highest, aligned, within bounds, never over others") {
    GuestMemory memory = memory_of(16);
    Placement placement(memory);
    const MemoryRange anywhere{0, ~0ull};
    CHECK(*placement.place_low(0x100, 16, anywhere, "a") == 0x500);
    CHECK(*placement.place_low(0x100, 4096, anywhere, "b") == 0x1000);
    CHECK(*placement.place_low(0xa00, 16, anywhere, "c") == 0x600);
    CHECK(*placement.place_low(0x9'0000, 4096, anywhere, "d") == 0x2000);
    CHECK(*placement.place_low(0x10'0000, 4096, anywhere, "e") == 0x10'0000);
    CHECK(*placement.place_high(0x1001, 4096, anywhere, "f") == 0xff'e000);
    CHECK(*placement.place_high(0x1000, 4096, anywhere, "g") == 0xff'd000);
    CHECK(*placement.place_high(0x1000, 4096, {0, 0x80'0001}, "h") == 0x7f'f000);
    CHECK_FALSE(placement.place_high(0x100'0000, 4096, anywhere, "i"));
    CHECK_FALSE(placement.place_low(1, 1, {0x7f'f000, 0x80'0000}, "j"));
    CHECK_FALSE(placement.place_low(~0ull, 4096, anywhere, "k"));
    CHECK_FALSE(placement.place_high(~0ull, 4096, anywhere, "l"));
}

TEST_CASE("the memory map is a PC's") {
    using Entry = MemoryMapEntry;
    const GuestMemory small = memory_of(1);
    CHECK(memory_map(small) == std::vector<Entry>{{0, 0x9'fc00, Entry::ram}, {0x9'fc00, 0x6'0400, Entry::reserved}});
    const GuestMemory large = memory_of(4096);
    CHECK(memory_map(large) == std::vector<Entry>{{0, 0x9'fc00, Entry::ram},
                                                  {0x9'fc00, 0x6'0400, Entry::reserved},
                                                  {0x10'0000, 0xbff0'0000, Entry::ram},
                                                  {0x1'0000'0000, 0x4000'0000, Entry::ram}});
}

TEST_CASE("sizes read well") {
    CHECK(size_text(3) == "3 bytes");
    CHECK(size_text(1025) == "2 KiB");
    CHECK(size_text(64 << 20) == "64 MiB");
    CHECK(size_text((64 << 20) + 1) == "65 MiB");
    CHECK(size_text(~0ull) == "17179869184 GiB");
}
