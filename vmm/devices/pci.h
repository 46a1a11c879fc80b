// PCI configuration space by mechanism 1 (PCI Local Bus Specification 3.0, 3.2.2.3.2), at ports 0xcf8 and 0xcfc, and
// the reset control register at 0xcf9, which lies inside of the former.
//
// There is one bus. Function 00:00.0 is a host bridge: Linux doubts a bus without one and would then leave PCI alone.
// All other places say that nothing is there, unless a function is plugged in.
#pragma once

#include <array>
#include <cstdint>
#include <map>

#include "ds/result.h"
#include "vmm/bus.h"
#include "vmm/devices/machine_event.h"

namespace vtrace {

/// Configuration space of one function; `offset` 0..255, never crossing a dword; `size` 1, 2 or 4.
class PciFunction {
  public:
    virtual ~PciFunction() = default;
    virtual uint32_t config_read(unsigned offset, unsigned size) = 0;
    virtual void config_write(unsigned offset, unsigned size, uint32_t value) = 0;
};

/// The host bridge: an Intel 82441FX by its IDs, without BARs or other registers.
class PciHostBridge final : public PciFunction {
  public:
    PciHostBridge();
    uint32_t config_read(unsigned offset, unsigned size) override;
    void config_write(unsigned, unsigned, uint32_t) override {} // nothing to set

  private:
    std::array<uint8_t, 64> header_{};
};

class PciBus {
  public:
    explicit PciBus(MachineEventHandler event);

    /// Plugs in a function at bus 0; it is borrowed and must outlive the bus. Fails when the place is taken.
    Result<> plug(unsigned device, unsigned function, PciFunction& pci_function);

    /// For ports 0xcf8 (four bytes, the reset control register included) and 0xcfc (four bytes).
    Device& address_ports() { return address_ports_; }
    Device& data_ports() { return data_ports_; }

  private:
    class AddressPorts final : public Device {
      public:
        explicit AddressPorts(PciBus& bus) : bus_(bus) {}
        uint64_t read(uint64_t offset, unsigned size) override;
        void write(uint64_t offset, unsigned size, uint64_t value) override;

      private:
        PciBus& bus_;
    };
    class DataPorts final : public Device {
      public:
        explicit DataPorts(PciBus& bus) : bus_(bus) {}
        uint64_t read(uint64_t offset, unsigned size) override;
        void write(uint64_t offset, unsigned size, uint64_t value) override;

      private:
        PciBus& bus_;
    };
    struct State {
        uint32_t address = 0;
        uint8_t reset_control = 0;
    };
    PciFunction* selected();

    MachineEventHandler event_;
    PciHostBridge host_bridge_;
    std::map<unsigned, PciFunction*> functions_; // by device * 8 + function
    State state_;
    AddressPorts address_ports_;
    DataPorts data_ports_;
};

} // namespace vtrace
