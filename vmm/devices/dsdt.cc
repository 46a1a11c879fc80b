#include "vmm/devices/dsdt.h"

#include "vmm/devices/acpi_pm.h"
#include "vmm/devices/marker.h"
#include "vmm/devices/platform.h"
#include "vmm/devices/rtc.h"
#include "vmm/devices/serial.h"

namespace vtrace {

using namespace aml;

namespace {

// A device of the ISA bus, by its PNP ID.
Term isa_device(std::string_view path, std::string_view pnp_id, std::initializer_list<Term> resources) {
    return device(path, sequence({name("_HID", eisa_id(pnp_id)), name("_CRS", resource_template(resources))}));
}

// Every slot's INTA..INTD to the IOAPIC's inputs 16..19, rotated by the slot's number as on a PC's backplane.
Term pci_routing() {
    constexpr unsigned slots = 32, pins = 4;
    constexpr uint32_t any_function = 0xffff;
    std::vector<Term> entries;
    for (uint32_t slot = 0; slot < slots; ++slot)
        for (uint32_t pin = 0; pin < pins; ++pin) {
            const uint32_t gsi = platform::Irq::pci_first_gsi + (slot + pin) % platform::Irq::pci_gsis;
            entries.push_back(package({integer(slot << 16 | any_function), integer(pin), integer(0), integer(gsi)}));
        }
    return package(entries);
}

Term pci_root(uint32_t memory_start) {
    using namespace platform;
    constexpr uint32_t vga_first = 0xa'0000, vga_last = 0xb'ffff;
    constexpr uint8_t config_ports = 8;
    return device("PCI0", sequence({
                              name("_HID", eisa_id("PNP0A03")),
                              name("_ADR", integer(0)),
                              name("_UID", integer(0)),
                              name("_CRS", resource_template({
                                               bus_number_window(0, 0),
                                               io(Port::pci_config_address, config_ports),
                                               io_window(0, Port::pci_config_address - 1),
                                               io_window(Port::pci_config_address + config_ports, 0xffff),
                                               memory_window(vga_first, vga_last, true),
                                               memory_window(memory_start, uint32_t{ioapic_base} - 1, false),
                                           })),
                              name("_PRT", pci_routing()),
                          }));
}

} // namespace

Term dsdt_definition_block(uint32_t pci_memory_start) {
    using namespace platform;
    const Term s5 = integer(AcpiPm::sleep_type_s5);
    const Term serial =
        device("COM1", sequence({
                           name("_HID", eisa_id("PNP0501")),
                           name("_UID", integer(1)),
                           name("_CRS", resource_template({io(Port::com1, Serial::ports), irq(Irq::com1)})),
                       }));
    constexpr uint64_t present_enabled_shown_working = 0x0f;
    const Term pvpanic = device("PEVT", sequence({
                                            name("_HID", string("QEMU0001")),
                                            name("_STA", integer(present_enabled_shown_working)),
                                            name("_CRS", resource_template({io(Port::pvpanic, 1)})),
                                        }));
    // Ports and memory that belong to the board; so that nothing else is placed there.
    const Term board =
        isa_device("MBRD", "PNP0C02",
                   {io(Port::system_control_b, 1), io(Port::system_control_a, 1), io(Port::debug_exit, 4),
                    io(Port::pic_elcr, 2), io(Port::fw_cfg, 2), io(Port::acpi_pm1_event, AcpiPm::ports),
                    io(Port::marker, Marker::ports), memory32_fixed(ioapic_base, 0x1000),
                    memory32_fixed(marker_base, Marker::mmio_length), memory32_fixed(lapic_base, 0x1000)});
    return sequence({
        name("\\_S5", package({s5, s5, integer(0), integer(0)})),
        scope("\\_SB",
              sequence({
                  pci_root(pci_memory_start),
                  board,
                  isa_device("PIC", "PNP0000", {io(Port::pic_master, 2), io(Port::pic_slave, 2), irq(Irq::cascade)}),
                  isa_device("TMR", "PNP0100", {io(Port::pit, 4), irq(Irq::timer)}),
                  isa_device("RTC", "PNP0B00", {io(Port::cmos, Rtc::ports), irq(Irq::rtc)}),
                  serial,
                  pvpanic,
              })),
    });
}

} // namespace vtrace
