// The engine as a whole: what must hold for any code, however the run is cut.
#define CATCH_CONFIG_MAIN
#include <map>
#include <span>
#include <catch2/catch.hpp>

#include <pthread.h>
#include <vector>

#include "tests/soft/loop_machine.h"
#include "vmm/soft/soft_vcpu.h"

namespace vtrace {
namespace {

/// What a run has left: registers and the memory that the loop writes.
struct Snapshot {
    CpuState state;
    std::vector<uint8_t> memory;
    bool operator==(const Snapshot&) const = default;
};
Snapshot snapshot_of(LoopMachine& loop) {
    const uint8_t* data = loop.machine->memory().at(LoopMachine::data, LoopMachine::data_size);
    return {loop.vcpu().state(), {data, data + LoopMachine::data_size}};
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
        RecordedLoop loop;
        loop.run(20'000, slice);
        return loop.branches();
    };
    const auto whole = records(20'000);
    CHECK(whole.size() > 1000);
    CHECK(records(1) == whole);
    CHECK(records(13) == whole);
}

} // namespace vtrace
