// ACPI fixed hardware (ACPI Specification 6.4, 4.8.3): PM1a event and control blocks, the PM timer, the SCI.
//
// There is no SMI command port: the machine is in ACPI mode from the start, and SCI_EN always reads 1.
#pragma once

#include <cstdint>

#include "vmm/clock.h"
#include "vmm/devices/byte_device.h"
#include "vmm/devices/irq_line.h"
#include "vmm/devices/machine_event.h"
#include "vmm/devices/ticks.h"

namespace vtrace {

class AcpiPm final : public ByteDevice {
  public:
    /// Event block (4 bytes), control block (2, two more unused), timer (4), adjacent.
    static constexpr unsigned event_length = 4, control_length = 2, timer_length = 4, ports = 12;
    static constexpr Oscillator timer{3'579'545};
    /// SLP_TYP of S5, which \_S5 tells the guest.
    static constexpr uint8_t sleep_type_s5 = 5;

    AcpiPm(Clock& clock, IrqLine sci, MachineEventHandler event);

    /// The fixed-feature power button: asks the guest's operating system to shut down.
    void press_power_button();

  protected:
    uint8_t read_byte(unsigned offset) override;
    void write_byte(unsigned offset, uint8_t value) override;

  private:
    struct State {
        uint16_t status = 0, enable = 0, control = 0;
        VirtualTime carry_as_of = 0; // timer carries up to here are in `status`
    };

    void collect_carry();
    void update();

    Clock& clock_;
    IrqLine sci_;
    MachineEventHandler event_;
    Clock::Handle carry_;
    State state_;
};

} // namespace vtrace
