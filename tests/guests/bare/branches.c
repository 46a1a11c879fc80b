// A guest that is rich in branches and takes no interrupts: run by vtrace and by QEMU, it must give the same sequence of
// taken branches (tests/oracle/qemu). It prints nothing, since polling a serial port takes as long as the host likes.
//
// Short forward branches skip 20 bytes or more: compare.py cannot tell shorter ones from a fall-through.
#include "runtime.h"

enum { ROUNDS = 1000 };

static u64 seed = 1;
static u32 random(void) {
    seed = seed * 6364136223846793005 + 1442695040888963407;
    return seed >> 33;
}

// ---- every condition, short and near, taken and not ----
#define CONDITIONS(F) F(o) F(no) F(b) F(ae) F(e) F(ne) F(be) F(a) F(s) F(ns) F(p) F(np) F(l) F(ge) F(le) F(g)
#define SHORT(c) "push %rdi\n popf\n j" #c " 1f\n add $1, %rax\n .fill 20, 1, 0x90\n 1:\n"
#define NEAR(c) "push %rdi\n popf\n j" #c " 1f\n add $1, %rax\n .fill 200, 1, 0x90\n 1:\n"
__asm__(".align 64\n"
        "all_conditions: xor %eax, %eax\n" CONDITIONS(SHORT) CONDITIONS(NEAR) "ret\n");
u64 all_conditions(u64 flags);

// ---- counting branches ----
__asm__("loops: mov $50, %ecx\n 1: loop 1b\n" // a branch to itself
        "mov $50, %ecx\n 1: nop\n dec %edi\n loopne 1b\n"
        "mov $50, %ecx\n 1: nop\n xor %eax, %eax\n loope 1b\n"
        "mov $3, %ecx\n 1: jrcxz 2f\n dec %rcx\n jmp 1b\n .fill 20, 1, 0x90\n 2:\n"
        "movabs $0x100000000, %rcx\n jecxz 3f\n ud2\n .fill 20, 1, 0x90\n 3:\n" // only ecx counts
        "movabs $0x100000003, %rcx\n 1: addr32 loop 1b\n"
        "mov $5, %ecx\n 1: dec %ecx\n jnz 1b\n"
        "ret\n");
void loops(u64 n);

// ---- calls, jumps and returns, near and far ----
__asm__(".align 64\n"
        "ret_imm: ret $16\n"
        "far_leaf: lretq\n"
        "far_leaf_imm: lretq $16\n"
        "calls: push %rbx\n mov %rdi, %rbx\n"
        "call leaf\n lea leaf(%rip), %rax\n call *%rax\n call *leaf_pointer(%rip)\n"
        "lea leaf_pointer(%rip), %rcx\n mov $0, %edx\n call *(%rcx, %rdx, 8)\n"
        "push $1\n push $2\n call ret_imm\n"
        "rex.W lcall *far_leaf_pointer(%rip)\n"
        "push $1\n push $2\n rex.W lcall *far_leaf_imm_pointer(%rip)\n"
        "rex.W ljmp *far_next_pointer(%rip)\n .fill 20, 1, 0x90\n"
        "far_next: lea 1f(%rip), %rax\n jmp *%rax\n .fill 20, 1, 0x90\n 1:\n"
        "jmp *jump_pointer(%rip)\n .fill 20, 1, 0x90\n jump_target:\n"
        "push $0x10\n lea 8(%rsp), %rax\n push %rax\n pushf\n push $0x08\n lea 1f(%rip), %rax\n push %rax\n iretq\n"
        ".fill 20, 1, 0x90\n 1:\n"
        "lea 1f(%rip), %rax\n push $0x08\n push %rax\n lretq\n .fill 20, 1, 0x90\n 1:\n"
        "lea 1f(%rip), %rax\n push %rax\n ret\n .fill 20, 1, 0x90\n 1:\n" // a return that no call made
        "pop %rbx\n ret\n"
        "leaf: lea 1(%rbx), %rbx\n ret\n"
        "deep: test %edi, %edi\n jz 1f\n dec %edi\n call deep\n nop\n .fill 20, 1, 0x90\n 1: ret\n"
        ".section .data\n .align 8\n"
        "leaf_pointer: .quad leaf\n jump_pointer: .quad jump_target\n"
        "far_leaf_pointer: .quad far_leaf\n .word 8\n far_leaf_imm_pointer: .quad far_leaf_imm\n .word 8\n"
        "far_next_pointer: .quad far_next\n .word 8\n .text\n");
void calls(u64 n);
void deep(u64 n);

// ---- branches across page borders, and code that changes ----
__asm__(".section .selfmod, \"awx\"\n .align 4096\n .fill 4094, 1, 0x90\n"
        "cross_jump: .byte 0xe9\n .long 1f - . - 4\n .fill 30, 1, 0x90\n 1: ret\n"
        ".align 4096\n .fill 4095, 1, 0x90\n"
        "cross_ret: .byte 0xc2, 0, 0\n" // ret imm16
        ".align 4096\n .fill 4093, 1, 0x90\n"
        "cross_jcc: .byte 0x0f, 0x84\n .long 1f - . - 4\n ret\n .fill 30, 1, 0x90\n 1: ret\n"
        ".align 4096\n"
        // The store changes where the jump right behind it goes.
        "patched: mov %dil, patched_jump+1(%rip)\n"
        "patched_jump: .byte 0xeb, 0\n .fill 32, 1, 0x90\n ret\n .fill 31, 1, 0x90\n ret\n .align 4096\n .text\n");
void cross_jump(void);
void cross_ret(void);
void cross_jcc(void);
void patched(u8 displacement);

// ---- rings ----
extern u8 user_main[], compat_main[], system_call_entry[];
__asm__(".align 64\n"
        // rdi rounds of each way into the kernel and back; then int $0x83, which ends it
        "user_main: mov %rdi, %rbx\n"
        "1: syscall\n int $0x80\n int3\n call 2f\n dec %rbx\n jnz 1b\n .fill 20, 1, 0x90\n int $0x83\n"
        "2: lea 3f(%rip), %rax\n jmp *%rax\n .fill 20, 1, 0x90\n 3: ret\n"
        "system_call_entry: cmp $0, %rbx\n jl 1f\n add $1, %rax\n .fill 20, 1, 0x90\n 1: sysretq\n"
        ".code32\n"
        "compat_main: mov %edi, %ebx\n"
        "1: call 2f\n int $0x80\n mov $3, %ecx\n 4: loopw 4b\n xor %ecx, %ecx\n jcxz 5f\n .fill 20, 1, 0x90\n 5:\n"
        "jecxz 6f\n .fill 20, 1, 0x90\n 6: push %cs\n call 7f\n dec %ebx\n jnz 1b\n .fill 20, 1, 0x90\n int $0x83\n"
        "2: push %ebp\n mov %esp, %ebp\n enter $16, $1\n leave\n leave\n ret\n"
        "7: lretl\n"
        ".code64\n");

static volatile u64 traps;
static bool on_trap(struct frame *frame) {
    ++traps;
    switch (frame->vector) {
    case UD: // ud2
    case DE: // div %ecx
    case PF: // mov (%rdi), %al
        frame->rip += 2;
        return true;
    case BP:
    case 0x80: return true;
    case 0x83: return false; // caught: the user is done
    default: return false;
    }
}

static void faults(u64 unmapped) {
    u64 a = 1, d = 0;
    __asm__ volatile("ud2\n\txor %%ecx, %%ecx\n\tdiv %%ecx\n\tmov (%%rdi), %%al\n\tud2" : "+a"(a), "+d"(d) : "D"(unmapped) : "rcx");
}

// ---- compiled code: tables, recursion, function pointers, strings ----
typedef u64 (*operation)(u64, u64);
static u64 op_add(u64 a, u64 b) { return a + b; }
static u64 op_gcd(u64 a, u64 b) { return b ? op_gcd(b, a % b) : a; }
static u64 op_collatz(u64 a, u64 b) {
    a &= 0xffff;
    for (u64 n = 0; a > 1 && n < (b & 63); ++n)
        a = a & 1 ? 3 * a + 1 : a / 2;
    return a;
}
static u64 __attribute__((noinline)) op_ackermann(u64 m, u64 n) {
    if (m == 0)
        return n + 1;
    return n == 0 ? op_ackermann(m - 1, 1) : op_ackermann(m - 1, op_ackermann(m, n - 1));
}
static u64 op_small_ackermann(u64 a, u64 b) { return op_ackermann(a & 1, b & 7); }
static operation volatile operations[] = {op_add, op_gcd, op_collatz, op_small_ackermann};

static u64 __attribute__((noinline)) interpret(u32 code) {
    u64 a = code, b = seed;
    for (int i = 0; i < 8; ++i, code >>= 4) {
        switch (code & 15) {
        case 0: a ^= b; break;
        case 1: a += 3; break;
        case 2: b = a << 1; break;
        case 3: a = b > a ? b - a : a - b; break;
        case 4: b *= 7; break;
        case 5: a = __builtin_bswap64(a); break;
        case 6: if (a & 1) b++; break;
        case 7: while (b & 0xf0) b -= 0x10; break;
        case 8: a = operations[b & 3](a & 0xfff, b & 0xfff); break;
        case 9: b = operations[a & 3](b & 0xfff, a & 0xfff); break;
        case 10: a |= b; break;
        case 11: a &= b; break;
        case 12: b = ~b; break;
        case 13: a = a * b + 1; break;
        case 14: b ^= a >> 3; break;
        default: a--;
        }
    }
    return a + b;
}

static u64 strings(u32 n) {
    u64 count = n & 31, di = (u64)frames[1], si = (u64)frames[2], result;
    __asm__ volatile("rep movsb" : "+D"(di), "+S"(si), "+c"(count)::"memory");
    count = n & 15;
    __asm__ volatile("rep stosq" : "+D"(di), "+c"(count) : "a"(0) : "memory");
    count = 40, di = (u64)frames[1];
    __asm__ volatile("repne scasb" : "+D"(di), "+c"(count) : "a"(n & 255) : "cc");
    result = count;
    count = 40, di = (u64)frames[1], si = (u64)frames[2];
    __asm__ volatile("repe cmpsb" : "+D"(di), "+S"(si), "+c"(count)::"cc");
    return result + count;
}

int main(void) {
    u64 sum = 0;
    trap_hook = on_trap;
    wrmsr(MSR_STAR, (u64)KERNEL_CS << 32 | (u64)USER_CS32 << 48);
    wrmsr(MSR_LSTAR, (u64)system_call_entry);
    set_gate(0x83, (void *)((u64)idt[0x83].offset_low | (u64)idt[0x83].offset_mid << 16), 3, 0);
    for (unsigned i = 0; i < 40; ++i)
        frames[2][i] = random();
    deep(1000);
    for (unsigned round = 0; round < ROUNDS; ++round) {
        sum += all_conditions((random() & 0x8d5) | 2);
        loops(random() & 63);
        calls(round);
        deep(random() & 31);
        faults(PAGE4K(0));
        cross_jump();
        cross_ret();
        cross_jcc();
        patched(round & 1 ? 32 : 64);
        for (unsigned i = 0; i < 20; ++i)
            sum += interpret(random());
        sum += strings(random());
        if (round % 16 == 0) {
            run_user(user_main, 5, 0);
            run_user32(compat_main, 5, 0);
        }
    }
    trap_hook = NULL;
    return sum == 0 || traps == 0;
}
