// Descriptors, gates and the tables that they lie in (SDM vol. 3, 3.4.5, 5.8.3, 6.11, 7.2): what segment loads, far
// transfers and event delivery have in common.
//
// A function here that fails has set Cpu::fault, or Cpu::leave and Cpu::detail for what the engine doesn't do; nothing
// of the processor's state has changed then, and the caller decides whose fault it becomes. See begin_transfer().
#pragma once

#include <cstdint>
#include <string>

#include "vmm/soft/cpu.h"

namespace vtrace::soft {

/// Types of system descriptors (SDM vol. 3, table 3-2). In IA-32e mode only ldt, the 32-bit TSS types and the 32-bit
/// gates exist, and mean their 64-bit forms.
namespace SystemType {
inline constexpr unsigned tss16_available = 1, ldt = 2, tss16_busy = 3, call_gate16 = 4, task_gate = 5,
                          interrupt_gate16 = 6, trap_gate16 = 7, tss32_available = 9, tss32_busy = 11, call_gate32 = 12,
                          interrupt_gate32 = 14, trap_gate32 = 15;
}

/// Eight bytes of a descriptor table, and the upper eight of a 16-byte entry.
struct Descriptor {
    uint64_t low = 0, high = 0;
    uint64_t address = 0; // linear, of the low half

    unsigned type() const { return low >> 40 & 15; }
    bool s() const { return low >> 44 & 1; }
    unsigned dpl() const { return low >> 45 & 3; }
    bool present() const { return low >> 47 & 1; }
    bool l() const { return low >> 53 & 1; }
    bool db() const { return low >> 54 & 1; }
    bool is_code() const { return s() && (type() & SegAttr::code); }
    bool is_data() const { return s() && !(type() & SegAttr::code); }
    bool conforming() const { return is_code() && (type() & SegAttr::conforming_or_down); }
    bool readable() const { return s() && (!is_code() || (type() & SegAttr::write_or_read)); }
    bool writable() const { return is_data() && (type() & SegAttr::write_or_read); }
    bool accessed() const { return type() & SegAttr::accessed; }
    uint32_t limit() const {
        uint32_t value = (low & 0xffff) | (low >> 32 & 0xf0000);
        return low >> 55 & 1 ? value << 12 | 0xfff : value;
    }
    /// Segments: 32 bits. System descriptors of 16 bytes: 64 bits.
    uint64_t base() const { return (low >> 16 & 0xffffff) | (low >> 32 & 0xff000000) | (high & 0xffffffff) << 32; }

    // Gates.
    uint16_t gate_selector() const { return static_cast<uint16_t>(low >> 16); }
    uint64_t gate_offset() const { return (low & 0xffff) | (low >> 32 & 0xffff0000) | (high & 0xffffffff) << 32; }
    unsigned gate_ist() const { return low >> 32 & 7; }
    unsigned gate_parameters() const { return low >> 32 & 31; }

    Segment segment(uint16_t selector) const {
        return {base(), limit(), selector, static_cast<uint16_t>(low >> 40 & 0xf0ff)};
    }
};

inline bool is_null(uint16_t selector) {
    return !(selector & 0xfffc);
}
inline unsigned rpl(uint16_t selector) {
    return selector & 3;
}
/// The selector as an error code: RPL cleared, EXT in its place.
inline uint32_t selector_error(uint16_t selector, uint32_t ext = 0) {
    return (selector & 0xfffcu) | ext;
}

/// What a failed function below means unless it says otherwise: a fault.
inline void begin_transfer(Cpu& cpu) {
    cpu.leave = Leave::fault;
}
/// The tail of a handler whose transfer has failed.
inline const Op* failed_transfer(Cpu& cpu, const Op* op) {
    return cpu.leave_before(op, cpu.leave);
}

inline bool set_fault(Cpu& cpu, uint8_t vector, uint32_t error_code) {
    cpu.fault = {vector, true, error_code, 0};
    return false;
}
bool set_unsupported(Cpu& cpu, std::string detail);

/// A linear address as the current mode forms it.
inline uint64_t linear_address(const Cpu& cpu, uint64_t base, uint64_t offset) {
    return cpu.long_mode() ? base + offset : static_cast<uint32_t>(base + offset);
}

/// Reads the 8-byte descriptor that a selector (not null) names; outside of its table: `vector` with the selector.
bool read_descriptor(Cpu& cpu, uint16_t selector, uint8_t vector, uint32_t ext, Descriptor& descriptor);
/// Completes it to the 16 bytes that LDT, TSS and call gates have in IA-32e mode: limit and upper type field checked.
bool read_upper_half(Cpu& cpu, uint16_t selector, uint8_t vector, uint32_t ext, Descriptor& descriptor);
/// Sets the accessed bit in memory and in `descriptor` (SDM vol. 3, 3.4.5.1).
bool mark_accessed(Cpu& cpu, Descriptor& descriptor);

/// The checks on a code segment's descriptor beside privilege: code, L and D not both in IA-32e mode. #GP(selector).
bool check_code_type(Cpu& cpu, const Descriptor& code, uint16_t selector, uint32_t ext = 0);
/// Is `offset` within the code segment, or canonical if that is 64-bit code? #GP(ext).
bool check_code_offset(Cpu& cpu, const Descriptor& code, uint64_t offset, uint32_t ext = 0);
inline bool is_code64(const Cpu& cpu, const Descriptor& code) {
    return cpu.long_mode() && code.l();
}

/// SS:(E)SP of a privilege level from the TSS, 16- or 32-bit as its type says (SDM vol. 3, 7.2.1). #TS(TR).
bool read_tss_stack(Cpu& cpu, unsigned level, uint32_t ext, uint16_t& ss, uint32_t& esp);
/// A stack pointer of the 64-bit TSS by byte offset: RSP0..2 at 4, IST1..7 at 36 (SDM vol. 3, 7.7). #TS(TR).
bool read_tss64_pointer(Cpu& cpu, unsigned offset, uint32_t ext, uint64_t& rsp);
inline unsigned tss64_rsp_offset(unsigned level) {
    return 4 + 8 * level;
}
inline unsigned tss64_ist_offset(unsigned ist) {
    return 36 + 8 * (ist - 1);
}

/// Reads and checks the stack segment that a change to the inner `level` takes from the TSS: #TS, #SS.
bool read_inner_stack_segment(Cpu& cpu, uint16_t selector, unsigned level, uint32_t ext, Descriptor& descriptor);
/// SS after a change of CPL in IA-32e mode: null, usable in 64-bit mode only.
inline Segment null_stack_segment(unsigned level) {
    return {0, 0, static_cast<uint16_t>(level), static_cast<uint16_t>(level << SegAttr::dpl_shift)};
}

} // namespace vtrace::soft
