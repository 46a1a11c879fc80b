// Devices working together through the chipset's wiring.
#include <catch2/catch.hpp>

#include "tests/devices/rig.h"

using namespace vtrace;
using test::Rig;
using test::run_until;

TEST_CASE("chipset: the timer reaches the processor through the PIC, and through IOAPIC input 2") {
    Rig rig;
    rig.init_pics();
    rig.out(0x21, 0xfe);                                           // IRQ 0 only
    rig.out(0x43, 0x34), rig.out(0x40, 0xa9), rig.out(0x40, 0x04); // 1193 ticks
    if (rig.lapic().interrupt_pending()) {                         // OUT went high with the control word
        rig.lapic().acknowledge_interrupt();
        rig.out(0x20, 0x20);
    }
    run_until(rig.clock, Pit::oscillator.time_of(1194) - 1);
    CHECK_FALSE(rig.lapic().interrupt_pending());
    run_until(rig.clock, Pit::oscillator.time_of(1194));
    CHECK(rig.lapic().acknowledge_interrupt() == 0x30);
    rig.out(0x20, 0x20);

    rig.out(0x21, 0xff);
    rig.redirect(2, 0x50);
    run_until(rig.clock, Pit::oscillator.time_of(1 + 2 * 1193));
    CHECK(rig.lapic().acknowledge_interrupt() == 0x50);
}

TEST_CASE("chipset: the serial port's interrupt and its output callback") {
    Rig rig;
    rig.enable_apic();
    rig.redirect(4, 0x54);
    rig.out(0x3fc, 0x08);
    rig.out(0x3f9, 0x01);
    rig.chipset->serial().receive("k");
    CHECK(rig.lapic().acknowledge_interrupt() == 0x54);
    CHECK(rig.in(0x3f8) == 'k');
    rig.out(0x3f8, 'v');
    CHECK(rig.console == "v");
}

TEST_CASE("chipset: the RTC's interrupt through the slave PIC") {
    Rig rig;
    rig.init_pics();
    rig.out(0x70, 0x0b), rig.out(0x71, 0x12);
    run_until(rig.clock, 1'000'000'000);
    CHECK(rig.lapic().acknowledge_interrupt() == 0x38);
}

TEST_CASE("chipset: a second one on the same buses is refused by name") {
    Rig rig;
    const auto second = Chipset::create({}, rig.clock, rig.memory, rig.ports, rig.mmio);
    REQUIRE_FALSE(second);
    CHECK(second.error().message.find("PIC master") != std::string::npos);
}

TEST_CASE("chipset: numbers of processors out of range are refused") {
    for (const unsigned vcpus : {0u, 255u, ~0u}) {
        Clock clock;
        Bus ports, mmio;
        auto memory = std::move(*GuestMemory::create(1 << 20));
        ChipsetConfig config;
        config.vcpus = vcpus;
        CHECK_FALSE(Chipset::create(config, clock, memory, ports, mmio));
    }
}

TEST_CASE("chipset: without callbacks it runs all the same") {
    Clock clock;
    Bus ports, mmio;
    auto memory = std::move(*GuestMemory::create(1 << 20));
    auto chipset = Chipset::create({}, clock, memory, ports, mmio);
    REQUIRE(chipset);
    ports.write(0x3f8, 1, 'x');
    ports.write(0xf4, 1, 1);
    ports.write(0x64, 1, 0xfe);
    (*chipset)->lapic(0).mmio_write(platform::lapic_base + ApicReg::icr_low, 4, 5 << 8 | 1 << 14 | 1 << 18);
    CHECK(ports.unclaimed() == 0);
}
