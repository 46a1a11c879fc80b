// Ports by which test guests and panicking kernels speak to the VMM: isa-debug-exit and pvpanic.
#pragma once

#include "vmm/devices/byte_device.h"
#include "vmm/devices/machine_event.h"

namespace vtrace {

/// isa-debug-exit: a write of any size ends the run with the value written. Reads as zero.
class DebugExit final : public Device {
  public:
    static constexpr unsigned ports = 4;
    explicit DebugExit(MachineEventHandler event) : event_(std::move(event)) {}

    uint64_t read(uint64_t, unsigned) override { return 0; }
    void write(uint64_t, unsigned, uint64_t value) override {
        event_({MachineEvent::Kind::debug_exit, static_cast<uint32_t>(value)});
    }

  private:
    MachineEventHandler event_;
};

/// pvpanic: reading tells which events it takes, writing reports them. A guest finds it as ACPI device QEMU0001.
class PvPanic final : public ByteDevice {
  public:
    static constexpr unsigned ports = 1;
    static constexpr uint8_t panicked = 1 << 0, crash_loaded = 1 << 1;
    explicit PvPanic(MachineEventHandler event) : event_(std::move(event)) {}

  protected:
    uint8_t read_byte(unsigned) override { return panicked | crash_loaded; }
    void write_byte(unsigned, uint8_t value) override {
        if (value & panicked)
            event_({MachineEvent::Kind::panicked});
        else if (value & crash_loaded)
            event_({MachineEvent::Kind::crash_loaded});
    }

  private:
    MachineEventHandler event_;
};

} // namespace vtrace
