// Lockstep: the software engine and KVM execute the same instructions from the same state, and are compared.
//
// The software engine leads, on the machine's own memory and devices. KVM follows, on a copy of the memory: what the
// instruction read from devices is answered from what the leader read, interrupts are injected where it took them.
//
// KVM is stopped after the instruction by the trap flag; where that would be seen by the guest or be lost (an event
// delivered, SYSCALL, PUSHF ...), by a HLT in place of the first byte that the leader went on to. Where the trap comes
// one instruction late (MOV SS, returns to user mode), the leader makes one more step.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "ds/debug_store.h"
#include "vmm/kvm/kvm_cpu.h"
#include "vmm/machine.h"

namespace vtrace::kvm {

/// The two engines part: what is different, and the states.
struct Difference {
    std::string what; // one line for each thing
    CpuState before, soft, kvm;
    std::vector<uint8_t> code; // the instruction, at `before`
    uint64_t instruction = 0;  // compared before it
};

/// What the compared steps were.
struct StepCounts {
    uint64_t instructions = 0, user = 0;
    uint64_t interrupts = 0, exceptions = 0, system_calls = 0, device_accesses = 0, string_repeats = 0;
    uint64_t resume_flags = 0; // faults for which KVM's processor pushed RF otherwise than the manual says
    uint64_t branches = 0;     // taken, as seen from KVM's RIP, each equal to the record that the software engine wrote
};

class Lockstep {
  public:
    /// `machine` has one vCPU; both are borrowed. Errors: of KVM, or no memory for the copy.
    static Result<std::unique_ptr<Lockstep>> create(const KvmHost& host, Machine& machine);
    ~Lockstep();

    /// Makes KVM's guest equal to the machine as it is now: a place to compare from.
    void begin();
    /// Until the next begin() the machine goes on by itself, unrecorded.
    void pause() {
        machine_.stop_recording();
        machine_.hold_interrupts(false);
    }
    /// One instruction, or the delivery of one interrupt, by both. The machine's vCPU is not halted, or something wakes
    /// it. nullopt: no difference. Error: KVM itself failed.
    Result<std::optional<Difference>> step();
    /// What step() leaves out for speed: all of memory, FPU, debug registers, MSRs, and the branch records of the place.
    Result<std::optional<Difference>> compare_all();

    const StepCounts& counts() const { return counts_; }
    /// The leader has met the end: a triple fault, or what it can't do.
    const std::string& leader_ended() const { return ended_; }

  private:
    enum class Stop : uint8_t { trap_flag, halt };
    struct Instruction;
    struct DeviceByte {
        bool port, write;
        uint64_t address;
        uint8_t value;
    };

    Lockstep(Machine& machine, GuestMemory memory) : machine_(machine), memory_(std::move(memory)) {}
    Instruction decode(const CpuState& state) const;
    VcpuRun lead(uint64_t budget);
    std::optional<ds::BtsRecord> last_record() const;
    Result<std::optional<Difference>> follow_long_repeat(const CpuState& before);
    std::optional<std::string> follow(const CpuState& before, const CpuState& after, Stop stop);
    std::optional<std::string> run_to(Gva target, uint64_t start_rip, Stop stop);
    std::optional<std::string> answer_device();
    bool answer_byte(bool port, bool write, uint64_t address, uint8_t* value, std::string& why);
    std::optional<std::string> compare(const CpuState& soft, uint64_t flags_mask);
    std::string compare_memory();
    void check_resume_flag(uint8_t vector);
    void align(const CpuState& soft);
    Difference difference(std::string what, const CpuState& before);
    void collect_records();

    Machine& machine_;
    GuestMemory memory_; // KVM's
    std::unique_ptr<KvmVm> vm_;
    std::unique_ptr<KvmCpu> cpu_;
    std::unique_ptr<ds::Doorbell> bell_;
    ds::Ring ring_;
    std::unique_ptr<ds::DebugStore> store_;
    std::unique_ptr<TraceSink> sink_;

    std::vector<DeviceAccess> accesses_; // of the leader, in this step
    std::vector<DeviceByte> expected_;   // the same, by bytes
    size_t answered_ = 0;
    CpuState last_; // the leader's
    std::vector<ds::BtsRecord> soft_branches_, kvm_branches_; // of this place
    std::string ended_;
    StepCounts counts_;
};

} // namespace vtrace::kvm
