// x87 instructions that compute, executed by stubs on a copy of the guest's x87 state.
#include "vmm/soft/fp_guard.h"
#include "vmm/soft/fp_handlers.h"

namespace vtrace::soft {
namespace {

constexpr unsigned x87_bytes = Fx::xmm; // of the image; MXCSR lies within

void prepare(Cpu& cpu, X87Frame& frame, uint16_t ignored) {
    std::memcpy(frame.image.fxsave.data(), cpu.fpu.fxsave.data(), x87_bytes);
    fx_set<uint32_t>(frame.image, Fx::mxcsr, Mxcsr::initial);
    if (ignored) { // CR0.NE clear: the host must not see what is pending
        uint16_t fsw = fx_get<uint16_t>(frame.image, Fx::fsw);
        fx_set<uint16_t>(frame.image, Fx::fsw, fsw & ~(Fsw::exceptions | Fsw::es | Fsw::b));
    }
}

void commit(Cpu& cpu, X87Frame& frame) {
    fx_set<uint64_t>(frame.image, Fx::mxcsr, fx_get<uint64_t>(cpu.fpu, Fx::mxcsr)); // and MXCSR_MASK
    std::memcpy(cpu.fpu.fxsave.data(), frame.image.fxsave.data(), x87_bytes);
    fx_clear_pointers(cpu.fpu);
}

/// Unmasked invalid operation, overflow and underflow leave the destination in memory as it was (SDM vol. 1, 8.5).
bool store_suppressed(const FpuImage& after) {
    return fx_pending(after) & (Fsw::ie | Fsw::oe | Fsw::ue);
}

template <class Ea>
const Op* run_x87(Cpu& cpu, const Op* op) {
    if (!fp_may_run<FpGroup::x87>(cpu, op))
        return nullptr;
    const X87Form& form = *reinterpret_cast<const X87Form*>(op->imm);
    X87Frame frame;
    [[maybe_unused]] uint64_t linear;
    if constexpr (!std::is_same_v<Ea, EaNone>) {
        if (!Ea::get(cpu, op, form.memory_size, form.memory_written, linear))
            return nullptr;
        if (!form.memory_written && !fp_load(cpu, op, linear, frame.memory, form.memory_size))
            return nullptr;
    }
    uint16_t ignored = VTRACE_UNLIKELY(fx_pending(cpu.fpu)) ? fx_get<uint16_t>(cpu.fpu, Fx::fsw) & Fsw::exceptions : 0;
    prepare(cpu, frame, ignored);
    if (form.flags_read || form.flags_written)
        frame.rflags = cpu.flags.get() | Rflags::reserved1;
    form.stub(&frame);
    if constexpr (!std::is_same_v<Ea, EaNone>) {
        // A store that an unmasked exception suppresses is checked all the same: #PF comes before the exception.
        if (form.memory_written && !(store_suppressed(frame.image)
                                         ? cpu.load_for_write_slow(op, linear, frame.memory, form.memory_size)
                                         : fp_store(cpu, op, linear, frame.memory, form.memory_size)))
            return nullptr;
    }
    if (form.flags_written)
        cpu.flags.set(frame.rflags & Rflags::status);
    commit(cpu, frame);
    if (VTRACE_UNLIKELY(ignored != 0)) {
        fx_set<uint16_t>(cpu.fpu, Fx::fsw, fx_get<uint16_t>(cpu.fpu, Fx::fsw) | ignored);
        fx_update_summary(cpu.fpu);
    }
    VTRACE_NEXT_BY_LOOP(cpu, op);
}

} // namespace

Handler x87_handler(const X87Form& form, EaShape shape) {
    return form.memory_size ? VTRACE_BY_SHAPE(shape, run_x87) : run_x87<EaNone>;
}

} // namespace vtrace::soft
