// The serial port: a 16550A (National Semiconductor PC16550D data sheet) with the host at the other end.
//
// Transmission takes no virtual time: a byte written is out at once and the transmitter is empty again, so that a
// chatty console doesn't stretch the guest's time. Reception takes no time either, but never overruns: bytes wait on
// the host's side until the receiver has room.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <functional>
#include <string_view>

#include "vmm/clock.h"
#include "vmm/devices/byte_device.h"
#include "vmm/devices/irq_line.h"

namespace vtrace {

class Serial final : public ByteDevice {
  public:
    static constexpr unsigned ports = 8;
    /// Bytes the guest sent; valid during the call only.
    using Output = std::function<void(std::string_view)>;

    Serial(Clock& clock, IrqLine irq, Output output);

    /// Bytes from the host to the guest, after those given before.
    void receive(std::string_view bytes);
    /// Bytes given by receive() that the guest hasn't read yet.
    size_t unread() const { return queue_.size() + state_.fifo_count; }

  protected:
    uint8_t read_byte(unsigned offset) override;
    void write_byte(unsigned offset, uint8_t value) override;

  private:
    static constexpr unsigned fifo_size = 16;
    struct State {
        uint8_t ier = 0, fcr = 0, lcr = 0, mcr = 0, lsr_errors = 0, msr_delta = 0, scr = 0;
        uint16_t divisor = 12; // 9600 baud
        std::array<uint8_t, fifo_size> fifo{};
        unsigned fifo_first = 0, fifo_count = 0;
        bool thre_interrupt = false;  // the transmitter emptied since the guest last asked
        bool receive_timeout = false; // bytes below the trigger level have waited for four character times
        uint8_t loopback_lines = 0;   // MSR's upper nibble when MCR.LOOP is set
    };

    bool fifo_enabled() const;
    unsigned capacity() const { return fifo_enabled() ? fifo_size : 1; }
    unsigned trigger_level() const;
    uint8_t interrupt_id() const;
    uint8_t line_status() const;
    uint8_t modem_lines() const;

    uint8_t read_receiver();
    void push_receiver(uint8_t byte);
    void refill();
    void transmit(uint8_t byte);
    void write_fcr(uint8_t value);
    void write_mcr(uint8_t value);
    void arm_timeout();
    VirtualTime character_time() const;
    void update_irq();

    Clock& clock_;
    IrqLine irq_;
    Output output_;
    Clock::Handle timeout_;
    State state_;
    std::deque<uint8_t> queue_; // the host's bytes that the receiver has no room for yet
};

} // namespace vtrace
