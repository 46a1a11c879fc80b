#include "vmm/devices/pic.h"

#include "vmm/devices/platform.h"

namespace vtrace {
namespace {

namespace Icw1 {
constexpr uint8_t ic4 = 1 << 0, sngl = 1 << 1, select = 1 << 4;
}
namespace Icw4 {
constexpr uint8_t upm = 1 << 0, aeoi = 1 << 1, sfnm = 1 << 4;
}
namespace Ocw2 {
constexpr uint8_t level = 7;
constexpr unsigned command_shift = 5;
// The commands by bits R, SL, EOI.
enum Command : uint8_t {
    rotate_auto_eoi_clear = 0,
    eoi = 1,
    no_operation = 2,
    specific_eoi = 3,
    rotate_auto_eoi_set = 4,
    rotate_eoi = 5,
    set_priority = 6,
    rotate_specific_eoi = 7,
};
} // namespace Ocw2
namespace Ocw3 {
constexpr uint8_t ris = 1 << 0, rr = 1 << 1, poll = 1 << 2, select = 1 << 3, smm = 1 << 5, esmm = 1 << 6;
}
constexpr uint8_t poll_interrupt = 1 << 7; // in the byte that a poll reads
constexpr unsigned spurious_input = 7;
// Inputs that are always edge-triggered: timer, keyboard, cascade; RTC and coprocessor error.
constexpr uint8_t elcr_master_mask = 0xf8, elcr_slave_mask = 0xde;

constexpr uint8_t bit(unsigned n) {
    return static_cast<uint8_t>(1u << n);
}

} // namespace

void Pic8259::set_input(unsigned input, bool level) {
    const uint8_t mask = bit(input);
    if (level) {
        if (!(state_.lines & mask))
            state_.irr_latch |= mask;
        state_.lines |= mask;
    } else {
        // A request must hold until its acknowledgement; one that goes before is forgotten.
        state_.irr_latch &= static_cast<uint8_t>(~mask);
        state_.lines &= static_cast<uint8_t>(~mask);
    }
}

void Pic8259::set_level_triggered(uint8_t mask) {
    state_.elcr = mask;
    state_.irr_latch &= static_cast<uint8_t>(~mask);
}

// The bit of `mask` with the highest priority, or -1. Priorities descend from the input after `lowest`.
int Pic8259::highest(uint8_t mask) const {
    for (unsigned i = 1; i <= inputs; ++i)
        if (const unsigned input = (state_.lowest + i) % inputs; mask & bit(input))
            return static_cast<int>(input);
    return -1;
}

int Pic8259::pending_input() const {
    if (state_.init_step)
        return -1;
    const uint8_t requests = irr() & static_cast<uint8_t>(~state_.imr);
    if (state_.special_mask) {
        // Special mask mode: only an input's own ISR bit holds it back. Masked in-service inputs hold nobody back.
        return highest(requests & static_cast<uint8_t>(~state_.isr));
    }
    for (unsigned i = 1; i <= inputs; ++i) {
        const unsigned input = (state_.lowest + i) % inputs;
        const bool in_service = state_.isr & bit(input);
        // Special fully nested mode: the slave may interrupt its own service.
        if (requests & bit(input) && (!in_service || (state_.special_fully_nested && cascade_inputs_ & bit(input))))
            return static_cast<int>(input);
        if (in_service)
            return -1;
    }
    return -1;
}

unsigned Pic8259::acknowledge() {
    const int pending = pending_input();
    if (pending < 0)
        return spurious_input;
    const unsigned input = static_cast<unsigned>(pending);
    state_.irr_latch &= static_cast<uint8_t>(~bit(input));
    if (!state_.auto_eoi)
        state_.isr |= bit(input);
    else if (state_.rotate_on_auto_eoi)
        state_.lowest = static_cast<uint8_t>(input);
    return input;
}

uint8_t Pic8259::read(unsigned a0) {
    if (state_.poll) {
        // A poll is an acknowledgement that reads instead of vectoring.
        state_.poll = false;
        return output() ? static_cast<uint8_t>(poll_interrupt | acknowledge()) : 0;
    }
    if (a0)
        return state_.imr;
    return state_.read_isr ? state_.isr : irr();
}

void Pic8259::write(unsigned a0, uint8_t value) {
    if (a0 == 0) {
        if (value & Icw1::select)
            initialize(value);
        else if (value & Ocw3::select)
            write_ocw3(value);
        else
            write_ocw2(value);
        return;
    }
    switch (state_.init_step) {
    case 2:
        state_.vector_base = value & 0xf8;
        state_.init_step = !state_.single ? 3 : state_.needs_icw4 ? 4 : 0;
        break;
    case 3: // the cascade's wiring is fixed
        state_.init_step = state_.needs_icw4 ? 4 : 0;
        break;
    case 4:
        state_.auto_eoi = value & Icw4::aeoi;
        state_.special_fully_nested = value & Icw4::sfnm;
        state_.init_step = 0;
        break;
    default:
        state_.imr = value;
    }
}

// ICW1 resets the edge detectors, the mask, the priorities and the status read (8259A, "Initialization Command Words").
void Pic8259::initialize(uint8_t icw1) {
    State fresh;
    fresh.lines = state_.lines;
    fresh.elcr = state_.elcr;
    fresh.vector_base = state_.vector_base;
    fresh.needs_icw4 = icw1 & Icw1::ic4;
    fresh.single = icw1 & Icw1::sngl;
    fresh.init_step = 2;
    state_ = fresh;
}

void Pic8259::write_ocw2(uint8_t value) {
    const unsigned level = value & Ocw2::level;
    // A non-specific EOI ends the service of the highest priority; in special mask mode masked ones are left alone.
    const uint8_t in_service = state_.special_mask ? state_.isr & static_cast<uint8_t>(~state_.imr) : state_.isr;
    const int served = highest(in_service);
    switch (value >> Ocw2::command_shift) {
    case Ocw2::rotate_auto_eoi_clear:
    case Ocw2::rotate_auto_eoi_set:
        state_.rotate_on_auto_eoi = value >> Ocw2::command_shift == Ocw2::rotate_auto_eoi_set;
        break;
    case Ocw2::eoi:
    case Ocw2::rotate_eoi:
        if (served >= 0) {
            state_.isr &= static_cast<uint8_t>(~bit(static_cast<unsigned>(served)));
            if (value >> Ocw2::command_shift == Ocw2::rotate_eoi)
                state_.lowest = static_cast<uint8_t>(served);
        }
        break;
    case Ocw2::specific_eoi:
        state_.isr &= static_cast<uint8_t>(~bit(level));
        break;
    case Ocw2::set_priority:
        state_.lowest = static_cast<uint8_t>(level);
        break;
    case Ocw2::rotate_specific_eoi:
        state_.isr &= static_cast<uint8_t>(~bit(level));
        state_.lowest = static_cast<uint8_t>(level);
        break;
    case Ocw2::no_operation:
        break;
    }
}

void Pic8259::write_ocw3(uint8_t value) {
    if (value & Ocw3::esmm)
        state_.special_mask = value & Ocw3::smm;
    if (value & Ocw3::poll)
        state_.poll = true;
    else if (value & Ocw3::rr)
        state_.read_isr = value & Ocw3::ris;
}

Pic::Pic(IrqLine output)
    : output_(std::move(output)), master_(bit(platform::Irq::cascade)), slave_(0), master_ports_(*this, master_),
      slave_ports_(*this, slave_), elcr_ports_(*this) {
    // As firmware leaves them: initialized for real mode's vectors, all inputs masked, the SCI level-triggered.
    constexpr uint8_t master_icws[] = {0x08, bit(platform::Irq::cascade), Icw4::upm};
    constexpr uint8_t slave_icws[] = {0x70, platform::Irq::cascade, Icw4::upm};
    const auto initialize = [](Pic8259& chip, const uint8_t(&icws)[3]) {
        chip.write(0, Icw1::select | Icw1::ic4);
        for (const uint8_t icw : icws)
            chip.write(1, icw);
        chip.write(1, 0xff);
    };
    initialize(master_, master_icws);
    initialize(slave_, slave_icws);
    slave_.set_level_triggered(bit(platform::Irq::sci - Pic8259::inputs));
}

void Pic::set_irq(unsigned irq, bool level) {
    if (irq == platform::Irq::cascade)
        return;
    if (irq < Pic8259::inputs)
        master_.set_input(irq, level);
    else
        slave_.set_input(irq - Pic8259::inputs, level);
    update();
}

uint8_t Pic::acknowledge() {
    const unsigned input = master_.acknowledge();
    uint8_t vector = master_.vector(input);
    if (input == platform::Irq::cascade) {
        vector = slave_.vector(slave_.acknowledge());
        drop_cascade();
    }
    output_.set(false); // INT falls with the acknowledgement, even if the next request is there already
    update();
    return vector;
}

// INT falls with the acknowledgement, so that what the slave requests next is a new edge for the master.
void Pic::drop_cascade() {
    master_.set_input(platform::Irq::cascade, false);
}

void Pic::update() {
    master_.set_input(platform::Irq::cascade, slave_.output());
    output_.set(master_.output());
}

uint8_t Pic::ChipPorts::read_byte(unsigned offset) {
    const bool poll = chip_.polling();
    const uint8_t value = chip_.read(offset & 1);
    if (poll && &chip_ == &pic_.slave_)
        pic_.drop_cascade();
    pic_.update();
    return value;
}

void Pic::ChipPorts::write_byte(unsigned offset, uint8_t value) {
    chip_.write(offset & 1, value);
    pic_.update();
}

uint8_t Pic::ElcrPorts::read_byte(unsigned offset) {
    return (offset ? pic_.slave_ : pic_.master_).level_triggered();
}

void Pic::ElcrPorts::write_byte(unsigned offset, uint8_t value) {
    (offset ? pic_.slave_ : pic_.master_).set_level_triggered(value & (offset ? elcr_slave_mask : elcr_master_mask));
    pic_.update();
}

} // namespace vtrace
