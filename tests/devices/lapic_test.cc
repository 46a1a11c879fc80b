// The local APIC by SDM vol. 3, chapter 10: priorities, EOI, errors, local vectors, IPIs, modes, x2APIC's #GPs.
#include <catch2/catch.hpp>

#include "tests/devices/rig.h"

using namespace vtrace;
using test::Rig;

namespace {

constexpr uint32_t nmi_mode = 4 << 8, init_mode = 5 << 8, startup_mode = 6 << 8, lowest_mode = 1 << 8;
constexpr uint32_t assert_level = 1 << 14, level_triggered = 1 << 15, logical = 1 << 11;
constexpr uint32_t to_self = 1 << 18, to_all = 2 << 18, to_others = 3 << 18;
constexpr uint32_t masked = 1 << 16;

void ipi_to_self(Rig& rig, uint8_t vector) {
    rig.apic_write(ApicReg::icr_low, to_self | vector);
}

void send(Rig& rig, uint32_t low, uint8_t destination, unsigned from = 0) {
    rig.apic_write(ApicReg::icr_high, uint32_t{destination} << 24, from);
    rig.apic_write(ApicReg::icr_low, low, from);
}

// vCPUs with this vector in IRR, as a bit mask.
unsigned requested(Rig& rig, uint8_t vector) {
    unsigned mask = 0;
    for (unsigned i = 0; i < rig.chipset->vcpus(); ++i)
        if (rig.apic_read(ApicReg::irr + vector / 32 * 16, i) >> vector % 32 & 1)
            mask |= 1u << i;
    return mask;
}

} // namespace

TEST_CASE("LAPIC: reset state") {
    Rig rig(2);
    CHECK(*rig.lapic(0).read_msr(ApicMsr::apic_base) == 0xfee00900);
    CHECK(*rig.lapic(1).read_msr(ApicMsr::apic_base) == 0xfee00800);
    CHECK(rig.apic_read(ApicReg::id, 1) == 1u << 24);
    CHECK(rig.apic_read(ApicReg::version) == 0x00050014);
    CHECK(rig.apic_read(ApicReg::svr, 1) == 0xff);
    CHECK(rig.apic_read(ApicReg::dfr, 1) == 0xffffffff);
    CHECK(rig.apic_read(ApicReg::ldr, 1) == 0);
    for (unsigned lvt = ApicReg::lvt_timer; lvt <= ApicReg::lvt_error; lvt += 16)
        CHECK(rig.apic_read(lvt, 1) == masked);
    // The bootstrap processor's is in virtual wire mode already.
    CHECK(rig.apic_read(ApicReg::svr) == 0x1ff);
    CHECK(rig.apic_read(ApicReg::lvt_lint0) == 0x700);
    CHECK(rig.apic_read(ApicReg::lvt_lint1) == 0x400);
    CHECK(rig.apic_read(ApicReg::lvt_timer) == masked);
    CHECK_FALSE(rig.lapic().interrupt_pending());
    CHECK_FALSE(rig.lapic().nmi_pending());
}

TEST_CASE("LAPIC: a software-disabled APIC drops fixed interrupts and masks its local vectors") {
    Rig rig;
    rig.apic_write(ApicReg::svr, 0xff);
    ipi_to_self(rig, 0x40);
    CHECK(requested(rig, 0x40) == 0);
    rig.apic_write(ApicReg::lvt_timer, 0x40);
    CHECK(rig.apic_read(ApicReg::lvt_timer) == (masked | 0x40));
    rig.enable_apic();
    rig.apic_write(ApicReg::lvt_timer, 0x40);
    CHECK(rig.apic_read(ApicReg::lvt_timer) == 0x40);
    ipi_to_self(rig, 0x40);
    rig.apic_write(ApicReg::svr, 0xff);
    CHECK(rig.apic_read(ApicReg::lvt_timer) == (masked | 0x40));
    CHECK(rig.lapic().interrupt_pending()); // what was accepted before stays
}

TEST_CASE("LAPIC: interrupts in order of priority, nested by class") {
    Rig rig;
    rig.enable_apic();
    for (const uint8_t vector : {0x31, 0x55, 0x52})
        ipi_to_self(rig, vector);
    CHECK(rig.lapic().acknowledge_interrupt() == 0x55);
    CHECK(rig.apic_read(ApicReg::ppr) == 0x50);
    CHECK_FALSE(rig.lapic().interrupt_pending()); // 0x52 is of the same class
    ipi_to_self(rig, 0x60);
    REQUIRE(rig.lapic().interrupt_pending());
    CHECK(rig.lapic().acknowledge_interrupt() == 0x60);
    rig.apic_write(ApicReg::eoi, 0);
    CHECK(rig.apic_read(ApicReg::ppr) == 0x50);
    rig.apic_write(ApicReg::eoi, 0);
    CHECK(rig.lapic().acknowledge_interrupt() == 0x52);
    rig.apic_write(ApicReg::eoi, 0);
    CHECK(rig.lapic().acknowledge_interrupt() == 0x31);
    CHECK(rig.apic_read(ApicReg::isr + 0x10) == 1u << 0x11);
    rig.apic_write(ApicReg::eoi, 0);
    rig.apic_write(ApicReg::eoi, 0); // none in service: nothing happens
    CHECK(rig.apic_read(ApicReg::ppr) == 0);
}

TEST_CASE("LAPIC: task priority holds back its class and those below; CR8 is its upper half") {
    Rig rig;
    rig.enable_apic();
    rig.apic_write(ApicReg::tpr, 0x4f);
    CHECK(rig.lapic().read_cr8() == 4);
    CHECK(rig.apic_read(ApicReg::ppr) == 0x4f);
    ipi_to_self(rig, 0x4e);
    CHECK_FALSE(rig.lapic().interrupt_pending());
    ipi_to_self(rig, 0x50);
    CHECK(rig.lapic().interrupt_pending());
    rig.lapic().write_cr8(5);
    CHECK(rig.apic_read(ApicReg::tpr) == 0x50);
    CHECK_FALSE(rig.lapic().interrupt_pending());
    rig.lapic().write_cr8(3);
    CHECK(rig.lapic().interrupt_pending());
}

TEST_CASE("LAPIC: an acknowledgement with nothing to give is the spurious vector, without ISR") {
    Rig rig;
    rig.apic_write(ApicReg::svr, 0x1ef);
    CHECK(rig.lapic().acknowledge_interrupt() == 0xef);
    CHECK(rig.apic_read(ApicReg::isr + 0x70) == 0);
}

TEST_CASE("LAPIC: illegal vectors and registers are told in the ESR, at its write") {
    Rig rig;
    rig.enable_apic();
    rig.apic_write(ApicReg::lvt_error, 0xfe);
    ipi_to_self(rig, 0x0f);
    CHECK(rig.apic_read(ApicReg::esr) == 0);
    rig.apic_write(ApicReg::esr, 0);
    CHECK(rig.apic_read(ApicReg::esr) == 0x20);
    CHECK(requested(rig, 0xfe) == 1);
    rig.apic_read(0x3c0);
    rig.apic_write(ApicReg::esr, 0);
    CHECK(rig.apic_read(ApicReg::esr) == 0x80);
    rig.apic_write(ApicReg::lvt_lint1, 0x05); // an illegal local vector
    rig.lapic().pulse_lint1();
    rig.apic_write(ApicReg::esr, 0);
    CHECK(rig.apic_read(ApicReg::esr) == 0x40);
    rig.apic_write(ApicReg::lvt_error, 0x01); // ends, though the error's own vector is illegal
    ipi_to_self(rig, 0x01);
    rig.apic_write(ApicReg::esr, 0);
    CHECK(rig.apic_read(ApicReg::esr) == 0x60);
    rig.apic_write(ApicReg::esr, 0);
    CHECK(rig.apic_read(ApicReg::esr) == 0);
}

TEST_CASE("LAPIC: the PMI raises LVT PC and sets its mask") {
    Rig rig;
    rig.enable_apic();
    rig.apic_write(ApicReg::lvt_pc, 0x400);
    rig.lapic().deliver_pmi();
    CHECK(rig.lapic().nmi_pending());
    CHECK(rig.apic_read(ApicReg::lvt_pc) == (masked | 0x400));
    rig.lapic().acknowledge_nmi();
    rig.lapic().deliver_pmi();
    CHECK_FALSE(rig.lapic().nmi_pending());
    rig.apic_write(ApicReg::lvt_pc, 0xe0);
    rig.lapic().deliver_pmi();
    CHECK(rig.lapic().acknowledge_interrupt() == 0xe0);
}

TEST_CASE("LAPIC: LINT0 as ExtINT, and the virtual wire when the APIC is off") {
    Rig rig;
    rig.init_pics();
    rig.chipset->set_isa_irq(4, true);
    REQUIRE(rig.lapic().interrupt_pending());
    rig.lapic().write_cr8(15); // the task priority doesn't hold ExtINT back
    REQUIRE(rig.lapic().interrupt_pending());
    CHECK(rig.lapic().acknowledge_interrupt() == 0x34);
    CHECK_FALSE(rig.lapic().interrupt_pending());
    CHECK(rig.apic_read(ApicReg::isr + 0x10) == 0); // the PIC's affair alone
    rig.out(0x20, 0x20);
    rig.apic_write(ApicReg::lvt_lint0, masked | 0x700);
    rig.chipset->set_isa_irq(5, true);
    CHECK_FALSE(rig.lapic().interrupt_pending());
    REQUIRE(rig.lapic().write_msr(ApicMsr::apic_base, platform::lapic_base | ApicBase::bsp));
    REQUIRE(rig.lapic().interrupt_pending());
    CHECK(rig.lapic().acknowledge_interrupt() == 0x35);
}

TEST_CASE("LAPIC: LINT0 as a level-triggered fixed interrupt keeps its remote IRR until EOI") {
    Rig rig;
    rig.init_pics();
    rig.apic_write(ApicReg::lvt_lint0, level_triggered | 0x50);
    rig.chipset->set_isa_irq(4, true);
    CHECK(rig.apic_read(ApicReg::lvt_lint0) == (1u << 14 | level_triggered | 0x50));
    CHECK(rig.lapic().acknowledge_interrupt() == 0x50);
    rig.apic_write(ApicReg::eoi, 0); // the PIC still asks
    CHECK(rig.lapic().acknowledge_interrupt() == 0x50);
    rig.chipset->set_isa_irq(4, false);
    rig.apic_write(ApicReg::eoi, 0);
    CHECK(rig.apic_read(ApicReg::lvt_lint0) == (level_triggered | 0x50));
    CHECK_FALSE(rig.lapic().interrupt_pending());
}

TEST_CASE("LAPIC: the NMI button comes through LINT1 unless port 0x70 holds it back") {
    Rig rig(2);
    rig.enable_apic(0), rig.enable_apic(1);
    rig.apic_write(ApicReg::lvt_lint1, 1 << 16, 0);
    rig.apic_write(ApicReg::lvt_lint1, 0x400, 1);
    rig.chipset->press_nmi_button();
    CHECK_FALSE(rig.lapic(0).nmi_pending());
    CHECK(rig.lapic(1).nmi_pending());
    rig.lapic(1).acknowledge_nmi();
    rig.out(0x70, 0x80);
    rig.chipset->press_nmi_button();
    CHECK_FALSE(rig.lapic(1).nmi_pending());
}

TEST_CASE("IPI: physical destinations and shorthands") {
    Rig rig(4);
    for (unsigned i = 0; i < 4; ++i)
        rig.enable_apic(i);
    send(rig, 0x41, 2);
    CHECK(requested(rig, 0x41) == 0b0100);
    send(rig, 0x42, 0xff);
    CHECK(requested(rig, 0x42) == 0b1111);
    send(rig, to_self | 0x43, 3, 1);
    CHECK(requested(rig, 0x43) == 0b0010);
    send(rig, to_all | 0x44, 0, 1);
    CHECK(requested(rig, 0x44) == 0b1111);
    send(rig, to_others | 0x45, 0, 1);
    CHECK(requested(rig, 0x45) == 0b1101);
    send(rig, 0x46, 7); // nobody
    CHECK(requested(rig, 0x46) == 0);
    CHECK(rig.apic_read(ApicReg::icr_low) == 0x46); // never busy
    CHECK(rig.apic_read(ApicReg::icr_high) == 7u << 24);
}

TEST_CASE("IPI: logical destinations, flat and cluster") {
    Rig rig(4);
    for (unsigned i = 0; i < 4; ++i) {
        rig.enable_apic(i);
        rig.apic_write(ApicReg::ldr, 1u << (24 + i), i);
    }
    send(rig, logical | 0x51, 0b1010);
    CHECK(requested(rig, 0x51) == 0b1010);
    send(rig, logical | 0x52, 0xff);
    CHECK(requested(rig, 0x52) == 0b1111);
    for (unsigned i = 0; i < 4; ++i) { // two clusters of two
        rig.apic_write(ApicReg::dfr, 0, i);
        CHECK(rig.apic_read(ApicReg::dfr, i) == 0x0fffffff);
        rig.apic_write(ApicReg::ldr, (i / 2) << 28 | 1u << (24 + i % 2), i);
    }
    send(rig, logical | 0x53, 0x12);
    CHECK(requested(rig, 0x53) == 0b1000);
    send(rig, logical | 0x54, 0x03);
    CHECK(requested(rig, 0x54) == 0b0011);
}

TEST_CASE("IPI: lowest priority goes to one, that with the least processor priority") {
    Rig rig(3);
    for (unsigned i = 0; i < 3; ++i) {
        rig.enable_apic(i);
        rig.apic_write(ApicReg::ldr, 1u << (24 + i), i);
    }
    rig.apic_write(ApicReg::tpr, 0x30, 0);
    rig.apic_write(ApicReg::tpr, 0x10, 1);
    rig.apic_write(ApicReg::tpr, 0x20, 2);
    send(rig, lowest_mode | logical | 0x61, 0b111);
    CHECK(requested(rig, 0x61) == 0b010);
    send(rig, lowest_mode | logical | 0x62, 0b101);
    CHECK(requested(rig, 0x62) == 0b100);
    rig.apic_write(ApicReg::svr, 0xff, 1); // a disabled one takes no part
    send(rig, lowest_mode | logical | 0x63, 0b111);
    CHECK(requested(rig, 0x63) == 0b100);
}

TEST_CASE("IPI: NMI, INIT and start-up, also to software-disabled APICs") {
    Rig rig(3);
    rig.enable_apic(1);
    rig.apic_write(ApicReg::tpr, 0x55, 1);
    send(rig, nmi_mode | assert_level, 2);
    CHECK(rig.lapic(2).nmi_pending());
    CHECK_FALSE(rig.lapic(1).nmi_pending());
    send(rig, init_mode | assert_level | level_triggered, 1);
    CHECK(rig.inits == std::vector<unsigned>{1});
    CHECK(rig.apic_read(ApicReg::tpr, 1) == 0);
    CHECK(rig.apic_read(ApicReg::svr, 1) == 0xff);
    CHECK(rig.apic_read(ApicReg::id, 1) == 1u << 24);
    send(rig, init_mode | level_triggered, 1); // the de-assertion does nothing
    CHECK(rig.inits.size() == 1);
    send(rig, to_others | startup_mode | assert_level | 0x9a, 0);
    CHECK(rig.startups == std::vector<std::pair<unsigned, uint8_t>>{{1, 0x9a}, {2, 0x9a}});
    send(rig, to_self | init_mode | assert_level, 0); // not valid with this shorthand
    send(rig, to_all | startup_mode | assert_level, 0);
    CHECK(rig.inits.size() == 1);
    CHECK(rig.startups.size() == 2);
}

TEST_CASE("APIC base: which transitions there are") {
    Rig rig;
    constexpr uint64_t base = platform::lapic_base | ApicBase::bsp, xapic = base | ApicBase::en;
    constexpr uint64_t x2apic = xapic | ApicBase::extd, invalid = base | ApicBase::extd;
    const auto set = [&](uint64_t value) { return rig.lapic().write_msr(ApicMsr::apic_base, value); };
    CHECK_FALSE(set(invalid));
    CHECK_FALSE(set(xapic | 1)); // reserved bits
    CHECK_FALSE(set(xapic | 1 << 9));
    CHECK_FALSE(set(xapic | 1ull << 46)); // beyond the physical address width
    CHECK(set(xapic | 1ull << 45));
    CHECK(set(xapic));
    CHECK(set(x2apic));
    CHECK_FALSE(set(xapic));
    CHECK_FALSE(set(invalid));
    CHECK(set(x2apic));
    CHECK(set(base));         // off
    CHECK_FALSE(set(x2apic)); // not directly
    CHECK(set(xapic));
    CHECK(rig.apic_read(ApicReg::svr) == 0xff); // as after reset
}

TEST_CASE("APIC base: the page moves, for this processor only, and vanishes outside of xAPIC mode") {
    Rig rig(2);
    CHECK(rig.lapic(0).owns(0xfee00fff));
    CHECK_FALSE(rig.lapic(0).owns(0xfee01000));
    REQUIRE(rig.lapic(0).write_msr(ApicMsr::apic_base, 0xd0000000 | ApicBase::en));
    CHECK(rig.lapic(0).owns(0xd0000020));
    CHECK_FALSE(rig.lapic(0).owns(0xfee00000));
    CHECK(rig.lapic(1).owns(0xfee00000));
    rig.enable_x2apic(1);
    CHECK_FALSE(rig.lapic(1).owns(0xfee00000));
    REQUIRE(rig.lapic(0).write_msr(ApicMsr::apic_base, 0xd0000000));
    CHECK_FALSE(rig.lapic(0).owns(0xd0000000));
}

TEST_CASE("x2APIC: MSRs exist in x2APIC mode only") {
    Rig rig;
    CHECK_FALSE(rig.x2apic_read(ApicReg::id));
    CHECK_FALSE(rig.x2apic_write(ApicReg::tpr, 0));
    CHECK_FALSE(rig.lapic().read_msr(0x900));
    CHECK_FALSE(rig.lapic().read_msr(0x1c));
}

TEST_CASE("x2APIC: IDs, and state kept from xAPIC mode") {
    Rig rig(18);
    rig.apic_write(ApicReg::svr, 0x1aa, 17);
    rig.apic_write(ApicReg::tpr, 0x20, 17);
    rig.enable_x2apic(17);
    CHECK(*rig.x2apic_read(ApicReg::id, 17) == 17);
    CHECK(*rig.x2apic_read(ApicReg::ldr, 17) == 0x00010002);
    CHECK(*rig.x2apic_read(ApicReg::svr, 17) == 0x1aa);
    CHECK(*rig.x2apic_read(ApicReg::tpr, 17) == 0x20);
}

TEST_CASE("x2APIC: #GP for read-only, write-only, missing registers and reserved bits") {
    Rig rig;
    rig.enable_x2apic();
    for (const unsigned reg : {ApicReg::id, ApicReg::version, ApicReg::ppr, ApicReg::ldr, ApicReg::isr,
                               ApicReg::tmr + 0x70, ApicReg::irr, ApicReg::current_count}) {
        CHECK(rig.x2apic_read(reg));
        CHECK_FALSE(rig.x2apic_write(reg, 0));
    }
    for (const unsigned reg :
         {ApicReg::eoi, ApicReg::self_ipi, ApicReg::dfr, ApicReg::icr_high, 0x090u, 0x0c0u, 0x2f0u})
        CHECK_FALSE(rig.x2apic_read(reg));
    for (const unsigned reg : {ApicReg::dfr, ApicReg::icr_high, 0x090u, 0x0c0u, 0x2f0u, 0x3f0u + 0x10})
        CHECK_FALSE(rig.x2apic_write(reg, 0));

    struct Case {
        unsigned reg;
        uint64_t good, bad;
    };
    const Case cases[] = {
        {ApicReg::tpr, 0xff, 0x100},
        {ApicReg::eoi, 0, 1},
        {ApicReg::svr, 0x1ff, 0x400},
        {ApicReg::esr, 0, 1},
        {ApicReg::lvt_timer, 0x700ff, 0x100},
        {ApicReg::lvt_thermal, 0x107ff, 0x800},
        {ApicReg::lvt_pc, 0x107ff, 0x20000},
        {ApicReg::lvt_lint0, 0x1a7ff, 0x20000},
        {ApicReg::lvt_error, 0x100ff, 0x400},
        {ApicReg::initial_count, 0xffffffff, 0x100000000},
        {ApicReg::divide, 0xb, 0x4},
        {ApicReg::self_ipi, 0xff, 0x100},
        {ApicReg::icr_low, 0xffffffff'000ccfff & ~0x700ull, 0x2000},
    };
    for (const Case& c : cases) {
        INFO("register " << c.reg);
        CHECK(rig.x2apic_write(c.reg, c.good));
        CHECK_FALSE(rig.x2apic_write(c.reg, c.bad));
    }
    CHECK_FALSE(rig.x2apic_write(ApicReg::icr_low, 1 << 16));
    CHECK_FALSE(rig.x2apic_write(ApicReg::icr_low, 1 << 20));
    CHECK(rig.x2apic_write(ApicReg::icr_low, 1 << 12 | 0x40)); // processors ignore the old delivery status bit
    CHECK(*rig.x2apic_read(ApicReg::icr_low) == 0x40);
}

TEST_CASE("x2APIC: IPIs by 32-bit destinations, logical clusters and SELF IPI") {
    Rig rig(20);
    for (unsigned i = 0; i < 20; ++i) {
        rig.enable_apic(i);
        rig.enable_x2apic(i);
    }
    const auto targets = [&](uint8_t vector) {
        std::vector<unsigned> out;
        for (unsigned i = 0; i < 20; ++i)
            if (*rig.x2apic_read(ApicReg::irr + vector / 32 * 16, i) >> vector % 32 & 1)
                out.push_back(i);
        return out;
    };
    REQUIRE(rig.x2apic_write(ApicReg::icr_low, 19ull << 32 | 0x71));
    CHECK(targets(0x71) == std::vector<unsigned>{19});
    REQUIRE(rig.x2apic_write(ApicReg::icr_low, 0x0001'0005ull << 32 | logical | 0x72));
    CHECK(targets(0x72) == std::vector<unsigned>{16, 18});
    REQUIRE(rig.x2apic_write(ApicReg::icr_low, 0xffff'ffffull << 32 | 0x73));
    CHECK(targets(0x73).size() == 20);
    REQUIRE(rig.x2apic_write(ApicReg::icr_low, 0xffull << 32 | 0x74)); // no broadcast here
    CHECK(targets(0x74).empty());
    REQUIRE(rig.x2apic_write(ApicReg::self_ipi, 0x75, 7));
    CHECK(targets(0x75) == std::vector<unsigned>{7});
    REQUIRE(rig.x2apic_write(ApicReg::self_ipi, 0x03, 7));
    REQUIRE(rig.x2apic_write(ApicReg::esr, 0, 7));
    CHECK(*rig.x2apic_read(ApicReg::esr, 7) == 0x20);
}

TEST_CASE("LAPIC: odd accesses to the page are harmless") {
    Rig rig;
    rig.enable_apic();
    CHECK(rig.lapic().mmio_read(platform::lapic_base + ApicReg::svr, 8) == 0x1ff);
    CHECK(rig.lapic().mmio_read(platform::lapic_base + ApicReg::svr + 1, 1) == 0x01);
    CHECK(rig.lapic().mmio_read(platform::lapic_base + ApicReg::svr + 4, 4) == 0);
    rig.lapic().mmio_write(platform::lapic_base + ApicReg::svr, 1, 0);
    rig.lapic().mmio_write(platform::lapic_base + ApicReg::svr + 4, 4, 0);
    CHECK(rig.apic_read(ApicReg::svr) == 0x1ff);
}
