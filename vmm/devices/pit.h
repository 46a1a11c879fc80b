// The 8254 interval timer of a PC (82C54 data sheet) and system control port B (0x61), which gates its counter 2.
//
// Clocked at 1.193182 MHz, exact in virtual nanoseconds. Counter 0 drives IRQ 0: the wire falls and rises again when
// OUT rises, and is high in between, so that a request isn't lost in the low half of a square wave. Counter 1 (refresh)
// runs without effect; counter 2 is the speaker's, whose OUT is read at port 0x61.
#pragma once

#include <array>
#include <cstdint>

#include "vmm/clock.h"
#include "vmm/devices/byte_device.h"
#include "vmm/devices/irq_line.h"
#include "vmm/devices/pit_counter.h"
#include "vmm/devices/ticks.h"

namespace vtrace {

class Pit final : public ByteDevice {
  public:
    static constexpr unsigned ports = 4;
    static constexpr Oscillator oscillator{1'193'182};

    Pit(Clock& clock, IrqLine irq0);

    /// For port 0x61.
    Device& port_b() { return port_b_; }

  protected:
    uint8_t read_byte(unsigned offset) override;
    void write_byte(unsigned offset, uint8_t value) override;

  private:
    class PortB final : public ByteDevice {
      public:
        explicit PortB(Pit& pit) : pit_(pit) {}
        uint8_t read_byte(unsigned offset) override;
        void write_byte(unsigned offset, uint8_t value) override;

      private:
        Pit& pit_;
    };

    PitTick now() const { return oscillator.ticks_at(clock_.now()); }
    void control(uint8_t word);
    void update();

    Clock& clock_;
    IrqLine irq0_;
    Clock::Handle rise_;
    std::array<PitCounter, 3> counters_{PitCounter{true}, PitCounter{true}, PitCounter{false}};
    uint8_t port_b_bits_ = 0;
    PortB port_b_;
};

} // namespace vtrace
