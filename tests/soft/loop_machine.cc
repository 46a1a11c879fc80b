#include "tests/soft/loop_machine.h"

#include <stdexcept>

#include <unistd.h>

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

LoopMachine::LoopMachine(std::string_view model, std::span<const uint8_t> code) {
    if (code.empty())
        code = {engine_loop_begin, engine_loop_end};
    char path[] = "/tmp/vtrace-engine-XXXXXX";
    const int fd = mkstemp(path);
    if (fd < 0 || write(fd, code.data(), code.size()) != static_cast<ssize_t>(code.size()))
        throw std::runtime_error("cannot write the guest's file");
    close(fd);
    MachineConfig config{.memory = 16u << 20, .cpuid = *CpuidModel::by_name(model), .boot = {}};
    config.boot.kernel_path = path;
    config.boot.flat = FlatOptions{};
    auto made = Machine::create(std::move(config));
    unlink(path);
    if (!made)
        throw std::runtime_error(made.error().message);
    machine = std::move(*made);
}

void LoopMachine::run(uint64_t count, uint64_t slice) {
    while (count > 0) {
        const VcpuRun run = vcpu().run(std::min(count, slice));
        if ((run.exit != VcpuExit::budget && run.exit != VcpuExit::device) || run.retired > count)
            throw std::runtime_error("the guest stopped: " + run.detail);
        count -= run.retired;
    }
}

RecordedLoop::RecordedLoop(std::string_view model, std::span<const uint8_t> code) : LoopMachine(model, code) {
    ring_ = std::move(*ds::Ring::create(1 << 17, bell_));
    store_ = std::move(*ds::DebugStore::create(ds::DebugStore::default_records, ring_));
    if (!store_->set_debugctl(ds::DebugCtl::tr | ds::DebugCtl::bts | ds::DebugCtl::btint))
        throw std::runtime_error("cannot record");
    machine->record({{store_.get(), &sink_, 0}});
}

std::vector<std::array<uint64_t, 3>> RecordedLoop::branches() {
    machine->drain_records();
    std::vector<std::array<uint64_t, 3>> result;
    for (auto span = ring_.acquire(); !span.empty(); span = ring_.acquire()) {
        for (const ds::BtsRecord& record : span)
            if (!ds::BtsFlags::is_event(record.flags))
                result.push_back({record.from, record.to, record.flags});
        ring_.release(span.size());
    }
    return result;
}

} // namespace vtrace
