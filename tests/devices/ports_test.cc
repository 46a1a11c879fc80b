// The small devices behind ports: i8042, resets, exits, fw_cfg, PCI configuration, ACPI fixed hardware.
#include <catch2/catch.hpp>

#include "tests/devices/rig.h"

using namespace vtrace;
using test::Rig;
using Kind = MachineEvent::Kind;

TEST_CASE("i8042: self-test and probing find a controller with nothing on it") {
    Rig rig;
    CHECK((rig.in(0x64) & 1) == 0);
    rig.out(0x64, 0xaa);
    CHECK((rig.in(0x64) & 1) == 1);
    CHECK(rig.in(0x60) == 0x55);
    CHECK((rig.in(0x64) & 5) == 4); // system flag after the self-test
    rig.out(0x64, 0xab);
    CHECK(rig.in(0x60) == 0x00);
    rig.out(0x64, 0xa9);
    CHECK(rig.in(0x60) != 0x00); // no auxiliary interface
    rig.out(0x64, 0x60), rig.out(0x60, 0x45);
    rig.out(0x64, 0x20);
    CHECK(rig.in(0x60) == 0x45);
    rig.out(0x64, 0xd3), rig.out(0x60, 0x5a);
    CHECK(rig.in(0x60) == 0x5a); // echoed, but not flagged as auxiliary data
    CHECK_FALSE(rig.in(0x64) & 0x20);
}

TEST_CASE("i8042: a byte for the missing keyboard times out at once, with its interrupt if enabled") {
    Rig rig;
    rig.init_pics();
    rig.out(0x60, 0xf2);
    CHECK((rig.in(0x64) & 0x41) == 0x41);
    CHECK(rig.in(0x60) == 0xfe);
    CHECK((rig.in(0x64) & 0x41) == 0);
    CHECK_FALSE(rig.lapic().interrupt_pending());
    rig.out(0x64, 0x60), rig.out(0x60, 0x01);
    rig.out(0x60, 0xff);
    CHECK(rig.lapic().acknowledge_interrupt() == 0x31);
}

TEST_CASE("all the ways to reset") {
    Rig rig;
    rig.out(0x64, 0xfe);
    CHECK(rig.events == std::vector<MachineEvent>{{Kind::reset}});
    rig.events.clear();
    rig.out(0x64, 0xd1), rig.out(0x60, 0x02); // output port bit 0 low
    CHECK(rig.events == std::vector<MachineEvent>{{Kind::reset}});
    rig.events.clear();
    CHECK(rig.in(0x92) == 0x02);
    rig.out(0x92, 0x03);
    rig.out(0x92, 0x03); // only the rising bit
    CHECK(rig.events == std::vector<MachineEvent>{{Kind::reset}});
    rig.events.clear();
    rig.out(0xcf9, 0x02);
    CHECK(rig.events.empty());
    rig.out(0xcf9, 0x06);
    CHECK(rig.events == std::vector<MachineEvent>{{Kind::reset}});
    rig.events.clear();
    rig.out(0x64, 0xff); // pulses nothing
    rig.out(0x64, 0xd1), rig.out(0x60, 0xdf);
    CHECK(rig.events.empty());
}

TEST_CASE("marker: both registers tell their values, and that this is vtrace") {
    Rig rig;
    rig.out(0x5654, 0x12);
    rig.out(0x5654, 0x1234, 2);
    rig.out(0x5654, 0x89abcdef, 4);
    rig.mmio.write(0xfed4'5654, 1, 0x56);
    rig.mmio.write(0xfed4'5654, 4, 0xffff'ffff);
    CHECK(rig.markers == std::vector<uint32_t>{0x12, 0x1234, 0x89abcdef, 0x56, 0xffff'ffff});
    CHECK(rig.events.empty());
    rig.markers.clear();
    CHECK(rig.in(0x5654, 4) == 0x43525456); // "VTRC"
    CHECK(rig.in(0x5654) == 'V');
    CHECK(rig.mmio.read(0xfed4'5654, 4) == 0x43525456);
    CHECK(rig.mmio.read(0xfed4'5654, 2) == 0x5456);
    rig.out(0x5655, 1);
    rig.mmio.write(0xfed4'5000, 4, 1);
    rig.mmio.write(0xfed4'5650, 8, uint64_t{1} << 32);
    rig.mmio.write(0xfed4'5654, 8, 1);
    CHECK(rig.markers.empty()); // only the register itself
    CHECK(rig.in(0x5655) == 'T');
    CHECK(rig.in(0x5656, 2) == 0x4352);
    CHECK(rig.mmio.read(0xfed4'5652, 4) == 0x54560000);
    CHECK(rig.mmio.read(0xfed4'5000, 4) == 0);
    CHECK(rig.mmio.unclaimed() + rig.ports.unclaimed() == 0);
}

TEST_CASE("isa-debug-exit and pvpanic report their values") {
    Rig rig;
    rig.out(0xf4, 0x10);
    rig.out(0xf4, 0x1234, 2);
    rig.out(0xf4, 0x89abcdef, 4);
    CHECK(rig.in(0x505) == 3);
    rig.out(0x505, 1);
    rig.out(0x505, 2);
    rig.out(0x505, 4); // unknown
    CHECK(rig.events == std::vector<MachineEvent>{{Kind::debug_exit, 0x10},
                                                  {Kind::debug_exit, 0x1234},
                                                  {Kind::debug_exit, 0x89abcdef},
                                                  {Kind::panicked},
                                                  {Kind::crash_loaded}});
}

TEST_CASE("fw_cfg: items, the directory and etc/e820") {
    Rig rig(3, 64 << 20);
    const auto select = [&](uint16_t key) { rig.out(0x510, key, 2); };
    const auto read = [&](unsigned bytes) {
        uint64_t value = 0;
        for (unsigned i = 0; i < bytes; ++i)
            value |= uint64_t{rig.in(0x511)} << 8 * i;
        return value;
    };
    select(0);
    CHECK(read(4) == 0x554d4551); // "QEMU"
    CHECK(read(2) == 0);          // beyond the end
    select(1);
    CHECK(read(4) == 1);
    select(3);
    CHECK(read(8) == 64 << 20);
    select(5);
    CHECK(read(2) == 3);
    select(0x0f);
    CHECK(read(2) == 3);
    select(0x7777);
    CHECK(read(4) == 0);

    select(0x19);
    CHECK(read(4) == 0x01000000); // one file, big-endian
    CHECK(read(4) == 20u << 24);
    const auto key = static_cast<uint16_t>(rig.in(0x511) << 8 | rig.in(0x511));
    read(2);
    std::string name;
    for (unsigned i = 0; i < 56; ++i)
        if (const char c = static_cast<char>(read(1)))
            name += c;
    CHECK(name == "etc/e820");
    select(key);
    CHECK(read(8) == 0);
    CHECK(read(8) == 64 << 20);
    CHECK(read(4) == 1);

    CHECK_FALSE(rig.chipset->fw_cfg().add_file("etc/e820", {}));
    CHECK_FALSE(rig.chipset->fw_cfg().add_file(std::string(56, 'x'), {}));
    CHECK(rig.chipset->fw_cfg().add_file(std::string(55, 'x'), {1}));
}

namespace {
struct FakeFunction final : PciFunction {
    uint32_t config_read(unsigned offset, unsigned) override { return 0xabcd0000 | offset; }
    void config_write(unsigned offset, unsigned size, uint32_t value) override { written = {offset, size, value}; }
    std::array<uint32_t, 3> written{};
};
} // namespace

TEST_CASE("PCI: mechanism 1 shows a host bridge and nothing else") {
    Rig rig;
    const auto select = [&](unsigned bus, unsigned device, unsigned function, unsigned offset) {
        rig.out(0xcf8, 1u << 31 | bus << 16 | device << 11 | function << 8 | offset, 4);
    };
    rig.out(0xcf8, 0x80000000, 4);
    CHECK(rig.in(0xcf8, 4) == 0x80000000);
    CHECK(rig.in(0xcfc, 4) == 0x12378086);
    CHECK(rig.in(0xcfe, 2) == 0x1237);
    select(0, 0, 0, 8);
    CHECK(rig.in(0xcfe, 2) == 0x0600);
    select(0, 0, 0, 0x0c);
    CHECK(rig.in(0xcfe) == 0x00); // one function
    select(0, 0, 0, 0x10);
    rig.out(0xcfc, 0xffffffff, 4);
    CHECK(rig.in(0xcfc, 4) == 0); // no BARs
    for (unsigned device = 1; device < 32; ++device) {
        select(0, device, 0, 0);
        CHECK(rig.in(0xcfc, 4) == 0xffffffff);
    }
    select(1, 0, 0, 0);
    CHECK(rig.in(0xcfc, 4) == 0xffffffff);
    rig.out(0xcf8, 0, 4); // not enabled
    CHECK(rig.in(0xcfc, 4) == 0xffffffff);

    FakeFunction fake;
    REQUIRE(rig.chipset->pci().plug(3, 1, fake));
    CHECK_FALSE(rig.chipset->pci().plug(3, 1, fake));
    CHECK_FALSE(rig.chipset->pci().plug(0, 0, fake));
    CHECK_FALSE(rig.chipset->pci().plug(32, 0, fake));
    select(0, 3, 1, 0x40);
    CHECK(rig.in(0xcfd) == 0x41);
    rig.out(0xcfe, 0x55aa, 2);
    CHECK(fake.written == std::array<uint32_t, 3>{0x42, 2, 0x55aa});
}

TEST_CASE("ACPI: power-off by SLP_TYP 5 and SLP_EN; other sleep states do nothing") {
    Rig rig;
    CHECK(rig.in(0x604, 2) == 1); // SCI_EN
    rig.out(0x604, 1 << 13 | 3 << 10, 2);
    CHECK(rig.events.empty());
    rig.out(0x604, 5 << 10, 2);
    CHECK(rig.events.empty());
    CHECK(rig.in(0x604, 2) == (5 << 10 | 1));
    rig.out(0x604, 1 << 13 | 5 << 10, 2);
    CHECK(rig.events == std::vector<MachineEvent>{{Kind::power_off}});
    CHECK(rig.in(0x604, 2) == (5 << 10 | 1)); // SLP_EN reads as zero
}

TEST_CASE("ACPI: the PM timer runs at 3.579545 MHz") {
    Rig rig;
    CHECK(rig.in(0x608, 4) == 0);
    rig.clock.set_now(1'000'000'000);
    CHECK(rig.in(0x608, 4) == 3'579'545);
    rig.clock.set_now(1'200'000'000'000); // wraps at 32 bits
    CHECK(rig.in(0x608, 4) == static_cast<uint32_t>(3'579'545ull * 1200));
}

TEST_CASE("ACPI: the power button and the timer's carry raise the SCI") {
    Rig rig;
    rig.enable_apic();
    rig.redirect(9, 1 << 15 | 0x59);
    rig.chipset->press_power_button();
    CHECK(rig.in(0x600, 2) == 0x100);
    CHECK_FALSE(rig.lapic().interrupt_pending());
    rig.out(0x602, 0x100, 2);
    CHECK(rig.in(0x602, 2) == 0x100);
    CHECK(rig.lapic().acknowledge_interrupt() == 0x59);
    rig.out(0x600, 0x100, 2); // write one to clear
    rig.apic_write(ApicReg::eoi, 0);
    CHECK(rig.in(0x600, 2) == 0);
    CHECK_FALSE(rig.lapic().interrupt_pending());

    rig.out(0x602, 0x001, 2);
    const VirtualTime carry = AcpiPm::timer.time_of(1ull << 31);
    test::run_until(rig.clock, carry - 1);
    CHECK_FALSE(rig.lapic().interrupt_pending());
    test::run_until(rig.clock, carry);
    CHECK(rig.lapic().acknowledge_interrupt() == 0x59);
    CHECK(rig.in(0x600, 2) == 1);
}
