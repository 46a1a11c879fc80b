// The bus that joins the local APICs and the IOAPIC: who gets a message, and the way back of EOIs.
#pragma once

#include <functional>
#include <vector>

#include "vmm/devices/apic_message.h"
#include "vmm/devices/lapic.h"

namespace vtrace {

/// APICs are borrowed and must outlive the bus's last use.
class ApicBus {
  public:
    void add(Lapic& lapic) { lapics_.push_back(&lapic); }
    /// Who hears the EOIs of level-triggered interrupts: the IOAPIC.
    void set_eoi_listener(std::function<void(uint8_t vector)> listener) { eoi_listener_ = std::move(listener); }

    /// Delivers to all that match, but `except`; lowest-priority messages to one of them: that with the lowest
    /// processor priority, and of several the one with the lowest ID. False if nobody accepted it.
    bool send(const ApicMessage& message, const Lapic* except = nullptr);
    void end_of_interrupt(uint8_t vector) {
        if (eoi_listener_)
            eoi_listener_(vector);
    }

  private:
    std::vector<Lapic*> lapics_; // by ascending ID
    std::function<void(uint8_t)> eoi_listener_;
};

} // namespace vtrace
