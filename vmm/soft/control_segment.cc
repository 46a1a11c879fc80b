// Instructions on segment registers and on descriptors that aren't loaded (SDM vol. 2; vol. 3, 5.10).
#include "vmm/soft/descriptor.h"
#include "vmm/soft/stack_frame.h"
#include "vmm/soft/system.h"
#include "vmm/soft/system_handlers.h"
#include "vmm/soft/system_operand.h"

namespace vtrace::soft {
namespace {

void set_zf(Cpu& cpu, bool value) {
    const uint64_t flags = cpu.flags.get();
    cpu.flags.set(value ? flags | Rflags::zf : flags & ~Rflags::zf);
}

bool protected_mode(Cpu& cpu, const Op* op) {
    if (cpu.cr0 & Cr0::pe)
        return true;
    cpu.raise(op, Vector::ud);
    return false;
}

/// What LAR, LSL, VERR, VERW look at.
enum class Look { none, found, faulted };

/// A selector that names nothing is an answer (ZF = 0), a page fault in the table is a fault.
Look look_up(Cpu& cpu, uint16_t selector, Descriptor& descriptor) {
    if (is_null(selector))
        return Look::none;
    // A limit violation comes back as #GP, which a read of the table itself can be too, where its base isn't canonical.
    constexpr uint8_t outside = 0xff;
    if (read_descriptor(cpu, selector, outside, 0, descriptor))
        return Look::found;
    return cpu.fault.vector == outside ? Look::none : Look::faulted;
}

bool level_allows(const Cpu& cpu, uint16_t selector, const Descriptor& descriptor) {
    return descriptor.conforming() || (descriptor.dpl() >= cpu.cpl && descriptor.dpl() >= rpl(selector));
}

constexpr uint32_t types(std::initializer_list<unsigned> list) {
    uint32_t mask = 0;
    for (unsigned type : list)
        mask |= 1u << type;
    return mask;
}

/// System types that LAR and LSL accept (tables of SDM vol. 2, LAR and LSL).
bool lar_accepts(const Cpu& cpu, unsigned type) {
    using namespace SystemType;
    constexpr uint32_t legacy =
        types({tss16_available, ldt, tss16_busy, call_gate16, task_gate, tss32_available, tss32_busy, call_gate32});
    constexpr uint32_t long_mode = types({ldt, tss32_available, tss32_busy, call_gate32});
    return (cpu.long_mode() ? long_mode : legacy) >> type & 1;
}
bool lsl_accepts(const Cpu& cpu, unsigned type) {
    using namespace SystemType;
    constexpr uint32_t legacy = types({tss16_available, ldt, tss16_busy, tss32_available, tss32_busy});
    constexpr uint32_t long_mode = types({ldt, tss32_available, tss32_busy});
    return (cpu.long_mode() ? long_mode : legacy) >> type & 1;
}

/// LAR, LSL, VERR, VERW: ZF says whether the descriptor can be seen from here and `accepts` it; then `use` may take
/// something from it.
template <class Accepts, class Use>
const Op* inspect(Cpu& cpu, const Op* op, Accepts&& accepts, Use&& use) {
    uint64_t selector;
    if (!protected_mode(cpu, op) || !load_operand(cpu, op, 2, selector))
        return nullptr;
    Descriptor descriptor;
    begin_transfer(cpu);
    const Look look = look_up(cpu, static_cast<uint16_t>(selector), descriptor);
    if (look == Look::faulted)
        return failed_transfer(cpu, op);
    const bool ok = look == Look::found && level_allows(cpu, static_cast<uint16_t>(selector), descriptor) &&
                    accepts(descriptor);
    if (ok)
        use(descriptor);
    set_zf(cpu, ok);
    VTRACE_NEXT_BY_LOOP(cpu, op);
}

/// LAR and LSL: `value` makes the result out of the descriptor.
template <class Accepts, class Value>
const Op* describe(Cpu& cpu, const Op* op, Accepts&& accepts, Value&& value) {
    return inspect(
        cpu, op, [&](const Descriptor& d) { return d.s() || accepts(cpu, d.type()); },
        [&](const Descriptor& d) { write_register(cpu, op->reg, operand_size(op), value(d)); });
}

/// Bits of the descriptor's upper half that LAR gives; 19:16, which the SDM leaves undefined, are 0 here.
constexpr uint32_t lar_mask = 0x00f0'ff00;

template <bool Write>
const Op* verify(Cpu& cpu, const Op* op) {
    return inspect(
        cpu, op, [](const Descriptor& d) { return Write ? d.writable() : d.readable(); }, [](const Descriptor&) {});
}

/// The end of a segment load: SS inhibits events for one instruction (SDM vol. 3, 6.8.3).
const Op* retire_segment_load(Cpu& cpu, const Op* op, Seg seg, bool shadow) {
    if (seg == SS && shadow)
        cpu.shadow = InterruptShadow::mov_ss;
    return retire(cpu, op);
}

bool fsgsbase_allowed(Cpu& cpu, const Op* op) {
    if (cpu.code64() && (cpu.cr4 & Cr4::fsgsbase))
        return true;
    cpu.raise(op, Vector::ud);
    return false;
}

} // namespace

const Op* op_lar(Cpu& cpu, const Op* op) {
    return describe(cpu, op, lar_accepts, [](const Descriptor& d) { return d.low >> 32 & lar_mask; });
}

const Op* op_lsl(Cpu& cpu, const Op* op) {
    return describe(cpu, op, lsl_accepts, [](const Descriptor& d) { return d.limit(); });
}

const Op* op_verr(Cpu& cpu, const Op* op) {
    return verify<false>(cpu, op);
}
const Op* op_verw(Cpu& cpu, const Op* op) {
    return verify<true>(cpu, op);
}

const Op* op_arpl(Cpu& cpu, const Op* op) {
    if (!protected_mode(cpu, op))
        return nullptr;
    const auto source = static_cast<unsigned>(read_register(cpu, op->reg, 2));
    uint64_t linear = 0, value;
    if (is_memory(op)) {
        uint16_t selector;
        if (!EaAny::get(cpu, op, 2, true, linear) || !cpu.load_for_write(op, linear, selector))
            return nullptr;
        value = selector;
    } else {
        value = read_register(cpu, op->rm, 2);
    }
    const bool raise_level = (value & 3) < (source & 3);
    if (raise_level) {
        value = (value & ~3ull) | (source & 3);
        if (!is_memory(op))
            write_register(cpu, op->rm, 2, value);
        else if (!store_sized(cpu, op, linear, value, 2))
            return nullptr;
    }
    set_zf(cpu, raise_level);
    VTRACE_NEXT_BY_LOOP(cpu, op);
}

const Op* op_mov_from_segment(Cpu& cpu, const Op* op) {
    if (!store_operand(cpu, op, 2, cpu.segments[register_number(op)].selector))
        return nullptr;
    VTRACE_NEXT_BY_LOOP(cpu, op);
}

const Op* op_mov_to_segment(Cpu& cpu, const Op* op) {
    const auto seg = static_cast<Seg>(register_number(op));
    uint64_t selector;
    if (seg == CS)
        return cpu.raise(op, Vector::ud);
    if (!load_operand(cpu, op, 2, selector) || !load_segment(cpu, op, seg, static_cast<uint16_t>(selector)))
        return nullptr;
    return retire_segment_load(cpu, op, seg, true);
}

const Op* op_push_segment(Cpu& cpu, const Op* op) {
    // With a 32-bit operand size only the selector's two bytes are written on processors of this family (SDM vol. 2,
    // PUSH); with 64 bits it is zero-extended.
    const unsigned size = operand_size(op);
    const uint16_t selector = cpu.segments[register_number(op)].selector;
    if (size == 4 ? !push_low_half(cpu, op, selector) : !push_value(cpu, op, selector, size))
        return nullptr;
    VTRACE_NEXT_BY_LOOP(cpu, op);
}

const Op* op_pop_segment(Cpu& cpu, const Op* op) {
    const auto seg = static_cast<Seg>(register_number(op));
    const unsigned size = operand_size(op);
    const uint64_t popped = rsp_after_pop(cpu, size);
    uint64_t selector;
    // Only the selector's bytes count, whatever the operand size moves the stack by.
    if (!peek_value(cpu, op, 2, selector) || !load_segment(cpu, op, seg, static_cast<uint16_t>(selector)))
        return nullptr;
    cpu.gpr[RSP] = popped; // by the width of the stack before SS was loaded
    return retire_segment_load(cpu, op, seg, true);
}

const Op* op_load_far_pointer(Cpu& cpu, const Op* op) {
    const auto seg = static_cast<Seg>(register_number(op));
    const unsigned size = operand_size(op);
    uint64_t linear, offset = 0, selector = 0;
    uint8_t bytes[10];
    if (!EaAny::get(cpu, op, size + 2, false, linear) || !cpu.load_bytes(op, linear, bytes, size + 2))
        return nullptr;
    std::memcpy(&offset, bytes, size);
    std::memcpy(&selector, bytes + size, 2);
    if (!load_segment(cpu, op, seg, static_cast<uint16_t>(selector)))
        return nullptr;
    write_register(cpu, op->reg, size, offset);
    return retire_segment_load(cpu, op, seg, false); // LSS inhibits nothing: it loads the pointer too
}

const Op* op_swapgs(Cpu& cpu, const Op* op) {
    if (!cpu.code64())
        return cpu.raise(op, Vector::ud);
    if (cpu.cpl != 0)
        return cpu.raise(op, Vector::gp, 0);
    std::swap(cpu.segments[GS].base, cpu.kernel_gs_base);
    cpu.segment_base[GS] = cpu.segments[GS].base;
    VTRACE_NEXT_BY_LOOP(cpu, op);
}

const Op* op_read_segment_base(Cpu& cpu, const Op* op) {
    if (!fsgsbase_allowed(cpu, op))
        return nullptr;
    write_register(cpu, op->rm, operand_size(op), cpu.segments[register_number(op)].base);
    VTRACE_NEXT_BY_LOOP(cpu, op);
}

const Op* op_write_segment_base(Cpu& cpu, const Op* op) {
    if (!fsgsbase_allowed(cpu, op))
        return nullptr;
    const uint64_t base = read_register(cpu, op->rm, operand_size(op));
    if (!cpu.is_canonical(base))
        return cpu.raise(op, Vector::gp, 0);
    const unsigned seg = register_number(op);
    cpu.segments[seg].base = cpu.segment_base[seg] = base;
    VTRACE_NEXT_BY_LOOP(cpu, op);
}

} // namespace vtrace::soft
