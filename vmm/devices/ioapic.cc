#include "vmm/devices/ioapic.h"

namespace vtrace {
namespace {

// Memory-mapped registers.
constexpr uint64_t ioregsel = 0x00, iowin = 0x10, eoi = 0x40;

// Indirect registers.
enum Register : uint8_t { IOAPICID = 0, IOAPICVER = 1, IOAPICARB = 2, IOREDTBL = 0x10 };

constexpr uint32_t id_mask = 0x0f00'0000;
constexpr uint32_t version = 0x20; // the first with the EOI register
constexpr unsigned max_entry_shift = 16;

// Redirection entries.
constexpr uint64_t vector_mask = 0xff, logical = 1 << 11, remote_irr = 1 << 14, level = 1 << 15, mask = 1 << 16;
constexpr uint64_t low_writable = 0x1'afff;
constexpr uint64_t high_writable = 0xff00'0000;
constexpr unsigned delivery_mode_shift = 8, destination_shift = 56;
constexpr uint32_t broadcast = 0xff;

} // namespace

IoApic::IoApic(ApicBus& bus) : bus_(bus) {
    state_.redirection.fill(mask);
}

void IoApic::set_input(unsigned input, bool asserted) {
    const uint32_t bit = 1u << input;
    const bool rises = asserted && !(state_.lines & bit);
    state_.lines = asserted ? state_.lines | bit : state_.lines & ~bit;
    if (state_.redirection[input] & level)
        sample_level(input);
    else if (rises && !(state_.redirection[input] & mask))
        deliver(input);
}

void IoApic::sample_level(unsigned input) {
    uint64_t& entry = state_.redirection[input];
    if (!(state_.lines & 1u << input) || !(entry & level) || entry & (mask | remote_irr))
        return;
    if (deliver(input))
        entry |= remote_irr;
}

bool IoApic::deliver(unsigned input) {
    const uint64_t entry = state_.redirection[input];
    ApicMessage message;
    message.mode = static_cast<DeliveryMode>(entry >> delivery_mode_shift & 7);
    message.vector = static_cast<uint8_t>(entry & vector_mask);
    // Only fixed and lowest-priority interrupts can be level-triggered; the others are edges whatever the bit says.
    message.level_triggered = entry & level;
    message.destination = static_cast<uint32_t>(entry >> destination_shift);
    message.to = message.destination == broadcast ? ApicMessage::To::broadcast
                 : entry & logical                ? ApicMessage::To::logical
                                                  : ApicMessage::To::physical;
    const bool accepted = bus_.send(message);
    return accepted && (message.mode == DeliveryMode::fixed || message.mode == DeliveryMode::lowest_priority);
}

void IoApic::end_of_interrupt(uint8_t vector) {
    for (unsigned input = 0; input < inputs; ++input) {
        uint64_t& entry = state_.redirection[input];
        if (!(entry & remote_irr) || (entry & vector_mask) != vector)
            continue;
        entry &= ~remote_irr;
        sample_level(input);
    }
}

uint32_t IoApic::read_register() const {
    switch (state_.select) {
    case IOAPICID:
    case IOAPICARB:
        return state_.id;
    case IOAPICVER:
        return version | (inputs - 1) << max_entry_shift;
    }
    if (state_.select < IOREDTBL || state_.select >= IOREDTBL + 2 * inputs)
        return 0;
    const uint64_t entry = state_.redirection[(state_.select - IOREDTBL) / 2u];
    return static_cast<uint32_t>(state_.select & 1 ? entry >> 32 : entry);
}

void IoApic::write_register(uint32_t value) {
    if (state_.select == IOAPICID) {
        state_.id = value & id_mask;
        return;
    }
    if (state_.select < IOREDTBL || state_.select >= IOREDTBL + 2 * inputs)
        return;
    const unsigned input = (state_.select - IOREDTBL) / 2u;
    uint64_t& entry = state_.redirection[input];
    if (state_.select & 1) {
        entry = (entry & 0xffff'ffff) | (value & high_writable) << 32;
        return;
    }
    entry = (entry & ~low_writable) | (value & low_writable);
    if (!(entry & level))
        entry &= ~remote_irr; // it has no meaning for edges; guests without the EOI register clear it by this
    sample_level(input);
}

uint64_t IoApic::read(uint64_t offset, unsigned) {
    if (offset == ioregsel)
        return state_.select;
    if (offset == iowin)
        return read_register();
    return 0;
}

void IoApic::write(uint64_t offset, unsigned size, uint64_t value) {
    if (offset == ioregsel)
        state_.select = static_cast<uint8_t>(value);
    else if (offset == iowin && size >= 4)
        write_register(static_cast<uint32_t>(value));
    else if (offset == eoi)
        end_of_interrupt(static_cast<uint8_t>(value));
}

} // namespace vtrace
