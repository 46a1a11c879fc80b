// The engine as a whole: what must hold for any code, however the run is cut.
#define CATCH_CONFIG_MAIN
#include <map>
#include <span>
#include <catch2/catch.hpp>

#include <cstdio>
#include <fstream>
#include <memory>
#include <pthread.h>
#include <unistd.h>
#include <vector>

#include "ds/debug_store.h"
#include "vmm/machine.h"
#include "vmm/soft/soft_vcpu.h"

// A loop with something of every family of handlers; position-independent 64-bit code, in RBX the count of rounds.
asm(R"(
    .pushsection .rodata
    .globl engine_loop_begin, engine_loop_end
engine_loop_begin:
    mov $0x1000000, %ebx
    mov $0x300000, %esi
    mov $0x310000, %edi
    fninit
    # A kernel's usual way to switch on SSE.
    mov %cr4, %rax
    or $0x600, %eax
    mov %rax, %cr4
1:  mov %rbx, 8(%rsi)
    add %rbx, (%rsi)
    addl $3, 16(%rsi,%rcx,1)
    mov 8(%rsi), %rax
    movzbl 9(%rsi), %edx
    movsbq (%rsi), %r8
    lea 5(%rax,%rdx,2), %r9
    cmp %r9, %rax
    jb 2f
    test $1, %al
    jz 2f
    xor %r10, %rax
2:  push %rax
    push $77
    pop %rcx
    pop %r11
    call 3f
    imul %rax, %rdx
    mul %rdx
    shl $3, %rax
    sar %cl, %rdx
    rcl $1, %r8
    shld $7, %rax, %r9
    bt $5, %rax
    setc %dl
    cmovz %r8, %r9
    bsf %rax, %rcx
    xchg %rax, 32(%rsi)
    lock xadd %rdx, 40(%rsi)
    lock cmpxchg %r9, 48(%rsi)
    cqto
    lahf
    mov $9, %ecx
    rep stosb
    sub $9, %rdi
    movd %eax, %xmm1
    paddd %xmm1, %xmm2
    movdqu %xmm2, 64(%rsi)
    fld1
    faddl 64(%rsi)
    fstpl 80(%rsi)
    pushf
    popf
    cpuid
    mov $0x1000000, %ebx
    rdtsc
    xor %ecx, %ecx
    str %r12
    lea 4f(%rip), %rax
    jmp *%rax
3:  ret
4:  loop 5f
5:  dec %r13
    jmp 1b
engine_loop_end:
    .popsection
)");
extern "C" const uint8_t engine_loop_begin[], engine_loop_end[];

namespace vtrace {
namespace {

/// A machine with the loop above as a flat binary.
struct LoopMachine {
    std::unique_ptr<Machine> machine;

    LoopMachine() {
        char path[] = "/tmp/vtrace-engine-XXXXXX";
        const int fd = mkstemp(path);
        REQUIRE(fd >= 0);
        const auto size = static_cast<size_t>(engine_loop_end - engine_loop_begin);
        REQUIRE(write(fd, engine_loop_begin, size) == static_cast<ssize_t>(size));
        close(fd);
        MachineConfig config{.memory = 16u << 20, .cpuid = *CpuidModel::by_name("x86-64-v2"), .boot = {}};
        config.boot.kernel_path = path;
        config.boot.flat = FlatOptions{};
        auto made = Machine::create(std::move(config));
        unlink(path);
        REQUIRE(made);
        machine = std::move(*made);
    }
    Vcpu& vcpu() { return machine->vcpu(0); }

    /// Retires exactly `count` instructions, at most `slice` at a time.
    void run(uint64_t count, uint64_t slice) {
        while (count > 0) {
            const VcpuRun run = vcpu().run(std::min(count, slice));
            REQUIRE((run.exit == VcpuExit::budget || run.exit == VcpuExit::device));
            REQUIRE(run.retired <= count);
            count -= run.retired;
        }
    }
};

/// What a run has left: registers and the memory that the loop writes.
struct Snapshot {
    CpuState state;
    std::vector<uint8_t> memory;
    bool operator==(const Snapshot&) const = default;
};
Snapshot snapshot_of(LoopMachine& loop) {
    const uint8_t* data = loop.machine->memory().at(0x300000, 0x11000);
    return {loop.vcpu().state(), {data, data + 0x11000}};
}

} // namespace

TEST_CASE("however a run is cut, the state at an instruction is the same") {
    constexpr uint64_t count = 20'011;
    LoopMachine whole;
    whole.run(count, count);
    const Snapshot expected = snapshot_of(whole);
    CHECK(expected.state.gpr[R13] > UINT64_MAX - count); // it did go round
    for (uint64_t slice : {1u, 2u, 3u, 7u, 33u, 1000u}) {
        LoopMachine cut;
        cut.run(count, slice);
        INFO("slices of " << slice);
        CHECK(snapshot_of(cut) == expected);
    }
}

TEST_CASE("every stop is at the instruction asked for") {
    LoopMachine stepped, jumped;
    uint64_t at = 0;
    for (uint64_t next : {1u, 5u, 6u, 40u, 41u, 64u, 100u, 501u, 1003u}) {
        jumped.run(next - at, UINT64_MAX);
        stepped.run(next - at, 1);
        at = next;
        INFO("after " << at);
        CHECK(jumped.vcpu().state().rip == stepped.vcpu().state().rip);
    }
}

TEST_CASE("a state taken out and put back is the same processor") {
    constexpr uint64_t count = 5'003;
    LoopMachine whole, moved;
    whole.run(count, count);
    for (uint64_t done = 0; done < count; ++done) {
        moved.run(1, 1);
        const CpuState state = moved.vcpu().state();
        moved.vcpu().set_state(CpuState{}); // nothing of it may be left behind
        moved.vcpu().set_state(state);
        REQUIRE(moved.vcpu().state() == state);
    }
    CHECK(snapshot_of(moved) == snapshot_of(whole));
}

TEST_CASE("a breakpoint stops before each execution, and is not seen") {
    // Every address that the loop comes by, and how often.
    constexpr uint64_t count = 3'000;
    LoopMachine stepped;
    std::map<Gva, uint64_t> visits;
    for (uint64_t n = 0; n < count; ++n) {
        const Gva at = stepped.vcpu().state().rip;
        stepped.run(1, 1);
        visits[at] += stepped.vcpu().state().rip != at; // an iteration of REP is none of its own
    }
    const Snapshot expected = snapshot_of(stepped);
    for (const auto& [address, times] : visits) {
        LoopMachine stopped;
        stopped.vcpu().set_breakpoints(std::span(&address, 1));
        uint64_t left = count, hits = 0;
        while (left > 0) {
            const VcpuRun run = stopped.vcpu().run(left);
            left -= run.retired;
            if (run.exit == VcpuExit::breakpoint) {
                REQUIRE(stopped.vcpu().state().rip == address);
                ++hits;
            }
        }
        INFO("at " << std::hex << address);
        CHECK(hits >= times);
        CHECK(hits <= times + 1); // where the last instruction leads
        CHECK(snapshot_of(stopped) == expected);
    }
}

TEST_CASE("a run needs no more stack the longer it is") {
    // Where a handler's last call isn't a tail call, each instruction of it leaves a frame behind.
    LoopMachine loop;
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    REQUIRE(pthread_attr_setstacksize(&attributes, 256 << 10) == 0);
    pthread_t thread;
    const auto body = [](void* argument) -> void* {
        static_cast<LoopMachine*>(argument)->run(3'000'000, 3'000'000);
        return nullptr;
    };
    REQUIRE(pthread_create(&thread, &attributes, body, &loop) == 0);
    pthread_join(thread, nullptr);
    pthread_attr_destroy(&attributes);
    CHECK(loop.machine->retired() == 3'000'000);
}

TEST_CASE("records are the same, however a run is cut") {
    const auto records = [](uint64_t slice) {
        ds::Doorbell bell;
        auto ring = ds::Ring::create(1 << 16, bell);
        REQUIRE(ring);
        auto store = ds::DebugStore::create(ds::DebugStore::default_records, *ring);
        REQUIRE(store);
        REQUIRE((*store)->set_debugctl(ds::DebugCtl::tr | ds::DebugCtl::bts | ds::DebugCtl::btint));
        struct Sink final : TraceSink {
            void code_page(unsigned, uint64_t, Gpa, std::span<const uint8_t, page_size>) override {}
            void code_mapping(unsigned, uint64_t, uint64_t, Gva, Gpa, bool) override {}
            void console(VirtualTime, std::string_view) override {}
        } sink;
        LoopMachine loop;
        loop.machine->record({{store->get(), &sink, 0}});
        loop.run(20'000, slice);
        loop.machine->drain_records();
        std::vector<std::array<uint64_t, 3>> result;
        for (auto span = ring->acquire(); !span.empty(); span = ring->acquire()) {
            for (const ds::BtsRecord& record : span)
                if (!ds::BtsFlags::is_event(record.flags))
                    result.push_back({record.from, record.to, record.flags});
            ring->release(span.size());
        }
        return result;
    };
    const auto whole = records(20'000);
    CHECK(whole.size() > 1000);
    CHECK(records(1) == whole);
    CHECK(records(13) == whole);
}

} // namespace vtrace
