// Single-stepping and debug registers (SDM vol. 3, chapter 17).
#include "runtime.h"

enum {
    DR6_RESET = 0xffff0ff0, DR6_BD = 1 << 13, DR6_BS = 1 << 14,
    DR7_RESET = 0x400, DR7_GD = 1 << 13,
    EXECUTE = 0, WRITE = 1, IO = 2, READ_WRITE = 3,
    LENGTH_1 = 0, LENGTH_2 = 1, LENGTH_4 = 3, LENGTH_8 = 2,
    CAPACITY = 32
};
#define DR7_ENABLE(n, type, length) (2ull << 2 * (n) | (u64)(type) << (16 + 4 * (n)) | (u64)(length) << (18 + 4 * (n)))

// Each #DB is logged and the guest goes on.
static volatile struct { u64 rip, dr6, cs, rflags; } hits[CAPACITY];
static volatile unsigned hit_count;

static bool on_debug(struct frame *frame) {
    if (frame->vector != DB)
        return false;
    const u64 dr6 = read_dr6();
    if (hit_count < CAPACITY) {
        hits[hit_count].rip = frame->rip;
        hits[hit_count].dr6 = dr6;
        hits[hit_count].cs = frame->cs;
        hits[hit_count].rflags = frame->rflags;
    }
    ++hit_count;
    write_dr6(DR6_RESET);
    const u64 dr7 = read_dr7();
    for (unsigned n = 0; n < 4; ++n)
        if (dr6 & 1 << n && !(dr7 >> (16 + 4 * n) & 3))
            frame->rflags |= FLAG_RF; // a fault: go past the instruction
    return true;
}

// ---- single step, ring 3: where did each #DB stop? ----
#define STOPS(...) (const u8 *const[]){__VA_ARGS__, NULL}
static void step(const char *name, const u8 *code, const u8 *const *stops) {
    struct context context = {user_code(code), USER_CS, FLAG_ONE | FLAG_TF, USER_STACK_TOP, USER_DS, (u64)frames[0], 0};
    print("# step: %s\n", name);
    hit_count = 0;
    trap_hook = on_debug;
    run_at(&context);
    trap_hook = NULL;
    unsigned n = 0;
    for (; stops[n]; ++n) {
        check("  stop", hits[n].rip, user_code(code) + (stops[n] - code));
        check("  dr6", hits[n].dr6, DR6_RESET | DR6_BS);
    }
    check("  stops", hit_count, n);
}

extern u8 s_plain[], s_plain_1[], s_plain_2[], s_plain_3[], s_plain_4[];
extern u8 s_pushf[], s_pushf_1[], s_pushf_2[];
extern u8 s_popf_off[], s_popf_off_1[], s_popf_off_2[], s_popf_off_3[];
extern u8 s_popf_on[], s_popf_on_2[];
extern u8 s_mov_ss[], s_mov_ss_1[], s_mov_ss_3[], s_mov_ss_4[];
extern u8 s_rep[], s_rep_1[], s_rep_2[], s_rep_3[], s_rep_4[], s_rep_5[];
extern u8 s_rep_zero[], s_rep_zero_1[], s_rep_zero_2[];
extern u8 s_syscall[], s_syscall_1[], s_ud2[], s_ud2_1[];
extern u8 syscall_entry[], s_int[], s_int_1[];
__asm__(".align 64\n"
        "s_plain: nop\n s_plain_1: xor %eax, %eax\n s_plain_2: jz s_plain_3\n nop\n s_plain_3: call s_plain_4\n nop\n s_plain_4: int $0x80\n"
        "s_pushf: pushf\n s_pushf_1: pop %rdi\n s_pushf_2: int $0x80\n"
        "s_popf_off: push $2\n s_popf_off_1: popf\n s_popf_off_2: nop\n s_popf_off_3: int $0x80\n"
        "s_popf_on: push $0x102\n popf\n nop\n s_popf_on_2: int $0x80\n"
        "s_mov_ss: mov %ss, %eax\n s_mov_ss_1: mov %eax, %ss\n nop\n s_mov_ss_3: nop\n s_mov_ss_4: int $0x80\n"
        "s_rep: mov $3, %ecx\n s_rep_1: lea -64(%rsp), %rdi\n s_rep_2: mov %rdi, %rsi\n s_rep_3: rep movsb\n s_rep_4: nop\n s_rep_5: int $0x80\n"
        "s_rep_zero: xor %ecx, %ecx\n s_rep_zero_1: rep movsb\n s_rep_zero_2: int $0x80\n"
        "s_syscall: nop\n s_syscall_1: syscall\n int $0x80\n"
        "syscall_entry: nop\n int $0x82\n"
        "s_ud2: nop\n s_ud2_1: ud2\n"
        "s_int: nop\n s_int_1: int $0x83\n");

static void single_step(void) {
    step("plain instructions, taken branch, call", s_plain, STOPS(s_plain_1, s_plain_2, s_plain_3, s_plain_4));
    step("pushf", s_pushf, STOPS(s_pushf_1, s_pushf_2));
    check("pushf stores TF", trap.frame.rdi & FLAG_TF, FLAG_TF);
    step("popf that clears TF traps once more", s_popf_off, STOPS(s_popf_off_1, s_popf_off_2));
    hit_count = 0;
    trap_hook = on_debug;
    run_user(s_popf_on, 0, 0);
    trap_hook = NULL;
    check("popf that sets TF: the first trap is after the next instruction", hits[0].rip, user_code(s_popf_on) + (s_popf_on_2 - s_popf_on));
    check("  traps", hit_count, 1);
    step("mov ss: no trap until after the next instruction", s_mov_ss, STOPS(s_mov_ss_1, s_mov_ss_3, s_mov_ss_4));
    step("rep: a trap after each iteration", s_rep, STOPS(s_rep_1, s_rep_2, s_rep_3, s_rep_3, s_rep_3, s_rep_4, s_rep_5));
    step("rep with rcx = 0", s_rep_zero, STOPS(s_rep_zero_1, s_rep_zero_2));
    step("a fault: #UD, no #DB", s_ud2, STOPS(s_ud2_1));
    check("  vector", trap.vector, UD);
    check("  saved TF", trap.frame.rflags & FLAG_TF, FLAG_TF);
    check("  saved RF", trap.frame.rflags & FLAG_RF, FLAG_RF);
    set_gate(0x83, (void *)((u64)idt[0x83].offset_low | (u64)idt[0x83].offset_mid << 16), 3, 0);
    step("INT n: no #DB in the handler", s_int, STOPS(s_int_1));
    check("  vector", trap.vector, 0x83);
    check("  saved TF", trap.frame.rflags & FLAG_TF, FLAG_TF);
    check("  saved RF", trap.frame.rflags & FLAG_RF, 0);

    wrmsr(MSR_STAR, (u64)KERNEL_CS << 32 | (u64)USER_CS32 << 48);
    wrmsr(MSR_LSTAR, (u64)syscall_entry);
    wrmsr(MSR_SFMASK, FLAG_TF);
    idt[0x82].ist = idt[DB].ist = 1;
    step("SYSCALL that masks TF", s_syscall, STOPS(s_syscall_1));
    check("  vector", trap.vector, 0x82);
    check("  r11 has TF", trap.frame.r11 & FLAG_TF, FLAG_TF);
    wrmsr(MSR_SFMASK, 0);
    struct context context = {user_code(s_syscall), USER_CS, FLAG_ONE | FLAG_TF, USER_STACK_TOP, USER_DS, 0, 0};
    hit_count = 0;
    trap_hook = on_debug;
    run_at(&context);
    trap_hook = NULL;
    check("SYSCALL that keeps TF: a trap at the entry", hits[1].rip, (u64)syscall_entry);
    check("  in ring 0", hits[1].cs, KERNEL_CS);
    check("  and one after the entry's first instruction", hits[2].rip, (u64)syscall_entry + 1);
    check("  traps", hit_count, 3);
    idt[0x82].ist = idt[DB].ist = 0;
}

// ---- breakpoints, ring 0 ----
static u64 data[4] __attribute__((aligned(64)));
#define WATCHED(n, address, type, length, statement)                                                                   \
    ({                                                                                                                 \
        hit_count = 0;                                                                                                 \
        trap_hook = on_debug;                                                                                          \
        write_dr##n((u64)(address));                                                                                   \
        write_dr6(DR6_RESET);                                                                                          \
        write_dr7(DR7_RESET | DR7_ENABLE(n, type, length));                                                            \
        statement;                                                                                                     \
        write_dr7(DR7_RESET);                                                                                          \
        trap_hook = NULL;                                                                                              \
        hit_count;                                                                                                     \
    })
#define STORE(type, offset) (*(volatile type *)((u8 *)data + (offset)) = 1)
#define LOAD(type, offset) ((void)*(volatile type *)((u8 *)data + (offset)))

extern u8 b_loop[], b_loop_end[], b_store_end[], b_out_end[], b_read_dr[], b_rep[], b_rep_end[], b_ss_after[], b_jump[];
__asm__("b_function: mov $3, %ecx\n b_loop: nop\n loop b_loop\n b_loop_end: ret\n"
        "b_store: movl $1, data(%rip)\n b_store_end: ret\n"
        "b_out: out %al, $0x80\n b_out_end: ret\n"
        "b_move: lea data(%rip), %rdi\n lea 64(%rdi), %rsi\n mov $4, %ecx\n b_rep: rep movsb\n b_rep_end: ret\n"
        "b_ss: mov data(%rip), %ss\n nop\n b_ss_after: ret\n");
void b_function(void) __attribute__((no_caller_saved_registers));
void b_store(void);
void b_out(void);
void b_move(void) __attribute__((no_caller_saved_registers));
void b_ss(void);

static void breakpoints(void) {
    check("execution breakpoint in a loop: hits", WATCHED(0, b_loop, EXECUTE, LENGTH_1, b_function()), 3);
    check("  before the instruction", hits[0].rip, (u64)b_loop);
    check("  dr6", hits[0].dr6, DR6_RESET | 1);
    check("  saved RF is clear", hits[0].rflags & FLAG_RF, 0);
    check("write breakpoint: hits", WATCHED(1, data, WRITE, LENGTH_4, b_store()), 1);
    check("  after the instruction", hits[0].rip, (u64)b_store_end);
    check("  dr6", hits[0].dr6, DR6_RESET | 2);
    check("  the store is done", (u32)data[0], 1);
    check("write breakpoint does not see a read", WATCHED(2, data, WRITE, LENGTH_4, LOAD(u32, 0)), 0);
    check("read-write breakpoint sees a read", WATCHED(3, data, READ_WRITE, LENGTH_4, LOAD(u32, 0)), 1);
    check("  dr6", hits[0].dr6, DR6_RESET | 8);
    check("read-write breakpoint does not see execution", WATCHED(0, b_loop, READ_WRITE, LENGTH_1, b_function()), 0);
    check("length 1: the next byte", WATCHED(0, (u8 *)data + 3, WRITE, LENGTH_1, STORE(u8, 4)), 0);
    check("length 1: a wider store over it", WATCHED(0, (u8 *)data + 3, WRITE, LENGTH_1, STORE(u32, 0)), 1);
    check("length 2: its second byte", WATCHED(0, (u8 *)data + 2, WRITE, LENGTH_2, STORE(u8, 3)), 1);
    check("length 4: its last byte", WATCHED(0, (u8 *)data + 4, WRITE, LENGTH_4, STORE(u8, 7)), 1);
    check("length 4: the byte after", WATCHED(0, (u8 *)data + 4, WRITE, LENGTH_4, STORE(u8, 8)), 0);
    check("length 4: the byte before", WATCHED(0, (u8 *)data + 4, WRITE, LENGTH_4, STORE(u8, 3)), 0);
    check("length 8: its last byte", WATCHED(0, (u8 *)data + 8, WRITE, LENGTH_8, STORE(u8, 15)), 1);
    check("length 8: the byte after", WATCHED(0, (u8 *)data + 8, WRITE, LENGTH_8, STORE(u8, 16)), 0);
    check("a store across its start", WATCHED(0, (u8 *)data + 8, WRITE, LENGTH_8, STORE(u32, 6)), 1);
    check("rep movsb over a watched byte: hits", WATCHED(0, (u8 *)data + 1, WRITE, LENGTH_1, b_move()), 1);
    check("  in the middle: rip is at it", hits[0].rip, (u64)b_rep);
    write_dr0((u64)data);
    hit_count = 0;
    trap_hook = on_debug;
    STORE(u8, 0);
    check("disabled in DR7: nothing", hit_count, 0);
    trap_hook = NULL;

    *(u16 *)data = KERNEL_DS;
    check("mov ss from a watched word: hits", WATCHED(0, data, READ_WRITE, LENGTH_2, b_ss()), 1);
    check("  after the instruction that follows", hits[0].rip, (u64)b_ss_after);

    write_cr4(read_cr4() | CR4_DE);
    check("I/O breakpoint: hits", WATCHED(0, 0x80, IO, LENGTH_1, b_out()), 1);
    check("  after the instruction", hits[0].rip, (u64)b_out_end);
    check("I/O breakpoint on another port", WATCHED(0, 0x81, IO, LENGTH_1, b_out()), 0);
}

static void registers(void) {
    write_cr4(read_cr4() | CR4_DE);
    check("DR4 with CR4.DE: #UD", TRY(__asm__ volatile("mov %%dr4, %%rax" ::: "rax")), UD);
    write_cr4(read_cr4() & ~(u64)CR4_DE);
    u64 value;
    write_dr6(DR6_RESET | 5);
    __asm__ volatile("mov %%dr4, %0" : "=r"(value));
    check("DR4 without CR4.DE is DR6", value, DR6_RESET | 5);
    write_dr6(0);
    check("DR6's fixed bits", read_dr6() & 0xffffffff, DR6_RESET);
    write_dr7(0);
    check("DR7's fixed bit", read_dr7(), DR7_RESET);
    check("DR6 with an upper bit: #GP", TRY(write_dr6(1ull << 32)), GP);
    check("DR7 with an upper bit: #GP", TRY(write_dr7(1ull << 32)), GP);
    write_dr0(0x123456789abcdef0);
    check("DR0 keeps 64 bits", read_dr0(), 0x123456789abcdef0);
    write_dr0(0);

    write_dr6(DR6_RESET);
    write_dr7(DR7_RESET | DR7_GD);
    check("GD: mov from DR0: #DB", TRY(__asm__ volatile("b_read_dr: mov %%dr0, %%rax" ::: "rax")), DB);
    check("  at the instruction", trap.frame.rip, (u64)b_read_dr);
    check("  dr6", trap.dr6, DR6_RESET | DR6_BD);
    check("  GD is clear in the handler", read_dr7(), DR7_RESET);
    write_dr6(DR6_RESET);
}

int main(void) {
    single_step();
    breakpoints();
    registers();
    return failures();
}
