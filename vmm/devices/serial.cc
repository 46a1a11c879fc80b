#include "vmm/devices/serial.h"

namespace vtrace {
namespace {

// Register offsets; several share one, by direction or by LCR.DLAB.
enum Register : unsigned { RBR_THR = 0, IER = 1, IIR_FCR = 2, LCR = 3, MCR = 4, LSR = 5, MSR = 6, SCR = 7 };

namespace Ier {
constexpr uint8_t erbfi = 1 << 0, etbei = 1 << 1, elsi = 1 << 2, edssi = 1 << 3, all = 0x0f;
}
namespace Iir {
constexpr uint8_t modem_status = 0x0, none = 0x1, thr_empty = 0x2, received_data = 0x4, line_status = 0x6,
                  character_timeout = 0xc, fifos_enabled = 0xc0;
}
namespace Fcr {
constexpr uint8_t enable = 1 << 0, reset_receiver = 1 << 1, kept = 0xc9; // enable, DMA mode and trigger level
constexpr unsigned trigger_shift = 6;
} // namespace Fcr
namespace Lcr {
constexpr uint8_t word_length = 3, stop_bits = 1 << 2, parity = 1 << 3, dlab = 1 << 7;
}
namespace Mcr {
constexpr uint8_t dtr = 1 << 0, rts = 1 << 1, out1 = 1 << 2, out2 = 1 << 3, loop = 1 << 4, all = 0x1f;
}
namespace Lsr {
constexpr uint8_t dr = 1 << 0, oe = 1 << 1, thre = 1 << 5, temt = 1 << 6; // the line itself has no errors
} // namespace Lsr
namespace Msr {
constexpr uint8_t dcts = 1 << 0, ddsr = 1 << 1, teri = 1 << 2, ddcd = 1 << 3, cts = 1 << 4, dsr = 1 << 5, ri = 1 << 6,
                  dcd = 1 << 7;
}
constexpr uint64_t input_clock_hz = 1'843'200, clocks_per_bit = 16;

} // namespace

Serial::Serial(Clock& clock, IrqLine irq, Output output)
    : clock_(clock), irq_(std::move(irq)), output_(std::move(output)), timeout_(clock.create("serial timeout", [this] {
          state_.receive_timeout = state_.fifo_count != 0;
          update_irq();
      })) {}

void Serial::receive(std::string_view bytes) {
    queue_.insert(queue_.end(), bytes.begin(), bytes.end());
    refill();
    update_irq();
}

bool Serial::fifo_enabled() const {
    return state_.fcr & Fcr::enable;
}

unsigned Serial::trigger_level() const {
    static constexpr unsigned levels[] = {1, 4, 8, 14};
    return fifo_enabled() ? levels[state_.fcr >> Fcr::trigger_shift] : 1;
}

// PC16550D, table IV: the pending source of the highest priority.
uint8_t Serial::interrupt_id() const {
    if (state_.ier & Ier::elsi && state_.lsr_errors)
        return Iir::line_status;
    if (state_.ier & Ier::erbfi && state_.fifo_count >= trigger_level())
        return Iir::received_data;
    if (state_.ier & Ier::erbfi && state_.receive_timeout)
        return Iir::character_timeout;
    if (state_.ier & Ier::etbei && state_.thre_interrupt)
        return Iir::thr_empty;
    if (state_.ier & Ier::edssi && state_.msr_delta)
        return Iir::modem_status;
    return Iir::none;
}

uint8_t Serial::line_status() const {
    return static_cast<uint8_t>(Lsr::thre | Lsr::temt | (state_.fifo_count ? Lsr::dr : 0) | state_.lsr_errors);
}

// The host is a modem that is always ready.
uint8_t Serial::modem_lines() const {
    return state_.mcr & Mcr::loop ? state_.loopback_lines : static_cast<uint8_t>(Msr::cts | Msr::dsr | Msr::dcd);
}

uint8_t Serial::read_byte(unsigned offset) {
    uint8_t value = 0xff;
    switch (offset) {
    case RBR_THR:
        value = state_.lcr & Lcr::dlab ? static_cast<uint8_t>(state_.divisor) : read_receiver();
        break;
    case IER:
        value = state_.lcr & Lcr::dlab ? static_cast<uint8_t>(state_.divisor >> 8) : state_.ier;
        break;
    case IIR_FCR: {
        const uint8_t id = interrupt_id();
        if (id == Iir::thr_empty) // reading the IIR acknowledges this source only
            state_.thre_interrupt = false;
        value = static_cast<uint8_t>(id | (fifo_enabled() ? Iir::fifos_enabled : 0));
        break;
    }
    case LCR:
        value = state_.lcr;
        break;
    case MCR:
        value = state_.mcr;
        break;
    case LSR:
        value = line_status();
        state_.lsr_errors = 0;
        break;
    case MSR:
        value = static_cast<uint8_t>(modem_lines() | state_.msr_delta);
        state_.msr_delta = 0;
        break;
    case SCR:
        value = state_.scr;
        break;
    }
    update_irq();
    return value;
}

void Serial::write_byte(unsigned offset, uint8_t value) {
    switch (offset) {
    case RBR_THR:
        if (state_.lcr & Lcr::dlab)
            state_.divisor = static_cast<uint16_t>((state_.divisor & 0xff00) | value);
        else
            transmit(value);
        break;
    case IER:
        if (state_.lcr & Lcr::dlab) {
            state_.divisor = static_cast<uint16_t>((state_.divisor & 0xff) | value << 8);
        } else {
            // Enabling the interrupt while the transmitter is empty raises it at once; drivers start sending by that.
            if (value & ~state_.ier & Ier::etbei)
                state_.thre_interrupt = true;
            state_.ier = value & Ier::all;
        }
        break;
    case IIR_FCR:
        write_fcr(value);
        break;
    case LCR:
        state_.lcr = value;
        break;
    case MCR:
        write_mcr(value);
        break;
    case SCR:
        state_.scr = value;
        break;
    default: // LSR and MSR are not for writing
        break;
    }
    update_irq();
}

uint8_t Serial::read_receiver() {
    if (state_.fifo_count == 0)
        return 0;
    const uint8_t byte = state_.fifo[state_.fifo_first];
    state_.fifo_first = (state_.fifo_first + 1) % fifo_size;
    --state_.fifo_count;
    state_.receive_timeout = false;
    refill();
    arm_timeout();
    return byte;
}

void Serial::push_receiver(uint8_t byte) {
    if (state_.fifo_count == capacity()) {
        state_.lsr_errors |= Lsr::oe;
        if (fifo_enabled()) // the FIFO keeps its content; the shift register is overwritten
            return;
        state_.fifo_count = 0;
    }
    state_.fifo[(state_.fifo_first + state_.fifo_count++) % fifo_size] = byte;
    arm_timeout();
}

// Moves waiting bytes into the receiver; in loopback the serial input is disconnected.
void Serial::refill() {
    if (state_.mcr & Mcr::loop)
        return;
    while (!queue_.empty() && state_.fifo_count < capacity()) {
        push_receiver(queue_.front());
        queue_.pop_front();
    }
}

void Serial::transmit(uint8_t byte) {
    if (state_.mcr & Mcr::loop)
        push_receiver(byte);
    else if (const char c = static_cast<char>(byte); output_)
        output_({&c, 1});
    state_.thre_interrupt = true;
}

void Serial::write_fcr(uint8_t value) {
    // Switching the FIFOs on or off empties them (PC16550D, 8.5).
    if ((value ^ state_.fcr) & Fcr::enable || (value & Fcr::enable && value & Fcr::reset_receiver)) {
        state_.fifo_count = 0;
        state_.receive_timeout = false;
    }
    state_.fcr = value & Fcr::enable ? value & Fcr::kept : 0;
    refill();
    arm_timeout();
}

void Serial::write_mcr(uint8_t value) {
    const uint8_t before = modem_lines();
    state_.mcr = value & Mcr::all;
    // Loopback wires RTS to CTS, DTR to DSR, OUT1 to RI, OUT2 to DCD.
    state_.loopback_lines =
        static_cast<uint8_t>((value & Mcr::rts ? Msr::cts : 0) | (value & Mcr::dtr ? Msr::dsr : 0) |
                             (value & Mcr::out1 ? Msr::ri : 0) | (value & Mcr::out2 ? Msr::dcd : 0));
    const uint8_t after = modem_lines();
    const uint8_t changed = before ^ after;
    state_.msr_delta |=
        static_cast<uint8_t>((changed & Msr::cts ? Msr::dcts : 0) | (changed & Msr::dsr ? Msr::ddsr : 0) |
                             (changed & before & Msr::ri ? Msr::teri : 0) | (changed & Msr::dcd ? Msr::ddcd : 0));
    refill();
}

void Serial::arm_timeout() {
    const bool waits = fifo_enabled() && state_.fifo_count != 0 && state_.fifo_count < trigger_level();
    clock_.schedule(timeout_, waits ? clock_.now() + 4 * character_time() : never);
}

VirtualTime Serial::character_time() const {
    const unsigned half_bits = 2 * (1 + 5 + (state_.lcr & Lcr::word_length) + (state_.lcr & Lcr::parity ? 1 : 0)) +
                               (state_.lcr & Lcr::stop_bits ? 4 : 2);
    const uint64_t divisor = state_.divisor ? state_.divisor : 0x10000;
    return half_bits * divisor * clocks_per_bit * 1'000'000'000 / (2 * input_clock_hz);
}

void Serial::update_irq() {
    // On a PC the port's interrupt passes a gate that OUT2 opens; in loopback the pin OUT2 is inactive.
    const bool gate = (state_.mcr & (Mcr::out2 | Mcr::loop)) == Mcr::out2;
    irq_.set(gate && interrupt_id() != Iir::none);
}

} // namespace vtrace
