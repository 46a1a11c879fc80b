#include "vmm/devices/pit.h"

namespace vtrace {
namespace {

constexpr unsigned control_port = 3;
constexpr unsigned select_shift = 6, read_back = 3; // the counter select that is the read-back command
// The read-back command's bits; the first two are active low.
constexpr uint8_t no_count = 1 << 5, no_status = 1 << 4;
constexpr unsigned speaker = 2; // the counter

namespace PortBBit {
constexpr uint8_t timer2_gate = 1 << 0, writable = 0x0f, refresh = 1 << 4, timer2_output = 1 << 5;
}
constexpr VirtualTime refresh_period = 15'085; // ns between two memory refreshes: 18 ticks

} // namespace

Pit::Pit(Clock& clock, IrqLine irq0)
    : clock_(clock), irq0_(std::move(irq0)), rise_(clock.create("PIT",
                                                                [this] {
                                                                    irq0_.set(false);
                                                                    irq0_.set(true);
                                                                    update();
                                                                })),
      port_b_(*this) {}

uint8_t Pit::read_byte(unsigned offset) {
    return offset == control_port ? 0xff : counters_[offset].read(now());
}

void Pit::write_byte(unsigned offset, uint8_t value) {
    if (offset == control_port)
        control(value);
    else
        counters_[offset].write(value, now());
    const bool of_counter_0 = offset == control_port ? value >> select_shift == 0 : offset == 0;
    if (of_counter_0) { // a control word or count moves OUT at once: low in mode 0, high in the others
        irq0_.set(counters_[0].output(now()));
        update();
    }
}

void Pit::control(uint8_t word) {
    const unsigned select = word >> select_shift;
    if (select != read_back) {
        counters_[select].control(word, now());
        return;
    }
    for (unsigned i = 0; i < counters_.size(); ++i) {
        if (!(word & 2u << i))
            continue;
        if (!(word & no_count))
            counters_[i].latch_count(now());
        if (!(word & no_status))
            counters_[i].latch_status(now());
    }
}

void Pit::update() {
    const auto rise = counters_[0].next_rise(now());
    clock_.schedule(rise_, rise ? oscillator.time_of(*rise) : never);
}

uint8_t Pit::PortB::read_byte(unsigned) {
    const bool refresh = pit_.clock_.now() / refresh_period & 1;
    return static_cast<uint8_t>(pit_.port_b_bits_ | (refresh ? PortBBit::refresh : 0) |
                                (pit_.counters_[speaker].output(pit_.now()) ? PortBBit::timer2_output : 0));
}

void Pit::PortB::write_byte(unsigned, uint8_t value) {
    pit_.port_b_bits_ = value & PortBBit::writable;
    pit_.counters_[speaker].set_gate(value & PortBBit::timer2_gate, pit_.now());
}

} // namespace vtrace
