// A local APIC with its timer (SDM vol. 3, chapter 10): xAPIC by a page of memory, x2APIC by MSRs.
//
// It is of the Pentium 4/Xeon kind (version 0x14) with six local vectors. Not there: CMCI, suppression of EOI
// broadcasts, focus processor checking, arbitration priority (reads as an illegal register), SMIs (ignored: there is no
// SMM). One per vCPU, all on the machine's thread.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <optional>

#include "vmm/clock.h"
#include "vmm/devices/apic_message.h"
#include "vmm/devices/platform.h"
#include "vmm/guest_memory.h"

namespace vtrace {

class ApicBus;

/// Offsets of the registers in the xAPIC page (SDM vol. 3, table 10-1); MSR 0x800 + offset / 16 in x2APIC mode.
namespace ApicReg {
inline constexpr unsigned id = 0x20, version = 0x30, tpr = 0x80, ppr = 0xa0, eoi = 0xb0, ldr = 0xd0, dfr = 0xe0,
                          svr = 0xf0, isr = 0x100, tmr = 0x180, irr = 0x200, esr = 0x280, icr_low = 0x300,
                          icr_high = 0x310, lvt_timer = 0x320, lvt_thermal = 0x330, lvt_pc = 0x340, lvt_lint0 = 0x350,
                          lvt_lint1 = 0x360, lvt_error = 0x370, initial_count = 0x380, current_count = 0x390,
                          divide = 0x3e0, self_ipi = 0x3f0;
}
namespace ApicMsr {
inline constexpr uint32_t apic_base = 0x1b, tsc_deadline = 0x6e0, x2apic_first = 0x800, x2apic_last = 0x8ff;
}
/// Bits of IA32_APIC_BASE (SDM vol. 3, 10.4.4 and 10.12.1).
namespace ApicBase {
inline constexpr uint64_t bsp = 1 << 8, extd = 1 << 10, en = 1 << 11;
}

class Lapic {
  public:
    struct Wiring {
        ApicBus* bus;                        // must outlive the APIC
        std::function<uint8_t()> pic_vector; // the INTA cycle to the 8259A
        std::function<void()> init; // an INIT arrived: the processor resets, and waits for a SIPI if it's not the BSP
        std::function<void(uint8_t)> startup; // a SIPI with this vector arrived; matters only to one that waits for it
        unsigned physical_address_bits = 46;  // as CPUID leaf 80000008H says
    };

    /// `id` is the initial (x2)APIC ID; ID 0 is the bootstrap processor.
    Lapic(Clock& clock, uint32_t id, Wiring wiring);
    Lapic(const Lapic&) = delete;
    Lapic& operator=(const Lapic&) = delete;

    // --- What the processor sees; as in CpuPins.

    bool interrupt_pending() const { return interrupt_pending_; }
    uint8_t acknowledge_interrupt();
    bool nmi_pending() const { return state_.nmi_pending; }
    void acknowledge_nmi() { state_.nmi_pending = false; }
    uint8_t read_cr8() const { return state_.tpr >> 4; }
    void write_cr8(uint8_t priority) { set_tpr(static_cast<uint8_t>(priority << 4)); }

    /// IA32_APIC_BASE, IA32_TSC_DEADLINE and the x2APIC range; nullopt and false are #GP(0) (SDM vol. 3, 10.12.1.3).
    std::optional<uint64_t> read_msr(uint32_t msr);
    bool write_msr(uint32_t msr, uint64_t value);

    /// The register page is at this address, for this processor only, and while the APIC is in xAPIC mode.
    bool owns(Gpa gpa) const { return xapic_mode() && (gpa & ~page_mask) == page(); }
    uint64_t mmio_read(Gpa gpa, unsigned size);
    void mmio_write(Gpa gpa, unsigned size, uint64_t value);

    /// TSC minus virtual time, when the guest has written its TSC: TSC deadlines are compared with the TSC.
    void set_tsc_offset(uint64_t offset);

    // --- The other pins.

    /// A counter overflow or Debug Store threshold: raises the interrupt of LVT PC, and sets its mask bit (10.5.1).
    void deliver_pmi();
    /// LINT0: the 8259A's INT output.
    void set_lint0(bool level);
    /// LINT1: the PC's NMI line; a pulse.
    void pulse_lint1();
    /// RESET of the processor. An INIT, which comes as a message, keeps the ID and IA32_APIC_BASE.
    void reset();
    /// Virtual wire mode, as firmware leaves the bootstrap processor (MultiProcessor Specification 1.4, 3.6.2.2):
    /// enabled, the PIC's interrupts through LINT0, NMIs through LINT1.
    void set_up_virtual_wire();

    // --- The bus.

    uint32_t id() const { return state_.id; }
    bool bsp() const { return state_.apic_base & ApicBase::bsp; }
    /// Whether a message reaches this APIC (10.6.2, 10.12.10).
    bool matches(const ApicMessage& message) const;
    /// Takes the message; false if a disabled APIC dropped it.
    bool accept(const ApicMessage& message);
    /// Takes part in lowest-priority arbitration.
    bool accepts_fixed() const { return enabled() && software_enabled(); }
    uint8_t processor_priority() const;

  private:
    enum Lvt : unsigned { timer, thermal, pc, lint0, lint1, error, lvt_count };
    using Bitmap = std::array<uint32_t, 8>; // 256 vectors

    struct State {
        uint32_t id = 0;
        uint64_t apic_base = 0;
        uint8_t tpr = 0;
        uint32_t ldr = 0, dfr = 0xffff'ffff, svr = 0xff;
        Bitmap isr{}, tmr{}, irr{};
        uint32_t esr = 0, errors = 0; // as read; collected since the last write
        uint64_t icr = 0;
        std::array<uint32_t, lvt_count> lvt{};
        bool nmi_pending = false;
        bool lint0_level = false, ext_int_message = false;

        uint32_t initial_count = 0;
        uint32_t divide_configuration = 0;
        VirtualTime timer_start = 0; // when the counter held initial_count
        uint64_t tsc_deadline = 0;   // 0: not armed
        uint64_t tsc_offset = 0;
    };

    bool enabled() const { return state_.apic_base & ApicBase::en; }
    bool x2apic_mode() const {
        return (state_.apic_base & (ApicBase::en | ApicBase::extd)) == (ApicBase::en | ApicBase::extd);
    }
    bool xapic_mode() const { return (state_.apic_base & (ApicBase::en | ApicBase::extd)) == ApicBase::en; }
    bool software_enabled() const;
    Gpa page() const { return state_.apic_base & page_base_mask(); }
    uint64_t page_base_mask() const;

    // lapic.cc: interrupts
    void clear_registers();
    void update_pending();
    bool ext_int_pending() const;
    void set_tpr(uint8_t value);
    bool accept_vector(uint8_t vector, bool level_triggered);
    bool deliver_local(Lvt entry);
    void sample_lint0();
    void report_error(uint32_t error);
    void end_of_interrupt();
    void send_ipi(uint64_t icr);

    // lapic_registers.cc: access by memory and by MSR
    bool set_apic_base(uint64_t value);
    std::optional<uint32_t> read_register(unsigned offset);
    bool write_register(unsigned offset, uint32_t value);
    void write_svr(uint32_t value);
    void write_lvt(Lvt entry, uint32_t value);
    static std::optional<Lvt> lvt_at(unsigned offset);
    static uint32_t lvt_valid(Lvt entry);
    std::optional<uint64_t> read_x2apic(uint32_t msr);
    bool write_x2apic(uint32_t msr, uint64_t value);

    // lapic_timer.cc
    uint32_t timer_mode() const;
    VirtualTime tick_length() const;
    uint32_t current_count() const;
    void write_initial_count(uint32_t value);
    void write_divide(uint32_t value);
    void write_tsc_deadline(uint64_t value);
    void timer_lvt_changed(uint32_t before);
    void arm_timer();
    void timer_fired();

    Clock& clock_;
    Wiring wiring_;
    Clock::Handle timer_event_;
    State state_;
    bool interrupt_pending_ = false; // cache: update_pending() after each change of what it depends on
};

} // namespace vtrace
