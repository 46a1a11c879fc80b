// The 8254 by its data sheet, at exact nanoseconds.
#include <catch2/catch.hpp>

#include "tests/devices/rig.h"
#include "vmm/devices/pit.h"

using namespace vtrace;

namespace {

struct PitRig {
    void out(unsigned port, uint8_t value) { pit.write(port & 3, 1, value); }
    uint8_t in(unsigned port) { return static_cast<uint8_t>(pit.read(port & 3, 1)); }
    uint16_t read_word(unsigned counter) {
        out(3, static_cast<uint8_t>(counter << 6)); // latch
        const uint8_t low = in(counter);
        return static_cast<uint16_t>(low | in(counter) << 8);
    }
    void load(unsigned counter, uint8_t mode, uint16_t count) {
        out(3, static_cast<uint8_t>(counter << 6 | 0x30 | mode << 1));
        out(counter, static_cast<uint8_t>(count));
        out(counter, static_cast<uint8_t>(count >> 8));
    }
    void at_tick(uint64_t tick) { test::run_until(clock, Pit::oscillator.time_of(tick)); }
    uint8_t port_b() { return static_cast<uint8_t>(pit.port_b().read(0, 1)); }
    void port_b(uint8_t value) { pit.port_b().write(0, 1, value); }

    Clock clock;
    std::vector<VirtualTime> rises;
    Pit pit{clock, IrqLine([this](bool level) {
                if (level)
                    rises.push_back(clock.now());
            })};
};

constexpr uint8_t out2 = 1 << 5;

} // namespace

TEST_CASE("oscillators convert without loss") {
    constexpr Oscillator pit = Pit::oscillator;
    CHECK(pit.ticks_at(0) == 0);
    CHECK(pit.time_of(1) == 839); // 838.095 ns
    CHECK(pit.ticks_at(838) == 0);
    CHECK(pit.ticks_at(839) == 1);
    CHECK(pit.time_of(1'193'182) == 1'000'000'000);
    for (const uint64_t tick : {1ull, 2ull, 65536ull, 1'193'181ull, 1'193'183ull, 123'456'789'012ull}) {
        CHECK(pit.ticks_at(pit.time_of(tick)) == tick);
        CHECK(pit.ticks_at(pit.time_of(tick) - 1) == tick - 1);
    }
    CHECK(pit.time_of(pit.hz * 18'446'744'072) == 18'446'744'072'000'000'000ull);
    CHECK(pit.time_of(~0ull) == never); // beyond 584 years
}

TEST_CASE("PIT mode 2: IRQ 0 rises every N ticks, exactly, without drift") {
    PitRig p;
    p.load(0, 2, 1193);
    p.rises.clear(); // the control word takes OUT high
    p.at_tick(1 + 1193 * 1000);
    REQUIRE(p.rises.size() == 1000);
    CHECK(p.rises[0] == Pit::oscillator.time_of(1 + 1193));
    CHECK(p.rises[999] == Pit::oscillator.time_of(1 + 1193 * 1000));
}

TEST_CASE("PIT mode 2: counts N, N-1, ..., 1, N") {
    PitRig p;
    p.load(0, 2, 4);
    p.at_tick(1);
    for (const uint16_t expected : {4, 3, 2, 1, 4, 3}) {
        CHECK(p.read_word(0) == expected);
        p.at_tick(Pit::oscillator.ticks_at(p.clock.now()) + 1);
    }
}

TEST_CASE("PIT mode 2: a new count takes over at the end of the period") {
    PitRig p;
    p.load(0, 2, 100);
    p.at_tick(51);
    p.out(0, 10), p.out(0, 0); // same mode, new count
    CHECK(p.read_word(0) == 50);
    p.rises.clear();
    p.at_tick(1 + 100 + 10);
    REQUIRE(p.rises.size() == 2);
    CHECK(p.rises[0] == Pit::oscillator.time_of(101));
    CHECK(p.rises[1] == Pit::oscillator.time_of(111));
}

TEST_CASE("PIT mode 2: zero is 65536") {
    PitRig p;
    p.load(0, 2, 0);
    p.rises.clear();
    p.at_tick(1 + 65536 - 1);
    CHECK(p.rises.empty());
    p.at_tick(1 + 65536);
    CHECK(p.rises.size() == 1);
}

TEST_CASE("PIT mode 3: a square wave of even and of odd counts") {
    for (const unsigned count : {8u, 9u}) {
        PitRig p;
        p.port_b(1);
        p.load(2, 3, static_cast<uint16_t>(count));
        unsigned high = 0, low = 0;
        for (unsigned tick = 1; tick < 1 + count * 3; ++tick) {
            p.at_tick(tick);
            (p.port_b() & out2 ? high : low)++;
        }
        CHECK(high == 3 * ((count + 1) / 2));
        CHECK(low == 3 * (count / 2));
    }
}

TEST_CASE("PIT mode 3 counts down by two") {
    PitRig p;
    p.load(0, 3, 8);
    p.at_tick(1);
    for (const uint16_t expected : {8, 6, 4, 2, 8, 6}) {
        CHECK(p.read_word(0) == expected);
        p.at_tick(Pit::oscillator.ticks_at(p.clock.now()) + 1);
    }
}

TEST_CASE("PIT mode 0: OUT is low until N + 1 ticks after the count, then stays high; the count wraps") {
    PitRig p;
    p.load(0, 0, 100);
    p.at_tick(100);
    CHECK(p.rises.empty());
    CHECK(p.read_word(0) == 1);
    p.at_tick(101);
    REQUIRE(p.rises.size() == 1);
    CHECK(p.rises[0] == Pit::oscillator.time_of(101));
    p.at_tick(102);
    CHECK(p.read_word(0) == 0xffff);
    p.at_tick(200'000);
    CHECK(p.rises.size() == 1);
    p.out(0, 10), p.out(0, 0); // a new count: OUT low again
    p.at_tick(200'011);
    CHECK(p.rises.size() == 2);
}

TEST_CASE("PIT mode 0: the gate stops the count") {
    PitRig p;
    p.port_b(1);
    p.load(2, 0, 1000);
    p.at_tick(101);
    p.port_b(0);
    p.at_tick(5000);
    CHECK(p.read_word(2) == 900);
    CHECK_FALSE(p.port_b() & out2);
    p.port_b(1);
    p.at_tick(5000 + 899);
    CHECK_FALSE(p.port_b() & out2);
    p.at_tick(5000 + 900);
    CHECK(p.port_b() & out2);
}

TEST_CASE("PIT mode 1: a gate edge starts a pulse of N ticks, another one restarts it") {
    PitRig p;
    p.port_b(0);
    p.load(2, 1, 50);
    p.at_tick(10);
    CHECK(p.port_b() & out2);
    p.port_b(1);
    p.at_tick(11);
    CHECK_FALSE(p.port_b() & out2);
    p.at_tick(40);
    p.port_b(0);
    p.port_b(1);
    p.at_tick(41 + 49);
    CHECK_FALSE(p.port_b() & out2);
    p.at_tick(41 + 50);
    CHECK(p.port_b() & out2);
}

TEST_CASE("PIT mode 4: one low tick N + 1 ticks after the count; OUT rises after it") {
    PitRig p;
    p.load(0, 4, 20);
    p.rises.clear();
    p.at_tick(1000);
    REQUIRE(p.rises.size() == 1);
    CHECK(p.rises[0] == Pit::oscillator.time_of(22));
}

TEST_CASE("PIT mode 5: the same strobe, started by the gate") {
    PitRig p;
    p.load(2, 5, 20);
    p.at_tick(100);
    p.port_b(1);
    p.at_tick(101 + 19);
    CHECK(p.port_b() & out2);
    p.at_tick(101 + 20);
    CHECK_FALSE(p.port_b() & out2);
    p.at_tick(101 + 21);
    CHECK(p.port_b() & out2);
}

TEST_CASE("PIT: BCD counting") {
    PitRig p;
    p.out(3, 0x30 | 2 << 1 | 1);
    p.out(0, 0x00), p.out(0, 0x10); // 1000
    p.at_tick(2);
    CHECK(p.read_word(0) == 0x0999);
}

TEST_CASE("PIT: a latched count stays until read, a second latch command is ignored") {
    PitRig p;
    p.load(0, 2, 1000);
    p.at_tick(101);
    p.out(3, 0x00);
    p.at_tick(301);
    p.out(3, 0x00);
    CHECK(p.in(0) == (900 & 0xff));
    CHECK(p.in(0) == 900 >> 8);
    CHECK(p.in(0) == (700 & 0xff)); // not latched any more
}

TEST_CASE("PIT: read-back latches status and count of several counters") {
    PitRig p;
    p.load(0, 2, 1000);
    p.out(3, 0xe2);                         // status of counter 0 only
    CHECK(p.in(0) == (0x40 | 0x80 | 0x34)); // null count: not loaded before the next tick; OUT high
    p.at_tick(11);
    p.out(3, 0xc2); // status and count
    CHECK(p.in(0) == (0x80 | 0x34));
    CHECK(p.in(0) == (990 & 0xff));
    CHECK(p.in(0) == 990 >> 8);
}

TEST_CASE("PIT: byte access modes") {
    PitRig p;
    p.out(3, 0x10 | 2 << 1); // low byte only
    p.out(0, 200);
    p.at_tick(11);
    CHECK(p.in(0) == 190);
    p.out(3, 0x20 | 2 << 1); // high byte only
    p.out(0, 2);
    p.at_tick(Pit::oscillator.ticks_at(p.clock.now()) + 1);
    CHECK(p.in(0) == 2);
}

TEST_CASE("port 0x61: gate and data bits are kept, the refresh bit toggles") {
    PitRig p;
    p.port_b(0xff);
    CHECK((p.port_b() & 0x0f) == 0x0f);
    const uint8_t before = p.port_b() & 0x10;
    p.clock.set_now(15'085);
    CHECK((p.port_b() & 0x10) != before);
}
