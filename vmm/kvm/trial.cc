#include "vmm/kvm/trial.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstring>
#include <iterator>

#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "vmm/kvm/kvm_api.h"

#ifndef sigev_notify_thread_id // glibc names it so only since 2.38
#define sigev_notify_thread_id _sigev_un._tid
#endif

namespace vtrace::kvm {
namespace {

using SteadyClock = std::chrono::steady_clock;

constexpr uint32_t rounds = 100'000, instructions_a_round = 3;
constexpr uint32_t expected = static_cast<uint32_t>(uint64_t{rounds} * (rounds + 1) / 2);
constexpr std::chrono::milliseconds patience{90};
static_assert(uint64_t{rounds} * instructions_a_round * 1000 / patience.count() == trial_least_speed);
constexpr uint8_t result_port = 0x10;

constexpr uint64_t memory_size = 0x10000, code_at = 0x1000, pml4_at = 0x2000, pdpt_at = 0x3000, directory_at = 0x4000,
                   result_at = 0x8000;
constexpr uint64_t tss_address = 0xfffb'd000; // three pages that Intel's processors want outside of RAM

const std::array<uint8_t, 23> code = {
    0x31,
    0xc0, //        xor eax, eax
    0xb9,
    rounds & 0xff,
    rounds >> 8 & 0xff,
    rounds >> 16 & 0xff,
    rounds >> 24, // mov ecx, rounds
    0x01,
    0xc8, // again: add eax, ecx
    0xff,
    0xc9, //        dec ecx
    0x75,
    0xfa, //        jnz again
    0x89,
    0x04,
    0x25,
    result_at & 0xff,
    result_at >> 8,
    0,
    0, // mov [result_at], eax
    0xe7,
    result_port, //        out result_port, eax
    0xf4,        //        hlt
};

/// A mapping that undoes itself.
class Mapping {
  public:
    Mapping(size_t size, int flags, int fd)
        : size_(size), at_(mmap(nullptr, size, PROT_READ | PROT_WRITE, flags, fd, 0)) {}
    Mapping(const Mapping&) = delete;
    Mapping& operator=(const Mapping&) = delete;
    ~Mapping() {
        if (*this)
            munmap(at_, size_);
    }
    explicit operator bool() const { return at_ != MAP_FAILED; }
    uint8_t* bytes() const { return static_cast<uint8_t*>(at_); }

  private:
    size_t size_;
    void* at_;
};

/// Interrupts this thread's KVM_RUN: after `patience`, and from then on again and again, so that a signal that comes
/// just before KVM_RUN does no harm.
class Alarm {
  public:
    Alarm() {
        struct sigaction action {};
        action.sa_handler = [](int) {};
        sigaction(SIGRTMIN + 1, &action, nullptr);
        sigevent event{};
        event.sigev_notify = SIGEV_THREAD_ID;
        event.sigev_signo = SIGRTMIN + 1;
        event.sigev_notify_thread_id = static_cast<pid_t>(syscall(SYS_gettid));
        made_ = timer_create(CLOCK_MONOTONIC, &event, &timer_) == 0;
        itimerspec times{};
        times.it_value.tv_nsec = std::chrono::nanoseconds(patience).count();
        times.it_interval.tv_nsec = std::chrono::nanoseconds(std::chrono::milliseconds(5)).count();
        set_ = made_ && timer_settime(timer_, 0, &times, nullptr) == 0;
    }
    Alarm(const Alarm&) = delete;
    Alarm& operator=(const Alarm&) = delete;
    ~Alarm() {
        if (made_)
            timer_delete(timer_);
    }
    bool set() const { return set_; }

  private:
    timer_t timer_{};
    bool made_ = false, set_ = false;
};

Unexpected refused(const char* what) {
    return fail("KVM is there but can't be used: it refuses {}: {}", what, errno_text(errno));
}

void put_entry(uint8_t* memory, uint64_t at, uint64_t entry) {
    std::memcpy(memory + at, &entry, sizeof entry);
}

void fill_memory(uint8_t* memory) {
    constexpr uint64_t present_writable = 3, large = 1 << 7;
    put_entry(memory, pml4_at, pdpt_at | present_writable);
    put_entry(memory, pdpt_at, directory_at | present_writable);
    put_entry(memory, directory_at, large | present_writable);
    std::memcpy(memory + code_at, code.data(), code.size());
}

/// A processor that has long mode and what goes with it; no more is used.
Result<> set_cpuid(int vcpu) {
    struct Leaf {
        uint32_t number, eax, edx;
    };
    constexpr uint32_t fpu_pse_tsc_msr_pae_cx8 = 0x179, syscall_nx_lm = 1 << 11 | 1 << 20 | 1 << 29;
    constexpr uint32_t address_bits = 48 << 8 | 36;
    constexpr Leaf leaves[] = {{0, 1, 0},
                               {1, 0, fpu_pse_tsc_msr_pae_cx8},
                               {0x8000'0000, 0x8000'0008, 0},
                               {0x8000'0001, 0, syscall_nx_lm},
                               {0x8000'0008, address_bits, 0}};
    alignas(kvm_cpuid2) std::array<uint8_t, sizeof(kvm_cpuid2) + std::size(leaves) * sizeof(kvm_cpuid_entry2)> buffer{};
    kvm_cpuid2 head{};
    head.nent = std::size(leaves);
    std::memcpy(buffer.data(), &head, sizeof head);
    size_t at = sizeof head;
    for (const Leaf& leaf : leaves) {
        kvm_cpuid_entry2 entry{};
        entry.function = leaf.number;
        entry.eax = leaf.eax;
        entry.edx = leaf.edx;
        std::memcpy(buffer.data() + at, &entry, sizeof entry);
        at += sizeof entry;
    }
    if (ioctl(vcpu, KVM_SET_CPUID2, buffer.data()) < 0)
        return refused("a CPUID with 64-bit mode");
    return {};
}

/// 64-bit mode at privilege 0, flat segments, interrupts off.
Result<> set_registers(int vcpu) {
    constexpr uint64_t cr0_pe_et_ne_pg = 0x8000'0031, cr4_pae = 1 << 5, efer_lme_lma = 0x500;
    constexpr uint8_t type_data = 3, type_code = 11;
    kvm_sregs sregs{};
    if (ioctl(vcpu, KVM_GET_SREGS, &sregs) < 0)
        return refused("to give its control registers");
    kvm_segment data{};
    data.limit = 0xffff'ffff;
    data.selector = 0x10;
    data.type = type_data;
    data.present = data.s = data.g = data.db = 1;
    sregs.ds = sregs.es = sregs.ss = sregs.fs = sregs.gs = sregs.cs = data;
    sregs.cs.selector = 8;
    sregs.cs.type = type_code;
    sregs.cs.l = 1;
    sregs.cs.db = 0;
    sregs.cr0 = cr0_pe_et_ne_pg;
    sregs.cr3 = pml4_at;
    sregs.cr4 = cr4_pae;
    sregs.efer = efer_lme_lma;
    if (ioctl(vcpu, KVM_SET_SREGS, &sregs) < 0)
        return refused("64-bit mode");
    kvm_regs regs{};
    regs.rip = code_at;
    regs.rflags = 2;
    if (ioctl(vcpu, KVM_SET_REGS, &regs) < 0)
        return refused("general registers");
    return {};
}

uint64_t speed(uint64_t instructions, SteadyClock::duration time) {
    const auto ns = std::max<int64_t>(1, std::chrono::nanoseconds(time).count());
    return instructions * 1'000'000'000 / static_cast<uint64_t>(ns);
}

/// Runs until the port write, or until the time is up.
Result<TrialSpeed> run_guest(int vcpu, const kvm_run& run, const uint8_t* memory) {
    const auto start = SteadyClock::now();
    while (ioctl(vcpu, KVM_RUN, 0) < 0) {
        if (errno != EINTR && errno != EAGAIN)
            return refused("to run a guest");
        const auto time = SteadyClock::now() - start;
        if (time < patience)
            continue;
        kvm_regs regs{};
        if (ioctl(vcpu, KVM_GET_REGS, &regs) < 0)
            return refused("to give its registers");
        const uint64_t left = std::min<uint64_t>(regs.rcx, rounds);
        const uint64_t rate = speed((rounds - left) * instructions_a_round, time);
        return fail("KVM answers but doesn't execute guests' kernel code on the processor: it ran {:.1f} million "
                    "instructions a second in a trial, as an interpreter does; the software engine is faster",
                    static_cast<double>(rate) / 1e6);
    }
    const auto time = SteadyClock::now() - start;
    if (run.exit_reason != KVM_EXIT_IO || run.io.direction != KVM_EXIT_IO_OUT || run.io.port != result_port)
        return fail("KVM is there but can't be used: a trial guest should have written to a port, but ended with KVM's "
                    "exit {}",
                    run.exit_reason);
    uint32_t written = 0, stored = 0;
    std::memcpy(&written, reinterpret_cast<const uint8_t*>(&run) + run.io.data_offset, sizeof written);
    std::memcpy(&stored, memory + result_at, sizeof stored);
    if (run.io.size != sizeof written || written != expected || stored != expected)
        return fail(
            "KVM is there but can't be used: a trial guest should have computed {:#x}, but wrote {:#x} to a port "
            "and {:#x} to memory",
            expected, written, stored);
    return TrialSpeed{speed(uint64_t{rounds} * instructions_a_round, time)};
}

Result<TrialSpeed> try_guest(const KvmHost& host) {
    const Mapping memory(memory_size, MAP_SHARED | MAP_ANONYMOUS, -1);
    if (!memory)
        return fail("cannot try KVM: no memory for a guest: {}", errno_text(errno));
    fill_memory(memory.bytes());

    const Fd vm(ioctl(host.fd(), KVM_CREATE_VM, 0));
    if (vm.get() < 0)
        return refused("a virtual machine");
    if (ioctl(vm.get(), KVM_SET_TSS_ADDR, tss_address) < 0)
        return refused("a task state segment");
    kvm_userspace_memory_region region{};
    region.memory_size = memory_size;
    region.userspace_addr = reinterpret_cast<uintptr_t>(memory.bytes());
    if (ioctl(vm.get(), KVM_SET_USER_MEMORY_REGION, &region) < 0)
        return refused("guest memory");
    const Fd vcpu(ioctl(vm.get(), KVM_CREATE_VCPU, 0));
    if (vcpu.get() < 0)
        return refused("a vCPU");
    const int run_size = ioctl(host.fd(), KVM_GET_VCPU_MMAP_SIZE, 0);
    if (run_size < static_cast<int>(sizeof(kvm_run)))
        return refused("to say how large a vCPU's page is");
    const Mapping run(static_cast<size_t>(run_size), MAP_SHARED, vcpu.get());
    if (!run)
        return refused("a vCPU's page");
    VTRACE_TRY(set_cpuid(vcpu.get()));
    VTRACE_TRY(set_registers(vcpu.get()));

    const Alarm alarm;
    if (!alarm.set())
        return fail("cannot try KVM: no timer: {}", errno_text(errno));
    return run_guest(vcpu.get(), *reinterpret_cast<const kvm_run*>(run.bytes()), memory.bytes());
}

} // namespace

Result<TrialSpeed> trial(const KvmHost& host) {
    auto speed = try_guest(host);
    if (!speed && !hardware_module())
        return fail("{} (the processor shows neither svm nor vmx: this is not KVM on hardware)", speed.error().message);
    return speed;
}

} // namespace vtrace::kvm
