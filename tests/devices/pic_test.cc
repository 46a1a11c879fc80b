// The 8259A by its data sheet: initialization, priorities, EOIs, rotation, masks, poll, cascade, spurious requests.
#include <catch2/catch.hpp>

#include "vmm/devices/pic.h"

using namespace vtrace;

namespace {

struct Pics {
    Pics() { init(0x01); }
    void init(uint8_t icw4, uint8_t icw4_slave = 0x01) {
        const uint8_t master[] = {0x08, 0x04, icw4}, slave[] = {0x70, 0x02, icw4_slave};
        out(0x20, 0x11);
        for (uint8_t icw : master)
            out(0x21, icw);
        out(0xa0, 0x11);
        for (uint8_t icw : slave)
            out(0xa1, icw);
    }
    Device& device(uint16_t port) {
        return port >= 0x4d0 ? pic.elcr_ports() : port >= 0xa0 ? pic.slave_ports() : pic.master_ports();
    }
    void out(uint16_t port, uint8_t value) { device(port).write(port & 1, 1, value); }
    uint8_t in(uint16_t port) { return static_cast<uint8_t>(device(port).read(port & 1, 1)); }
    void pulse(unsigned irq) {
        pic.set_irq(irq, false);
        pic.set_irq(irq, true);
    }
    uint8_t isr(uint16_t port = 0x20) {
        out(port, 0x0b);
        return in(port);
    }
    uint8_t irr(uint16_t port = 0x20) {
        out(port, 0x0a);
        return in(port);
    }

    Pic pic{IrqLine()};
};

} // namespace

TEST_CASE("PIC: a request waits for its mask, is acknowledged with its vector, and is in service until its EOI") {
    Pics p;
    p.out(0x21, 0xff);
    p.pulse(1);
    CHECK_FALSE(p.pic.pending());
    CHECK(p.irr() == 0x02);
    p.out(0x21, 0xfd);
    CHECK(p.in(0x21) == 0xfd);
    REQUIRE(p.pic.pending());
    CHECK(p.pic.acknowledge() == 0x09);
    CHECK(p.isr() == 0x02);
    CHECK(p.irr() == 0x00);
    CHECK_FALSE(p.pic.pending());
    p.out(0x20, 0x20);
    CHECK(p.isr() == 0x00);
    CHECK_FALSE(p.pic.pending()); // an edge counts once, though the line is still high
}

TEST_CASE("PIC: fully nested: higher inputs interrupt the service of lower ones, not the other way round") {
    Pics p;
    p.pulse(4);
    CHECK(p.pic.acknowledge() == 0x0c);
    p.pulse(5);
    CHECK_FALSE(p.pic.pending());
    p.pulse(1);
    REQUIRE(p.pic.pending());
    CHECK(p.pic.acknowledge() == 0x09);
    CHECK(p.isr() == 0x12);
    p.out(0x20, 0x20); // non-specific: of the highest, input 1
    CHECK(p.isr() == 0x10);
    CHECK_FALSE(p.pic.pending());
    p.out(0x20, 0x64); // specific: input 4
    CHECK(p.isr() == 0x00);
    CHECK(p.pic.acknowledge() == 0x0d);
}

TEST_CASE("PIC: a request that goes before its acknowledgement gives input 7's vector without an ISR bit") {
    Pics p;
    p.pulse(3);
    p.pic.set_irq(3, false);
    CHECK_FALSE(p.pic.pending());
    CHECK(p.pic.acknowledge() == 0x0f);
    CHECK(p.isr() == 0x00);
}

TEST_CASE("PIC: a spurious request of the slave leaves input 2 in service at the master") {
    Pics p;
    p.out(0x4d1, 0x02); // level-triggered input 9
    p.pic.set_irq(9, true);
    REQUIRE(p.pic.pending());
    // The slave's request vanishes between the two INTA cycles: mask it at the slave but leave the master's latch.
    p.pic.set_irq(9, false);
    CHECK(p.pic.acknowledge() == 0x0f); // the cascade's line fell as well: spurious at the master
    CHECK(p.isr() == 0x00);
}

TEST_CASE("PIC: the slave's vectors come through input 2 and need both EOIs") {
    Pics p;
    p.pulse(12);
    REQUIRE(p.pic.pending());
    CHECK(p.pic.acknowledge() == 0x74);
    CHECK(p.isr(0x20) == 0x04);
    CHECK(p.isr(0xa0) == 0x10);
    p.pulse(8); // of higher priority, but in the same input of the master
    CHECK_FALSE(p.pic.pending());
    p.out(0xa0, 0x20);
    p.out(0x20, 0x20);
    REQUIRE(p.pic.pending());
    CHECK(p.pic.acknowledge() == 0x70);
    p.pulse(0); // the master's input 0 is above the slave
    CHECK(p.pic.pending());
}

TEST_CASE("PIC: several requests at the slave are served one after the other") {
    Pics p;
    p.pulse(14);
    p.pulse(10);
    CHECK(p.pic.acknowledge() == 0x72);
    p.out(0xa0, 0x20);
    p.out(0x20, 0x20);
    REQUIRE(p.pic.pending());
    CHECK(p.pic.acknowledge() == 0x76);
    p.out(0xa0, 0x20);
    p.out(0x20, 0x20);
    CHECK_FALSE(p.pic.pending());
}

TEST_CASE("PIC: special fully nested mode lets the slave interrupt its own service") {
    Pics p;
    p.init(0x11);
    p.pulse(12);
    p.pic.acknowledge();
    p.pulse(8);
    REQUIRE(p.pic.pending());
    CHECK(p.pic.acknowledge() == 0x70);
}

TEST_CASE("PIC: rotation makes the served input the lowest") {
    Pics p;
    p.pulse(3);
    p.pic.acknowledge();
    p.out(0x20, 0xa0); // rotate on non-specific EOI: 3 is the lowest now, 4 the highest
    p.pulse(3);
    p.pulse(0);
    p.pulse(6);
    CHECK(p.pic.acknowledge() == 0x0e);
    p.out(0x20, 0x20);
    CHECK(p.pic.acknowledge() == 0x08);
    p.out(0x20, 0x20);
    CHECK(p.pic.acknowledge() == 0x0b);
    p.out(0x20, 0xe0 | 3); // rotate on specific EOI
    p.out(0x20, 0xc0 | 5); // set priority: 5 the lowest, 6 the highest
    p.pulse(5);
    p.pulse(6);
    CHECK(p.pic.acknowledge() == 0x0e);
}

TEST_CASE("PIC: automatic EOI leaves nothing in service, and can rotate") {
    Pics p;
    p.init(0x03);
    p.pulse(1);
    CHECK(p.pic.acknowledge() == 0x09);
    CHECK(p.isr() == 0x00);
    p.out(0x20, 0x80); // rotate in automatic EOI mode
    p.pulse(1);
    p.pic.acknowledge();
    p.pulse(1);
    p.pulse(2 + 1);
    CHECK(p.pic.acknowledge() == 0x0b);
    CHECK(p.pic.acknowledge() == 0x09);
}

TEST_CASE("PIC: special mask mode opens all levels that aren't masked") {
    Pics p;
    p.pulse(1);
    p.pic.acknowledge();
    p.pulse(5);
    CHECK_FALSE(p.pic.pending());
    p.out(0x21, 0x02);
    p.out(0x20, 0x68); // ESMM, SMM
    REQUIRE(p.pic.pending());
    CHECK(p.pic.acknowledge() == 0x0d);
    p.out(0x20, 0x20); // ends input 5: masked input 1 is left alone
    CHECK(p.isr() == 0x02);
    p.out(0x20, 0x48); // SMM off
    p.pulse(5);
    CHECK_FALSE(p.pic.pending());
}

TEST_CASE("PIC: a poll acknowledges and tells the input") {
    Pics p;
    p.out(0x20, 0x0c);
    CHECK(p.in(0x20) == 0x00);
    p.pulse(6);
    p.out(0x20, 0x0c);
    CHECK(p.in(0x20) == 0x86);
    CHECK(p.isr() == 0x40);
}

TEST_CASE("PIC: level-triggered inputs request as long as they're high; ELCR has fixed edge inputs") {
    Pics p;
    p.out(0x4d0, 0xff);
    p.out(0x4d1, 0xff);
    CHECK(p.in(0x4d0) == 0xf8);
    CHECK(p.in(0x4d1) == 0xde);
    p.pic.set_irq(5, true);
    CHECK(p.pic.acknowledge() == 0x0d);
    p.out(0x20, 0x20);
    CHECK(p.pic.pending()); // still asserted
    p.pic.set_irq(5, false);
    CHECK_FALSE(p.pic.pending());
}

TEST_CASE("PIC: ICW1 resets mask, priorities and edge latches; nothing is requested during initialization") {
    Pics p;
    p.out(0x21, 0xf0);
    p.out(0x20, 0xc0 | 3);
    p.pulse(2 + 2);
    p.out(0x20, 0x11);
    CHECK_FALSE(p.pic.pending());
    p.out(0x21, 0x48), p.out(0x21, 0x04), p.out(0x21, 0x01);
    CHECK(p.in(0x21) == 0x00);
    CHECK(p.irr() == 0x00); // the line is high, but there was no edge since
    p.pulse(0);
    p.pulse(4);
    CHECK(p.pic.acknowledge() == 0x48);
}

TEST_CASE("PIC: without ICW4, and single, the command words are as many as ICW1 says") {
    Pics p;
    p.out(0x20, 0x12); // SNGL, no ICW4
    p.out(0x21, 0x50);
    p.out(0x21, 0xfe); // is the mask already
    CHECK(p.in(0x21) == 0xfe);
    p.pulse(0);
    CHECK(p.pic.acknowledge() == 0x50);
}
