// x87 control instructions: they handle the image directly, so that what waits and what doesn't never meets the host's
// FPU.
#include "vmm/soft/fp_environment.h"
#include "vmm/soft/fp_guard.h"
#include "vmm/soft/fp_handlers.h"

namespace vtrace::soft {
namespace {

EnvironmentLayout layout_of(const Cpu& cpu, const Op* op) {
    bool protected_mode = (cpu.cr0 & Cr0::pe) && !(cpu.system_flags & Rflags::vm);
    return {op->reg == 0, protected_mode};
}

const Op* run_fninit(Cpu& cpu, const Op* op) {
    if (!fp_may_run<FpGroup::x87_no_wait>(cpu, op))
        return nullptr;
    fx_init_x87(cpu.fpu);
    VTRACE_NEXT_BY_LOOP(cpu, op);
}

const Op* run_fnclex(Cpu& cpu, const Op* op) {
    if (!fp_may_run<FpGroup::x87_no_wait>(cpu, op))
        return nullptr;
    constexpr uint16_t cleared = Fsw::exceptions | Fsw::sf | Fsw::es | Fsw::b;
    fx_set<uint16_t>(cpu.fpu, Fx::fsw, fx_get<uint16_t>(cpu.fpu, Fx::fsw) & ~cleared);
    VTRACE_NEXT_BY_LOOP(cpu, op);
}

template <FpGroup Group>
const Op* run_fnop(Cpu& cpu, const Op* op) {
    if (!fp_may_run<Group>(cpu, op))
        return nullptr;
    VTRACE_NEXT_BY_LOOP(cpu, op);
}

const Op* run_fwait(Cpu& cpu, const Op* op) {
    if ((cpu.cr0 & Cr0::mp) && (cpu.cr0 & Cr0::ts))
        return cpu.raise(op, Vector::nm);
    if (fx_pending(cpu.fpu) && (cpu.cr0 & Cr0::ne))
        return cpu.raise(op, Vector::mf);
    VTRACE_NEXT_BY_LOOP(cpu, op);
}

const Op* run_fnstsw_ax(Cpu& cpu, const Op* op) {
    if (!fp_may_run<FpGroup::x87_no_wait>(cpu, op))
        return nullptr;
    cpu.set<uint16_t>(RAX * sizeof(uint64_t), fx_get<uint16_t>(cpu.fpu, Fx::fsw));
    VTRACE_NEXT_BY_LOOP(cpu, op);
}

template <class Ea, unsigned Field>
const Op* store_word(Cpu& cpu, const Op* op) {
    uint64_t linear;
    if (!fp_may_run<FpGroup::x87_no_wait>(cpu, op) || !Ea::get(cpu, op, sizeof(uint16_t), true, linear) ||
        !cpu.store(op, linear, fx_get<uint16_t>(cpu.fpu, Field)))
        return nullptr;
    VTRACE_NEXT_BY_LOOP(cpu, op);
}
template <class Ea>
const Op* run_fnstsw(Cpu& cpu, const Op* op) {
    return store_word<Ea, Fx::fsw>(cpu, op);
}
template <class Ea>
const Op* run_fnstcw(Cpu& cpu, const Op* op) {
    return store_word<Ea, Fx::fcw>(cpu, op);
}

template <class Ea>
const Op* run_fldcw(Cpu& cpu, const Op* op) {
    uint64_t linear;
    uint16_t fcw;
    if (!fp_may_run<FpGroup::x87>(cpu, op) || !Ea::get(cpu, op, sizeof fcw, false, linear) ||
        !cpu.load(op, linear, fcw))
        return nullptr;
    fx_set_fcw(cpu.fpu, fcw);
    VTRACE_NEXT_BY_LOOP(cpu, op);
}

template <class Ea>
const Op* run_fnstenv(Cpu& cpu, const Op* op) {
    EnvironmentLayout layout = layout_of(cpu, op);
    uint8_t bytes[environment_max];
    uint64_t linear;
    if (!fp_may_run<FpGroup::x87_no_wait>(cpu, op) || !Ea::get(cpu, op, layout.size(), true, linear))
        return nullptr;
    store_environment(cpu.fpu, layout, bytes);
    if (!cpu.store_bytes(op, linear, bytes, layout.size()))
        return nullptr;
    fx_set_fcw(cpu.fpu, fx_get<uint16_t>(cpu.fpu, Fx::fcw) | Fcw::masks);
    VTRACE_NEXT_BY_LOOP(cpu, op);
}

template <class Ea>
const Op* run_fldenv(Cpu& cpu, const Op* op) {
    EnvironmentLayout layout = layout_of(cpu, op);
    uint8_t bytes[environment_max];
    uint64_t linear;
    if (!fp_may_run<FpGroup::x87>(cpu, op) || !Ea::get(cpu, op, layout.size(), false, linear) ||
        !cpu.load_bytes(op, linear, bytes, layout.size()))
        return nullptr;
    load_environment(cpu.fpu, layout, bytes);
    VTRACE_NEXT_BY_LOOP(cpu, op);
}

template <class Ea>
const Op* run_fnsave(Cpu& cpu, const Op* op) {
    EnvironmentLayout layout = layout_of(cpu, op);
    unsigned size = layout.size() + 8 * Fx::st_size;
    uint8_t bytes[x87_state_max];
    uint64_t linear;
    if (!fp_may_run<FpGroup::x87_no_wait>(cpu, op) || !Ea::get(cpu, op, size, true, linear))
        return nullptr;
    store_environment(cpu.fpu, layout, bytes);
    for (unsigned i = 0; i < 8; i++)
        std::memcpy(bytes + layout.size() + i * Fx::st_size, cpu.fpu.fxsave.data() + Fx::st + i * Fx::slot_size,
                    Fx::st_size);
    if (!cpu.store_bytes(op, linear, bytes, size))
        return nullptr;
    fx_init_x87(cpu.fpu);
    VTRACE_NEXT_BY_LOOP(cpu, op);
}

template <class Ea>
const Op* run_frstor(Cpu& cpu, const Op* op) {
    EnvironmentLayout layout = layout_of(cpu, op);
    unsigned size = layout.size() + 8 * Fx::st_size;
    uint8_t bytes[x87_state_max];
    uint64_t linear;
    if (!fp_may_run<FpGroup::x87>(cpu, op) || !Ea::get(cpu, op, size, false, linear) ||
        !cpu.load_bytes(op, linear, bytes, size))
        return nullptr;
    load_environment(cpu.fpu, layout, bytes);
    for (unsigned i = 0; i < 8; i++)
        std::memcpy(cpu.fpu.fxsave.data() + Fx::st + i * Fx::slot_size, bytes + layout.size() + i * Fx::st_size,
                    Fx::st_size);
    VTRACE_NEXT_BY_LOOP(cpu, op);
}

} // namespace

Handler x87_control_handler(X87Control control, EaShape shape) {
    switch (control) {
    case X87Control::fninit:
        return run_fninit;
    case X87Control::fnclex:
        return run_fnclex;
    case X87Control::fnop:
        return run_fnop<FpGroup::x87>;
    case X87Control::fnop_no_wait:
        return run_fnop<FpGroup::x87_no_wait>;
    case X87Control::fwait:
        return run_fwait;
    case X87Control::fnstsw_ax:
        return run_fnstsw_ax;
    case X87Control::fnstsw:
        return VTRACE_BY_SHAPE(shape, run_fnstsw);
    case X87Control::fnstcw:
        return VTRACE_BY_SHAPE(shape, run_fnstcw);
    case X87Control::fldcw:
        return VTRACE_BY_SHAPE(shape, run_fldcw);
    case X87Control::fnstenv:
        return VTRACE_BY_SHAPE(shape, run_fnstenv);
    case X87Control::fldenv:
        return VTRACE_BY_SHAPE(shape, run_fldenv);
    case X87Control::fnsave:
        return VTRACE_BY_SHAPE(shape, run_fnsave);
    case X87Control::frstor:
        return VTRACE_BY_SHAPE(shape, run_frstor);
    }
    return nullptr;
}

} // namespace vtrace::soft
