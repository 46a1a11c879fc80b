// A device whose registers are one byte wide, as those of the ISA bus are.
#pragma once

#include "vmm/bus.h"

namespace vtrace {

/// Splits wider accesses into byte accesses at ascending addresses, as the ISA bus does.
class ByteDevice : public Device {
  public:
    uint64_t read(uint64_t offset, unsigned size) final {
        uint64_t value = 0;
        for (unsigned i = 0; i < size; ++i)
            value |= uint64_t{read_byte(static_cast<unsigned>(offset) + i)} << 8 * i;
        return value;
    }
    void write(uint64_t offset, unsigned size, uint64_t value) final {
        for (unsigned i = 0; i < size; ++i)
            write_byte(static_cast<unsigned>(offset) + i, static_cast<uint8_t>(value >> 8 * i));
    }

  protected:
    virtual uint8_t read_byte(unsigned offset) = 0;
    virtual void write_byte(unsigned offset, uint8_t value) = 0;
};

} // namespace vtrace
