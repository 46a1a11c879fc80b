// The machine and its software stage. Under KVM: machine_native.cc.
#include "vmm/machine.h"

#include <algorithm>

#include "vmm/devices/acpi_tables.h"
#include "vmm/machine_parts.h"
#include "vmm/soft/fp_stub.h"

namespace vtrace {
namespace {

constexpr uint64_t slice = 1'000'000; // instructions between two looks at what the host wants

} // namespace

std::string_view describe(Outcome outcome) {
    switch (outcome) {
    case Outcome::power_off:
        return "power-off";
    case Outcome::reset:
        return "reset";
    case Outcome::guest_exit:
        return "guest exit";
    case Outcome::panic:
        return "panic";
    case Outcome::triple_fault:
        return "triple fault";
    case Outcome::hang:
        return "hang";
    case Outcome::limit:
        return "limit reached";
    case Outcome::stopped:
        return "stopped";
    case Outcome::unsupported:
        return "unsupported";
    }
    return "unknown";
}

// ---------------------------------------------------------------------------------------------------------------------

Machine::Machine(MachineConfig config, GuestMemory memory) : config_(std::move(config)), memory_(std::move(memory)) {}
Machine::~Machine() = default;

Result<std::unique_ptr<Machine>> Machine::create(MachineConfig config) {
    auto memory = GuestMemory::create(config.memory);
    if (!memory)
        return Unexpected(memory.error());
    std::unique_ptr<Machine> machine(new Machine(std::move(config), std::move(*memory)));
    VTRACE_TRY(machine->build());
    return machine;
}

Result<> Machine::build() {
    VTRACE_TRY(soft::fp_stub_memory());
    if (config_.kvm)
        VTRACE_TRY(build_native());
    ChipsetConfig chipset;
    chipset.vcpus = config_.vcpus;
    chipset.rtc_start = config_.rtc_start;
    chipset.physical_address_bits = config_.cpuid.physical_address_bits();
    chipset.serial_output = [this](std::string_view bytes) { on_console(bytes); };
    chipset.event = [this](const MachineEvent& event) { on_event(event); };
    chipset.marker = [this](uint32_t value) { windows_.on_marker(value); };
    chipset.init = [this](unsigned vcpu) { on_init(vcpu); };
    chipset.startup = [this](unsigned vcpu, uint8_t vector) { on_startup(vcpu, vector); };
    auto made = Chipset::create(std::move(chipset), clock_, memory_, ports_, mmio_);
    if (!made)
        return Unexpected(made.error());
    chipset_ = std::move(*made);

    auto rsdp = write_acpi_tables(memory_, config_.vcpus);
    if (!rsdp)
        return Unexpected(rsdp.error());
    auto guest = load_guest(memory_, config_.boot, *rsdp);
    if (!guest)
        return Unexpected(guest.error());
    guest_ = std::move(*guest);
    if (guest_.state.long_mode() && !config_.cpuid.has(Feature::lm))
        return fail("cannot boot '{}' on CPU model '{}': the guest is a 64-bit one, the processor has no 64-bit mode; take "
                    "another --cpu ('vtrace cpus' lists them)",
                    config_.boot.kernel_path, config_.cpuid.name());

    const auto blocks = std::make_shared<soft::BlockCache>(memory_);
    for (unsigned index = 0; index < config_.vcpus; ++index)
        VTRACE_TRY(add_processor(index, blocks));
    watch_.wait_for(config_.input_after);
    if (config_.input_after.empty())
        type_input();
    return {};
}

Result<> Machine::add_processor(unsigned index, const std::shared_ptr<soft::BlockCache>& blocks) {
    auto processor = std::make_unique<Processor>();
    processor->pins = std::make_unique<Pins>(*this, index);
    processor->vcpu = std::make_unique<soft::SoftVcpu>(memory_, *processor->pins, clock_, config_.cpuid, blocks);
    processor->pins->connect(*processor->vcpu);
    if (native_) {
        auto cpu = kvm::KvmCpu::create(*native_->vm, index, config_.cpuid);
        if (!cpu)
            return Unexpected(cpu.error());
        processor->kvm_cpu = std::move(*cpu);
        processor->native = std::make_unique<kvm::KvmVcpu>(*processor->kvm_cpu, *processor->pins, native_->lock);
    }
    CpuState state = index == 0 ? guest_.state : CpuState{};
    if (index != 0)
        state.activity = ActivityState::wait_for_sipi;
    processor->vcpu->set_state(state);
    processors_.push_back(std::move(processor));
    return {};
}

void Machine::start_recording(const std::vector<soft::Recording>& recordings) {
    for (unsigned index = 0; index < processors_.size(); ++index)
        processors_[index]->vcpu->record(recordings[index]);
    drain_records(); // so that a reader knows the time from the first branch on
}

void Machine::stop_recording() {
    drain_records();
    for (auto& processor : processors_)
        processor->vcpu->record({});
}

void Machine::record(const std::vector<soft::Recording>& recordings) {
    recordings_ = recordings;
    if (windows_.open())
        begin_window();
}

void Machine::type_input() {
    chipset_->serial().receive(std::exchange(config_.input, {}));
}

Vcpu& Machine::vcpu(unsigned index) {
    return *processors_[index]->vcpu;
}
ds::Facility* Machine::facility(unsigned index) {
    return processors_[index]->vcpu->facility();
}
uint64_t Machine::retired(unsigned index) const {
    return processors_[index]->vcpu->retired();
}
uint64_t Machine::retired() const {
    uint64_t sum = 0;
    for (const auto& processor : processors_)
        sum += processor->vcpu->retired();
    return sum;
}
void Machine::drain_records() {
    for (auto& processor : processors_)
        processor->vcpu->drain_records();
}

// ---------------------------------------------------------------------------------------------------------------------

void Machine::on_console(std::string_view bytes) {
    watch_.feed(bytes);
    windows_.on_console(bytes);
    if (watch_.panicked() && panic_deadline_ == never)
        panic_deadline_ = clock_.now() + panic_grace;
    if (watch_.found())
        type_input();
    if (config_.console)
        config_.console(bytes);
}

void Machine::on_event(const MachineEvent& event) {
    switch (event.kind) {
    case MachineEvent::Kind::power_off:
        powered_off_ = true;
        break;
    case MachineEvent::Kind::reset:
        reset_ = true;
        break;
    case MachineEvent::Kind::debug_exit:
        exited_ = true;
        exit_code_ = event.code;
        break;
    case MachineEvent::Kind::panicked:
        panicked_ = true;
        panic_deadline_ = std::min(panic_deadline_, clock_.now() + panic_grace);
        break;
    case MachineEvent::Kind::crash_loaded:
        break; // the guest goes on in its crash kernel
    }
}

void Machine::init_now(Vcpu& vcpu) {
    const CpuState before = vcpu.state();
    CpuState state;
    // INIT keeps the FPU, and most of what RESET would clear (SDM vol. 3, table 9-1); the BSP would start at the reset
    // vector, where this machine has no firmware.
    state.fpu = before.fpu;
    state.tsc = before.tsc;
    state.msrs = before.msrs;
    state.activity = ActivityState::wait_for_sipi;
    vcpu.set_state(state);
}

/// False: it doesn't wait for one.
bool Machine::startup_now(Vcpu& vcpu, uint8_t vector) {
    CpuState state = vcpu.state();
    if (state.activity != ActivityState::wait_for_sipi)
        return false;
    state.segments[CS].selector = static_cast<uint16_t>(vector << 8);
    state.segments[CS].base = uint64_t{vector} << 12;
    state.rip = 0;
    state.activity = ActivityState::running;
    vcpu.set_state(state);
    return true;
}

void Machine::on_init(unsigned index) {
    Processor& processor = *processors_[index];
    if (stage_) {
        processor.init_requested = true;
        processor.startup_requested.reset();
        return;
    }
    init_now(*processor.vcpu);
    if (ds::Facility* facility = processor.vcpu->facility())
        facility->init();
}

void Machine::on_startup(unsigned index, uint8_t vector) {
    Processor& processor = *processors_[index];
    if (stage_)
        processor.startup_requested = vector;
    else if (startup_now(*processor.vcpu, vector))
        processor.halted = false;
}

/// Something the guest did ends the run?
bool Machine::finish_if_due(RunResult& result) {
    const bool panic = panicked_ || watch_.panicked();
    if (exited_) {
        result.outcome = Outcome::guest_exit;
        result.code = exit_code_;
    } else if (panic && (powered_off_ || reset_ || clock_.now() >= panic_deadline_)) {
        result.outcome = Outcome::panic;
        result.detail = panic_detail();
    } else if (powered_off_) {
        result.outcome = Outcome::power_off;
    } else if (reset_) {
        result.outcome = Outcome::reset;
    } else {
        return false;
    }
    return true;
}

/// The line that announced a panic.
std::string Machine::panic_detail() const {
    return watch_.panicked() ? watch_.panic_line() : "the guest reported it by pvpanic";
}

/// The next time at which something other than a processor must act.
VirtualTime Machine::next_stop(const RunLimits& limits) const {
    return std::min({clock_.next_due(), limits.time, panic_deadline_, windows_.next_time()});
}

bool Machine::limit_reached(const RunLimits& limits, RunResult& result) {
    if (retired() >= limits.instructions)
        result.detail = fmt::format("{} instructions", limits.instructions);
    else if (clock_.now() >= limits.time)
        result.detail = fmt::format("{} ns of guest time", limits.time);
    else
        return false;
    result.outcome = Outcome::limit;
    return true;
}

/// Nobody will ever get anywhere: one that waits for another is no hang.
bool Machine::all_stuck() const {
    return std::all_of(processors_.begin(), processors_.end(), [this](const auto& p) {
        const Vcpu& vcpu = stage_ ? static_cast<const Vcpu&>(*p->native) : *p->vcpu;
        return p->stalled || (p->halted && !vcpu.interrupts_allowed());
    });
}

/// Lets one processor run for a quantum.
Machine::Turn Machine::run_turn(Processor& processor, const RunLimits& limits, RunResult& result) {
    // One alone needs no turns.
    const VirtualTime end = processors_.size() > 1 ? clock_.now() + quantum : clock_.now() + slice;
    while (clock_.now() < end) {
        clock_.run_due();
        if (finish_if_due(result) || limit_reached(limits, result))
            return Turn::ended;
        const uint64_t retired_all = retired();
        windows_.on_progress(clock_.now(), retired_all);
        if (windows_.due())
            return Turn::window_due;
        const VirtualTime stop = std::min(end, next_stop(limits));
        const uint64_t budget = std::min(stop > clock_.now() ? stop - clock_.now() : 1,
                                         std::min(limits.instructions, windows_.next_retired()) - retired_all);
        VcpuRun run = processor.vcpu->run(budget);
        processor.halted = run.exit == VcpuExit::halted;
        if (run.retired)
            idle_steps_ = 0;
        if (run.exit == VcpuExit::device || processor.halted || processor.vcpu->interrupts_allowed())
            processor.stall.progress(clock_.now());
        switch (run.exit) {
        case VcpuExit::budget:
        case VcpuExit::device:
            break;
        case VcpuExit::breakpoint:
            windows_.on_breakpoint();
            break;
        case VcpuExit::halted:
        case VcpuExit::stopped:
            return Turn::goes_on;
        case VcpuExit::shutdown:
            result.outcome = finish_if_due(result) ? result.outcome : Outcome::triple_fault;
            result.detail = run.detail;
            return Turn::ended;
        case VcpuExit::unsupported:
            result.outcome = Outcome::unsupported;
            result.detail = run.detail;
            return Turn::ended;
        }
    }
    const CpuState state = processor.vcpu->state();
    processor.stalled = processor.stall.look(state, clock_.now());
    if (processor.stalled && all_stuck()) {
        result.outcome = Outcome::hang;
        result.detail = fmt::format("a loop with interrupts off goes nowhere, at RIP {:#x}", state.rip);
        return Turn::ended;
    }
    return Turn::goes_on;
}

/// Every processor is halted. True: and there is nothing that could wake one; `result` has the outcome.
bool Machine::never_wakes(RunResult& result) {
    const bool wakeable = std::any_of(processors_.begin(), processors_.end(), [this](const auto& p) {
        return stage_ ? p->native->interrupts_allowed() : p->vcpu->interrupts_allowed();
    });
    // Without interrupts only an NMI could wake them, and nothing here sends one by itself.
    if (wakeable && (clock_.next_due() != never || panic_deadline_ != never))
        return false;
    if (!finish_if_due(result)) {
        const bool panic = watch_.panicked() || panicked_;
        result.outcome = panic ? Outcome::panic : Outcome::hang;
        result.detail = panic       ? panic_detail()
                        : !wakeable ? "all processors are halted with interrupts off"
                                    : "all processors are halted, and no timer will wake them";
    }
    return true;
}

/// Every processor is halted: jumps to the next event. True: there is none that could wake one, or a limit is reached.
bool Machine::pass_idle_time(const RunLimits& limits, RunResult& result) {
    const VirtualTime next = next_stop(limits);
    if (never_wakes(result))
        return true;
    if (++idle_steps_ > most_idle_steps) {
        result.outcome = Outcome::hang;
        result.detail = "all processors are halted, and the timers that still run do not wake them";
        return true;
    }
    clock_.set_now(next);
    return false;
}

bool Machine::settle(const RunLimits& limits, RunResult& result) {
    for (;;) {
        clock_.run_due();
        if (finish_if_due(result) || limit_reached(limits, result))
            return true;
        Processor& processor = *processors_[0];
        processor.halted = processor.vcpu->activity() != ActivityState::running;
        const bool wakes = processor.pins->nmi_pending() ||
                           (processor.pins->interrupt_pending() && processor.vcpu->interrupts_allowed());
        if (!processor.halted || wakes)
            return false;
        if (pass_idle_time(limits, result))
            return true;
    }
}

void Machine::hold_interrupts(bool on) { processors_[0]->vcpu->hold_interrupts(on); }
void Machine::log_accesses(std::vector<DeviceAccess>* log) { processors_[0]->pins->log_accesses(log); }

/// The processors take turns until the run ends or a window is due.
Machine::Turn Machine::run_soft(const RunLimits& limits, const std::function<void()>& progress, RunResult& result) {
    VirtualTime next_progress = clock_.now() + slice;
    for (;;) {
        bool any_running = false;
        for (unsigned index = 0; index < processors_.size(); ++index) {
            result.vcpu = index;
            if (const Turn turn = run_turn(*processors_[index], limits, result); turn != Turn::goes_on)
                return turn;
            any_running |= !processors_[index]->halted;
        }
        result.vcpu = 0;
        if (stop_.exchange(false, std::memory_order_relaxed)) {
            result.outcome = Outcome::stopped;
            return Turn::ended;
        }
        if (progress && clock_.now() >= next_progress) {
            progress();
            next_progress = clock_.now() + slice;
        }
        if (!any_running && pass_idle_time(limits, result))
            return Turn::ended;
    }
}

/// At an instruction boundary of all processors, as what follows. Where all of the run is one window, that isn't noted.
void Machine::begin_window() {
    if (recordings_.empty())
        return;
    if (windows_.planned())
        for (unsigned index = 0; index < processors_.size(); ++index)
            recordings_[index].store->begin_window(windows_.count(), processors_[index]->vcpu->next_instruction());
    start_recording(recordings_);
}

void Machine::end_window() {
    if (recordings_.empty())
        return;
    if (windows_.planned())
        for (unsigned index = 0; index < processors_.size(); ++index)
            recordings_[index].store->end_window(windows_.count(), processors_[index]->vcpu->next_instruction());
    stop_recording();
}

void Machine::turn_window() {
    windows_.turn(clock_.now(), retired());
    if (windows_.open())
        begin_window();
    else
        end_window();
    set_breakpoints();
}

void Machine::set_breakpoints() {
    const auto breakpoint = windows_.breakpoint();
    for (auto& processor : processors_)
        processor->vcpu->set_breakpoints(breakpoint ? std::span(&*breakpoint, 1) : std::span<const Gva>());
}

RunResult Machine::run(const RunLimits& limits, const std::function<void()>& progress) {
    RunResult result{};
    set_breakpoints();
    for (;;) {
        const bool natively = native_ && !windows_.open();
        if ((natively ? run_native(limits, progress, result) : run_soft(limits, progress, result)) == Turn::ended)
            break;
        turn_window();
        if (limits.window && windows_.open()) {
            result.outcome = Outcome::limit;
            result.detail = "the begin of a window";
            break;
        }
    }
    if (windows_.open() && windows_.planned())
        end_window();
    drain_records();
    result.instructions = retired();
    result.time = clock_.now();
    return result;
}

} // namespace vtrace
