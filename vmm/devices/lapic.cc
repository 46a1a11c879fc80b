#include "vmm/devices/lapic.h"

#include <bit>

#include "vmm/devices/apic_bus.h"
#include "vmm/devices/lapic_bits.h"

namespace vtrace {

using namespace apic;

namespace {

using Bits = std::array<uint32_t, 8>;

void set_bit(Bits& bits, uint8_t vector) {
    bits[vector / 32] |= 1u << vector % 32;
}
void clear_bit(Bits& bits, uint8_t vector) {
    bits[vector / 32] &= ~(1u << vector % 32);
}
bool test_bit(const Bits& bits, uint8_t vector) {
    return bits[vector / 32] >> vector % 32 & 1;
}

// The highest vector set, or 0 when there is none: vector 0 is never in these.
uint8_t highest(const Bits& bits) {
    for (unsigned i = 8; i-- > 0;)
        if (bits[i])
            return static_cast<uint8_t>(i * 32 + 31 - static_cast<unsigned>(std::countl_zero(bits[i])));
    return 0;
}

constexpr uint8_t priority_class(unsigned vector) {
    return static_cast<uint8_t>(vector & 0xf0);
}
constexpr uint32_t dfr_flat = 0xf;

} // namespace

Lapic::Lapic(Clock& clock, uint32_t id, Wiring wiring)
    : clock_(clock), wiring_(std::move(wiring)), timer_event_(clock.create("LAPIC timer", [this] { timer_fired(); })) {
    state_.id = id;
    reset();
}

void Lapic::reset() {
    state_.apic_base = platform::lapic_base | ApicBase::en | (state_.id == 0 ? ApicBase::bsp : 0);
    state_.tsc_offset = 0;
    clear_registers();
}

void Lapic::set_up_virtual_wire() {
    state_.svr |= SvrBit::enable;
    const auto mode = [](DeliveryMode delivery) {
        return static_cast<uint32_t>(delivery) << LvtBit::delivery_mode_shift;
    };
    state_.lvt[Lvt::lint0] = mode(DeliveryMode::ext_int);
    state_.lvt[Lvt::lint1] = mode(DeliveryMode::nmi);
    update_pending();
}

// The state after power-up but for the ID, IA32_APIC_BASE and the level of the pins (10.4.7.1, 10.4.7.3).
void Lapic::clear_registers() {
    State fresh;
    fresh.id = state_.id;
    fresh.apic_base = state_.apic_base;
    fresh.lint0_level = state_.lint0_level;
    fresh.tsc_offset = state_.tsc_offset;
    fresh.lvt.fill(LvtBit::mask);
    if (x2apic_mode())
        fresh.ldr = (state_.id >> 4) << 16 | 1u << (state_.id & 15); // 10.12.10.2
    state_ = fresh;
    clock_.schedule(timer_event_, never);
    update_pending();
}

bool Lapic::software_enabled() const {
    return state_.svr & SvrBit::enable;
}

// PPR (10.8.3.1).
uint8_t Lapic::processor_priority() const {
    const uint8_t in_service = highest(state_.isr);
    return priority_class(state_.tpr) >= priority_class(in_service) ? state_.tpr : priority_class(in_service);
}

// The PIC's request reaches the processor through LINT0 in ExtINT mode, or directly when the APIC is off; or it came as
// a message through the IOAPIC's input 0.
bool Lapic::ext_int_pending() const {
    if (!enabled())
        return state_.lint0_level;
    const uint32_t entry = state_.lvt[lint0];
    const bool through = !(entry & LvtBit::mask) &&
                         static_cast<DeliveryMode>(entry >> LvtBit::delivery_mode_shift & 7) == DeliveryMode::ext_int;
    return state_.ext_int_message || (through && state_.lint0_level);
}

void Lapic::update_pending() {
    const uint8_t requested = enabled() ? highest(state_.irr) : 0;
    interrupt_pending_ =
        (requested && priority_class(requested) > priority_class(processor_priority())) || ext_int_pending();
}

uint8_t Lapic::acknowledge_interrupt() {
    if (ext_int_pending()) {
        state_.ext_int_message = false;
        const uint8_t vector = wiring_.pic_vector(); // may come back through set_lint0()
        update_pending();
        return vector;
    }
    const uint8_t requested = enabled() ? highest(state_.irr) : 0;
    if (!requested || priority_class(requested) <= priority_class(processor_priority()))
        return static_cast<uint8_t>(state_.svr & SvrBit::vector); // the request has gone: spurious (10.9)
    clear_bit(state_.irr, requested);
    set_bit(state_.isr, requested);
    update_pending();
    return requested;
}

void Lapic::set_tpr(uint8_t value) {
    state_.tpr = value;
    update_pending();
}

bool Lapic::accept_vector(uint8_t vector, bool level_triggered) {
    if (!accepts_fixed())
        return false;
    if (vector < first_legal_vector) {
        report_error(EsrBit::receive_illegal_vector);
        return false;
    }
    set_bit(state_.irr, vector);
    if (level_triggered)
        set_bit(state_.tmr, vector);
    else
        clear_bit(state_.tmr, vector);
    update_pending();
    return true;
}

bool Lapic::accept(const ApicMessage& message) {
    if (!enabled())
        return false;
    switch (message.mode) {
    case DeliveryMode::fixed:
    case DeliveryMode::lowest_priority:
        return accept_vector(message.vector, message.level_triggered);
    case DeliveryMode::nmi:
        state_.nmi_pending = true;
        return true;
    case DeliveryMode::init:
        clear_registers();
        if (wiring_.init)
            wiring_.init();
        return true;
    case DeliveryMode::startup:
        if (wiring_.startup)
            wiring_.startup(message.vector);
        return true;
    case DeliveryMode::ext_int:
        state_.ext_int_message = true;
        update_pending();
        return true;
    case DeliveryMode::smi:
        break;
    }
    return false;
}

bool Lapic::matches(const ApicMessage& message) const {
    switch (message.to) {
    case ApicMessage::To::broadcast:
        return true;
    case ApicMessage::To::physical:
        return message.destination == state_.id;
    case ApicMessage::To::logical:
        break;
    }
    if (x2apic_mode()) // 10.12.10.1: cluster in bits 31:16, members in 15:0
        return message.destination >> 16 == state_.ldr >> 16 && message.destination & state_.ldr & 0xffff;
    const uint32_t logical_id = state_.ldr >> 24, mda = message.destination & 0xff;
    if (message.destination > 0xff)
        return false;
    if (state_.dfr >> 28 == dfr_flat)
        return logical_id & mda;
    return logical_id >> 4 == mda >> 4 && logical_id & mda & 0xf; // 10.6.2.2, cluster model
}

// Raises the interrupt of a local vector; false if it is masked or dropped.
bool Lapic::deliver_local(Lvt entry) {
    const uint32_t lvt = state_.lvt[entry];
    if (!enabled() || lvt & LvtBit::mask)
        return false;
    // The timer and the error interrupt have no delivery mode; their bits are zero, which is fixed.
    switch (static_cast<DeliveryMode>(lvt >> LvtBit::delivery_mode_shift & 7)) {
    case DeliveryMode::fixed: {
        const bool level = entry == Lvt::lint0 && lvt & LvtBit::level;
        return accept_vector(static_cast<uint8_t>(lvt & LvtBit::vector), level);
    }
    case DeliveryMode::nmi:
        state_.nmi_pending = true;
        return true;
    case DeliveryMode::init:
        return accept({DeliveryMode::init, 0, false, ApicMessage::To::physical, state_.id});
    default: // SMI: there is no SMM; ExtINT follows the level of LINT0; the rest is reserved
        return false;
    }
}

void Lapic::report_error(uint32_t error) {
    if (state_.errors & error)
        return;
    state_.errors |= error;
    // An illegal vector in LVT Error itself is noted above, and the second time round ends here.
    deliver_local(Lvt::error);
}

void Lapic::deliver_pmi() {
    deliver_local(Lvt::pc);
    state_.lvt[Lvt::pc] |= LvtBit::mask;
}

void Lapic::set_lint0(bool level) {
    const bool rises = level && !state_.lint0_level;
    state_.lint0_level = level;
    if (rises && !(state_.lvt[Lvt::lint0] & LvtBit::level))
        deliver_local(Lvt::lint0);
    sample_lint0();
    update_pending();
}

// LINT0 as a level-triggered fixed interrupt: its remote IRR flag is set from acceptance to EOI (10.5.1).
void Lapic::sample_lint0() {
    uint32_t& lvt = state_.lvt[Lvt::lint0];
    const auto mode = static_cast<DeliveryMode>(lvt >> LvtBit::delivery_mode_shift & 7);
    if (state_.lint0_level && mode == DeliveryMode::fixed && lvt & LvtBit::level && !(lvt & LvtBit::remote_irr) &&
        deliver_local(Lvt::lint0))
        lvt |= LvtBit::remote_irr;
}

void Lapic::pulse_lint1() {
    if (!enabled()) { // LINT1 is the NMI pin then
        state_.nmi_pending = true;
        return;
    }
    deliver_local(Lvt::lint1);
}

void Lapic::end_of_interrupt() {
    const uint8_t vector = highest(state_.isr);
    if (!vector)
        return;
    clear_bit(state_.isr, vector);
    update_pending();
    if (!test_bit(state_.tmr, vector))
        return;
    wiring_.bus->end_of_interrupt(vector);
    if (uint32_t& lvt = state_.lvt[Lvt::lint0]; lvt & LvtBit::remote_irr && (lvt & LvtBit::vector) == vector) {
        lvt &= ~LvtBit::remote_irr;
        sample_lint0();
    }
}

void Lapic::send_ipi(uint64_t icr) {
    const auto mode = static_cast<DeliveryMode>(icr >> IcrBit::delivery_mode_shift & 7);
    const auto shorthand = static_cast<Shorthand>(icr >> IcrBit::shorthand_shift & 3);
    ApicMessage message;
    message.mode = mode;
    message.vector = static_cast<uint8_t>(icr & IcrBit::vector);
    if ((mode == DeliveryMode::fixed || mode == DeliveryMode::lowest_priority) && message.vector < first_legal_vector) {
        report_error(EsrBit::send_illegal_vector);
        return;
    }
    // INIT level de-assert only synchronizes arbitration IDs, which nobody has any more.
    if (mode == DeliveryMode::init && icr & IcrBit::level_triggered && !(icr & IcrBit::assert_level))
        return;
    if (mode == DeliveryMode::ext_int || mode == DeliveryMode::smi)
        return;
    const bool to_self = shorthand == Shorthand::self || shorthand == Shorthand::all_including_self;
    // Table 10-3: with self among the receivers only fixed is valid. NMI works there on processors, too.
    if (to_self && mode != DeliveryMode::fixed && mode != DeliveryMode::nmi)
        return;
    switch (shorthand) {
    case Shorthand::self:
        accept(message);
        return;
    case Shorthand::all_including_self:
    case Shorthand::all_excluding_self:
        message.to = ApicMessage::To::broadcast;
        wiring_.bus->send(message, shorthand == Shorthand::all_excluding_self ? this : nullptr);
        return;
    case Shorthand::none:
        break;
    }
    const uint32_t all_ones = x2apic_mode() ? 0xffff'ffff : 0xff;
    message.destination =
        static_cast<uint32_t>(icr >> (x2apic_mode() ? IcrBit::destination_shift : IcrBit::xapic_destination_shift));
    message.to = message.destination == all_ones ? ApicMessage::To::broadcast
                 : icr & IcrBit::logical         ? ApicMessage::To::logical
                                                 : ApicMessage::To::physical;
    wiring_.bus->send(message);
}

} // namespace vtrace
