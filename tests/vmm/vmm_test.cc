// The machine's small parts: bus, clock, guest memory.
#define CATCH_CONFIG_MAIN
#include <catch2/catch.hpp>

#include <array>
#include <vector>

#include "vmm/bus.h"
#include "vmm/clock.h"
#include "vmm/guest_memory.h"

namespace vtrace {
namespace {

/// Remembers what it was asked.
struct Probe final : Device {
    std::vector<std::array<uint64_t, 3>> writes;
    uint64_t answer = 0;
    uint64_t read(uint64_t offset, unsigned size) override { return answer + offset * 16 + size; }
    void write(uint64_t offset, unsigned size, uint64_t value) override { writes.push_back({offset, size, value}); }
};

} // namespace

TEST_CASE("a bus finds the device of an address, and no other") {
    Bus bus;
    Probe low, high;
    low.answer = 0x100;
    high.answer = 0x200;
    REQUIRE(bus.attach(0x20, 2, high, "high"));
    REQUIRE(bus.attach(0x10, 0x10, low, "low"));
    CHECK(bus.read(0x10, 1) == 0x101);
    CHECK(bus.read(0x1f, 1) == 0x1f1);
    CHECK(bus.read(0x20, 2) == 0x202);
    bus.write(0x21, 1, 0x5a);
    CHECK(high.writes == std::vector<std::array<uint64_t, 3>>{{1, 1, 0x5a}});

    SECTION("nobody's addresses read as ones, and are counted") {
        CHECK(bus.read(0xf, 1) == ~0ull);
        CHECK(bus.read(0x22, 1) == ~0ull);
        CHECK(bus.read(~0ull, 1) == ~0ull);
        bus.write(0, 4, 1);
        CHECK(bus.unclaimed() == 4);
    }
    SECTION("an access that leaves the device's range is nobody's") {
        CHECK(bus.read(0x21, 2) == ~0ull);
        CHECK(bus.read(0x1d, 4) == ~0ull);
    }
    SECTION("ranges don't overlap") {
        auto overlap = bus.attach(0x1f, 4, low, "third");
        REQUIRE_FALSE(overlap);
        CHECK(overlap.error().message.find("low") != std::string::npos);
        CHECK_FALSE(bus.attach(0x0, 0x100, low, "all"));
        CHECK(bus.attach(0x22, 1, low, "next"));
    }
}

TEST_CASE("events fire in the order of their times, equal ones in that of creation") {
    Clock clock;
    std::vector<char> fired;
    auto a = clock.create("a", [&] { fired.push_back('a'); });
    auto b = clock.create("b", [&] { fired.push_back('b'); });
    auto c = clock.create("c", [&] { fired.push_back('c'); });
    CHECK(clock.next_due() == never);
    clock.schedule(c, 10);
    clock.schedule(b, 10);
    clock.schedule(a, 20);
    CHECK(clock.next_due() == 10);
    clock.run_due();
    CHECK(fired.empty());
    clock.set_now(20);
    clock.run_due();
    CHECK(fired == std::vector<char>{'b', 'c', 'a'});
    CHECK(clock.next_due() == never);

    SECTION("an event can schedule itself again, and take others off") {
        unsigned rounds = 0;
        Clock::Handle periodic = 0;
        periodic = clock.create("periodic", [&] {
            if (++rounds < 3)
                clock.schedule(periodic, clock.now());
            clock.schedule(a, never);
        });
        clock.schedule(a, 30);
        clock.schedule(periodic, 25);
        clock.set_now(40);
        clock.run_due();
        CHECK(rounds == 3);
        CHECK(fired.size() == 3);
    }
    SECTION("time never goes back") {
        clock.set_now(5);
        CHECK(clock.now() == 20);
    }
}

TEST_CASE("guest memory ends where it ends") {
    CHECK_FALSE(GuestMemory::create(4096));
    CHECK_FALSE(GuestMemory::create((1 << 20) + 1));
    auto made = GuestMemory::create(2 << 20);
    REQUIRE(made);
    GuestMemory memory = std::move(*made);
    CHECK(memory.at(0, 2 << 20) != nullptr);
    CHECK(memory.at(0, (2 << 20) + 1) == nullptr);
    CHECK(memory.at((2 << 20) - 1, 1) != nullptr);
    CHECK(memory.at((2 << 20) - 1, 2) == nullptr);
    CHECK(memory.at(2 << 20) == nullptr);
    CHECK(memory.at(~0ull, 1) == nullptr);
    CHECK(memory.at(4096, ~0ull) == nullptr);
    CHECK(memory.at(GuestMemory::high_start) == nullptr);

    const std::array<uint8_t, 4> bytes{1, 2, 3, 4};
    CHECK(memory.write(0x1000, bytes));
    std::array<uint8_t, 4> back{};
    CHECK(memory.read(0x1000, back));
    CHECK(back == bytes);
    auto beyond = memory.write((2 << 20) - 2, bytes);
    REQUIRE_FALSE(beyond);
    CHECK(beyond.error().message.find("0x1ffffe") != std::string::npos);
}

TEST_CASE("memory beyond 3 GiB goes on at 4 GiB") {
    auto memory = GuestMemory::create(5ull << 30);
    REQUIRE(memory);
    CHECK(memory->low_size() == GuestMemory::pci_hole_start);
    CHECK(memory->at(GuestMemory::pci_hole_start) == nullptr);
    CHECK(memory->at(GuestMemory::pci_hole_start - 8, 16) == nullptr);
    CHECK(memory->at(GuestMemory::high_start, 2ull << 30) != nullptr);
    CHECK(memory->at(GuestMemory::high_start, (2ull << 30) + 1) == nullptr);
    CHECK(memory->page_index(GuestMemory::high_start) == memory->low_size() / page_size);
    CHECK(memory->page_index(GuestMemory::high_start + (2ull << 30) - 1) == memory->pages() - 1);
}

} // namespace vtrace
