// The machine under KVM: a thread for each processor, one for time, one lock for everything but running the guest; and
// the ways from one engine to the other.
#include <algorithm>
#include <chrono>
#include <thread>

#include "vmm/machine_parts.h"

namespace vtrace {
namespace {

using HostClock = std::chrono::steady_clock;

uint64_t ns_since(HostClock::time_point start) {
    return static_cast<uint64_t>(
        std::chrono::duration_cast<std::chrono::nanoseconds>(HostClock::now() - start).count());
}

/// Between two looks at what the host wants, and at processors that may be stuck.
constexpr VirtualTime look_period = 10'000'000;
/// Being this long without a sign of life makes a processor worth a look.
constexpr VirtualTime quiet = StallWatch::patience / 4;

} // namespace

Result<> Machine::build_native() {
    auto alarm = kvm::Alarm::create();
    if (!alarm)
        return Unexpected(alarm.error());
    auto vm = kvm::KvmVm::create(*config_.kvm, memory_);
    if (!vm)
        return Unexpected(vm.error());
    native_ = std::make_unique<Native>(std::move(*vm), std::move(*alarm));
    // KVM may answer TSC_DEADLINE itself, whatever its MSR filter says, and then nothing would ever come of it.
    config_.cpuid = config_.cpuid.without(Feature::tsc_deadline).without_debug_store().with_tsc_hz(native_->vm->tsc_hz());
    clock_.set_tsc_hz(native_->vm->tsc_hz());
    kvm::KvmVcpu::install_kick_signal();
    return {};
}

// ---------------------------------------------------------------------------------------------------------------------

/// One stretch of native execution. While it exists, all of the machine is guarded by Native::lock.
class Machine::NativeStage {
  public:
    NativeStage(Machine& machine, const RunLimits& limits)
        : machine_(machine), limits_(limits), time_base_(machine.clock_.now()), start_(HostClock::now()) {}

    Turn run(const std::function<void()>& progress, RunResult& result);

  private:
    void sync_time() { machine_.clock_.set_now(time_base_ + ns_since(start_)); }
    VcpuRun execute(Processor& processor);
    void serve(unsigned index);
    void serve_requests(Processor& processor);
    void handle(Processor& processor, VcpuRun run, unsigned index);
    void wait_for_work(Processor& processor, std::unique_lock<std::mutex>& lock);
    void after_events();
    void tell_processors();
    void look_at_processors();
    void end(Turn turn);
    void arm(VirtualTime time);

    Machine& machine_;
    const RunLimits& limits_;
    const VirtualTime time_base_;
    const HostClock::time_point start_;

    VirtualTime armed_ = never; // when the thread of time wakes
    VirtualTime next_look_ = 0;
    Turn ended_ = Turn::goes_on;
    RunResult result_{};
};

/// The first reason counts.
void Machine::NativeStage::end(Turn turn) {
    if (ended_ != Turn::goes_on)
        return;
    ended_ = turn;
    for (auto& processor : machine_.processors_) {
        processor->native->request_stop();
        processor->wake.notify_one();
    }
    arm(0);
}

/// Wakes the thread of time then, if it isn't to wake earlier.
void Machine::NativeStage::arm(VirtualTime time) {
    if (time >= armed_)
        return;
    armed_ = time;
    machine_.native_->alarm.set(time <= time_base_ ? start_ : start_ + std::chrono::nanoseconds(time - time_base_));
}

/// What one processor did may be another's interrupt.
void Machine::NativeStage::tell_processors() {
    for (auto& processor : machine_.processors_) {
        if (!processor->requested() && !processor->native->has_work())
            continue;
        processor->native->look_at_interrupts(processor->requested());
        processor->wake.notify_one();
    }
}

/// To be called whenever something has happened, with the time set.
void Machine::NativeStage::after_events() {
    machine_.clock_.run_due();
    machine_.windows_.on_progress(machine_.clock_.now(), machine_.retired());
    if (machine_.finish_if_due(result_) || machine_.limit_reached(limits_, result_))
        return end(Turn::ended);
    if (machine_.windows_.due())
        return end(Turn::window_due);
    tell_processors();
    arm(machine_.next_stop(limits_));
}

// ---------------------------------------------------------------------------------------------------------------------
// A processor's thread

void Machine::NativeStage::serve_requests(Processor& processor) {
    if (std::exchange(processor.init_requested, false)) {
        machine_.init_now(*processor.native);
        processor.halted = true;
    }
    if (const auto vector = std::exchange(processor.startup_requested, std::nullopt))
        if (machine_.startup_now(*processor.native, *vector))
            processor.halted = false;
}

void Machine::NativeStage::wait_for_work(Processor& processor, std::unique_lock<std::mutex>& lock) {
    processor.wake.wait(lock, [&] {
        return ended_ != Turn::goes_on || processor.requested() || processor.native->wakes();
    });
}

void Machine::NativeStage::handle(Processor& processor, VcpuRun run, unsigned index) {
    processor.halted = run.exit == VcpuExit::halted;
    if (run.exit == VcpuExit::device || processor.halted || processor.native->interrupts_allowed())
        processor.stall.progress(machine_.clock_.now());
    switch (run.exit) {
    case VcpuExit::budget:
    case VcpuExit::device:
    case VcpuExit::halted:
    case VcpuExit::stopped:
        break;
    case VcpuExit::breakpoint:
        machine_.windows_.on_breakpoint();
        break;
    case VcpuExit::shutdown:
    case VcpuExit::unsupported:
        if (!machine_.finish_if_due(result_))
            result_.outcome = run.exit == VcpuExit::shutdown ? Outcome::triple_fault : Outcome::unsupported;
        result_.detail = run.detail;
        result_.vcpu = index;
        end(Turn::ended);
        break;
    }
    if (std::exchange(processor.look_for_stall, false))
        processor.stalled = processor.stall.look(processor.native->state(), machine_.clock_.now());
}

void Machine::NativeStage::serve(unsigned index) {
    Processor& processor = *machine_.processors_[index];
    std::unique_lock lock(machine_.native_->lock);
    for (;;) {
        serve_requests(processor);
        // Also at the end: what is half done is completed.
        VcpuRun run = processor.native->run(0);
        sync_time();
        if (run.exit == VcpuExit::stopped)
            return;
        handle(processor, std::move(run), index);
        after_events();
        if (processor.halted)
            wait_for_work(processor, lock);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// The thread of time

/// Brings out those that have long shown no sign of life, for a look at their registers.
void Machine::NativeStage::look_at_processors() {
    const VirtualTime now = machine_.clock_.now();
    if (now < next_look_)
        return;
    next_look_ = now + look_period;
    for (auto& processor : machine_.processors_) {
        if (!processor->halted && processor->stall.quiet_for(now) > quiet) {
            processor->look_for_stall = true;
            processor->native->look_at_interrupts(true);
        }
    }
    const auto& processors = machine_.processors_;
    if (std::any_of(processors.begin(), processors.end(),
                    [](const auto& p) { return p->requested() || p->native->wakes(); }))
        return;
    if (std::all_of(processors.begin(), processors.end(), [](const auto& p) { return p->halted; })) {
        if (machine_.never_wakes(result_))
            end(Turn::ended);
    } else if (machine_.all_stuck()) {
        result_.outcome = Outcome::hang;
        result_.detail = "a loop with interrupts off goes nowhere";
        end(Turn::ended);
    }
}

Machine::Turn Machine::NativeStage::run(const std::function<void()>& progress, RunResult& result) {
    std::unique_lock lock(machine_.native_->lock);
    machine_.stage_ = this;
    for (auto& processor : machine_.processors_)
        processor->native->on_time([this] { sync_time(); });
    std::vector<std::thread> threads;
    for (unsigned index = 0; index < machine_.processors_.size(); ++index)
        threads.emplace_back([this, index] { serve(index); });

    VirtualTime next_progress = machine_.clock_.now() + look_period;
    arm(machine_.next_stop(limits_));
    while (ended_ == Turn::goes_on) {
        arm(machine_.clock_.now() + look_period);
        lock.unlock();
        machine_.native_->alarm.wait();
        lock.lock();
        armed_ = never;
        sync_time();
        if (machine_.stop_.exchange(false, std::memory_order_relaxed)) {
            result_.outcome = Outcome::stopped;
            end(Turn::ended);
        }
        after_events();
        look_at_processors();
        if (progress && machine_.clock_.now() >= next_progress) {
            progress();
            next_progress = machine_.clock_.now() + look_period;
        }
    }
    lock.unlock();
    for (std::thread& thread : threads)
        thread.join();
    // They may have sent each other something in the midst of it.
    for (auto& processor : machine_.processors_)
        serve_requests(*processor);
    machine_.stage_ = nullptr;
    if (ended_ == Turn::ended)
        result = result_;
    return ended_;
}

Machine::Turn Machine::run_native(const RunLimits& limits, const std::function<void()>& progress, RunResult& result) {
    give_to_kvm();
    const Turn turn = NativeStage(*this, limits).run(progress, result);
    take_from_kvm();
    return turn;
}

// ---------------------------------------------------------------------------------------------------------------------
// Hand-over. One sample of the time stamp counter serves all processors, so that theirs stay in step.

void Machine::give_to_kvm() {
    const auto start = HostClock::now();
    const uint64_t tsc_base = processors_[0]->kvm_cpu->tsc_base();
    const auto breakpoint = windows_.breakpoint();
    for (auto& processor : processors_) {
        processor->native->set_state_at(processor->vcpu->state(), tsc_base);
        processor->native->set_breakpoints(breakpoint ? std::span(&*breakpoint, 1) : std::span<const Gva>());
    }
    ++hand_overs_.to_native.count;
    hand_overs_.to_native.host_ns += ns_since(start);
}

void Machine::take_from_kvm() {
    const auto start = HostClock::now();
    const uint64_t tsc_base = processors_[0]->kvm_cpu->tsc_base();
    for (auto& processor : processors_) {
        processor->vcpu->set_state(processor->native->state_at(tsc_base));
        processor->vcpu->forget_memory();
        processor->vcpu->set_breakpoints({});
    }
    ++hand_overs_.to_soft.count;
    hand_overs_.to_soft.host_ns += ns_since(start);
}

} // namespace vtrace
