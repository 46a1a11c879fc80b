// Event delivery through the IVT and the IDT (SDM vol. 3, chapter 6; vol. 2, INT n).
#include <fmt/format.h>

#include "vmm/soft/debug_register.h"
#include "vmm/soft/descriptor.h"
#include "vmm/soft/monitor.h"
#include "vmm/soft/stack_frame.h"
#include "vmm/soft/system.h"

namespace vtrace::soft {
namespace {

/// Error code bits (SDM vol. 3, 6.13).
constexpr uint32_t error_ext = 1, error_idt = 2;

/// Is the event external to the program, so that a fault in its delivery has EXT set? INT1 counts, INT n/INT3/INTO
/// don't.
uint32_t ext_bit(EventKind kind) {
    return kind == EventKind::software_interrupt ? 0 : error_ext;
}

bool is_software(EventKind kind) {
    return kind == EventKind::software_interrupt || kind == EventKind::privileged_software_exception;
}

/// RFLAGS as pushed: RF is set for faults so that their restart meets no instruction breakpoint (SDM vol. 3, 17.3.1.1).
uint64_t pushed_flags(const Cpu& cpu, EventKind kind, uint8_t vector) {
    uint64_t flags = cpu.rflags();
    if (kind != EventKind::exception)
        return flags;
    switch (vector) {
    case Vector::db: // a fault only as general detect, whose marks are still there, and as instruction breakpoint: not
                     // set
        return (cpu.dr6 & Dr6::bd) && (cpu.dr7 & Dr7::gd) ? flags | Rflags::rf : flags;
    case Vector::bp:
    case Vector::of:
    case Vector::df:
    case Vector::mc:
        return flags;
    default:
        return flags | Rflags::rf;
    }
}

/// Where an event goes, once all that can fail has been checked.
struct Target {
    Descriptor code;
    uint16_t selector;
    uint64_t offset;
    unsigned level;        // the new CPL
    bool masks_interrupts; // interrupt gate, not trap gate
    bool change_stack;     // SS too
    Segment stack_segment; // with change_stack
};

struct Delivery {
    Cpu& cpu;
    EventKind kind;
    const Fault& event;

    uint32_t ext() const { return ext_bit(kind); }
    bool run();

  private:
    bool real_mode();
    bool read_gate(Descriptor& gate);
    bool read_target(const Descriptor& gate, Target& target);
    bool through_legacy_gate(const Descriptor& gate, Target& target);
    bool through_gate64(const Descriptor& gate, Target& target);
    bool push_frame(StackFrame& frame, const Target& target, unsigned size, bool with_stack);
    void enter(const Target& target, uint64_t rsp);
    void finish();
};

bool Delivery::run() {
    if (kind == EventKind::exception && event.vector == Vector::pf)
        cpu.cr2 = event.cr2;
    if (!(cpu.cr0 & Cr0::pe))
        return real_mode();
    Descriptor gate;
    Target target;
    if (!read_gate(gate) || !read_target(gate, target))
        return false;
    return cpu.long_mode() ? through_gate64(gate, target) : through_legacy_gate(gate, target);
}

/// SDM vol. 3, 20.1.4: the IVT's entries are far pointers of four bytes; no error codes.
bool Delivery::real_mode() {
    const unsigned entry = event.vector * 4u;
    if (entry + 3 > cpu.idtr.limit)
        return set_fault(cpu, Vector::gp, 0);
    uint16_t ip = 0, cs = 0;
    const uint64_t address = linear_address(cpu, cpu.idtr.base, entry);
    if (!cpu.system_read(address, ip) || !cpu.system_read(address + 2, cs))
        return false;

    StackFrame frame(cpu, false, cpu.segments[SS], cpu.gpr[RSP], 0, 0);
    if (!frame.push(cpu.rflags(), 2) || !frame.push(cpu.segments[CS].selector, 2) || !frame.push(cpu.rip, 2))
        return false;
    if (ip > cpu.segments[CS].limit)
        return set_fault(cpu, Vector::gp, 0);
    if (!frame.commit())
        return false;

    cpu.gpr[RSP] = frame.rsp();
    cpu.set_rflags(cpu.rflags() & ~(Rflags::if_ | Rflags::tf | Rflags::ac | Rflags::rf));
    Segment code = cpu.segments[CS];
    code.selector = cs;
    code.base = uint64_t{cs} << 4;
    cpu.rip = ip;
    set_code_segment(cpu, code, 0);
    finish();
    return true;
}

/// The IDT's entry and the checks on the gate itself. #GP, #NP with the vector in the error code.
bool Delivery::read_gate(Descriptor& gate) {
    const bool long_mode = cpu.long_mode();
    const unsigned size = long_mode ? 16 : 8;
    const uint32_t code = event.vector * 8u | error_idt | ext();
    if (event.vector * size + size - 1 > cpu.idtr.limit)
        return set_fault(cpu, Vector::gp, code);
    gate.address = linear_address(cpu, cpu.idtr.base, event.vector * size);
    if (!cpu.system_read(gate.address, gate.low) || (long_mode && !cpu.system_read(gate.address + 8, gate.high)))
        return false;

    using namespace SystemType;
    const unsigned type = gate.type();
    const bool wide = type == interrupt_gate32 || type == trap_gate32;
    const bool narrow = type == interrupt_gate16 || type == trap_gate16;
    if (gate.s() || !(wide || (!long_mode && (narrow || type == task_gate))))
        return set_fault(cpu, Vector::gp, code);
    if (kind == EventKind::software_interrupt && gate.dpl() < cpu.cpl)
        return set_fault(cpu, Vector::gp, code);
    if (!gate.present())
        return set_fault(cpu, Vector::np, code);
    if (type == task_gate)
        return set_unsupported(cpu, fmt::format("vector {} goes through a task gate, at {:#x}:{:#x}; hardware task "
                                                "switches are not implemented",
                                                event.vector, cpu.segments[CS].selector, cpu.rip));
    return true;
}

/// The handler's code segment and, with it, the privilege level.
bool Delivery::read_target(const Descriptor& gate, Target& target) {
    target.selector = gate.gate_selector();
    if (is_null(target.selector))
        return set_fault(cpu, Vector::gp, ext());
    Descriptor& code = target.code;
    if (!read_descriptor(cpu, target.selector, Vector::gp, ext(), code))
        return false;
    const uint32_t selector_code = selector_error(target.selector, ext());
    if (!code.is_code() || code.dpl() > cpu.cpl)
        return set_fault(cpu, Vector::gp, selector_code);
    if (cpu.long_mode() && (!code.l() || code.db()))
        return set_fault(cpu, Vector::gp, selector_code);
    if (!code.present())
        return set_fault(cpu, Vector::np, selector_code);
    target.level = code.conforming() ? cpu.cpl : code.dpl();
    target.masks_interrupts = !(gate.type() & 1);
    target.offset = gate.gate_offset();
    return true;
}

bool Delivery::push_frame(StackFrame& frame, const Target& target, unsigned size, bool with_stack) {
    if (with_stack && (!frame.push(cpu.segments[SS].selector, size) || !frame.push(cpu.gpr[RSP], size)))
        return false;
    if (!frame.push(pushed_flags(cpu, kind, event.vector), size) || !frame.push(cpu.segments[CS].selector, size) ||
        !frame.push(cpu.rip, size) || (event.has_error_code && !frame.push(event.error_code, size)))
        return false;
    return check_code_offset(cpu, target.code, target.offset, ext());
}

/// 16- and 32-bit gates (SDM vol. 3, 6.12.1).
bool Delivery::through_legacy_gate(const Descriptor& gate, Target& target) {
    const bool wide = gate.type() & 8;
    const unsigned size = wide ? 4 : 2;
    if (!wide)
        target.offset &= 0xffff;
    target.change_stack = target.level < cpu.cpl;
    uint64_t rsp = cpu.gpr[RSP];
    Descriptor stack;
    if (target.change_stack) {
        uint16_t ss = 0;
        uint32_t esp = 0;
        if (!read_tss_stack(cpu, target.level, ext(), ss, esp) ||
            !read_inner_stack_segment(cpu, ss, target.level, ext(), stack))
            return false;
        target.stack_segment = stack.segment(ss);
        rsp = esp;
    }
    const Segment& ss = target.change_stack ? target.stack_segment : cpu.segments[SS];
    const uint32_t stack_code = target.change_stack ? selector_error(ss.selector, ext()) : ext();
    StackFrame frame(cpu, false, ss, rsp, target.level, stack_code);
    if (!push_frame(frame, target, size, target.change_stack))
        return false;
    if (!mark_accessed(cpu, target.code) || (target.change_stack && !mark_accessed(cpu, stack)) || !frame.commit())
        return false;
    target.stack_segment.attributes |= SegAttr::accessed;
    enter(target, frame.rsp());
    return true;
}

/// 64-bit gates (SDM vol. 3, 6.14): SS and RSP are always pushed, on a stack that is aligned to 16 bytes.
bool Delivery::through_gate64(const Descriptor& gate, Target& target) {
    const bool inner = target.level < cpu.cpl;
    target.change_stack = inner;
    target.stack_segment = null_stack_segment(target.level);
    uint64_t rsp = cpu.gpr[RSP];
    if (gate.gate_ist()) {
        if (!read_tss64_pointer(cpu, tss64_ist_offset(gate.gate_ist()), ext(), rsp))
            return false;
    } else if (inner) {
        if (!read_tss64_pointer(cpu, tss64_rsp_offset(target.level), ext(), rsp))
            return false;
    }
    StackFrame frame(cpu, true, cpu.segments[SS], rsp & ~15ull, target.level, ext());
    if (!push_frame(frame, target, 8, true) || !mark_accessed(cpu, target.code) || !frame.commit())
        return false;
    enter(target, frame.rsp());
    return true;
}

void Delivery::enter(const Target& target, uint64_t rsp) {
    cpu.gpr[RSP] = rsp;
    if (target.change_stack)
        cpu.segments[SS] = target.stack_segment;
    uint64_t cleared = Rflags::tf | Rflags::nt | Rflags::rf | Rflags::vm;
    if (target.masks_interrupts)
        cleared |= Rflags::if_;
    Segment code = target.code.segment(static_cast<uint16_t>((target.selector & ~3u) | target.level));
    cpu.rip = target.offset;
    set_code_segment(cpu, code, target.level);
    cpu.set_rflags(cpu.rflags() & ~cleared);
    finish();
}

void Delivery::finish() {
    cpu.shadow = InterruptShadow::none;
    cpu.activity = ActivityState::running;
    if (kind == EventKind::nmi)
        cpu.nmi_blocked = true;
    // SDM vol. 3, 17.2.4: on entry to the debug handler general detect is lifted.
    const bool debug = event.vector == Vector::db && kind != EventKind::software_interrupt;
    if (debug && (cpu.dr7 & Dr7::gd))
        cpu.dr7 &= ~Dr7::gd;
    if (debug && cpu.monitor)
        cpu.monitor->facility().on_debug_exception();
}

// ---------------------------------------------------------------------------------------------------------------------
// Faults in the delivery of events (SDM vol. 3, 6.15, interrupt 8)

enum class FaultClass { benign, contributory, page_fault, double_fault };

FaultClass classify(EventKind kind, uint8_t vector) {
    if (kind != EventKind::exception)
        return FaultClass::benign;
    switch (vector) {
    case Vector::de:
    case Vector::ts:
    case Vector::np:
    case Vector::ss:
    case Vector::gp:
        return FaultClass::contributory;
    case Vector::pf:
        return FaultClass::page_fault;
    case Vector::df:
        return FaultClass::double_fault;
    default:
        return FaultClass::benign;
    }
}

/// Table 6-5. `first` isn't a double fault.
bool makes_double_fault(FaultClass first, FaultClass second) {
    if (first == FaultClass::contributory)
        return second == FaultClass::contributory;
    return first == FaultClass::page_fault && (second == FaultClass::contributory || second == FaultClass::page_fault);
}

std::string describe(EventKind kind, const Fault& event) {
    static constexpr const char* names[] = {"#DE", "#DB", "NMI", "#BP", "#OF", "#BR",   "#UD", "#NM", "#DF", nullptr,
                                            "#TS", "#NP", "#SS", "#GP", "#PF", nullptr, "#MF", "#AC", "#MC", "#XM"};
    if (kind == EventKind::external_interrupt)
        return fmt::format("interrupt {:#x}", event.vector);
    if (kind == EventKind::nmi)
        return "NMI";
    if (is_software(kind))
        return fmt::format("INT {:#x}", event.vector);
    std::string text = event.vector < std::size(names) && names[event.vector] ? names[event.vector]
                                                                              : fmt::format("vector {}", event.vector);
    if (event.has_error_code)
        text += fmt::format("({:#x})", event.error_code);
    if (event.vector == Vector::pf)
        text += fmt::format(" at {:#x}", event.cr2);
    return text;
}

uint64_t record_flags(EventKind kind, const Fault& event) {
    switch (kind) {
    case EventKind::external_interrupt:
    case EventKind::nmi:
        return ds::BtsFlags::make(ds::BtsKind::interrupt, event.vector);
    case EventKind::exception:
        return ds::BtsFlags::make(ds::BtsKind::exception, event.vector, event.has_error_code ? event.error_code : 0);
    default:
        return ds::BtsFlags::make(ds::BtsKind::branch);
    }
}

/// One attempt, recorded if it succeeds. False: Cpu::fault, or Cpu::leave is Leave::unsupported.
bool attempt(Cpu& cpu, EventKind kind, const Fault& event, uint64_t from_linear) {
    begin_transfer(cpu);
    if (!Delivery{cpu, kind, event}.run())
        return false;
    cpu.record(from_linear, cpu.code_linear(cpu.rip), record_flags(kind, event));
    return true;
}

} // namespace

bool deliver_event(Cpu& cpu, EventKind kind, const Fault& event, uint64_t from_linear) {
    Fault current = event;
    std::string chain;
    while (!attempt(cpu, kind, current, from_linear)) {
        if (cpu.leave == Leave::unsupported)
            return false;
        chain += (chain.empty() ? "" : ", then ") + describe(kind, current);
        const Fault second = cpu.fault;
        const FaultClass first_class = classify(kind, current.vector);
        const FaultClass second_class = classify(EventKind::exception, second.vector);
        if (second.vector == Vector::pf)
            cpu.cr2 = second.cr2;
        if (first_class == FaultClass::double_fault) {
            cpu.activity = ActivityState::shutdown;
            cpu.leave = Leave::shutdown;
            cpu.detail = fmt::format("at {:#x}:{:#x}: {}, then {}", cpu.segments[CS].selector, cpu.rip,
                                     chain, describe(EventKind::exception, second));
            return false;
        }
        if (makes_double_fault(first_class, second_class)) {
            chain += ", then " + describe(EventKind::exception, second);
            current = Fault{Vector::df, true, 0, 0};
        } else {
            current = second;
        }
        kind = EventKind::exception;
    }
    cpu.leave = Leave::boundary;
    return true;
}

const Op* software_interrupt(Cpu& cpu, const Op* op, uint8_t vector, EventKind kind) {
    // A fault in the delivery is the instruction's own: it hasn't retired then.
    const uint64_t from = cpu.code_linear(cpu.op_rip(op));
    cpu.rip = cpu.next_rip(op);
    if (!attempt(cpu, kind, Fault{vector, false, 0, 0}, from))
        return failed_transfer(cpu, op);
    cpu.no_step_trap = true; // delivery has cleared TF, and what it was doesn't count
    return cpu.leave_at(cpu.rip, Leave::boundary);
}

} // namespace vtrace::soft
