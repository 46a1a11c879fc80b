// Ways between rings and modes: IRET, SYSCALL/SYSRET, SYSENTER/SYSEXIT, far CALL, JMP and RET with their corners
// (SDM vol. 2, and vol. 3, 5.8). A fault in IRET is taken before anything has changed: at the IRET, in the old ring.
#include "runtime.h"

#define BAD_ADDRESS 0x800000000000ull

// Instructions whose address the checks name.
extern u8 iret_here[], sysret_here[], sysretl_here[], sysexit_here[], syscall_entry[];

__asm__(".align 64\n"
        // iret_with(rdi = frame of five): IRETQ from ring 0
        "iret_with: pushq 32(%rdi)\n pushq 24(%rdi)\n pushq 16(%rdi)\n pushq 8(%rdi)\n pushq (%rdi)\n"
        "iret_here: iretq\n"
        // sysret_with(rdi = rcx, rsi = r11, rdx = rsp)
        "sysret_with: mov %rdi, %rcx\n mov %rsi, %r11\n mov %rdx, %rsp\n"
        "sysret_here: sysretq\n"
        "sysretl_with: mov %rdi, %rcx\n mov %rsi, %r11\n mov %rdx, %rsp\n"
        "sysretl_here: sysretl\n"
        "sysexit_with: mov %rdi, %rdx\n mov %rsi, %rcx\n"
        "sysexit_here: rex.W sysexit\n"
        "sysexitl_with: mov %rdi, %rdx\n mov %rsi, %rcx\n sysexitl\n");
_Noreturn void iret_with(const struct context *c);
_Noreturn void sysret_with(u64 rcx, u64 r11, u64 rsp);
_Noreturn void sysretl_with(u64 rcx, u64 r11, u64 rsp);
_Noreturn void sysexit_with(u64 rdx, u64 rcx);
_Noreturn void sysexitl_with(u64 rdx, u64 rcx);

extern u8 user_int80[], user_syscall[], user_sysenter[], compat_int80[], compat_syscall[], kernel_int81[];
__asm__("user_int80: int $0x80\n"
        "kernel_int81: int $0x81\n"
        "user_syscall: syscall\n int $0x80\n"
        "user_sysenter: sysenter\n int $0x80\n"
        ".code32\n"
        "compat_int80: int $0x80\n"
        "compat_syscall: syscall\n int $0x80\n"
        ".code64\n"
        // Both entries: leave through an interrupt gate, so that the frame shows what the entry left.
        "syscall_entry: int $0x82\n");

extern u8 user_popf[];
__asm__("user_popf: push $0x3202\n popf\n int $0x80\n");

extern u8 user_ds[];
__asm__("user_ds: mov %ds, %edi\n mov %es, %esi\n int $0x80\n");

extern u8 user_far_call[], user_far_ret_end[];
__asm__("user_far_call: sub $16, %rsp\n movq $0, (%rsp)\n mov %edi, 8(%rsp)\n rex.W lcall *(%rsp)\n user_far_ret_end: int $0x80\n");

static struct context user(void) {
    return (struct context){user_code(user_int80), USER_CS, FLAG_ONE, USER_STACK_TOP, USER_DS, 0, 0};
}

static void iret_fault(const char *name, struct context context, u64 vector, u64 error) {
    print("# IRET %s\n", name);
    check("  vector", TRY(iret_with(&context)), vector);
    check("  error code", trap.error, error);
    check("  at the IRET", trap.frame.rip, (u64)iret_here);
    check("  in ring 0", trap.frame.cs, KERNEL_CS);
}

static void iret(void) {
    struct context c = user();
    check("IRET to ring 3", TRY(iret_with(&c)), 0x80);
    check("  cs", trap.frame.cs, USER_CS);
    check("  ss", trap.frame.ss, USER_DS);
    c.cs = USER_CS32;
    c.rip = user_code(compat_int80);
    c.rsp |= 0xdead00000000;
    check("IRET to compatibility mode", TRY(iret_with(&c)), 0x80);
    check("  cs", trap.frame.cs, USER_CS32);

    c = user(), c.cs = 0;
    iret_fault("to a null CS", c, GP, 0);
    c = user(), c.cs = 3;
    iret_fault("to a null CS with RPL 3", c, GP, 0);
    c = user(), c.cs = USER_DS;
    iret_fault("to a data segment", c, GP, USER_DS & ~3);
    c = user(), c.cs = USER_CS & ~3;
    iret_fault("to a ring 3 segment with RPL 0", c, GP, USER_CS & ~3);
    c = user(), c.cs = KERNEL_CS | 3;
    iret_fault("to a ring 0 segment with RPL 3", c, GP, KERNEL_CS);
    c = user(), c.cs = 0x7fb;
    iret_fault("to a selector beyond the GDT", c, GP, 0x7f8);
    gdt[SLOT(0) / 8] = 0x00af7b000000ffff; // user code, 64-bit, not present
    c = user(), c.cs = SLOT(0) | 3;
    iret_fault("to a code segment not present", c, NP, SLOT(0));
    c = user(), c.ss = 0;
    iret_fault("to ring 3 with a null SS", c, GP, 0);
    c = user(), c.ss = 3;
    iret_fault("to ring 3 with a null SS of RPL 3", c, GP, 0);
    c = user(), c.ss = USER_DS & ~3;
    iret_fault("with SS.RPL other than CS.RPL", c, GP, USER_DS & ~3);
    c = user(), c.ss = USER_CS;
    iret_fault("with a code segment in SS", c, GP, USER_CS & ~3);
    gdt[SLOT(1) / 8] = 0x00cf73000000ffff; // user data, not present
    c = user(), c.ss = SLOT(1) | 3;
    iret_fault("with a stack segment not present", c, SS, SLOT(1));
    gdt[SLOT(1) / 8] = 0x00cff1000000ffff; // user data, read-only
    iret_fault("with a read-only stack segment", c, GP, SLOT(1));
    c = user(), c.rip = BAD_ADDRESS, c.rsp = USER_STACK_TOP;
    print("# IRET to a non-canonical RIP\n");
    check("  vector", TRY(iret_with(&c)), GP);
    check("  error code", trap.error, 0);

    // In ring 0 a null SS is allowed in 64-bit mode.
    static u8 stack[512] __attribute__((aligned(16)));
    struct context k = {(u64)kernel_int81, KERNEL_CS, FLAG_ONE, (u64)(stack + sizeof stack), 0, 0, 0};
    check("IRET to ring 0 with a null SS", TRY(iret_with(&k)), 0x81);
    check("  ss", trap.frame.ss, 0);
    check("  rsp", trap.frame.rsp, (u64)(stack + sizeof stack));

    c = user();
    check("IRET with NT set in long mode: #GP", TRY(__asm__ volatile("pushf\n orl $0x4000, (%%rsp)\n popf" ::: "memory"); iret_with(&c)), GP);
    check("  error code", trap.error, 0);

    c = user(), c.rflags = FLAG_ONE | FLAG_RF | FLAG_AC | 1ull << 21 | FLAG_CF | FLAG_OF;
    check("IRET loads flags", TRY(iret_with(&c)), 0x80);
    check("  all but RF, which the next instruction clears", trap.frame.rflags & ~(u64)FLAG_RF, c.rflags & ~(u64)FLAG_RF);
    c = user(), c.rflags = FLAG_ONE | 8 | 0x20 | 0x8000 | FLAG_VM;
    TRY(iret_with(&c));
    check("IRET to 64-bit ring 3 leaves VM and reserved bits alone", trap.frame.rflags & ~(u64)FLAG_RF, FLAG_ONE);
}

static void ring3_flags(void) {
    // POPF in ring 3 leaves IF and IOPL alone, in silence; in ring 0 it sets both.
    check("POPF in ring 3", run_user(user_popf, 0, 0), 0x80);
    check("  does not change IF and IOPL", trap.frame.rflags & 0x3200, 0);
    struct context c = user();
    c.rip = user_code(user_popf);
    c.rflags = FLAG_ONE | 3 << 12;
    check("POPF in ring 3 with IOPL 3", run_at(&c), 0x80);
    check("  changes IF", trap.frame.rflags & 0x3200, 0x3200);
}

static void data_segments_cleared(void) {
    // A return to an outer ring nulls DS, ES, FS, GS where they hold what that ring may not use.
    struct context c = user();
    c.rip = user_code(user_ds);
    __asm__ volatile("mov %0, %%ds\n mov %1, %%es" ::"r"(KERNEL_DS), "r"(USER_DS));
    TRY(iret_with(&c));
    check("IRET to ring 3 nulls a ring 0 DS", trap.frame.rdi, 0);
    check("IRET to ring 3 keeps a ring 3 ES", trap.frame.rsi, USER_DS);
}

static void syscall_setup(void) {
    wrmsr(MSR_STAR, (u64)KERNEL_CS << 32 | (u64)(USER_CS32) << 48);
    wrmsr(MSR_LSTAR, (u64)syscall_entry);
    wrmsr(MSR_CSTAR, (u64)syscall_entry);
    wrmsr(MSR_SFMASK, FLAG_IF | FLAG_DF | FLAG_TF | FLAG_CF);
    wrmsr(MSR_EFER, rdmsr(MSR_EFER) | 1);
    idt[0x82].ist = 1; // SYSCALL leaves the user's RSP
}

static void syscalls(void) {
    syscall_setup();
    struct context c = user();
    c.rip = user_code(user_syscall);
    c.rflags = FLAG_ONE | FLAG_CF | FLAG_OF | FLAG_DF;
    check("SYSCALL", run_at(&c), 0x82);
    check("  rcx is the return address", trap.frame.rcx, user_code(user_syscall) + 2);
    check("  r11 is rflags", trap.frame.r11 & ~(u64)FLAG_RF, c.rflags);
    check("  flags are masked by SFMASK", trap.frame.rflags & ~(u64)FLAG_RF, FLAG_ONE | FLAG_OF);
    check("  rsp is the user's", trap.frame.rsp, USER_STACK_TOP);
    check("  cs", trap.frame.cs, KERNEL_CS);
    check("  ss", trap.frame.ss, KERNEL_CS + 8);
    wrmsr(MSR_EFER, rdmsr(MSR_EFER) & ~1ull);
    check("SYSCALL with EFER.SCE clear: #UD", run_user(user_syscall, 0, 0), UD);
    check("SYSRET with EFER.SCE clear: #UD", TRY(sysret_with(c.rip, 2, USER_STACK_TOP)), UD);
    wrmsr(MSR_EFER, rdmsr(MSR_EFER) | 1);
    check("LSTAR of a non-canonical address: #GP", TRY(wrmsr(MSR_LSTAR, BAD_ADDRESS)), GP);

    check("SYSRETQ", TRY(sysret_with(user_code(user_int80), FLAG_ONE | FLAG_CF, USER_STACK_TOP)), 0x80);
    check("  cs is STAR[63:48] + 16, RPL 3", trap.frame.cs, USER_CS);
    check("  ss is STAR[63:48] + 8, RPL 3", trap.frame.ss, USER_DS);
    check("  flags from r11", trap.frame.rflags & ~(u64)FLAG_RF, FLAG_ONE | FLAG_CF);
    check("SYSRETQ with RF and VM in r11", TRY(sysret_with(user_code(user_int80), FLAG_RF | FLAG_VM | 1 << 5, USER_STACK_TOP)), 0x80);
    check("  clears RF and VM, bit 1 set", trap.frame.rflags, FLAG_ONE);
    check("SYSRETL to compatibility mode", TRY(sysretl_with(user_code(compat_int80), FLAG_ONE, USER_STACK_TOP)), 0x80);
    check("  cs is STAR[63:48], RPL 3", trap.frame.cs, USER_CS32);
    idt[GP].ist = 1;
    check("SYSRETQ with a non-canonical RCX: #GP", TRY(sysret_with(BAD_ADDRESS, FLAG_ONE, USER_STACK_TOP)), GP);
    check("  error code", trap.error, 0);
    check("  in ring 0, as Intel does", trap.frame.cs, KERNEL_CS);
    check("  at the SYSRET", trap.frame.rip, (u64)sysret_here);
    check("  rsp is what the kernel had set", trap.frame.rsp, USER_STACK_TOP);
    idt[GP].ist = 0;
    idt[0x82].ist = 0;
}

static void sysenter(void) {
    if (!(cpuid(1, 0).d & 1 << 11)) {
        skip("SYSENTER", "no SEP in CPUID");
        return;
    }
    static u8 stack[512] __attribute__((aligned(16)));
    wrmsr(MSR_SYSENTER_CS, 0);
    check("SYSENTER with a null CS: #GP", run_user(user_sysenter, 0, 0), GP);
    check("SYSEXIT with a null CS: #GP", TRY(sysexit_with(0, 0)), GP);
    // CS, SS = CS + 8; SYSEXIT: CS + 16, + 24 (32-bit), + 32, + 40 (64-bit): a run of six descriptors of our own.
    static const u64 run[] = {0x00af9b000000ffff, 0x00cf93000000ffff, 0x00cffb000000ffff,
                              0x00cff3000000ffff, 0x00affb000000ffff, 0x00cff3000000ffff};
    for (unsigned i = 0; i < 6; ++i)
        gdt[SLOT(4 + i) / 8] = run[i];
    wrmsr(MSR_SYSENTER_CS, SLOT(4));
    wrmsr(MSR_SYSENTER_ESP, (u64)(stack + sizeof stack));
    wrmsr(MSR_SYSENTER_EIP, (u64)syscall_entry);
    struct context c = user();
    c.rip = user_code(user_sysenter);
    c.rflags = FLAG_ONE | FLAG_IF | FLAG_CF;
    check("SYSENTER from 64-bit mode", run_at(&c), 0x82);
    check("  cs", trap.frame.cs, SLOT(4));
    check("  ss", trap.frame.ss, SLOT(5));
    check("  rsp", trap.frame.rsp, (u64)(stack + sizeof stack));
    check("  IF clear, others kept", trap.frame.rflags & ~(u64)FLAG_RF, FLAG_ONE | FLAG_CF);
    check("SYSEXIT to 64-bit mode", TRY(sysexit_with(user_code(user_int80), USER_STACK_TOP)), 0x80);
    check("  cs", trap.frame.cs, SLOT(8) | 3);
    check("  ss", trap.frame.ss, SLOT(9) | 3);
    check("  rsp", trap.frame.rsp, USER_STACK_TOP);
    check("SYSEXIT to compatibility mode", TRY(sysexitl_with(user_code(compat_int80), USER_STACK_TOP)), 0x80);
    check("  cs", trap.frame.cs, SLOT(6) | 3);
    check("  ss", trap.frame.ss, SLOT(7) | 3);
    check("SYSEXIT to a non-canonical RIP: #GP", TRY(sysexit_with(BAD_ADDRESS, USER_STACK_TOP)), GP);
    check("  at the SYSEXIT", trap.frame.rip, (u64)sysexit_here);
    check("SYSENTER_EIP of a non-canonical address: #GP", TRY(wrmsr(MSR_SYSENTER_EIP, BAD_ADDRESS)), GP);
}

// ---- far transfers ----
struct __attribute__((packed)) far { u64 offset; u16 selector; };
#define FAR_CALL(target) __asm__ volatile("rex.W lcall *%0" ::"m"(target) : "memory", "rax")
#define FAR_JMP(target) __asm__ volatile("rex.W ljmp *%0" ::"m"(target) : "memory", "rax")

extern u8 far_returns[], far_returns_imm[], far_trap[], lret_here[];
__asm__("far_returns: mov %cs, %eax\n rex.W lret\n"
        "far_returns_imm: rex.W lret $8\n"
        "far_trap: int $0x81\n"
        // lret_with(rdi = rip, rsi = cs, rdx = rsp, rcx = ss)
        "lret_with: push %rcx\n push %rdx\n push %rsi\n push %rdi\n"
        "lret_here: rex.W lret\n");
_Noreturn void lret_with(u64 rip, u64 cs, u64 rsp, u64 ss);

static void set_call_gate(unsigned slot, void *code, unsigned selector, unsigned dpl, unsigned type) {
    const u64 offset = (u64)code;
    gdt[SLOT(slot) / 8] = (offset & 0xffff) | (u64)selector << 16 | (u64)(0x80 | dpl << 5 | type) << 40 | (offset >> 16 & 0xffff) << 48;
    gdt[SLOT(slot) / 8 + 1] = offset >> 32;
}

static void far_transfers(void) {
    struct far target = {(u64)far_returns, KERNEL_CS};
    check("far CALL and RET in ring 0", TRY(FAR_CALL(target)), NO_TRAP);
    target.offset = (u64)far_trap;
    check("far JMP in ring 0", TRY(FAR_JMP(target)), 0x81);
    target.selector = 0;
    check("far JMP to a null selector: #GP", TRY(FAR_JMP(target)), GP);
    check("  error code", trap.error, 0);
    target.selector = KERNEL_DS;
    check("far JMP to a data segment: #GP", TRY(FAR_JMP(target)), GP);
    check("  error code", trap.error, KERNEL_DS);
    target.selector = USER_CS;
    check("far JMP to an outer ring: #GP", TRY(FAR_JMP(target)), GP);
    check("  error code", trap.error, USER_CS & ~3);
    target.selector = KERNEL_CS | 3;
    check("far JMP with RPL above CPL: #GP", TRY(FAR_JMP(target)), GP);
    gdt[SLOT(0) / 8] = 0x00ef9b000000ffff;
    target.selector = SLOT(0);
    check("far JMP to a code segment with L and D: #GP", TRY(FAR_JMP(target)), GP);
    check("  error code", trap.error, SLOT(0));
    target = (struct far){BAD_ADDRESS, KERNEL_CS};
    check("far JMP to a non-canonical offset: #GP", TRY(FAR_JMP(target)), GP);
    target = (struct far){(u64)far_trap, TSS};
    check("far JMP to a TSS in long mode: #GP", TRY(FAR_JMP(target)), GP);
    check("  error code", trap.error, TSS);
    check("far CALL with an immediate in 64-bit mode: #UD", TRY(__asm__ volatile(".byte 0x9a")), UD);

    check("far RET to ring 3", TRY(lret_with(user_code(user_int80), USER_CS, USER_STACK_TOP, USER_DS)), 0x80);
    check("  rsp", trap.frame.rsp, USER_STACK_TOP);
    check("  ss", trap.frame.ss, USER_DS);
    check("far RET to a null SS: #GP", TRY(lret_with(user_code(user_int80), USER_CS, USER_STACK_TOP, 0)), GP);
    check("  at the RET", trap.frame.rip, (u64)lret_here);
    check("far RET to an inner selector's data: #GP", TRY(lret_with(0, KERNEL_DS, 0, 0)), GP);
    check("  error code", trap.error, KERNEL_DS);

    set_call_gate(12, far_trap, KERNEL_CS, 3, 0xc);
    check("CALL through a gate to ring 0", run_user(user_far_call, SLOT(12) | 3, 0), 0x81);
    check("  cs", trap.frame.cs, KERNEL_CS);
    check("  ss is null", trap.frame.ss, 0);
    check("  rsp: four words pushed on RSP0", trap.frame.rsp, tss.rsp[0] - 32);
    set_call_gate(12, far_returns, KERNEL_CS, 3, 0xc);
    check("  and far RET to ring 3", run_user(user_far_call, SLOT(12) | 3, 0), 0x80);
    check("    at the next instruction", trap.frame.rip, user_code(user_far_ret_end) + 2);
    set_call_gate(12, far_trap, KERNEL_CS, 0, 0xc);
    check("CALL through a gate of DPL 0 from ring 3: #GP", run_user(user_far_call, SLOT(12) | 3, 0), GP);
    check("  error code", trap.error, SLOT(12));
    set_call_gate(12, far_trap, KERNEL_CS, 3, 0xc);
    gdt[SLOT(12) / 8] &= ~(1ull << 47);
    check("CALL through a gate not present: #NP", run_user(user_far_call, SLOT(12) | 3, 0), NP);
    check("  error code", trap.error, SLOT(12));
    set_call_gate(12, far_trap, KERNEL_CS32, 3, 0xc);
    check("CALL through a gate to 32-bit code: #GP", run_user(user_far_call, SLOT(12) | 3, 0), GP);
    check("  error code", trap.error, KERNEL_CS32);
    check("CALL to inner code without a gate: #GP", run_user(user_far_call, KERNEL_CS | 3, 0), GP);
    check("  error code", trap.error, KERNEL_CS);
}

int main(void) {
    iret();
    ring3_flags();
    data_segments_cleared();
    syscalls();
    sysenter();
    far_transfers();
    return failures();
}
