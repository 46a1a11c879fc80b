// The cost of a guest's own BTS: the same guest recorded by the host alone, and with a guest-owned BTS active beside it, in
// turns in one run. Prints nanoseconds a branch of each, and their ratio.
//
// The guest is a loop of integer code with a taken branch in five instructions, denser than a kernel's one in thirteen; its
// buffer is circular, so that every branch is stored.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>

#include "ds/msr.h"
#include "tests/soft/loop_machine.h"

asm(R"(
    .pushsection .rodata
    .globl bench_loop_begin, bench_loop_end
bench_loop_begin:
    mov $0x300000, %esi
1:  mov (%rsi), %rax
    add $3, %rax
    mov %rax, (%rsi)
    call 3f
    test $1, %al
    jz 2f
    xor %rax, 8(%rsi)
2:  lea 7(%rax,%rdx,2), %rdx
    cmp $5, %al
    jne 1b
    inc %rbx
    jmp 1b
3:  mov 16(%rsi), %rcx
    lea 1(%rcx), %rcx
    mov %rcx, 16(%rsi)
    ret
bench_loop_end:
    .popsection
)");
extern "C" const uint8_t bench_loop_begin[], bench_loop_end[];

using namespace vtrace;

namespace {

constexpr uint64_t instructions = 40'000'000, slice = 500'000;
constexpr Gpa area = 0x400000, buffer = 0x410000;
constexpr uint64_t buffer_bytes = 4096 * 24, tr_bts = 1 << 6 | 1 << 7;

/// Nanoseconds a branch.
double measure(bool guest_owned) {
    RecordedLoop loop("core2", {bench_loop_begin, bench_loop_end});
    ds::Facility& facility = *loop.machine->facility(0);
    if (guest_owned) {
        const uint64_t fields[] = {buffer, buffer, buffer + buffer_bytes, ~0ull};
        std::memcpy(loop.machine->memory().at(area, sizeof fields), fields, sizeof fields);
        if (!facility.write_msr(ds::msr::ds_area, area) || !facility.write_msr(ds::msr::debugctl, tr_bts))
            std::abort();
    }
    size_t branches = 0;
    const auto start = std::chrono::steady_clock::now();
    for (uint64_t done = 0; done < instructions; done += slice) {
        loop.run(slice, slice);
        branches += loop.branches().size();
    }
    const std::chrono::duration<double, std::nano> time = std::chrono::steady_clock::now() - start;
    if (facility.branches().written != (guest_owned ? branches : 0))
        std::abort();
    return time.count() / static_cast<double>(branches);
}

} // namespace

int main() {
    double host = 1e9, both = 1e9;
    for (int round = 0; round < 5; ++round) {
        host = std::min(host, measure(false));
        both = std::min(both, measure(true));
    }
    std::printf("host recording alone: %.1f ns a branch\nwith guest-owned BTS: %.1f ns a branch\nratio: %.2f\n", host, both,
                both / host);
}
