// The pair of 8259A interrupt controllers of a PC (Intel 8259A data sheet, 231468), with the edge/level control
// register.
//
// The slave's INT output is the master's input 2. IRQ n is input n of the master or n - 8 of the slave.
#pragma once

#include <array>
#include <cstdint>

#include "vmm/devices/byte_device.h"
#include "vmm/devices/irq_line.h"

namespace vtrace {

/// One 8259A: registers and priorities, without knowledge of the other chip but for the cascade's nesting rule.
class Pic8259 {
  public:
    static constexpr unsigned inputs = 8;

    explicit Pic8259(uint8_t cascade_inputs) : cascade_inputs_(cascade_inputs) {}

    void set_input(unsigned input, bool level);
    void set_level_triggered(uint8_t mask);
    uint8_t level_triggered() const { return state_.elcr; }

    /// The INT pin.
    bool output() const { return pending_input() >= 0; }
    /// First and second INTA cycle: the input served, or 7 without an ISR bit when the request has gone (spurious).
    unsigned acknowledge();
    uint8_t vector(unsigned input) const { return static_cast<uint8_t>(state_.vector_base | input); }

    /// The next read is a poll (OCW3): it acknowledges.
    bool polling() const { return state_.poll; }
    uint8_t read(unsigned a0);
    void write(unsigned a0, uint8_t value);

  private:
    struct State {
        uint8_t irr_latch = 0; // edges seen and not yet served
        uint8_t lines = 0, imr = 0, isr = 0, elcr = 0, vector_base = 0;
        uint8_t lowest = 7;    // the input of the lowest priority
        uint8_t init_step = 0; // 0: operating; else the ICW expected next
        bool needs_icw4 = false, single = false, auto_eoi = false, rotate_on_auto_eoi = false, special_mask = false;
        bool special_fully_nested = false, read_isr = false, poll = false;
    };

    uint8_t irr() const {
        return static_cast<uint8_t>((state_.irr_latch & ~state_.elcr) | (state_.lines & state_.elcr));
    }
    int highest(uint8_t mask) const;
    int pending_input() const;
    void initialize(uint8_t icw1);
    void write_ocw2(uint8_t value);
    void write_ocw3(uint8_t value);

    uint8_t cascade_inputs_; // inputs with a slave behind
    State state_;
};

/// Both chips, their ports and their wiring.
class Pic {
  public:
    /// `output` is the master's INT pin.
    explicit Pic(IrqLine output);

    void set_irq(unsigned irq, bool level);
    bool pending() const { return output_.level(); }
    /// The INTA cycle: the vector to serve. Gives the spurious vector when the request has gone.
    uint8_t acknowledge();

    /// For the ports 0x20, 0xa0 (two bytes each) and 0x4d0 (two bytes).
    Device& master_ports() { return master_ports_; }
    Device& slave_ports() { return slave_ports_; }
    Device& elcr_ports() { return elcr_ports_; }

  private:
    class ChipPorts final : public ByteDevice {
      public:
        ChipPorts(Pic& pic, Pic8259& chip) : pic_(pic), chip_(chip) {}
        uint8_t read_byte(unsigned offset) override;
        void write_byte(unsigned offset, uint8_t value) override;

      private:
        Pic& pic_;
        Pic8259& chip_;
    };
    class ElcrPorts final : public ByteDevice {
      public:
        explicit ElcrPorts(Pic& pic) : pic_(pic) {}
        uint8_t read_byte(unsigned offset) override;
        void write_byte(unsigned offset, uint8_t value) override;

      private:
        Pic& pic_;
    };
    void drop_cascade();
    void update();

    IrqLine output_;
    Pic8259 master_, slave_;
    ChipPorts master_ports_, slave_ports_;
    ElcrPorts elcr_ports_;
};

} // namespace vtrace
