// The 82093AA by its data sheet: redirection, edge and level, remote IRR, destinations, EOI.
#include <catch2/catch.hpp>

#include "tests/devices/rig.h"

using namespace vtrace;
using test::Rig;

namespace {

constexpr uint32_t masked = 1 << 16, level = 1 << 15, remote_irr = 1 << 14, logical = 1 << 11, low_active = 1 << 13;

void serve(Rig& rig, uint8_t vector, unsigned vcpu = 0) {
    REQUIRE(rig.lapic(vcpu).interrupt_pending());
    CHECK(rig.lapic(vcpu).acknowledge_interrupt() == vector);
    rig.apic_write(ApicReg::eoi, 0, vcpu);
}

} // namespace

TEST_CASE("IOAPIC: identification and reset state") {
    Rig rig;
    CHECK(rig.ioapic_read(1) == 0x00170020);
    CHECK(rig.ioapic_read(0) == 0);
    rig.ioapic_write(0, 0xffffffff);
    CHECK(rig.ioapic_read(0) == 0x0f000000);
    CHECK(rig.ioapic_read(2) == 0x0f000000);
    for (uint8_t i = 0; i < 24; ++i)
        CHECK(rig.ioapic_read(static_cast<uint8_t>(0x10 + 2 * i)) == masked);
    rig.redirect(5, 0xffffffff, 0xffffffff);
    CHECK(rig.ioapic_read(0x1a) == 0x0001afff); // delivery status and remote IRR are read-only
    CHECK(rig.ioapic_read(0x1b) == 0xff000000);
    CHECK(rig.ioapic_read(0xff) == 0);
    CHECK(rig.mmio.read(platform::ioapic_base, 4) == 0xff);
}

TEST_CASE("IOAPIC: an edge is delivered once; at a masked input it is lost") {
    Rig rig;
    rig.enable_apic();
    rig.redirect(4, 0x51);
    rig.chipset->set_isa_irq(4, true);
    serve(rig, 0x51);
    rig.chipset->set_isa_irq(4, true);
    CHECK_FALSE(rig.lapic().interrupt_pending());
    rig.redirect(4, masked | 0x51);
    rig.chipset->set_isa_irq(4, false);
    rig.chipset->set_isa_irq(4, true);
    rig.redirect(4, 0x51);
    CHECK_FALSE(rig.lapic().interrupt_pending());
}

TEST_CASE("IOAPIC: a level is delivered again after EOI while it lasts") {
    Rig rig;
    rig.enable_apic();
    rig.redirect(17, level | low_active | 0x61);
    rig.chipset->set_gsi(17, true);
    CHECK(rig.ioapic_read(0x32) == (level | low_active | remote_irr | 0x61));
    CHECK(rig.lapic().acknowledge_interrupt() == 0x61);
    CHECK(rig.apic_read(ApicReg::tmr + 0x30) == 2);
    rig.chipset->set_gsi(17, false);
    rig.chipset->set_gsi(17, true); // not again before the EOI
    CHECK_FALSE(rig.lapic().interrupt_pending());
    rig.apic_write(ApicReg::eoi, 0);
    CHECK(rig.ioapic_read(0x32) & remote_irr); // still asserted: sent again
    CHECK(rig.lapic().acknowledge_interrupt() == 0x61);
    rig.chipset->set_gsi(17, false);
    rig.apic_write(ApicReg::eoi, 0);
    CHECK_FALSE(rig.ioapic_read(0x32) & remote_irr);
    CHECK_FALSE(rig.lapic().interrupt_pending());
}

TEST_CASE("IOAPIC: a masked level is delivered when it is unmasked") {
    Rig rig;
    rig.enable_apic();
    rig.redirect(17, masked | level | 0x61);
    rig.chipset->set_gsi(17, true);
    CHECK_FALSE(rig.lapic().interrupt_pending());
    rig.redirect(17, level | 0x61);
    serve(rig, 0x61);
}

TEST_CASE("IOAPIC: remote IRR is cleared by the EOI register and by switching to edge") {
    Rig rig;
    rig.enable_apic();
    rig.redirect(17, level | 0x61);
    rig.chipset->set_gsi(17, true);
    rig.chipset->set_gsi(17, false);
    rig.mmio.write(platform::ioapic_base + 0x40, 4, 0x62); // another vector
    CHECK(rig.ioapic_read(0x32) & remote_irr);
    rig.mmio.write(platform::ioapic_base + 0x40, 4, 0x61);
    CHECK_FALSE(rig.ioapic_read(0x32) & remote_irr);
    rig.chipset->set_gsi(17, true);
    rig.chipset->set_gsi(17, false);
    CHECK(rig.ioapic_read(0x32) & remote_irr);
    rig.redirect(17, masked | 0x61);
    rig.redirect(17, level | 0x61);
    CHECK_FALSE(rig.ioapic_read(0x32) & remote_irr);
}

TEST_CASE("IOAPIC: a level that nobody accepts doesn't set remote IRR") {
    Rig rig;
    rig.apic_write(ApicReg::svr, 0xff);
    rig.redirect(17, level | 0x61); // the APIC is software-disabled
    rig.chipset->set_gsi(17, true);
    CHECK_FALSE(rig.ioapic_read(0x32) & remote_irr);
    rig.enable_apic();
    rig.redirect(17, level | 0x61);
    serve(rig, 0x61);
}

TEST_CASE("IOAPIC: the EOI of an edge-triggered interrupt doesn't reach it") {
    Rig rig;
    rig.enable_apic();
    rig.redirect(17, level | 0x61);
    rig.chipset->set_gsi(17, true);
    rig.lapic().acknowledge_interrupt();
    rig.apic_write(ApicReg::icr_low, 1 << 18 | 0x61); // the same vector as an IPI: TMR says edge now
    rig.apic_write(ApicReg::eoi, 0);
    CHECK(rig.ioapic_read(0x32) & remote_irr);
}

TEST_CASE("IOAPIC: destinations: physical, broadcast, logical, lowest priority") {
    Rig rig(3);
    for (unsigned i = 0; i < 3; ++i) {
        rig.enable_apic(i);
        rig.apic_write(ApicReg::ldr, 1u << (24 + i), i);
    }
    const auto pulse_reaches = [&](uint32_t low, uint32_t destination) {
        rig.redirect(20, low, destination << 24);
        rig.chipset->set_gsi(20, false);
        rig.chipset->set_gsi(20, true);
        std::vector<unsigned> out;
        for (unsigned i = 0; i < 3; ++i)
            if (rig.lapic(i).interrupt_pending()) {
                out.push_back(i);
                rig.lapic(i).acknowledge_interrupt();
                rig.apic_write(ApicReg::eoi, 0, i);
            }
        return out;
    };
    CHECK(pulse_reaches(0x71, 2) == std::vector<unsigned>{2});
    CHECK(pulse_reaches(0x71, 0xff) == std::vector<unsigned>{0, 1, 2});
    CHECK(pulse_reaches(logical | 0x71, 0b011) == std::vector<unsigned>{0, 1});
    rig.apic_write(ApicReg::tpr, 0x20, 0);
    CHECK(pulse_reaches(1 << 8 | logical | 0x71, 0b011) == std::vector<unsigned>{1});
    rig.redirect(20, 4 << 8, 1 << 24); // NMI
    rig.chipset->set_gsi(20, false);
    rig.chipset->set_gsi(20, true);
    CHECK(rig.lapic(1).nmi_pending());
}

TEST_CASE("IOAPIC: reaches APICs in x2APIC mode by their 8-bit IDs") {
    Rig rig(2);
    rig.enable_apic(1);
    rig.enable_x2apic(1);
    rig.redirect(20, 0x71, 1 << 24);
    rig.chipset->set_gsi(20, true);
    CHECK(rig.lapic(1).acknowledge_interrupt() == 0x71);
    REQUIRE(rig.x2apic_write(ApicReg::eoi, 0, 1));
    rig.redirect(20, logical | level | 0x72, 2 << 24); // cluster 0, member 1
    CHECK(rig.lapic(1).acknowledge_interrupt() == 0x72);
    rig.chipset->set_gsi(20, false);
    REQUIRE(rig.x2apic_write(ApicReg::eoi, 0, 1));
    CHECK_FALSE(rig.ioapic_read(0x38) & remote_irr);
}

TEST_CASE("IOAPIC: input 0 as ExtINT carries the PICs' interrupts") {
    Rig rig;
    rig.init_pics();
    rig.apic_write(ApicReg::lvt_lint0, 1 << 16);
    rig.redirect(0, 7 << 8);
    rig.chipset->set_isa_irq(6, true);
    REQUIRE(rig.lapic().interrupt_pending());
    CHECK(rig.lapic().acknowledge_interrupt() == 0x36);
    CHECK_FALSE(rig.lapic().interrupt_pending());
}
