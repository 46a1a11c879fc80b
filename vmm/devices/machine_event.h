// What a device tells the machine about the fate of the whole guest.
#pragma once

#include <cstdint>
#include <functional>

namespace vtrace {

struct MachineEvent {
    enum class Kind : uint8_t {
        power_off,    // ACPI S5 (SLP_TYP and SLP_EN in PM1a control)
        reset,        // i8042 command 0xfe, port 0x92 bit 0, or port 0xcf9
        debug_exit,   // write to isa-debug-exit; `code` is the value written
        panicked,     // pvpanic: the guest's kernel panicked
        crash_loaded, // pvpanic: it panicked and a crash kernel takes over; the guest runs on
    };
    Kind kind;
    uint32_t code = 0;
    bool operator==(const MachineEvent&) const = default;
};

/// Called within the guest's port write, on the machine's thread. It should note the event and let the vCPU stop at the
/// next boundary; it must not destroy the devices.
using MachineEventHandler = std::function<void(const MachineEvent&)>;

} // namespace vtrace
