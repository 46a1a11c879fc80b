#include "vmm/kvm/kvm_vcpu.h"

#include <cerrno>
#include <csignal>

#include "vmm/devices/lapic.h"

namespace vtrace::kvm {
namespace {

const int kick_signal = SIGRTMIN;

} // namespace

void KvmVcpu::install_kick_signal() {
    // Its coming ends KVM_RUN; there is nothing to do.
    struct sigaction action {};
    action.sa_handler = [](int) {};
    sigaction(kick_signal, &action, nullptr);
}

CpuState KvmVcpu::state_at(uint64_t tsc_base) const {
    CpuState state = kept_;
    cpu_.get_state(state);
    state.tsc = cpu_.tsc_at(tsc_base);
    return state;
}

void KvmVcpu::set_state_at(const CpuState& state, uint64_t tsc_base) {
    kept_ = state;
    cpu_.set_state(state, pins_.read_apic_msr(ApicMsr::apic_base).value_or(0));
    cpu_.set_tsc(state.tsc, tsc_base);
    cpu_.run().if_flag = (state.rflags & Rflags::if_) != 0; // as if it had just come out
    cpu_.run().ready_for_interrupt_injection = 0; // not known before the next exit
}

void KvmVcpu::set_breakpoints(std::span<const Gva> addresses) {
    breakpoints_.assign(addresses.begin(), addresses.end());
    cpu_.set_guest_debug(addresses.empty() ? 0 : KVM_GUESTDBG_ENABLE | KVM_GUESTDBG_USE_HW_BP, addresses);
}

// ---------------------------------------------------------------------------------------------------------------------
// Coming in and out

void KvmVcpu::kick() {
    cpu_.set_immediate_exit(true); // first: a KVM_RUN that begins now ends by it
    if (inside_.load())
        pthread_kill(thread_, kick_signal);
}

void KvmVcpu::request_stop() {
    stop_requested_.store(true);
    kick();
}

void KvmVcpu::look_at_interrupts(bool always) {
    // A window was asked for: KVM comes out as soon as there is one.
    const bool comes_out = cpu_.run().request_interrupt_window && !pins_.nmi_pending();
    if (inside_.load() && (always || !comes_out))
        kick();
}

void KvmVcpu::inject_events() {
    kvm_run& run = cpu_.run();
    if (pins_.nmi_pending()) { // KVM holds it back while NMIs are blocked
        pins_.acknowledge_nmi();
        cpu_.inject_nmi();
    }
    if (pins_.interrupt_pending() && run.ready_for_interrupt_injection && run.if_flag) {
        cpu_.inject_interrupt(pins_.acknowledge_interrupt());
        run.ready_for_interrupt_injection = 0;
    }
    run.request_interrupt_window = pins_.interrupt_pending();
}

VcpuRun KvmVcpu::enter_failed(int error) const {
    return {VcpuExit::unsupported, 0,
            cpu_.failure().empty() ? fmt::format("KVM_RUN of vCPU {} failed: {}", cpu_.id(), errno_text(error))
                                   : fmt::format("KVM refused a request: {}", cpu_.failure())};
}

/// Completes the instruction that the last exit was in the midst of; it may need more than one answer of ours.
VcpuRun KvmVcpu::stop() {
    while (!cpu_.complete_exit()) {
        if (!cpu_.failure().empty())
            return enter_failed(EIO);
        // What else it came out for (an interrupt window, HLT, a breakpoint) is a boundary, and found again later.
        if (VcpuRun run = handle_exit(); run.exit == VcpuExit::shutdown || run.exit == VcpuExit::unsupported)
            return run;
    }
    return {VcpuExit::stopped, 0, {}};
}

VcpuRun KvmVcpu::run(uint64_t) {
    cpu_.set_immediate_exit(false); // before the flag is looked at: a request sets the flag, then this
    if (stop_requested_.exchange(false))
        return stop();
    if (kept_.activity == ActivityState::shutdown)
        return {VcpuExit::shutdown, 0, "the processor is shut down"};
    if (kept_.activity != ActivityState::running) {
        if (kept_.activity == ActivityState::wait_for_sipi || !wakes())
            return {VcpuExit::halted, 0, {}};
        kept_.activity = ActivityState::running;
    }
    inject_events();
    const uint8_t cr8 = pins_.read_cr8();
    cpu_.run().cr8 = cr8;

    thread_ = pthread_self();
    inside_.store(true);
    lock_.unlock();
    const int error = cpu_.enter();
    lock_.lock();
    inside_.store(false);
    sync_time_();
    if (cpu_.run().cr8 != cr8)
        pins_.write_cr8(static_cast<uint8_t>(cpu_.run().cr8));
    if (error == EINTR || error == EAGAIN)
        return {VcpuExit::budget, 0, {}};
    return error ? enter_failed(error) : handle_exit();
}

} // namespace vtrace::kvm
