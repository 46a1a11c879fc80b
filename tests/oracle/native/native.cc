#include "tests/oracle/native/native.h"

#include <asm/prctl.h>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

namespace vtrace::oracle {

namespace {

// What the entry code reads; offsets are known to the assembly below.
struct Entry {
    uint64_t gpr[16];
    uint64_t rip; // also the offset of the far pointer below
    uint64_t rflags;
    uint64_t host_rsp;
    uint32_t far_offset;
    uint16_t far_selector;
    uint16_t data_selector;
    uint8_t pad[64 - 32];
    uint8_t fxsave[512];
};
static_assert(offsetof(Entry, rip) == 128 && offsetof(Entry, far_offset) == 152 && offsetof(Entry, fxsave) == 192);

} // namespace

extern "C" {
alignas(64) Entry vtrace_oracle_entry;
void vtrace_oracle_enter();
void vtrace_oracle_signal(int, siginfo_t*, void*);
void vtrace_oracle_signal_entry(int, siginfo_t*, void*);
[[noreturn]] void vtrace_oracle_leave();
}

// Enter: saves what the ABI wants saved, loads everything, jumps. Leave: the other way, from the signal handler, which
// is abandoned (SA_NODEFER: no mask to restore). Signals arrive with AC as the case left it: clear it before any C++
// code.
asm(R"(
    .text
    .globl vtrace_oracle_enter
vtrace_oracle_enter:
    push %rbx
    push %rbp
    push %r12
    push %r13
    push %r14
    push %r15
    lea vtrace_oracle_entry(%rip), %rax
    mov %rsp, 144(%rax)
    fxrstor64 192(%rax)
    movzwl 158(%rax), %ecx
    mov %ecx, %ds
    mov %ecx, %es
    pushq 136(%rax)
    popfq
    mov 8(%rax), %rcx
    mov 16(%rax), %rdx
    mov 24(%rax), %rbx
    mov 32(%rax), %rsp
    mov 40(%rax), %rbp
    mov 48(%rax), %rsi
    mov 56(%rax), %rdi
    mov 64(%rax), %r8
    mov 72(%rax), %r9
    mov 80(%rax), %r10
    mov 88(%rax), %r11
    mov 96(%rax), %r12
    mov 104(%rax), %r13
    mov 112(%rax), %r14
    mov 120(%rax), %r15
    mov 0(%rax), %rax
    ljmp *(vtrace_oracle_entry + 152)(%rip)

    .globl vtrace_oracle_leave
vtrace_oracle_leave:
    mov (vtrace_oracle_entry + 144)(%rip), %rsp
    pop %r15
    pop %r14
    pop %r13
    pop %r12
    pop %rbp
    pop %rbx
    cld
    ret

    .globl vtrace_oracle_signal_entry
vtrace_oracle_signal_entry:
    pushfq
    andl $0xfffbffff, (%rsp)
    popfq
    jmp vtrace_oracle_signal
)");

namespace {

Answer answer;

bool in_arena(uint64_t rip) {
    return (rip >= Arena::code && rip < Arena::code + Arena::code_size) ||
           (rip >= Arena::exits && rip < Arena::exits + Arena::exits_size) ||
           (rip >= 1 << 16 && rip < Arena::data + Arena::guard);
}

} // namespace

void vtrace_oracle_signal(int signal, siginfo_t*, void* context) {
    static constexpr int order[16] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                                      REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};
    const mcontext_t& machine = static_cast<ucontext_t*>(context)->uc_mcontext;
    auto reg = [&](int index) { return static_cast<uint64_t>(machine.gregs[index]); };
    uint64_t rip = reg(REG_RIP);
    if (!in_arena(rip)) {
        std::fprintf(stderr, "signal %d at %#lx, outside of the arena\n", signal, rip);
        std::signal(signal, SIG_DFL);
        return;
    }
    for (unsigned i = 0; i < 16; i++)
        answer.state.gpr[i] = reg(order[i]);
    answer.state.rflags = reg(REG_EFL);
    answer.vector = static_cast<int>(reg(REG_TRAPNO));
    answer.error_code = static_cast<uint32_t>(reg(REG_ERR));
    answer.cr2 = reg(REG_CR2);
    std::memcpy(answer.state.fpu.fxsave.data(), machine.fpregs, 512);
    if (answer.vector == Vector::bp) {
        answer.vector = completed;
        rip--;
    }
    answer.state.rip = rip;
    vtrace_oracle_leave();
}

Result<> Native::start() {
    struct Mapping {
        uint64_t address, size;
        int protection, fill;
    };
    for (const Mapping& m : {Mapping{Arena::code, Arena::code_size, PROT_READ | PROT_WRITE | PROT_EXEC, 0xcc},
                             Mapping{Arena::exits, Arena::exits_size, PROT_READ | PROT_WRITE | PROT_EXEC, 0xcc},
                             Mapping{Arena::data, Arena::size, PROT_READ | PROT_WRITE, 0}}) {
        void* at = mmap(reinterpret_cast<void*>(m.address), m.size, m.protection,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
        if (at != reinterpret_cast<void*>(m.address))
            return fail("cannot map the arena at {:#x}: {}", m.address, errno_text(errno));
        std::memset(at, m.fill, m.size);
    }
    if (syscall(SYS_arch_prctl, ARCH_SET_GS, Arena::gs_base) != 0)
        return fail("cannot set the GS base: {}", errno_text(errno));

    stack_t stack{};
    stack.ss_size = 64 << 10;
    stack.ss_sp = mmap(nullptr, stack.ss_size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (stack.ss_sp == MAP_FAILED || sigaltstack(&stack, nullptr) != 0)
        return fail("cannot set up a signal stack: {}", errno_text(errno));
    struct sigaction action {};
    action.sa_sigaction = vtrace_oracle_signal_entry;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    for (int signal : {SIGTRAP, SIGSEGV, SIGBUS, SIGILL, SIGFPE})
        if (sigaction(signal, &action, nullptr) != 0)
            return fail("cannot handle signal {}: {}", signal, errno_text(errno));
    return {};
}

void Native::set_read_only_page(const uint8_t* bytes) {
    void* page = reinterpret_cast<void*>(Arena::data + Arena::writable);
    mprotect(page, 4096, PROT_READ | PROT_WRITE);
    std::memcpy(page, bytes, 4096);
    mprotect(page, 4096, PROT_READ);
}

uint64_t Native::fs_base() {
    uint64_t base = 0;
    syscall(SYS_arch_prctl, ARCH_GET_FS, &base);
    return base;
}

Answer Native::run(const UserState& in, Mode mode) {
    Entry& entry = vtrace_oracle_entry;
    std::memcpy(entry.gpr, in.gpr.data(), sizeof entry.gpr);
    entry.rflags = in.rflags;
    entry.far_offset = static_cast<uint32_t>(in.rip);
    entry.far_selector = mode == Mode::bits64 ? user_cs64 : user_cs32;
    entry.data_selector = mode == Mode::bits64 ? 0 : user_ds;
    std::memcpy(entry.fxsave, in.fpu.fxsave.data(), 512);
    vtrace_oracle_enter();
    return answer;
}

} // namespace vtrace::oracle
