// The keyboard controller (8042) with nothing plugged in, and what hangs on it: CPU reset and the A20 gate.
//
// It passes its self-test and has a keyboard interface but no auxiliary one. A byte for the keyboard is answered at
// once with "resend" and the time-out flag, as a controller does whose keyboard is missing; so drivers give up quickly.
#pragma once

#include <cstdint>

#include "vmm/devices/byte_device.h"
#include "vmm/devices/irq_line.h"
#include "vmm/devices/machine_event.h"

namespace vtrace {

class I8042 {
  public:
    I8042(IrqLine irq1, MachineEventHandler event);

    /// For ports 0x60, 0x64 (one byte each).
    Device& data_port() { return data_; }
    Device& command_port() { return command_; }
    /// For port 0x92, system control port A: A20 (bit 1, kept; the gate is always open) and fast reset (bit 0).
    Device& system_control_a() { return system_control_a_; }

  private:
    template <uint8_t (I8042::*Read)(), void (I8042::*Write)(uint8_t)>
    class PortDevice final : public ByteDevice {
      public:
        explicit PortDevice(I8042& owner) : owner_(owner) {}
        uint8_t read_byte(unsigned) override { return (owner_.*Read)(); }
        void write_byte(unsigned, uint8_t value) override { (owner_.*Write)(value); }

      private:
        I8042& owner_;
    };
    struct State {
        uint8_t command_byte = 0;
        uint8_t output_port = 0x03;  // A20 on, no reset
        uint8_t pending_command = 0; // waits for its data byte
        uint8_t output = 0, status = 0;
        uint8_t ram[32] = {};
        uint8_t control_a = 0x02;
    };

    uint8_t read_data();
    void write_data(uint8_t value);
    uint8_t read_status();
    void write_command(uint8_t value);
    uint8_t read_control_a();
    void write_control_a(uint8_t value);
    void respond(uint8_t value, uint8_t flags = 0);
    void write_output_port(uint8_t value);

    IrqLine irq1_;
    MachineEventHandler event_;
    State state_;
    PortDevice<&I8042::read_data, &I8042::write_data> data_;
    PortDevice<&I8042::read_status, &I8042::write_command> command_;
    PortDevice<&I8042::read_control_a, &I8042::write_control_a> system_control_a_;
};

} // namespace vtrace
