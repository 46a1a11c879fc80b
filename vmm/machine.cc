#include "vmm/machine.h"

#include <algorithm>

#include "vmm/devices/acpi_tables.h"
#include "vmm/soft/fp_stub.h"
#include "vmm/soft/soft_vcpu.h"
#include "vmm/stall_watch.h"

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

/// A processor's view of the machine.
class Machine::Pins final : public CpuPins {
  public:
    Pins(Machine& machine, unsigned index) : machine_(machine), lapic_(machine.chipset_->lapic(index)) {}
    void connect(const soft::SoftVcpu& vcpu) { vcpu_ = &vcpu; }

    uint32_t io_read(uint16_t port, unsigned size) override {
        return static_cast<uint32_t>(machine_.ports_.read(port, size));
    }
    void io_write(uint16_t port, unsigned size, uint32_t value) override { machine_.ports_.write(port, size, value); }
    uint64_t mmio_read(Gpa gpa, unsigned size) override {
        return lapic_.owns(gpa) ? lapic_.mmio_read(gpa, size) : machine_.mmio_.read(gpa, size);
    }
    void mmio_write(Gpa gpa, unsigned size, uint64_t value) override {
        lapic_.owns(gpa) ? lapic_.mmio_write(gpa, size, value) : machine_.mmio_.write(gpa, size, value);
    }
    bool interrupt_pending() const override { return lapic_.interrupt_pending(); }
    uint8_t acknowledge_interrupt() override { return lapic_.acknowledge_interrupt(); }
    bool nmi_pending() const override { return lapic_.nmi_pending(); }
    void acknowledge_nmi() override { lapic_.acknowledge_nmi(); }
    uint8_t read_cr8() const override { return lapic_.read_cr8(); }
    void write_cr8(uint8_t priority) override { lapic_.write_cr8(priority); }
    std::optional<uint64_t> read_apic_msr(uint32_t msr) override { return lapic_.read_msr(msr); }
    bool write_apic_msr(uint32_t msr, uint64_t value) override {
        if (vcpu_)
            lapic_.set_tsc_offset(vcpu_->tsc_offset());
        return lapic_.write_msr(msr, value);
    }

  private:
    Machine& machine_;
    Lapic& lapic_;
    const soft::SoftVcpu* vcpu_ = nullptr;
};

struct Machine::Processor {
    std::unique_ptr<Pins> pins;
    std::unique_ptr<soft::SoftVcpu> vcpu;
    bool halted = false;
    StallWatch stall;
    bool stalled = false; // what `stall` last said
};

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
    ChipsetConfig chipset;
    chipset.vcpus = config_.vcpus;
    chipset.rtc_start = config_.rtc_start;
    chipset.physical_address_bits = config_.cpuid.physical_address_bits();
    chipset.serial_output = [this](std::string_view bytes) { on_console(bytes); };
    chipset.event = [this](const MachineEvent& event) { on_event(event); };
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

    const auto blocks = std::make_shared<soft::BlockCache>(memory_);
    for (unsigned index = 0; index < config_.vcpus; ++index) {
        auto processor = std::make_unique<Processor>();
        processor->pins = std::make_unique<Pins>(*this, index);
        processor->vcpu = std::make_unique<soft::SoftVcpu>(memory_, *processor->pins, clock_, config_.cpuid, blocks);
        processor->pins->connect(*processor->vcpu);
        CpuState state = index == 0 ? guest_.state : CpuState{};
        if (index != 0)
            state.activity = ActivityState::wait_for_sipi;
        processor->vcpu->set_state(state);
        processors_.push_back(std::move(processor));
    }
    watch_.wait_for(config_.input_after);
    if (config_.input_after.empty())
        type_input();
    return {};
}

void Machine::record(const std::vector<soft::Recording>& recordings) {
    for (unsigned index = 0; index < processors_.size(); ++index)
        processors_[index]->vcpu->record(recordings[index]);
}

void Machine::type_input() {
    chipset_->serial().receive(std::exchange(config_.input, {}));
}

Vcpu& Machine::vcpu(unsigned index) {
    return *processors_[index]->vcpu;
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

void Machine::on_init(unsigned index) {
    CpuState state;
    // INIT keeps the FPU, and most of what RESET would clear (SDM vol. 3, table 9-1); the BSP would start at the reset
    // vector, where this machine has no firmware.
    state.fpu = processors_[index]->vcpu->state().fpu;
    state.tsc = processors_[index]->vcpu->state().tsc;
    state.activity = ActivityState::wait_for_sipi;
    processors_[index]->vcpu->set_state(state);
}

void Machine::on_startup(unsigned index, uint8_t vector) {
    soft::SoftVcpu& vcpu = *processors_[index]->vcpu;
    CpuState state = vcpu.state();
    if (state.activity != ActivityState::wait_for_sipi)
        return;
    state.segments[CS].selector = static_cast<uint16_t>(vector << 8);
    state.segments[CS].base = uint64_t{vector} << 12;
    state.rip = 0;
    state.activity = ActivityState::running;
    vcpu.set_state(state);
    processors_[index]->halted = false;
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
    return std::min({clock_.next_due(), limits.time, panic_deadline_});
}

/// Lets one processor run for a quantum. True: `result` has the outcome.
bool Machine::run_turn(Processor& processor, const RunLimits& limits, RunResult& result) {
    // One alone needs no turns.
    const VirtualTime end = processors_.size() > 1 ? clock_.now() + quantum : clock_.now() + slice;
    while (clock_.now() < end) {
        clock_.run_due();
        if (finish_if_due(result))
            return true;
        const uint64_t retired_all = retired();
        if (retired_all >= limits.instructions) {
            result.outcome = Outcome::limit;
            result.detail = fmt::format("{} instructions", limits.instructions);
            return true;
        }
        if (clock_.now() >= limits.time) {
            result.outcome = Outcome::limit;
            result.detail = fmt::format("{} ns of guest time", limits.time);
            return true;
        }
        const VirtualTime stop = std::min(end, next_stop(limits));
        const uint64_t budget =
            std::min(stop > clock_.now() ? stop - clock_.now() : 1, limits.instructions - retired_all);
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
        case VcpuExit::halted:
            return false;
        case VcpuExit::stopped:
            return false;
        case VcpuExit::shutdown:
            result.outcome = finish_if_due(result) ? result.outcome : Outcome::triple_fault;
            result.detail = run.detail;
            return true;
        case VcpuExit::unsupported:
            result.outcome = Outcome::unsupported;
            result.detail = run.detail;
            return true;
        }
    }
    const CpuState state = processor.vcpu->state();
    processor.stalled = processor.stall.look(state, clock_.now());
    // One that waits for another is no hang.
    if (processor.stalled && std::all_of(processors_.begin(), processors_.end(), [](const auto& p) {
            return p->stalled || (p->halted && !p->vcpu->interrupts_allowed());
        })) {
        result.outcome = Outcome::hang;
        result.detail = fmt::format("a loop with interrupts off goes nowhere, at RIP {:#x}", state.rip);
        return true;
    }
    return false;
}

/// Every processor is halted: jumps to the next event. True: there is none that could wake one, or a limit is reached.
bool Machine::pass_idle_time(const RunLimits& limits, RunResult& result) {
    const bool wakeable = std::any_of(processors_.begin(), processors_.end(),
                                      [](const auto& p) { return p->vcpu->interrupts_allowed(); });
    const VirtualTime next = next_stop(limits);
    // Without interrupts only an NMI could wake them, and nothing here sends one by itself.
    if (!wakeable || (clock_.next_due() == never && panic_deadline_ == never)) {
        if (!finish_if_due(result)) {
            const bool panic = watch_.panicked() || panicked_;
            result.outcome = panic ? Outcome::panic : Outcome::hang;
            result.detail = panic       ? panic_detail()
                            : !wakeable ? "all processors are halted with interrupts off"
                                        : "all processors are halted, and no timer will wake them";
        }
        return true;
    }
    if (++idle_steps_ > most_idle_steps) {
        result.outcome = Outcome::hang;
        result.detail = "all processors are halted, and the timers that still run do not wake them";
        return true;
    }
    clock_.set_now(next);
    return false;
}

RunResult Machine::run(const RunLimits& limits, const std::function<void()>& progress) {
    RunResult result{};
    const auto finish = [&] {
        result.instructions = retired();
        result.time = clock_.now();
        return result;
    };
    drain_records(); // so that a reader knows the time from the first branch on
    VirtualTime next_progress = clock_.now() + slice;
    for (;;) {
        bool any_running = false;
        for (unsigned index = 0; index < processors_.size(); ++index) {
            result.vcpu = index;
            if (run_turn(*processors_[index], limits, result))
                return finish();
            any_running |= !processors_[index]->halted;
        }
        result.vcpu = 0;
        if (stop_.exchange(false, std::memory_order_relaxed)) {
            result.outcome = Outcome::stopped;
            return finish();
        }
        if (progress && clock_.now() >= next_progress) {
            progress();
            next_progress = clock_.now() + slice;
        }
        if (!any_running && pass_idle_time(limits, result))
            return finish();
    }
}

} // namespace vtrace
