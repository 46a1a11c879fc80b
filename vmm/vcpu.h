// Vcpu: one virtual CPU, whichever engine executes it. And CpuPins: what a processor sees of the machine around it.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "vmm/clock.h"
#include "vmm/cpu_state.h"
#include "vmm/guest_memory.h"

namespace vtrace {

/// The machine as one processor's pins and local APIC show it. Implemented by the machine, one for each vCPU; the engine
/// calls it on the machine's thread, with Clock::now() exact for port, memory, APIC and MSR accesses.
class CpuPins {
  public:
    virtual ~CpuPins() = default;

    virtual uint32_t io_read(uint16_t port, unsigned size) = 0; // size 1, 2, 4
    virtual void io_write(uint16_t port, unsigned size, uint32_t value) = 0;
    /// Physical addresses that are not RAM; size 1, 2, 4, 8; never crosses a page. The local APIC's page is here too.
    virtual uint64_t mmio_read(Gpa gpa, unsigned size) = 0;
    virtual void mmio_write(Gpa gpa, unsigned size, uint64_t value) = 0;

    /// A maskable interrupt waits that the APIC's priorities let through (RFLAGS.IF is the engine's business). Cheap:
    /// the engine asks at every boundary where the answer may have changed.
    virtual bool interrupt_pending() const = 0;
    /// Acknowledges it: moves it from IRR to ISR, or takes the vector from the PIC. Only when interrupt_pending().
    virtual uint8_t acknowledge_interrupt() = 0;
    virtual bool nmi_pending() const = 0;
    virtual void acknowledge_nmi() = 0;

    /// A performance monitoring interrupt, of counters or Debug Store: LVT PC says what becomes of it.
    virtual void raise_pmi() = 0;

    /// CR8, the APIC's task priority, 0..15.
    virtual uint8_t read_cr8() const = 0;
    virtual void write_cr8(uint8_t priority) = 0;

    /// The APIC's MSRs: IA32_APIC_BASE (0x1b), IA32_TSC_DEADLINE (0x6e0), x2APIC (0x800-0x8ff). nullopt / false: #GP.
    virtual std::optional<uint64_t> read_apic_msr(uint32_t msr) = 0;
    virtual bool write_apic_msr(uint32_t msr, uint64_t value) = 0;
};

/// Why Vcpu::run() came back.
enum class VcpuExit : uint8_t {
    budget,      // the budget is used up exactly
    device,      // the guest touched a device, port or APIC: timers may have changed; run again
    halted,      // HLT, with nothing pending that would wake it
    shutdown,    // triple fault: the guest's fault, `detail` has the vectors
    stopped,     // request_stop() was called
    breakpoint,  // an address of set_breakpoints() is at RIP, not yet executed: the next run() passes it
    unsupported, // the guest asks for something that this engine does not do; `detail` says what and where
};

struct VcpuRun {
    VcpuExit exit;
    uint64_t retired = 0; // instructions retired in this call; a REP instruction counts one, an interrupt delivery none
    std::string detail;
};

class Vcpu {
  public:
    virtual ~Vcpu() = default;

    virtual CpuState state() const = 0;
    virtual void set_state(const CpuState& state) = 0;

    /// Executes at most `budget` instructions from the current boundary. Delivers pending interrupts first.
    virtual VcpuRun run(uint64_t budget) = 0;

    /// Makes run() return `stopped` at a near instruction boundary. The only call for other threads and signal handlers.
    virtual void request_stop() = 0;

    /// Linear addresses before whose execution run() returns `breakpoint`; none by default. The guest sees nothing of it.
    virtual void set_breakpoints(std::span<const Gva> addresses) = 0;
    /// RFLAGS.IF: a halted processor could be woken by an interrupt.
    virtual bool interrupts_allowed() const = 0;

    /// Translates as a data read by the supervisor would, without side effects (no A bits, no faults).
    virtual std::optional<Gpa> translate(Gva address) const = 0;
};

} // namespace vtrace
