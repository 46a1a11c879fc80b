// The marker: a register by which a guest tells the machine that it has reached something worth tracing.
//
//   mov dx, 0x5654      ; port "VT"; al, ax and eax are all right
//   mov eax, VALUE
//   out dx, eax
//
// or, without ports, a store of 1, 2 or 4 bytes to physical address 0xfed45654. Reads give "VTRC", so that a guest can
// tell whether it runs under vtrace. Writes have no other effect.
#pragma once

#include <functional>

#include "vmm/bus.h"

namespace vtrace {

/// Called within the guest's write, on the machine's thread, as a MachineEventHandler.
using MarkerHandler = std::function<void(uint32_t value)>;

/// The device behind both; to be attached at the port (`ports` of them) and at the page (`mmio_length` bytes).
class Marker {
  public:
    static constexpr unsigned ports = 4;
    static constexpr uint64_t mmio_length = 0x1000, mmio_register = 0x654;
    static constexpr uint32_t magic = 'V' | 'T' << 8 | 'R' << 16 | uint32_t{'C'} << 24;

    /// `handler` may be empty.
    explicit Marker(MarkerHandler handler);

    Device& port_register() { return port_; }
    Device& page() { return page_; }

  private:
    /// Reads give the magic's bytes, and zero beside them; writes count at its first byte only.
    class Register final : public Device {
      public:
        Register(const MarkerHandler& handler, uint64_t offset) : handler_(handler), offset_(offset) {}
        uint64_t read(uint64_t offset, unsigned size) override;
        void write(uint64_t offset, unsigned size, uint64_t value) override;

      private:
        const MarkerHandler& handler_;
        uint64_t offset_;
    };

    const MarkerHandler handler_;
    Register port_{handler_, 0}, page_{handler_, mmio_register};
};

} // namespace vtrace
