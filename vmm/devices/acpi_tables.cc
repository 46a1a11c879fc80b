#include "vmm/devices/acpi_tables.h"

#include <algorithm>
#include <string_view>
#include <vector>

#include "vmm/devices/acpi_pm.h"
#include "vmm/devices/dsdt.h"
#include "vmm/devices/platform.h"
#include "vmm/devices/rtc.h"

namespace vtrace {
namespace {

using Bytes = std::vector<uint8_t>;

constexpr std::string_view oem_id = "VTRACE", oem_table_id = "VTRACEPC", creator_id = "VTRC";
constexpr uint32_t oem_revision = 1, creator_revision = 1;

// Offsets common to all tables with the standard header (table 5.5).
constexpr size_t header_length_at = 4, header_checksum_at = 9;

void put(Bytes& out, uint64_t value, unsigned bytes) {
    for (unsigned i = 0; i < bytes; ++i)
        out.push_back(static_cast<uint8_t>(value >> 8 * i));
}

void put(Bytes& out, std::string_view text) {
    out.insert(out.end(), text.begin(), text.end());
}

void store(Bytes& out, size_t at, uint64_t value, unsigned bytes) {
    for (unsigned i = 0; i < bytes; ++i)
        out[at + i] = static_cast<uint8_t>(value >> 8 * i);
}

// Makes the first `length` bytes sum up to zero by the byte at `at`.
void fix_checksum(Bytes& table, size_t at, size_t length) {
    table[at] = 0;
    uint8_t sum = 0;
    for (size_t i = 0; i < length; ++i)
        sum = static_cast<uint8_t>(sum + table[i]);
    table[at] = static_cast<uint8_t>(-sum);
}

Bytes header(std::string_view signature, uint8_t revision) {
    Bytes out;
    put(out, signature);
    put(out, 0, 4); // length and checksum are finish()'s
    put(out, revision, 1);
    put(out, 0, 1);
    put(out, oem_id);
    put(out, oem_table_id);
    put(out, oem_revision, 4);
    put(out, creator_id);
    put(out, creator_revision, 4);
    return out;
}

Bytes finish(Bytes table) {
    store(table, header_length_at, table.size(), 4);
    fix_checksum(table, header_checksum_at, table.size());
    return table;
}

// Places tables one after the other in the area.
class Placer {
  public:
    explicit Placer(GuestMemory& memory) : memory_(memory) {}

    Result<Gpa> place(const Bytes& table, std::string_view what, uint64_t alignment = 16) {
        const Gpa at = (next_ + alignment - 1) & ~(alignment - 1);
        if (at + table.size() > platform::acpi_area_end)
            return fail("cannot write the ACPI tables: {} does not fit below {:#x}", what, platform::acpi_area_end);
        VTRACE_TRY(memory_.write(at, table));
        next_ = at + table.size();
        return at;
    }

  private:
    GuestMemory& memory_;
    Gpa next_ = platform::acpi_area_start;
};

// Table 5.2.
namespace Rsdp {
constexpr size_t size = 36, v1_size = 20, checksum_at = 8, extended_checksum_at = 32;
constexpr uint8_t revision = 2;
} // namespace Rsdp

Bytes rsdp(Gpa xsdt) {
    Bytes out;
    put(out, "RSD PTR ");
    put(out, 0, 1);
    put(out, oem_id);
    put(out, Rsdp::revision, 1);
    put(out, 0, 4); // no RSDT
    put(out, Rsdp::size, 4);
    put(out, xsdt, 8);
    put(out, 0, 1 + 3);
    fix_checksum(out, Rsdp::checksum_at, Rsdp::v1_size);
    fix_checksum(out, Rsdp::extended_checksum_at, Rsdp::size);
    return out;
}

// Table 5.12: without a global lock holder or waking vector, and all reserved.
Bytes facs() {
    constexpr size_t size = 64, length_at = 4, version_at = 32;
    Bytes out(size);
    std::copy_n("FACS", 4, out.begin());
    store(out, length_at, size, 4);
    store(out, version_at, 2, 1);
    return out;
}

// Table 5.9. Offsets of the fields that aren't zero.
namespace Fadt {
constexpr size_t size = 276;
enum Offset : size_t {
    FIRMWARE_CTRL = 36,
    DSDT = 40,
    Preferred_PM_Profile = 45,
    SCI_INT = 46,
    PM1a_EVT_BLK = 56,
    PM1a_CNT_BLK = 64,
    PM_TMR_BLK = 76,
    PM1_EVT_LEN = 88,
    PM1_CNT_LEN = 89,
    PM_TMR_LEN = 91,
    P_LVL2_LAT = 96,
    P_LVL3_LAT = 98,
    CENTURY = 108,
    IAPC_BOOT_ARCH = 109,
    Flags = 112,
    RESET_REG = 116,
    RESET_VALUE = 128,
    Minor_Version = 131,
    X_DSDT = 140,
    X_PM1a_EVT_BLK = 148,
    X_PM1a_CNT_BLK = 172,
    X_PM_TMR_BLK = 208,
    Hypervisor_Vendor_Identity = 268,
};
constexpr uint8_t revision = 6, minor_version = 4;
constexpr uint8_t profile_enterprise_server = 4;
constexpr uint16_t no_c2 = 101, no_c3 = 1001; // latencies that say so
// No 8042 flag: there is neither keyboard nor mouse behind the one we have, and a guest needn't look.
constexpr uint16_t legacy_devices = 1 << 0, vga_not_present = 1 << 2;
constexpr uint32_t wbinvd = 1 << 0, proc_c1 = 1 << 2, slp_button = 1 << 5, fix_rtc = 1 << 6, tmr_val_ext = 1 << 8,
                   reset_reg_sup = 1 << 10;
constexpr uint8_t reset_value = 0x06; // RST_CPU and SYS_RST of port 0xcf9
} // namespace Fadt

// Generic address structure (table 5.1) of an I/O port.
void store_port(Bytes& out, size_t at, uint16_t port, unsigned bytes) {
    constexpr uint8_t system_io = 1;
    const uint8_t access_size = bytes == 1 ? 1 : bytes == 2 ? 2 : 3;
    const uint8_t fields[] = {system_io, static_cast<uint8_t>(bytes * 8), 0, access_size};
    std::copy(std::begin(fields), std::end(fields), out.begin() + static_cast<ptrdiff_t>(at));
    store(out, at + sizeof fields, port, 8);
}

Bytes fadt(Gpa facs_at, Gpa dsdt_at) {
    using namespace Fadt;
    using namespace platform;
    Bytes out = header("FACP", revision);
    out.resize(size);
    store(out, FIRMWARE_CTRL, facs_at, 4);
    store(out, DSDT, dsdt_at, 4);
    store(out, Preferred_PM_Profile, profile_enterprise_server, 1);
    store(out, SCI_INT, Irq::sci, 2);
    store(out, PM1a_EVT_BLK, Port::acpi_pm1_event, 4);
    store(out, PM1a_CNT_BLK, Port::acpi_pm1_control, 4);
    store(out, PM_TMR_BLK, Port::acpi_pm_timer, 4);
    store(out, PM1_EVT_LEN, AcpiPm::event_length, 1);
    store(out, PM1_CNT_LEN, AcpiPm::control_length, 1);
    store(out, PM_TMR_LEN, AcpiPm::timer_length, 1);
    store(out, P_LVL2_LAT, no_c2, 2);
    store(out, P_LVL3_LAT, no_c3, 2);
    store(out, CENTURY, Rtc::century_register, 1);
    store(out, IAPC_BOOT_ARCH, legacy_devices | vga_not_present, 2);
    store(out, Flags, wbinvd | proc_c1 | slp_button | fix_rtc | tmr_val_ext | reset_reg_sup, 4);
    store_port(out, RESET_REG, Port::reset_control, 1);
    store(out, RESET_VALUE, reset_value, 1);
    store(out, Minor_Version, minor_version, 1);
    store(out, X_DSDT, dsdt_at, 8);
    store_port(out, X_PM1a_EVT_BLK, Port::acpi_pm1_event, AcpiPm::event_length);
    store_port(out, X_PM1a_CNT_BLK, Port::acpi_pm1_control, AcpiPm::control_length);
    store_port(out, X_PM_TMR_BLK, Port::acpi_pm_timer, AcpiPm::timer_length);
    std::copy_n("vtrace", 6, out.begin() + Hypervisor_Vendor_Identity);
    return finish(std::move(out));
}

// 5.2.12. The interrupt controller structures' types and flags.
namespace Madt {
constexpr uint8_t revision = 5;
constexpr uint32_t pcat_compat = 1 << 0;
enum Type : uint8_t { local_apic = 0, io_apic = 1, interrupt_source_override = 2, local_apic_nmi = 4 };
constexpr uint32_t cpu_enabled = 1 << 0;
constexpr uint16_t polarity_conforms = 0, polarity_high = 1, trigger_conforms = 0 << 2, trigger_level = 3 << 2;
constexpr uint8_t isa_bus = 0, all_processors = 0xff, lint1 = 1;
} // namespace Madt

Bytes madt(unsigned vcpus) {
    using namespace Madt;
    using namespace platform;
    Bytes out = header("APIC", revision);
    put(out, lapic_base, 4);
    put(out, pcat_compat, 4);
    for (unsigned i = 0; i < vcpus; ++i) {
        put(out, local_apic | 8 << 8, 2);
        put(out, i, 1); // processor UID
        put(out, i, 1); // APIC ID
        put(out, cpu_enabled, 4);
    }
    put(out, io_apic | 12 << 8, 2);
    put(out, 0, 1 + 1); // its ID
    put(out, ioapic_base, 4);
    put(out, 0, 4); // first GSI
    const auto override_source = [&out](unsigned irq, unsigned gsi, uint16_t flags) {
        put(out, interrupt_source_override | 10 << 8, 2);
        put(out, isa_bus, 1);
        put(out, irq, 1);
        put(out, gsi, 4);
        put(out, flags, 2);
    };
    override_source(Irq::timer, Irq::timer_gsi, polarity_conforms | trigger_conforms);
    override_source(Irq::sci, Irq::sci, polarity_high | trigger_level);
    put(out, local_apic_nmi | 6 << 8, 2);
    put(out, all_processors, 1);
    put(out, polarity_conforms | trigger_conforms, 2);
    put(out, lint1, 1);
    return finish(std::move(out));
}

} // namespace

Result<Gpa> write_acpi_tables(GuestMemory& memory, unsigned vcpus) {
    if (vcpus == 0 || vcpus > platform::max_vcpus)
        return fail("cannot write the ACPI tables: {} processors, must be 1 to {}", vcpus, platform::max_vcpus);
    Placer placer(memory);
    // The RSDP comes first in memory but is known last.
    auto rsdp_at = placer.place(rsdp(0), "RSDP");
    if (!rsdp_at)
        return rsdp_at;

    Bytes dsdt = header("DSDT", 2);
    const auto pci_start = static_cast<uint32_t>(GuestMemory::pci_hole_start);
    const aml::Term block = dsdt_definition_block(pci_start);
    dsdt.insert(dsdt.end(), block.begin(), block.end());
    const auto dsdt_at = placer.place(finish(std::move(dsdt)), "DSDT");
    if (!dsdt_at)
        return dsdt_at;
    constexpr uint64_t facs_alignment = 64;
    const auto facs_at = placer.place(facs(), "FACS", facs_alignment);
    if (!facs_at)
        return facs_at;
    const auto fadt_at = placer.place(fadt(*facs_at, *dsdt_at), "FADT");
    if (!fadt_at)
        return fadt_at;
    const auto madt_at = placer.place(madt(vcpus), "MADT");
    if (!madt_at)
        return madt_at;

    Bytes xsdt = header("XSDT", 1);
    put(xsdt, *fadt_at, 8);
    put(xsdt, *madt_at, 8);
    const auto xsdt_at = placer.place(finish(std::move(xsdt)), "XSDT");
    if (!xsdt_at)
        return xsdt_at;
    VTRACE_TRY(memory.write(*rsdp_at, rsdp(*xsdt_at)));
    return rsdp_at;
}

} // namespace vtrace
