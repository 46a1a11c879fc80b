// A whole chipset with its buses and a clock that tests move by hand.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "vmm/devices/chipset.h"

namespace vtrace::test {

/// Moves the clock to `time`, firing each event at its exact due time, as a vCPU engine does.
inline void run_until(Clock& clock, VirtualTime time) {
    while (clock.next_due() <= time) {
        clock.set_now(clock.next_due());
        clock.run_due();
    }
    clock.set_now(time);
}

struct Rig {
    explicit Rig(unsigned vcpus = 1, uint64_t memory_size = 64 << 20)
        : memory(std::move(*GuestMemory::create(memory_size))) {
        ChipsetConfig config;
        config.vcpus = vcpus;
        config.serial_output = [this](std::string_view text) { console += text; };
        config.event = [this](const MachineEvent& event) { events.push_back(event); };
        config.marker = [this](uint32_t value) { markers.push_back(value); };
        config.init = [this](unsigned vcpu) { inits.push_back(vcpu); };
        config.startup = [this](unsigned vcpu, uint8_t vector) { startups.push_back({vcpu, vector}); };
        chipset = std::move(*Chipset::create(std::move(config), clock, memory, ports, mmio));
    }

    uint32_t in(uint16_t port, unsigned size = 1) { return static_cast<uint32_t>(ports.read(port, size)); }
    void out(uint16_t port, uint32_t value, unsigned size = 1) { ports.write(port, size, value); }
    Lapic& lapic(unsigned index = 0) { return chipset->lapic(index); }
    uint32_t apic_read(unsigned reg, unsigned vcpu = 0) {
        return static_cast<uint32_t>(lapic(vcpu).mmio_read(platform::lapic_base + reg, 4));
    }
    void apic_write(unsigned reg, uint32_t value, unsigned vcpu = 0) {
        lapic(vcpu).mmio_write(platform::lapic_base + reg, 4, value);
    }
    /// Software-enables the local APIC, as every guest does first.
    void enable_apic(unsigned vcpu = 0) { apic_write(ApicReg::svr, 0x1ff, vcpu); }
    void enable_x2apic(unsigned vcpu = 0) {
        const uint64_t base = *lapic(vcpu).read_msr(ApicMsr::apic_base);
        (void)lapic(vcpu).write_msr(ApicMsr::apic_base, base | ApicBase::extd);
    }
    bool x2apic_write(unsigned reg, uint64_t value, unsigned vcpu = 0) {
        return lapic(vcpu).write_msr(ApicMsr::x2apic_first + reg / 16, value);
    }
    std::optional<uint64_t> x2apic_read(unsigned reg, unsigned vcpu = 0) {
        return lapic(vcpu).read_msr(ApicMsr::x2apic_first + reg / 16);
    }
    uint32_t ioapic_read(uint8_t reg) {
        mmio.write(platform::ioapic_base, 4, reg);
        return static_cast<uint32_t>(mmio.read(platform::ioapic_base + 0x10, 4));
    }
    void ioapic_write(uint8_t reg, uint32_t value) {
        mmio.write(platform::ioapic_base, 4, reg);
        mmio.write(platform::ioapic_base + 0x10, 4, value);
    }
    /// Redirection entry of an input: low and high dword.
    void redirect(unsigned input, uint32_t low, uint32_t high = 0) {
        ioapic_write(static_cast<uint8_t>(0x11 + 2 * input), high);
        ioapic_write(static_cast<uint8_t>(0x10 + 2 * input), low);
    }
    /// Initializes the PICs as Linux does: vectors 0x30 and 0x38, all unmasked; and opens LINT0 for them.
    void init_pics() {
        out(0x20, 0x11), out(0x21, 0x30), out(0x21, 0x04), out(0x21, 0x01);
        out(0xa0, 0x11), out(0xa1, 0x38), out(0xa1, 0x02), out(0xa1, 0x01);
        out(0x21, 0x00), out(0xa1, 0x00);
        enable_apic();
        apic_write(ApicReg::lvt_lint0, 0x700);
    }

    Clock clock;
    Bus ports, mmio;
    GuestMemory memory;
    std::string console;
    std::vector<MachineEvent> events;
    std::vector<uint32_t> markers;
    std::vector<unsigned> inits;
    std::vector<std::pair<unsigned, uint8_t>> startups;
    std::unique_ptr<Chipset> chipset;
};

} // namespace vtrace::test
