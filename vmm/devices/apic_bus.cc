#include "vmm/devices/apic_bus.h"

namespace vtrace {

bool ApicBus::send(const ApicMessage& message, const Lapic* except) {
    if (message.mode == DeliveryMode::lowest_priority) {
        Lapic* chosen = nullptr;
        for (Lapic* lapic : lapics_)
            if (lapic != except && lapic->accepts_fixed() && lapic->matches(message) &&
                (!chosen || lapic->processor_priority() < chosen->processor_priority()))
                chosen = lapic;
        return chosen && chosen->accept(message);
    }
    bool accepted = false;
    for (Lapic* lapic : lapics_)
        if (lapic != except && lapic->matches(message))
            accepted |= lapic->accept(message);
    return accepted;
}

} // namespace vtrace
