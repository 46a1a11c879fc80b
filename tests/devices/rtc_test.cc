// The MC146818A by its data sheet: date, formats, UIP, and its three interrupts.
#include <catch2/catch.hpp>

#include "tests/devices/rig.h"

using namespace vtrace;

namespace {

constexpr VirtualTime second = 1'000'000'000;

struct Cmos {
    explicit Cmos(int64_t start = default_rtc_start, uint64_t low = 64 << 20, uint64_t high = 0)
        : rtc(clock, IrqLine([this](bool level) {
                  if (level)
                      rises.push_back(clock.now());
              }),
              start, low, high) {}
    uint8_t get(uint8_t index) {
        rtc.write(0, 1, index);
        return static_cast<uint8_t>(rtc.read(1, 1));
    }
    void set(uint8_t index, uint8_t value) {
        rtc.write(0, 1, index);
        rtc.write(1, 1, value);
    }
    void at(VirtualTime time) { test::run_until(clock, time); }

    Clock clock;
    std::vector<VirtualTime> rises;
    Rtc rtc;
};

enum : uint8_t { A = 10, B = 11, C = 12, D = 13 };

} // namespace

TEST_CASE("RTC: starts at the configured date, in BCD and 24 hours, and runs on virtual time") {
    Cmos c(951'782'399); // 2000-02-28 23:59:59, a Monday; a leap year
    CHECK(c.get(0) == 0x59);
    CHECK(c.get(2) == 0x59);
    CHECK(c.get(4) == 0x23);
    CHECK(c.get(6) == 2);
    CHECK(c.get(7) == 0x28);
    CHECK(c.get(8) == 0x02);
    CHECK(c.get(9) == 0x00);
    CHECK(c.get(0x32) == 0x20);
    CHECK(c.get(D) == 0x80);
    c.at(second);
    CHECK(c.get(0) == 0x00);
    CHECK(c.get(4) == 0x00);
    CHECK(c.get(7) == 0x29);
    c.at(second + 86'400 * second);
    CHECK(c.get(7) == 0x01);
    CHECK(c.get(8) == 0x03);
}

TEST_CASE("RTC: binary and 12-hour formats") {
    Cmos c(default_rtc_start + 13 * 3600 + 45 * 60);
    c.set(B, 0x04 | 0x02);
    CHECK(c.get(4) == 13);
    CHECK(c.get(2) == 45);
    c.set(B, 0x00);
    CHECK(c.get(4) == 0x81);  // 1 p.m.
    c.at(11 * 3600 * second); // 00:45
    CHECK(c.get(4) == 0x12);
}

TEST_CASE("RTC: setting the clock with SET") {
    Cmos c;
    c.at(10 * second + 5);
    c.set(B, 0x82);
    c.set(9, 0x99), c.set(0x32, 0x19), c.set(8, 0x12), c.set(7, 0x31);
    c.set(4, 0x23), c.set(2, 0x59), c.set(0, 0x58);
    c.at(100 * second);
    CHECK(c.get(0) == 0x58); // the clock stands
    CHECK_FALSE(c.get(A) & 0x80);
    c.set(B, 0x02);
    CHECK(c.get(0) == 0x58);
    c.at(102 * second);
    CHECK(c.get(0) == 0x00);
    CHECK(c.get(9) == 0x00);
    CHECK(c.get(0x32) == 0x20);
}

TEST_CASE("RTC: UIP from 244 us before the update until its end") {
    Cmos c;
    c.at(second - 2'228'001);
    CHECK_FALSE(c.get(A) & 0x80);
    c.at(second - 2'228'000);
    CHECK(c.get(A) & 0x80);
    c.at(second - 1);
    CHECK(c.get(A) & 0x80);
    c.at(second);
    CHECK_FALSE(c.get(A) & 0x80);
}

TEST_CASE("RTC: update-ended interrupts once a second, each acknowledged by reading C") {
    Cmos c;
    c.set(A, 0x20); // no periodic flag beside it
    c.set(B, 0x12);
    c.at(second);
    REQUIRE(c.rises == std::vector<VirtualTime>{second});
    c.at(3 * second);
    CHECK(c.rises.size() == 1); // not acknowledged: the line stays up
    CHECK(c.get(C) == 0x90);
    CHECK(c.get(C) == 0x00);
    c.at(4 * second);
    CHECK(c.rises.size() == 2);
}

TEST_CASE("RTC: flags are set without their interrupts enabled, too") {
    Cmos c;
    c.at(second);
    CHECK(c.get(C) == 0x50); // update ended, periodic (1024 Hz); no IRQF
    CHECK(c.rises.empty());
}

TEST_CASE("RTC: periodic interrupts at the rate of A") {
    Cmos c;
    c.set(A, 0x26); // 1024 Hz
    c.set(B, 0x42);
    unsigned count = 0;
    while (c.clock.next_due() <= second) {
        c.at(c.clock.next_due());
        ++count;
        CHECK(c.get(C) & 0xc0);
    }
    CHECK(count == 1024);
    c.set(A, 0x2f); // 2 Hz
    c.rises.clear();
    c.at(second + second / 2);
    CHECK(c.rises == std::vector<VirtualTime>{second + second / 2});
    c.set(A, 0x21); // rates 1 and 2 are those of 8 and 9: 256 and 128 Hz
    c.get(C);
    c.rises.clear();
    c.at(second + second / 2 + second / 256);
    CHECK(c.rises == std::vector<VirtualTime>{second + second / 2 + second / 256});
    c.set(A, 0x20); // none
    c.get(C);
    CHECK(c.clock.next_due() == never);
}

TEST_CASE("RTC: alarm at a time of day, and with don't-care fields") {
    Cmos c;
    c.set(1, 0x30), c.set(3, 0x01), c.set(5, 0x00);
    c.set(B, 0x22);
    c.at(3600 * second);
    CHECK(c.rises == std::vector<VirtualTime>{90 * second});
    CHECK(c.get(C) & 0x20);
    c.rises.clear();
    c.set(3, 0xff), c.set(5, 0xc0); // each minute at second 30
    c.at(3600 * second + 29 * second);
    CHECK(c.rises.empty());
    c.at(3600 * second + 30 * second);
    CHECK(c.rises.size() == 1);
    c.get(C);
    c.set(1, 0x61); // no such second: never
    CHECK(c.clock.next_due() == never);
}

TEST_CASE("RTC: setting SET clears UIE") {
    Cmos c;
    c.set(B, 0x92);
    CHECK(c.get(B) == 0x82);
}

TEST_CASE("CMOS: memory size, RAM and the NMI mask") {
    Cmos c(default_rtc_start, 0xc000'0000, 0x1'0000'0000);
    CHECK((c.get(0x15) | c.get(0x16) << 8) == 640);
    CHECK((c.get(0x17) | c.get(0x18) << 8) == 0xffff);
    CHECK((c.get(0x34) | c.get(0x35) << 8) == (0xc000'0000 - 0x100'0000) / 0x1'0000);
    CHECK((c.get(0x5b) | c.get(0x5c) << 8 | c.get(0x5d) << 16) == 0x1'0000);
    c.set(0x7f, 0xa5);
    CHECK(c.get(0x7f) == 0xa5);
    CHECK_FALSE(c.rtc.nmi_masked());
    c.rtc.write(0, 1, 0x80);
    CHECK(c.rtc.nmi_masked());
}
