// The privileged side of the processor: events, segments, control registers, MSRs. Slow paths all.
#pragma once

#include <cstdint>
#include <optional>

#include "vmm/soft/cpu.h"

namespace vtrace::soft {

// --- exceptions.cc ---------------------------------------------------------------------------------------------------

enum class EventKind : uint8_t { external_interrupt, nmi, exception, software_interrupt, privileged_software_exception };

/// Delivers an event through the IVT or IDT at the current boundary (cpu.rip = return address: the faulting instruction
/// for a fault, the next one for a trap, INT n or an interrupt), with the nested-fault rules of SDM vol. 3, table 6-5, and
/// appends the record: `from_linear` -> handler (kind interrupt, exception, or branch for INT n/INT3/INTO/INT1).
/// False on a triple fault: cpu.leave is Leave::shutdown and cpu.detail names the vectors.
bool deliver_event(Cpu& cpu, EventKind kind, const Fault& event, uint64_t from_linear);

// --- segments.cc -----------------------------------------------------------------------------------------------------
// All return nullptr after raise()/leave_at(), i.e. they are the tail of a block-ending handler; RIP, CS, CPL changed and
// recorded when they succeed. `op` is the instruction.

const Op* far_jump(Cpu& cpu, const Op* op, uint16_t selector, uint64_t offset);
const Op* far_call(Cpu& cpu, const Op* op, uint16_t selector, uint64_t offset, unsigned operand_size);
const Op* far_return(Cpu& cpu, const Op* op, unsigned operand_size, unsigned extra_bytes);
const Op* interrupt_return(Cpu& cpu, const Op* op, unsigned operand_size);
const Op* software_interrupt(Cpu& cpu, const Op* op, uint8_t vector, EventKind kind);

/// MOV/POP/LxS to a data, stack or system segment register outside of far transfers. False: raised on `op`.
bool load_segment(Cpu& cpu, const Op* op, Seg seg, uint16_t selector);

/// Sets CS-dependent mode, CPL and everything cached from them (calls cpu.update_mode()).
void set_code_segment(Cpu& cpu, const Segment& cs, unsigned cpl);

// --- msr.cc, cpuid.cc ------------------------------------------------------------------------------------------------

std::optional<uint64_t> read_msr(Cpu& cpu, const Op* op, uint32_t msr); // nullopt: #GP
bool write_msr(Cpu& cpu, const Op* op, uint32_t msr, uint64_t value);   // false: #GP

// --- debug.cc --------------------------------------------------------------------------------------------------------

/// Code breakpoints armed in DR7 that match linear address `rip` (DR6 bits), 0 if none; ignores RFLAGS.RF (caller's).
uint64_t code_breakpoints(const Cpu& cpu, uint64_t linear);
/// Data breakpoints that [linear, +size) meets; the MMU's slow path adds them to cpu.pending_db.
uint64_t data_breakpoints(const Cpu& cpu, uint64_t linear, unsigned size, bool write);
/// Some data breakpoint is armed in the page of `linear`: it must never be in the TLB.
bool page_watched(const Cpu& cpu, uint64_t linear);

// --- control_io.cc ---------------------------------------------------------------------------------------------------

/// May the instruction access ports [port, +size)? By IOPL and the TSS's bitmap. False: #GP(0) or #PF raised on `op`.
bool io_allowed(Cpu& cpu, const Op* op, uint16_t port, unsigned size);

// The handlers of system instructions: system_handlers.h.

} // namespace vtrace::soft
