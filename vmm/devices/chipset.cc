#include "vmm/devices/chipset.h"

#include "vmm/devices/platform.h"

namespace vtrace {
namespace {

/// Callbacks that the machine left out do nothing.
ChipsetConfig with_defaults(ChipsetConfig config) {
    if (!config.event)
        config.event = [](const MachineEvent&) {};
    if (!config.init)
        config.init = [](unsigned) {};
    if (!config.startup)
        config.startup = [](unsigned, uint8_t) {};
    return config;
}

} // namespace

Result<std::unique_ptr<Chipset>> Chipset::create(ChipsetConfig config, Clock& clock, const GuestMemory& memory,
                                                 Bus& ports, Bus& mmio) {
    if (config.vcpus == 0 || config.vcpus > platform::max_vcpus)
        return fail("cannot make a machine of {} processors: must be 1 to {}", config.vcpus, platform::max_vcpus);
    if (config.physical_address_bits < 32 || config.physical_address_bits > 52)
        return fail("cannot make a machine of {} physical address bits: must be 32 to 52",
                    config.physical_address_bits);
    std::unique_ptr<Chipset> chipset(new Chipset(with_defaults(std::move(config)), clock, memory));
    VTRACE_TRY(chipset->attach(ports, mmio));
    VTRACE_TRY(chipset->add_memory_map(memory));
    return chipset;
}

Chipset::Chipset(ChipsetConfig config, Clock& clock, const GuestMemory& memory)
    : config_(std::move(config)), pic_(IrqLine([this](bool level) {
          // The PIC's INT goes to LINT0 of every processor, and to the IOAPIC's input 0.
          for (auto& lapic : lapics_)
              lapic->set_lint0(level);
          ioapic_.set_input(0, level);
      })),
      ioapic_(apic_bus_), pit_(clock, isa_line(platform::Irq::timer)),
      rtc_(clock, isa_line(platform::Irq::rtc), config_.rtc_start, memory.low_size(), memory.high_size()),
      serial_(clock, isa_line(platform::Irq::com1), config_.serial_output),
      i8042_(isa_line(platform::Irq::keyboard), config_.event),
      acpi_pm_(clock, isa_line(platform::Irq::sci), config_.event), pci_(config_.event),
      fw_cfg_(config_.vcpus, memory.size()), debug_exit_(config_.event), pvpanic_(config_.event),
      marker_(config_.marker) {
    for (unsigned i = 0; i < config_.vcpus; ++i) {
        Lapic::Wiring wiring;
        wiring.bus = &apic_bus_;
        wiring.pic_vector = [this] { return pic_.acknowledge(); };
        wiring.init = [this, i] { config_.init(i); };
        wiring.startup = [this, i](uint8_t vector) { config_.startup(i, vector); };
        wiring.physical_address_bits = config_.physical_address_bits;
        lapics_.push_back(std::make_unique<Lapic>(clock, i, std::move(wiring)));
        apic_bus_.add(*lapics_.back());
    }
    lapics_.front()->set_up_virtual_wire();
    apic_bus_.set_eoi_listener([this](uint8_t vector) { ioapic_.end_of_interrupt(vector); });
}

IrqLine Chipset::isa_line(unsigned irq) {
    return IrqLine([this, irq](bool level) { set_isa_irq(irq, level); });
}

void Chipset::set_isa_irq(unsigned irq, bool level) {
    pic_.set_irq(irq, level);
    ioapic_.set_input(irq == platform::Irq::timer ? platform::Irq::timer_gsi : irq, level);
}

void Chipset::press_nmi_button() {
    if (rtc_.nmi_masked())
        return;
    for (auto& lapic : lapics_)
        lapic->pulse_lint1();
}

Result<> Chipset::attach(Bus& ports, Bus& mmio) {
    using namespace platform;
    VTRACE_TRY(ports.attach(Port::pic_master, 2, pic_.master_ports(), "PIC master"));
    VTRACE_TRY(ports.attach(Port::pic_slave, 2, pic_.slave_ports(), "PIC slave"));
    VTRACE_TRY(ports.attach(Port::pic_elcr, 2, pic_.elcr_ports(), "PIC edge/level control"));
    VTRACE_TRY(ports.attach(Port::pit, Pit::ports, pit_, "PIT"));
    VTRACE_TRY(ports.attach(Port::system_control_b, 1, pit_.port_b(), "system control port B"));
    VTRACE_TRY(ports.attach(Port::cmos, Rtc::ports, rtc_, "RTC"));
    VTRACE_TRY(ports.attach(Port::i8042_data, 1, i8042_.data_port(), "i8042 data"));
    VTRACE_TRY(ports.attach(Port::i8042_command, 1, i8042_.command_port(), "i8042 command"));
    VTRACE_TRY(ports.attach(Port::system_control_a, 1, i8042_.system_control_a(), "system control port A"));
    VTRACE_TRY(ports.attach(Port::com1, Serial::ports, serial_, "serial port"));
    VTRACE_TRY(ports.attach(Port::debug_exit, DebugExit::ports, debug_exit_, "isa-debug-exit"));
    VTRACE_TRY(ports.attach(Port::pvpanic, PvPanic::ports, pvpanic_, "pvpanic"));
    VTRACE_TRY(ports.attach(Port::fw_cfg, FwCfg::ports, fw_cfg_, "fw_cfg"));
    VTRACE_TRY(ports.attach(Port::acpi_pm1_event, AcpiPm::ports, acpi_pm_, "ACPI power management"));
    VTRACE_TRY(ports.attach(Port::pci_config_address, 4, pci_.address_ports(), "PCI configuration address"));
    VTRACE_TRY(ports.attach(Port::pci_config_data, 4, pci_.data_ports(), "PCI configuration data"));
    VTRACE_TRY(ports.attach(Port::marker, Marker::ports, marker_.port_register(), "marker"));
    VTRACE_TRY(mmio.attach(marker_base, Marker::mmio_length, marker_.page(), "marker"));
    return mmio.attach(ioapic_base, IoApic::mmio_length, ioapic_, "IOAPIC");
}

// fw_cfg's "etc/e820": packed entries of address, length (64 bits each) and type (32 bits); RAM only.
Result<> Chipset::add_memory_map(const GuestMemory& memory) {
    constexpr uint32_t type_ram = 1;
    std::vector<uint8_t> bytes;
    const auto put = [&bytes](uint64_t value, unsigned count) {
        for (unsigned i = 0; i < count; ++i)
            bytes.push_back(static_cast<uint8_t>(value >> 8 * i));
    };
    const auto entry = [&](Gpa start, uint64_t length) {
        put(start, 8);
        put(length, 8);
        put(type_ram, 4);
    };
    entry(0, memory.low_size());
    if (memory.high_size())
        entry(GuestMemory::high_start, memory.high_size());
    return fw_cfg_.add_file("etc/e820", std::move(bytes));
}

} // namespace vtrace
