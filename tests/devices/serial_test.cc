// The 16550A by its data sheet, and as Linux's driver probes it.
#include <catch2/catch.hpp>

#include "tests/devices/rig.h"

using namespace vtrace;

namespace {

enum : unsigned { THR, IER, IIR, LCR, MCR, LSR, MSR, SCR };

struct Port {
    uint8_t in(unsigned reg) { return static_cast<uint8_t>(serial.read(reg, 1)); }
    void out(unsigned reg, uint8_t value) { serial.write(reg, 1, value); }

    Clock clock;
    bool irq = false;
    std::string output;
    Serial serial{clock, IrqLine([this](bool level) { irq = level; }),
                  [this](std::string_view text) { output += text; }};
};

} // namespace

TEST_CASE("serial: found as a 16550A by the steps of Linux's autoconfiguration") {
    Port p;
    p.out(IER, 0);
    CHECK(p.in(IER) == 0);
    p.out(IER, 0x0f);
    CHECK(p.in(IER) == 0x0f);
    p.out(IER, 0xff);
    CHECK(p.in(IER) == 0x0f); // no sleep mode or UUE bit, which later chips have
    p.out(IER, 0);
    p.out(MCR, 0x10 | 0x0a);
    CHECK((p.in(MSR)&0xf0) == 0x90); // loopback: RTS is CTS, OUT2 is DCD
    p.out(MCR, 0);
    p.out(LCR, 0);
    p.out(2, 0x01);
    CHECK(p.in(IIR) >> 6 == 3);
    p.out(LCR, 0x80); // in place of an EFR there is the IIR
    CHECK(p.in(2) == 0xc1);
    p.out(LCR, 0xbf);
    CHECK(p.in(2) == 0xc1);
    p.out(LCR, 0);
    p.out(2, 0);
    CHECK(p.in(IIR) >> 6 == 0);
    p.out(SCR, 0x5a);
    CHECK(p.in(SCR) == 0x5a);
}

TEST_CASE("serial: output is at once, and the transmitter is always empty") {
    Port p;
    for (const char c : std::string("hello"))
        p.out(THR, static_cast<uint8_t>(c));
    CHECK(p.output == "hello");
    CHECK(p.in(LSR) == 0x60);
}

TEST_CASE("serial: THRE interrupts on enabling and after each byte, and is acknowledged by reading the IIR") {
    Port p;
    p.out(MCR, 0x08);
    p.out(IER, 0x02);
    CHECK(p.irq);
    CHECK(p.in(IIR) == 0x02);
    CHECK_FALSE(p.irq);
    CHECK(p.in(IIR) == 0x01);
    p.out(THR, 'x');
    CHECK(p.irq);
    p.in(IIR);
    p.out(IER, 0x00);
    p.out(IER, 0x02); // enabled anew
    CHECK(p.irq);
}

TEST_CASE("serial: OUT2 gates the interrupt line") {
    Port p;
    p.out(IER, 0x02);
    CHECK_FALSE(p.irq);
    p.out(MCR, 0x08);
    CHECK(p.irq);
    p.out(MCR, 0x18); // loopback takes the pin away
    CHECK_FALSE(p.irq);
}

TEST_CASE("serial: interrupts by priority: line status, data, THRE, modem status") {
    Port p;
    p.out(IER, 0x0f);
    p.out(MCR, 0x10); // loopback drops CTS, DSR, DCD: modem status; the receiver takes what is sent
    p.out(THR, 'a');
    p.out(THR, 'b'); // overrun: without FIFO there is room for one
    CHECK(p.in(IIR) == 0x06);
    CHECK((p.in(LSR)&0x03) == 0x03);
    CHECK(p.in(IIR) == 0x04);
    CHECK(p.in(THR) == 'b'); // the register was overwritten
    CHECK(p.in(IIR) == 0x02);
    CHECK(p.in(IIR) == 0x00);
    CHECK((p.in(MSR)&0x0f) == 0x0b); // delta CTS, DSR, DCD
    CHECK(p.in(IIR) == 0x01);
}

TEST_CASE("serial: the ring indicator reports its trailing edge only") {
    Port p;
    p.out(MCR, 0x10);
    p.in(MSR);
    p.out(MCR, 0x14); // OUT1 is RI
    CHECK(p.in(MSR) == 0x40);
    p.out(MCR, 0x10);
    CHECK(p.in(MSR) == 0x04);
}

TEST_CASE("serial: received data interrupts at the FIFO's trigger level") {
    Port p;
    p.out(MCR, 0x08);
    p.out(2, 0x81); // FIFO, trigger level 8
    p.out(IER, 0x01);
    p.serial.receive("1234567");
    CHECK_FALSE(p.irq);
    CHECK(p.in(LSR) == 0x61);
    p.serial.receive("8");
    CHECK(p.irq);
    CHECK(p.in(IIR) == 0xc4);
    CHECK(p.in(THR) == '1');
    CHECK_FALSE(p.irq); // below the level
}

TEST_CASE("serial: fewer bytes interrupt after four character times") {
    Port p;
    p.out(LCR, 0x83);
    p.out(0, 1), p.out(1, 0); // 115200 baud
    p.out(LCR, 0x03);         // 8N1: ten bits a character
    p.out(MCR, 0x08);
    p.out(2, 0xc1);
    p.out(IER, 0x01);
    p.serial.receive("x");
    const VirtualTime four_characters = 4 * 10ull * 1'000'000'000 / 115'200;
    test::run_until(p.clock, four_characters - 5);
    CHECK_FALSE(p.irq);
    test::run_until(p.clock, four_characters + 5);
    CHECK(p.irq);
    CHECK(p.in(IIR) == 0xcc);
    CHECK(p.in(THR) == 'x');
    CHECK_FALSE(p.irq);
    CHECK(p.in(IIR) == 0xc1);
}

TEST_CASE("serial: input waits for room and none is lost") {
    Port p;
    p.out(2, 0x01);
    std::string text(1000, ' ');
    for (size_t i = 0; i < text.size(); ++i)
        text[i] = static_cast<char>('a' + i % 26);
    p.serial.receive(text);
    CHECK(p.serial.unread() == 1000);
    std::string got;
    while (p.in(LSR)&1)
        got += static_cast<char>(p.in(THR));
    CHECK(got == text);
    CHECK_FALSE(p.in(LSR)&0x02);
    CHECK(p.in(THR) == 0);
}

TEST_CASE("serial: FCR's reset empties the receiver") {
    Port p;
    p.out(2, 0x01);
    p.serial.receive("abc");
    p.out(2, 0x03);
    CHECK_FALSE(p.in(LSR)&1);
    p.serial.receive("d");
    p.out(2, 0x00); // and so does switching the FIFO off
    CHECK_FALSE(p.in(LSR)&1);
}

TEST_CASE("serial: loopback keeps output and input apart from the outside") {
    Port p;
    p.out(2, 0x01);
    p.out(MCR, 0x10);
    p.serial.receive("outside");
    p.out(THR, 'x');
    CHECK(p.output.empty());
    CHECK(p.in(THR) == 'x');
    CHECK_FALSE(p.in(LSR)&1);
    p.out(MCR, 0x00);
    CHECK(p.in(THR) == 'o');
}
