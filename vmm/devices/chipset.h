// Chipset: all devices of the PC around the processors, wired up, with their ports and memory on the machine's buses.
//
// The machine makes one, implements CpuPins for vCPU i by forwarding to lapic(i) and the buses, and listens to the
// three callbacks. Everything runs on the machine's thread; callbacks come from within a guest's access or
// Clock::run_due().
//
// At first the devices are as firmware leaves them: the PICs initialized (vectors 8 and 0x70) and masked, the BSP's
// APIC in virtual wire mode, the rest as after reset.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string_view>
#include <vector>

#include "ds/result.h"
#include "vmm/bus.h"
#include "vmm/clock.h"
#include "vmm/devices/acpi_pm.h"
#include "vmm/devices/apic_bus.h"
#include "vmm/devices/exit_ports.h"
#include "vmm/devices/fw_cfg.h"
#include "vmm/devices/i8042.h"
#include "vmm/devices/ioapic.h"
#include "vmm/devices/lapic.h"
#include "vmm/devices/machine_event.h"
#include "vmm/devices/marker.h"
#include "vmm/devices/pci.h"
#include "vmm/devices/pic.h"
#include "vmm/devices/pit.h"
#include "vmm/devices/rtc.h"
#include "vmm/devices/serial.h"
#include "vmm/guest_memory.h"

namespace vtrace {

struct ChipsetConfig {
    unsigned vcpus = 1;                    // 1..platform::max_vcpus; APIC IDs are 0..vcpus-1, 0 is the BSP
    int64_t rtc_start = default_rtc_start; // date at virtual time 0, seconds since 1970 UTC
    unsigned physical_address_bits = 46;   // as the vCPU's CPUID says, at most 52

    Serial::Output serial_output; // what the guest writes to COM1
    MachineEventHandler event;    // power-off, reset, exits, panics
    MarkerHandler marker;         // what the guest writes to its marker register
    /// An INIT IPI reached this vCPU: it takes its state after INIT (SDM vol. 3, table 9-1); the BSP then runs from the
    /// reset vector, others wait for a SIPI. Its APIC is reset already.
    std::function<void(unsigned vcpu)> init;
    /// A start-up IPI reached it: if it waits for one, it starts at vector * 4096 in real mode; else it is ignored.
    std::function<void(unsigned vcpu, uint8_t vector)> startup;
};

class Chipset {
  public:
    /// Attaches itself to both buses. `memory` is asked for its size only; clock and buses must outlive the chipset,
    /// and the buses not be used after it. Fails for a bad number of vCPUs or when something is attached in its place.
    static Result<std::unique_ptr<Chipset>> create(ChipsetConfig config, Clock& clock, const GuestMemory& memory,
                                                   Bus& ports, Bus& mmio);
    Chipset(const Chipset&) = delete;
    Chipset& operator=(const Chipset&) = delete;

    unsigned vcpus() const { return static_cast<unsigned>(lapics_.size()); }

    /// What CpuPins of vCPU `index` needs: its interrupts, NMIs, CR8, APIC MSRs, and the APIC's page. mmio accesses go
    /// first to `lapic(i).owns(gpa)`, then to the bus. For the KVM and soft engines' PMIs: lapic(i).deliver_pmi().
    Lapic& lapic(unsigned index) { return *lapics_[index]; }
    const Lapic& lapic(unsigned index) const { return *lapics_[index]; }

    Serial& serial() { return serial_; }
    FwCfg& fw_cfg() { return fw_cfg_; }
    PciBus& pci() { return pci_; }

    /// The fixed-feature power button: asks the guest to shut down.
    void press_power_button() { acpi_pm_.press_power_button(); }
    /// The NMI button: LINT1 of every processor, unless the guest holds NMIs back by port 0x70.
    void press_nmi_button();

    /// For devices to be plugged in later: the level of an ISA line (0..15; not 2) at the PICs and the IOAPIC.
    void set_isa_irq(unsigned irq, bool level);
    /// The level of an IOAPIC input that has no ISA line (16..23).
    void set_gsi(unsigned gsi, bool level) { ioapic_.set_input(gsi, level); }

  private:
    Chipset(ChipsetConfig config, Clock& clock, const GuestMemory& memory);
    Result<> attach(Bus& ports, Bus& mmio);
    Result<> add_memory_map(const GuestMemory& memory);
    IrqLine isa_line(unsigned irq);

    ChipsetConfig config_;
    ApicBus apic_bus_;
    std::vector<std::unique_ptr<Lapic>> lapics_;
    Pic pic_;
    IoApic ioapic_;
    Pit pit_;
    Rtc rtc_;
    Serial serial_;
    I8042 i8042_;
    AcpiPm acpi_pm_;
    PciBus pci_;
    FwCfg fw_cfg_;
    DebugExit debug_exit_;
    PvPanic pvpanic_;
    Marker marker_;
};

} // namespace vtrace
