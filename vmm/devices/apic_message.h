// What travels on the bus between interrupt controllers (SDM vol. 3, 10.6): IPIs and interrupts from the IOAPIC.
#pragma once

#include <cstdint>

namespace vtrace {

/// Delivery modes, coded as in the ICR, the LVT and the IOAPIC's redirection entries (SDM vol. 3, figure 10-12).
enum class DeliveryMode : uint8_t {
    fixed = 0,
    lowest_priority = 1,
    smi = 2,
    nmi = 4,
    init = 5,
    startup = 6,
    ext_int = 7,
};

struct ApicMessage {
    /// `broadcast`: the sender's all-ones destination. 8-bit senders (xAPIC, IOAPIC) and 32-bit ones differ in it.
    enum class To : uint8_t { physical, logical, broadcast };

    DeliveryMode mode = DeliveryMode::fixed;
    uint8_t vector = 0;
    bool level_triggered = false;
    To to = To::physical;
    uint32_t destination = 0;
};

} // namespace vtrace
