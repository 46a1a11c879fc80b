// The I/O APIC (Intel 82093AA data sheet, 290566; EOI register as in later I/O hubs): 24 inputs.
#pragma once

#include <array>
#include <cstdint>

#include "vmm/bus.h"
#include "vmm/devices/apic_bus.h"

namespace vtrace {

/// Inputs are logical: true is asserted. The polarity bit of a redirection entry is kept for the guest to read and has
/// no other effect: the wiring always agrees with it. An edge at a masked input is lost, as the data sheet says.
class IoApic final : public Device {
  public:
    static constexpr unsigned inputs = 24;
    static constexpr uint64_t mmio_length = 0x1000;

    /// `bus` must outlive it; its EOIs must come to end_of_interrupt().
    explicit IoApic(ApicBus& bus);

    void set_input(unsigned input, bool level);
    /// An EOI of a level-triggered interrupt: clears remote IRR where the vector is the same, and sends again what is
    /// still asserted.
    void end_of_interrupt(uint8_t vector);

    uint64_t read(uint64_t offset, unsigned size) override;
    void write(uint64_t offset, unsigned size, uint64_t value) override;

  private:
    struct State {
        uint8_t select = 0; // IOREGSEL
        uint32_t id = 0;    // in bits 27:24
        std::array<uint64_t, inputs> redirection{};
        uint32_t lines = 0;
    };

    uint32_t read_register() const;
    void write_register(uint32_t value);
    void sample_level(unsigned input);
    bool deliver(unsigned input);

    ApicBus& bus_;
    State state_;
};

} // namespace vtrace
