// A machine with nothing but a processor and memory, for tests.
#pragma once

#include "vmm/vcpu.h"

namespace vtrace {

/// No device answers, no interrupt comes.
class NoPins final : public CpuPins {
  public:
    uint32_t io_read(uint16_t, unsigned) override { return ~0u; }
    void io_write(uint16_t, unsigned, uint32_t) override {}
    uint64_t mmio_read(Gpa, unsigned) override { return ~0ull; }
    void mmio_write(Gpa, unsigned, uint64_t) override {}
    bool interrupt_pending() const override { return false; }
    uint8_t acknowledge_interrupt() override { return 0; }
    bool nmi_pending() const override { return false; }
    void acknowledge_nmi() override {}
    void raise_pmi() override {}
    uint8_t read_cr8() const override { return 0; }
    void write_cr8(uint8_t) override {}
    std::optional<uint64_t> read_apic_msr(uint32_t) override { return std::nullopt; }
    bool write_apic_msr(uint32_t, uint64_t) override { return false; }
};

} // namespace vtrace
