// The local APIC's timer (SDM vol. 3, 10.5.4): one-shot, periodic, TSC deadline, at exact nanoseconds.
#include <catch2/catch.hpp>

#include "tests/devices/rig.h"

using namespace vtrace;
using test::Rig;
using test::run_until;

namespace {

constexpr VirtualTime crystal = 1'000'000'000 / platform::crystal_hz;
constexpr uint32_t periodic = 1 << 17, deadline = 2 << 17, masked = 1 << 16, divide_by_1 = 0xb, divide_by_2 = 0x0;

struct Timer : Rig {
    explicit Timer(uint32_t lvt, uint32_t divide = divide_by_1) {
        enable_apic();
        apic_write(ApicReg::divide, divide);
        apic_write(ApicReg::lvt_timer, lvt | 0x40);
    }
    bool fired() {
        if (!lapic().interrupt_pending())
            return false;
        CHECK(lapic().acknowledge_interrupt() == 0x40);
        apic_write(ApicReg::eoi, 0);
        return true;
    }
};

} // namespace

TEST_CASE("LAPIC timer: one-shot counts down once") {
    Timer t(0);
    run_until(t.clock, 12'345);
    t.apic_write(ApicReg::initial_count, 100);
    CHECK(t.apic_read(ApicReg::current_count) == 100);
    run_until(t.clock, 12'345 + 10 * crystal);
    CHECK(t.apic_read(ApicReg::current_count) == 90);
    run_until(t.clock, 12'345 + 100 * crystal - 1);
    CHECK(t.apic_read(ApicReg::current_count) == 1);
    CHECK_FALSE(t.fired());
    run_until(t.clock, 12'345 + 100 * crystal);
    CHECK(t.apic_read(ApicReg::current_count) == 0);
    CHECK(t.fired());
    run_until(t.clock, 1'000'000);
    CHECK_FALSE(t.fired());
    CHECK(t.apic_read(ApicReg::initial_count) == 100);
}

TEST_CASE("LAPIC timer: each divisor") {
    const std::pair<uint32_t, unsigned> codes[] = {{0x0, 2},  {0x1, 4},  {0x2, 8},   {0x3, 16},
                                                   {0x8, 32}, {0x9, 64}, {0xa, 128}, {0xb, 1}};
    for (const auto& [code, divisor] : codes) {
        Timer t(0, code);
        t.apic_write(ApicReg::initial_count, 10);
        CHECK(t.clock.next_due() == 10 * divisor * crystal);
    }
}

TEST_CASE("LAPIC timer: periodic without drift; late ones give one interrupt") {
    Timer t(periodic);
    t.apic_write(ApicReg::initial_count, 25);
    unsigned count = 0;
    while (t.clock.next_due() <= 1'000'000) {
        run_until(t.clock, t.clock.next_due());
        CHECK(t.clock.now() % (25 * crystal) == 0);
        count += t.fired();
    }
    CHECK(count == 1'000'000 / (25 * crystal));
    t.clock.set_now(2'000'000'500);
    t.clock.run_due();
    CHECK(t.fired());
    CHECK_FALSE(t.fired());
    CHECK(t.clock.next_due() == 2'000'001'000);
}

TEST_CASE("LAPIC timer: writing zero stops it, masking silences it but it counts on") {
    Timer t(periodic);
    t.apic_write(ApicReg::initial_count, 100);
    t.apic_write(ApicReg::lvt_timer, periodic | masked | 0x40);
    run_until(t.clock, 250 * crystal);
    CHECK_FALSE(t.fired());
    CHECK(t.apic_read(ApicReg::current_count) == 50);
    t.apic_write(ApicReg::lvt_timer, periodic | 0x40);
    run_until(t.clock, 300 * crystal);
    CHECK(t.fired());
    t.apic_write(ApicReg::initial_count, 0);
    CHECK(t.apic_read(ApicReg::current_count) == 0);
    CHECK(t.clock.next_due() == never);
}

TEST_CASE("LAPIC timer: a one-shot that ran out while masked is lost") {
    Timer t(masked);
    t.apic_write(ApicReg::initial_count, 100);
    run_until(t.clock, 200 * crystal);
    t.apic_write(ApicReg::lvt_timer, 0x40);
    CHECK_FALSE(t.fired());
    CHECK(t.clock.next_due() == never);
    t.apic_write(ApicReg::lvt_timer, periodic | 0x40);
    CHECK(t.clock.next_due() == never);
}

TEST_CASE("LAPIC timer: changing divisor and mode keeps the count") {
    Timer t(0, divide_by_1);
    t.apic_write(ApicReg::initial_count, 100);
    run_until(t.clock, 40 * crystal);
    t.apic_write(ApicReg::divide, divide_by_2);
    CHECK(t.apic_read(ApicReg::current_count) == 60);
    CHECK(t.clock.next_due() == 40 * crystal + 60 * 2 * crystal);
    run_until(t.clock, 10'000);
    CHECK(t.fired());
    t.apic_write(ApicReg::divide, 0xa); // run out: stays so
    CHECK(t.apic_read(ApicReg::current_count) == 0);
    CHECK(t.clock.next_due() == never);

    Timer p(periodic);
    p.apic_write(ApicReg::initial_count, 100);
    run_until(p.clock, 930 * crystal);
    CHECK(p.fired());
    p.apic_write(ApicReg::lvt_timer, 0x40); // the period that runs is the last
    CHECK(p.apic_read(ApicReg::current_count) == 70);
    run_until(p.clock, 5000 * crystal);
    CHECK(p.fired());
    CHECK(p.clock.next_due() == never);
}

TEST_CASE("LAPIC timer: TSC deadline") {
    Timer t(deadline);
    CHECK(*t.lapic().read_msr(ApicMsr::tsc_deadline) == 0);
    REQUIRE(t.lapic().write_msr(ApicMsr::tsc_deadline, 5000));
    CHECK(*t.lapic().read_msr(ApicMsr::tsc_deadline) == 5000);
    CHECK(t.clock.next_due() == 5000);
    t.apic_write(ApicReg::initial_count, 77); // ignored in this mode
    CHECK(t.apic_read(ApicReg::initial_count) == 0);
    CHECK(t.apic_read(ApicReg::current_count) == 0);
    run_until(t.clock, 4999);
    CHECK_FALSE(t.fired());
    run_until(t.clock, 5000);
    CHECK(t.fired());
    CHECK(*t.lapic().read_msr(ApicMsr::tsc_deadline) == 0);

    t.lapic().write_msr(ApicMsr::tsc_deadline, 4000); // passed: at once
    t.clock.run_due();
    CHECK(t.fired());
    t.lapic().write_msr(ApicMsr::tsc_deadline, 6000);
    t.lapic().write_msr(ApicMsr::tsc_deadline, 0); // disarms
    CHECK(t.clock.next_due() == never);
    t.lapic().write_msr(ApicMsr::tsc_deadline, 6000);
    t.apic_write(ApicReg::lvt_timer, 0x40); // leaving the mode disarms as well
    CHECK(t.clock.next_due() == never);
    t.lapic().write_msr(ApicMsr::tsc_deadline, 6000); // ignored in the others
    CHECK(*t.lapic().read_msr(ApicMsr::tsc_deadline) == 0);
}

TEST_CASE("LAPIC timer: a masked deadline disarms without interrupt; deadlines follow the TSC") {
    Timer t(deadline | masked);
    t.lapic().write_msr(ApicMsr::tsc_deadline, 1000);
    run_until(t.clock, 2000);
    CHECK_FALSE(t.fired());
    CHECK(*t.lapic().read_msr(ApicMsr::tsc_deadline) == 0);

    t.apic_write(ApicReg::lvt_timer, deadline | 0x40);
    t.lapic().write_msr(ApicMsr::tsc_deadline, 10'000);
    t.lapic().set_tsc_offset(5000);
    CHECK(t.clock.next_due() == 5000);
    t.lapic().set_tsc_offset(~0ull - 999); // TSC 1000 behind
    CHECK(t.clock.next_due() == 11'000);
    t.lapic().write_msr(ApicMsr::tsc_deadline, ~0ull);
    CHECK(t.clock.next_due() > 1ull << 63);
}

TEST_CASE("LAPIC timer: disabling the APIC stops it") {
    Timer t(periodic);
    t.apic_write(ApicReg::initial_count, 100);
    REQUIRE(t.lapic().write_msr(ApicMsr::apic_base, platform::lapic_base | ApicBase::bsp));
    CHECK(t.clock.next_due() == never);
}
