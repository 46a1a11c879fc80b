// Machine: a PC with its processors, memory and devices, from power-on to the outcome of the run.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "ds/facility.h"
#include "ds/result.h"
#include "vmm/boot/boot.h"
#include "vmm/bus.h"
#include "vmm/clock.h"
#include "vmm/console_watch.h"
#include "vmm/devices/chipset.h"
#include "vmm/guest_memory.h"
#include "vmm/soft/cpuid.h"
#include "vmm/soft/recording.h"
#include "vmm/vcpu.h"
#include "vmm/windows.h"

namespace vtrace {

namespace kvm {
class KvmHost;
}
namespace soft {
class BlockCache;
}

struct MachineConfig {
    uint64_t memory = 512ull << 20; // bytes
    unsigned vcpus = 1;
    CpuidModel cpuid;
    BootOptions boot;
    int64_t rtc_start = default_rtc_start;
    std::function<void(std::string_view)> console = {}; // what the guest writes to COM1; may be empty
    std::string input = {};                             // what it reads there ...
    std::string input_after = {}; // ... once this text has stood on the console; empty: from the start
    /// Runs the guest natively outside of traced windows; must outlive the machine. Null: the software engine does all.
    const kvm::KvmHost* kvm = nullptr;
};

/// How a run ended.
enum class Outcome : uint8_t {
    power_off,    // ACPI S5
    reset,        // the guest asked for a reset (reboot), with no panic before
    guest_exit,   // isa-debug-exit; RunResult::code
    panic,        // pvpanic, or the console said "Kernel panic"
    triple_fault, // a processor shut down
    hang,         // no processor can ever run again, or one spins with interrupts off
    limit,        // RunLimits
    stopped,      // request_stop()
    unsupported,  // the guest needs what the engine lacks
};
std::string_view describe(Outcome outcome);

struct RunLimits {
    uint64_t instructions = UINT64_MAX; // of all vCPUs together
    VirtualTime time = never;
    bool window = false; // the next window's begin ends the run, too
};

struct RunResult {
    Outcome outcome;
    uint32_t code = 0;     // guest_exit: the value written to port 0xf4
    unsigned vcpu = 0;     // triple_fault, unsupported: which one
    std::string detail;    // one line more, or empty
    uint64_t instructions; // retired by all vCPUs
    VirtualTime time;
};

/// What a processor read from a device or wrote to it.
struct DeviceAccess {
    bool port, write;
    uint64_t address;
    unsigned size;
    uint64_t value;
};

/// What changes from one engine to the other have cost: from the last instruction in one to the first in the other.
struct HandOvers {
    struct Cost {
        uint64_t count = 0, host_ns = 0;
    };
    Cost to_soft, to_native;
};

/// Under the software engine, several vCPUs take turns on the calling thread: each runs `quantum` of virtual time while
/// the others wait, so that the machine is deterministic and virtual time is the sum of all instructions.
///
/// Under KVM each vCPU runs on a thread of its own, virtual time goes with the host's, and instructions are not counted.
/// Devices are the same for both, and so are the outcomes.
class Machine {
  public:
    static constexpr VirtualTime quantum = 20'000;
    /// After a panic's first line the guest may still say why for this long.
    static constexpr VirtualTime panic_grace = 100'000'000;
    /// So many timers run out one after the other while all processors are halted: those are masked, and none will wake
    /// them. A PIT at 18 Hz does it for six days.
    static constexpr uint64_t most_idle_steps = 10'000'000;

    /// Builds the machine and loads the guest. Errors: of the memory, the boot files, or the number of vCPUs.
    static Result<std::unique_ptr<Machine>> create(MachineConfig config);
    ~Machine();
    Machine(const Machine&) = delete;
    Machine& operator=(const Machine&) = delete;

    /// Whenever a window is open, records go there; one a vCPU. Before run() only.
    void record(const std::vector<soft::Recording>& recordings);
    /// For who drives vcpu(0) by itself: records go there from now on, whatever the windows; and no more.
    void start_recording(const std::vector<soft::Recording>& recordings);
    void stop_recording();
    /// What windows there are; without a call, all of the run is one. Before record() and run() only.
    void trace_windows(WindowPlan plan) { windows_.follow(std::move(plan)); }
    void trace_nothing() { windows_.trace_nothing(); }
    const Windows& windows() const { return windows_; }

    /// Runs until something ends it. `progress`, if given, is called about every 10 ms of host time's worth of guest
    /// work (each million instructions); it may call request_stop(). The console callback may come from other threads,
    /// one call at a time.
    RunResult run(const RunLimits& limits, const std::function<void()>& progress = {});
    /// Ends run() at a near instruction boundary. From any thread, or a signal handler.
    void request_stop() { stop_.store(true, std::memory_order_relaxed); }

    /// For who drives vcpu(0) by itself, instruction by instruction: fires what is due, and lets time pass while the only
    /// processor is halted. True: the run has ended, `result` says how; else the processor can execute.
    bool settle(const RunLimits& limits, RunResult& result);
    /// vcpu(0) leaves interrupts and NMIs pending.
    void hold_interrupts(bool on);
    /// From now on each access of the first processor is appended there; null: no more. Borrowed.
    void log_accesses(std::vector<DeviceAccess>* log);

    GuestMemory& memory() { return memory_; }
    /// The guest's own Debug Store and counters; null: its CPU model has none, or KVM runs it.
    ds::Facility* facility(unsigned vcpu);
    Clock& clock() { return clock_; }
    Chipset& chipset() { return *chipset_; }
    const LoadedGuest& guest() const { return guest_; }
    const CpuidModel& cpuid() const { return config_.cpuid; }
    const std::string& cpu_name() const { return config_.cpuid.name(); }
    uint64_t tsc_hz() const { return clock_.tsc_hz(); }
    /// Outside of windows the guest runs natively.
    bool native() const { return native_ != nullptr; }
    const HandOvers& hand_overs() const { return hand_overs_; }
    unsigned vcpus() const { return static_cast<unsigned>(processors_.size()); }
    /// Not while it runs natively; run() leaves all state here.
    Vcpu& vcpu(unsigned index);
    /// By the software engine.
    uint64_t retired(unsigned index) const;
    uint64_t retired() const;
    /// MachineConfig::input has been typed, or there was none.
    bool input_typed() const { return config_.input.empty(); }
    /// Empties every vCPU's BTS area into its ring.
    void drain_records();

  private:
    class Pins;
    struct Processor;
    struct Native;
    class NativeStage;
    enum class Turn : uint8_t { goes_on, window_due, ended };

    Machine(MachineConfig config, GuestMemory memory);
    Result<> build();
    Result<> build_native();
    Result<> add_processor(unsigned index, const std::shared_ptr<soft::BlockCache>& blocks);
    void on_event(const MachineEvent& event);
    void on_console(std::string_view bytes);
    void on_init(unsigned vcpu);
    void on_startup(unsigned vcpu, uint8_t vector);
    void init_now(Vcpu& vcpu);
    bool startup_now(Vcpu& vcpu, uint8_t vector);
    void type_input();
    bool finish_if_due(RunResult& result);
    bool limit_reached(const RunLimits& limits, RunResult& result);
    void begin_window();
    void end_window();
    void turn_window();
    void set_breakpoints();
    void take_from_kvm();
    void give_to_kvm();
    Turn run_soft(const RunLimits& limits, const std::function<void()>& progress, RunResult& result);
    Turn run_native(const RunLimits& limits, const std::function<void()>& progress, RunResult& result);
    std::string panic_detail() const;
    VirtualTime next_stop(const RunLimits& limits) const;
    Turn run_turn(Processor& processor, const RunLimits& limits, RunResult& result);
    bool all_stuck() const;
    bool never_wakes(RunResult& result);
    bool pass_idle_time(const RunLimits& limits, RunResult& result);

    MachineConfig config_;
    GuestMemory memory_;
    Clock clock_;
    Bus ports_, mmio_;
    std::unique_ptr<Chipset> chipset_;
    LoadedGuest guest_;
    std::unique_ptr<Native> native_; // null: there is only the software engine
    std::vector<std::unique_ptr<Processor>> processors_;
    std::vector<soft::Recording> recordings_;
    Windows windows_;
    HandOvers hand_overs_;
    NativeStage* stage_ = nullptr; // while processors run natively
    ConsoleWatch watch_;
    std::atomic<bool> stop_{false};

    // What the guest has done that ends the run.
    bool powered_off_ = false, reset_ = false, exited_ = false, panicked_ = false;
    uint32_t exit_code_ = 0;
    VirtualTime panic_deadline_ = never;
    uint64_t idle_steps_ = 0; // jumps to the next event since a processor retired an instruction
};

} // namespace vtrace
