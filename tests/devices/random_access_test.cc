// Whatever a guest does to ports, registers and MSRs, in whatever order: no crash, no hang, and the invariants hold.
#include <catch2/catch.hpp>

#include <random>

#include "tests/devices/rig.h"

using namespace vtrace;
using test::Rig;

namespace {

// The cached answer against one that is computed from the registers (SDM vol. 3, 10.8.3.1), for APICs whose ExtINT is
// out of the question.
bool expected_pending(Rig& rig, unsigned vcpu) {
    unsigned highest_irr = 0;
    for (unsigned i = 0; i < 256; ++i)
        if (*rig.x2apic_read(ApicReg::irr + i / 32 * 16, vcpu) >> i % 32 & 1)
            highest_irr = i;
    return highest_irr >> 4 > *rig.x2apic_read(ApicReg::ppr, vcpu) >> 4;
}

void random_run(uint64_t seed, unsigned steps) {
    Rig rig(3);
    std::mt19937_64 random(seed);
    const auto below = [&](uint64_t limit) { return random() % limit; };
    // Registers with effects, and now and then anything.
    const uint16_t ports[] = {0x20,  0x21,  0x40,  0x41,  0x42,  0x43,  0x60,  0x61,  0x64,  0x70,  0x71,  0x92,
                              0xa0,  0xa1,  0xf4,  0x3f8, 0x3f9, 0x3fa, 0x3fb, 0x3fc, 0x3fd, 0x3fe, 0x3ff, 0x4d0,
                              0x4d1, 0x505, 0x510, 0x511, 0x600, 0x602, 0x604, 0x608, 0xcf8, 0xcf9, 0xcfc, 0xcfe};
    // Values of all magnitudes: many commands are small numbers.
    const auto value = [&] { return random() >> below(64); };
    for (unsigned step = 0; step < steps; ++step) {
        const unsigned vcpu = static_cast<unsigned>(below(3));
        const unsigned size = 1u << below(4);
        Lapic& lapic = rig.lapic(vcpu);
        switch (below(12)) {
        case 0:
        case 1:
        case 2: {
            const uint16_t port = below(8) ? ports[below(std::size(ports))] : static_cast<uint16_t>(random());
            if (below(3))
                rig.out(port, static_cast<uint32_t>(value()), size > 4 ? 4 : size);
            else
                rig.in(port, size > 4 ? 4 : size);
            break;
        }
        case 3: // IOAPIC
            if (below(2))
                rig.redirect(static_cast<unsigned>(below(24)), static_cast<uint32_t>(value()),
                             static_cast<uint32_t>(random()));
            else
                rig.mmio.write(platform::ioapic_base + below(0x60), size, value());
            break;
        case 4:
        case 5: {
            const Gpa gpa =
                (*lapic.read_msr(ApicMsr::apic_base) & ~page_mask) + (below(4) ? below(64) * 16 : below(4090));
            if (!lapic.owns(gpa))
                break;
            if (below(4))
                lapic.mmio_write(gpa, size, value());
            else
                lapic.mmio_read(gpa, size);
            break;
        }
        case 6: {
            const uint32_t msr = below(8) ? static_cast<uint32_t>(0x800 + below(0x40)) : below(2) ? 0x6e0 : 0x1b;
            if (msr == 0x1b && below(2)) // valid transitions, most of the time
                lapic.write_msr(msr, platform::lapic_base | (below(3) ? 0xc00 : below(2) ? 0x800 : 0));
            else if (below(3))
                lapic.write_msr(msr, value());
            else
                lapic.read_msr(msr);
            break;
        }
        case 7:
            if (lapic.interrupt_pending()) {
                lapic.acknowledge_interrupt();
                if (lapic.owns(platform::lapic_base))
                    lapic.mmio_write(platform::lapic_base + ApicReg::eoi, 4, 0);
            }
            break;
        case 8:
            rig.chipset->set_gsi(16 + static_cast<unsigned>(below(8)), below(2));
            break;
        case 9:
            rig.clock.set_now(rig.clock.now() + (random() >> (20 + below(44))));
            rig.clock.run_due();
            break;
        case 10: // as an engine idles: to the next event
            if (rig.clock.next_due() != never)
                rig.clock.set_now(rig.clock.next_due());
            rig.clock.run_due();
            break;
        case 11:
            switch (below(5)) {
            case 0:
                rig.chipset->serial().receive("input\n");
                break;
            case 1:
                rig.chipset->press_nmi_button();
                break;
            case 2:
                lapic.deliver_pmi();
                break;
            case 3:
                lapic.set_tsc_offset(value());
                break;
            default:
                lapic.write_cr8(static_cast<uint8_t>(below(16)));
            }
        }
        REQUIRE(rig.clock.next_due() >= rig.clock.now()); // else run_due() would never end
        rig.events.clear();
    }
    // Bring the APICs into x2APIC mode, where their registers can be read without effects, and judge the cached answer.
    for (unsigned i = 0; i < 3; ++i) {
        Lapic& lapic = rig.lapic(i);
        const uint64_t base = *lapic.read_msr(ApicMsr::apic_base);
        if (!(base & ApicBase::en))
            lapic.write_msr(ApicMsr::apic_base, base | ApicBase::en);
        rig.enable_x2apic(i);
        REQUIRE(rig.x2apic_write(ApicReg::lvt_lint0, 1 << 16, i));
        while (lapic.interrupt_pending() && !expected_pending(rig, i)) // an ExtINT message that waits
            lapic.acknowledge_interrupt();
        CHECK(lapic.interrupt_pending() == expected_pending(rig, i));
    }
}

} // namespace

TEST_CASE("random accesses never crash, and the pending interrupt is always the right one") {
    for (uint64_t seed = 1; seed <= 40; ++seed) {
        INFO("seed " << seed);
        random_run(seed, 5000);
    }
}
