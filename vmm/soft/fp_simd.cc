// MMX and SSE instructions, executed by stubs.
#include "vmm/soft/fp_guard.h"
#include "vmm/soft/fp_handlers.h"

namespace vtrace::soft {
namespace {

const SimdForm& form_of(const Op* op) {
    return *reinterpret_cast<const SimdForm*>(op->imm);
}
uint8_t* xmm(Cpu& cpu, unsigned offset) {
    return cpu.fpu.fxsave.data() + Fx::xmm + offset;
}

/// Address of the memory operand; false: a fault was raised.
template <class Ea>
bool locate(Cpu& cpu, const Op* op, const SimdForm& form, uint64_t& linear) {
    constexpr uint64_t alignment_mask = 15;
    if (!Ea::get(cpu, op, form.memory_size, form.memory_written, linear))
        return false;
    if (form.aligned && (linear & alignment_mask)) {
        cpu.raise(op, Vector::gp, 0);
        return false;
    }
    return true;
}

/// XMM op= XMM or memory, and nothing else.
template <class Ea>
const Op* run_direct(Cpu& cpu, const Op* op) {
    if (!fp_may_run<FpGroup::sse>(cpu, op))
        return nullptr;
    const SimdForm& form = form_of(op);
    if constexpr (std::is_same_v<Ea, EaNone>) {
        form.direct(xmm(cpu, op->reg), xmm(cpu, op->rm));
    } else {
        alignas(16) uint8_t source[16];
        uint64_t linear;
        if (!locate<Ea>(cpu, op, form, linear) || !fp_load(cpu, op, linear, source, form.memory_size))
            return nullptr;
        form.direct(xmm(cpu, op->reg), source);
    }
    VTRACE_NEXT_BY_LOOP(cpu, op);
}

using Vector128 = std::array<uint8_t, 16>;

/// MOVAPS, MOVUPS, MOVDQA, ...: whole registers.
template <class Ea>
const Op* run_move_load(Cpu& cpu, const Op* op) {
    if (!fp_may_run<FpGroup::sse>(cpu, op))
        return nullptr;
    uint64_t linear;
    Vector128 value;
    if (!locate<Ea>(cpu, op, form_of(op), linear) || !cpu.load(op, linear, value))
        return nullptr;
    std::memcpy(xmm(cpu, op->reg), &value, sizeof value);
    VTRACE_NEXT_BY_LOOP(cpu, op);
}
template <class Ea>
const Op* run_move_store(Cpu& cpu, const Op* op) {
    if (!fp_may_run<FpGroup::sse>(cpu, op))
        return nullptr;
    uint64_t linear;
    Vector128 value;
    std::memcpy(&value, xmm(cpu, op->reg), sizeof value);
    if (!locate<Ea>(cpu, op, form_of(op), linear) || !cpu.store(op, linear, value))
        return nullptr;
    VTRACE_NEXT_BY_LOOP(cpu, op);
}

/// Which of the flags raised by an instruction run with all exceptions masked the processor reports, if any of
/// `unmasked` is among them: invalid, denormal and divide-by-zero are found before the result is computed, and then
/// nothing is known of it (SDM vol. 1, 11.5.2 and 11.5.4).
uint32_t reported_flags(uint32_t raised, uint32_t unmasked) {
    constexpr uint32_t before_result = Mxcsr::ie | Mxcsr::de | Mxcsr::ze;
    return raised & unmasked & before_result ? raised & before_result : raised;
}

/// Executes under the guest's MXCSR. False: an unmasked exception was raised, nothing but MXCSR's flags changed.
bool run_arithmetic(Cpu& cpu, const Op* op, const SimdForm& form, SimdFrame& frame) {
    uint32_t guest = fx_get<uint32_t>(cpu.fpu, Fx::mxcsr) & Mxcsr::supported;
    uint32_t unmasked = ~(guest >> Mxcsr::masks_shift) & Mxcsr::flags;
    frame.mxcsr = (guest | Mxcsr::masks) & ~Mxcsr::flags;
    uint32_t raised;
    if (VTRACE_LIKELY(!unmasked)) {
        form.stub(&frame);
        raised = frame.mxcsr_after & Mxcsr::flags;
    } else {
        // An unmasked underflow is any tiny result, also an exact one, and overrules FTZ. Masked, only a run with FTZ
        // flags exact ones.
        uint32_t tiny = 0;
        if (unmasked & Mxcsr::ue) {
            SimdFrame flushed = frame;
            flushed.mxcsr |= Mxcsr::ftz;
            form.stub(&flushed);
            tiny = flushed.mxcsr_after & Mxcsr::ue;
            frame.mxcsr &= ~Mxcsr::ftz;
        }
        form.stub(&frame);
        raised = (frame.mxcsr_after & Mxcsr::flags) | tiny;
        if (raised & unmasked) {
            fx_set(cpu.fpu, Fx::mxcsr, guest | reported_flags(raised, unmasked));
            cpu.raise(op, cpu.cr4 & Cr4::osxmmexcpt ? Vector::xm : Vector::ud);
            return false;
        }
    }
    fx_set(cpu.fpu, Fx::mxcsr, guest | raised);
    return true;
}

void fetch(Cpu& cpu, FpOperand kind, unsigned offset, uint8_t* vector, SimdFrame& frame) {
    if (kind == FpOperand::xmm)
        std::memcpy(vector, xmm(cpu, offset), Fx::slot_size);
    else if (kind == FpOperand::mmx)
        std::memcpy(vector, cpu.fpu.fxsave.data() + fx_mmx_offset(cpu.fpu, offset / Fx::slot_size), sizeof(uint64_t));
    else if (kind == FpOperand::gpr)
        frame.rax = cpu.get<uint64_t>(offset);
}
/// MMX registers: after fx_enter_mmx().
void commit(Cpu& cpu, FpOperand kind, unsigned offset, const uint8_t* vector, const SimdFrame& frame) {
    if (kind == FpOperand::xmm) {
        std::memcpy(xmm(cpu, offset), vector, Fx::slot_size);
    } else if (kind == FpOperand::mmx) {
        std::memcpy(cpu.fpu.fxsave.data() + Fx::st + offset, vector, sizeof(uint64_t));
        fx_set<uint16_t>(cpu.fpu, Fx::st + offset + sizeof(uint64_t), 0xffff); // sign and exponent
    } else if (kind == FpOperand::gpr) {
        cpu.set<uint64_t>(offset, frame.rax); // the stub's 32-bit results have their upper half clear
    }
}

/// Any form, in this order: may it run, memory read, computation, memory write, registers.
template <class Ea, FpGroup Group>
const Op* run_general(Cpu& cpu, const Op* op) {
    if (!fp_may_run<Group>(cpu, op))
        return nullptr;
    const SimdForm& form = form_of(op);
    SimdFrame frame;
    [[maybe_unused]] uint64_t linear;
    if constexpr (!std::is_same_v<Ea, EaNone>) {
        if (!locate<Ea>(cpu, op, form, linear))
            return nullptr;
        if (!form.memory_written && !fp_load(cpu, op, linear, frame.memory, form.memory_size))
            return nullptr;
    }
    fetch(cpu, form.reg, op->reg, frame.reg, frame);
    fetch(cpu, form.rm, op->rm, frame.rm, frame);
    if (form.xmm0_read)
        std::memcpy(frame.xmm0, xmm(cpu, 0), sizeof frame.xmm0);
    if (form.string_lengths) {
        frame.rax = cpu.get<uint64_t>(RAX * sizeof(uint64_t));
        frame.rdx = cpu.get<uint64_t>(RDX * sizeof(uint64_t));
    }
    if (form.arithmetic) {
        if (form.mmx) // before an exception too; none of these stores to memory
            fx_enter_mmx(cpu.fpu);
        if (!run_arithmetic(cpu, op, form, frame))
            return nullptr;
    } else {
        form.stub(&frame);
    }
    if constexpr (!std::is_same_v<Ea, EaNone>) {
        if (form.memory_written && !fp_store(cpu, op, linear, frame.memory, form.memory_size))
            return nullptr;
    }
    if (form.mmx)
        fx_enter_mmx(cpu.fpu);
    if (form.reg_written)
        commit(cpu, form.reg, op->reg, frame.reg, frame);
    if (form.rm_written)
        commit(cpu, form.rm, op->rm, frame.rm, frame);
    if (form.xmm0_written)
        std::memcpy(xmm(cpu, 0), frame.xmm0, sizeof frame.xmm0);
    if (form.rcx_written)
        cpu.set<uint64_t>(RCX * sizeof(uint64_t), frame.rcx);
    if (form.flags_written)
        cpu.flags.set(frame.rflags & Rflags::status);
    VTRACE_NEXT_BY_LOOP(cpu, op);
}

template <class Ea>
const Op* run_sse(Cpu& cpu, const Op* op) {
    return run_general<Ea, FpGroup::sse>(cpu, op);
}
template <class Ea>
const Op* run_mmx(Cpu& cpu, const Op* op) {
    return run_general<Ea, FpGroup::mmx>(cpu, op);
}
template <class Ea>
const Op* run_sse_mmx(Cpu& cpu, const Op* op) {
    return run_general<Ea, FpGroup::sse_mmx>(cpu, op);
}

/// Opcodes 0F that move 16 bytes as they are, by direction (mandatory prefixes tell types of data, or alignment).
bool is_move(const HostEncoding& e, bool store) {
    constexpr uint8_t movups_load = 0x10, movups_store = 0x11, movaps_load = 0x28, movaps_store = 0x29, movntps = 0x2b,
                      movdqa_load = 0x6f, movdqa_store = 0x7f, movntdq = 0xe7;
    constexpr uint8_t data_prefix = 0x66, repe = 0xf3;
    if (e.escape[1])
        return false;
    bool packed = e.prefix == 0 || e.prefix == data_prefix;
    bool integer = e.prefix == repe || e.prefix == data_prefix;
    if (store)
        return (packed && (e.opcode == movups_store || e.opcode == movaps_store || e.opcode == movntps)) ||
               (integer && e.opcode == movdqa_store) || (e.prefix == data_prefix && e.opcode == movntdq);
    return (packed && (e.opcode == movups_load || e.opcode == movaps_load)) || (integer && e.opcode == movdqa_load);
}

} // namespace

Handler simd_handler(const SimdForm& form, EaShape shape) {
    if (form.memory_size == sizeof(Vector128) && form.reg == FpOperand::xmm &&
        is_move(form.encoding, form.memory_written))
        return form.memory_written ? VTRACE_BY_SHAPE(shape, run_move_store) : VTRACE_BY_SHAPE(shape, run_move_load);
    if (form.direct)
        return form.memory_size ? VTRACE_BY_SHAPE(shape, run_direct) : run_direct<EaNone>;
    if (form.mmx && form.sse)
        return form.memory_size ? VTRACE_BY_SHAPE(shape, run_sse_mmx) : run_sse_mmx<EaNone>;
    if (form.mmx)
        return form.memory_size ? VTRACE_BY_SHAPE(shape, run_mmx) : run_mmx<EaNone>;
    return form.memory_size ? VTRACE_BY_SHAPE(shape, run_sse) : run_sse<EaNone>;
}

} // namespace vtrace::soft
