#include "vmm/devices/pci.h"

namespace vtrace {
namespace {

// CONFIG_ADDRESS.
constexpr uint32_t enable = 1u << 31, address_writable = 0x80ff'fffc, register_mask = 0xfc;
constexpr unsigned bus_shift = 16, devfn_shift = 8, functions_per_device = 8, devices_per_bus = 32;

// The reset control register: RST_CPU resets when it goes from 0 to 1.
constexpr unsigned reset_control_offset = 1;
constexpr uint8_t rst_cpu = 1 << 2, reset_control_writable = 0x0e;

// Type 0 configuration header.
constexpr unsigned vendor_id = 0x00, device_id = 0x02, command = 0x04, status = 0x06, revision = 0x08, subclass = 0x0a,
                   base_class = 0x0b;
constexpr uint16_t vendor_intel = 0x8086, device_82441fx = 0x1237;
constexpr uint8_t class_bridge = 0x06, subclass_host = 0x00, revision_b0 = 0x02;
constexpr uint8_t command_memory_and_master = 0x06;
constexpr uint8_t status_medium_devsel = 0x02; // in the upper byte

constexpr uint64_t ones(unsigned size) {
    return size >= 8 ? ~0ull : (1ull << 8 * size) - 1;
}

} // namespace

PciHostBridge::PciHostBridge() {
    const auto store16 = [this](unsigned offset, uint16_t value) {
        header_[offset] = static_cast<uint8_t>(value);
        header_[offset + 1] = static_cast<uint8_t>(value >> 8);
    };
    store16(vendor_id, vendor_intel);
    store16(device_id, device_82441fx);
    header_[command] = command_memory_and_master;
    header_[status + 1] = status_medium_devsel;
    header_[revision] = revision_b0;
    header_[subclass] = subclass_host;
    header_[base_class] = class_bridge;
}

uint32_t PciHostBridge::config_read(unsigned offset, unsigned size) {
    uint32_t value = 0;
    for (unsigned i = 0; i < size && offset + i < header_.size(); ++i)
        value |= uint32_t{header_[offset + i]} << 8 * i;
    return value;
}

PciBus::PciBus(MachineEventHandler event)
    : event_(std::move(event)), functions_{{0, &host_bridge_}}, address_ports_(*this), data_ports_(*this) {}

Result<> PciBus::plug(unsigned device, unsigned function, PciFunction& pci_function) {
    if (device >= devices_per_bus || function >= functions_per_device)
        return fail("cannot plug in PCI function 00:{:02x}.{}: there is no such place", device, function);
    if (!functions_.emplace(device * functions_per_device + function, &pci_function).second)
        return fail("cannot plug in PCI function 00:{:02x}.{}: the place is taken", device, function);
    return {};
}

PciFunction* PciBus::selected() {
    if (!(state_.address & enable) || (state_.address >> bus_shift & 0xff) != 0)
        return nullptr;
    const auto found = functions_.find(state_.address >> devfn_shift & 0xff);
    return found == functions_.end() ? nullptr : found->second;
}

// Only dword accesses are to CONFIG_ADDRESS; others pass it by, and one of them meets the reset control register.
uint64_t PciBus::AddressPorts::read(uint64_t offset, unsigned size) {
    if (offset == 0 && size == 4)
        return bus_.state_.address;
    if (offset == reset_control_offset && size == 1)
        return bus_.state_.reset_control;
    return ones(size);
}

void PciBus::AddressPorts::write(uint64_t offset, unsigned size, uint64_t value) {
    State& state = bus_.state_;
    if (offset == 0 && size == 4) {
        state.address = static_cast<uint32_t>(value) & address_writable;
    } else if (offset == reset_control_offset && size == 1) {
        const bool resets = value & rst_cpu && !(state.reset_control & rst_cpu);
        state.reset_control = value & reset_control_writable;
        if (resets)
            bus_.event_({MachineEvent::Kind::reset});
    }
}

uint64_t PciBus::DataPorts::read(uint64_t offset, unsigned size) {
    PciFunction* function = bus_.selected();
    if (!function || offset + size > 4)
        return ones(size);
    const auto config_offset = static_cast<unsigned>((bus_.state_.address & register_mask) + offset);
    return function->config_read(config_offset, size) & ones(size);
}

void PciBus::DataPorts::write(uint64_t offset, unsigned size, uint64_t value) {
    PciFunction* function = bus_.selected();
    if (!function || offset + size > 4)
        return;
    const auto config_offset = static_cast<unsigned>((bus_.state_.address & register_mask) + offset);
    function->config_write(config_offset, size, static_cast<uint32_t>(value & ones(size)));
}

} // namespace vtrace
