// Exceptions and the IDT: gates, error codes, stacks, nested and double faults (SDM vol. 3, chapter 6).
#include "runtime.h"

enum { CODE_IDT = 2, CODE_EXT = 1, TRAP_GATE = 0x8f };
#define IDT_ERROR(vector) ((u64)(vector) << 3 | CODE_IDT)
#define INT(n) __asm__ volatile("int %0" ::"i"(n) : "memory")

// ---- what the handler itself sees ----
static volatile u64 seen_ss, seen_rflags, seen_rsp;
static bool observe(struct frame *frame) {
    u64 ss;
    __asm__("mov %%ss, %0" : "=r"(ss));
    seen_ss = ss;
    seen_rflags = rflags();
    seen_rsp = (u64)(frame + 1);
    return false;
}

extern u8 user_int80[], user_int81[], user_int3[], user_cd03[], user_icebp[], user_ud2[], user_touch[], user_unaligned[];
__asm__(".align 64\n"
        "user_int80: int $0x80\n"
        "user_int81: int $0x81\n"
        "user_int3: int3\n"
        "user_cd03: .byte 0xcd, 3\n"
        "user_icebp: .byte 0xf1\n"
        "user_ud2: ud2\n"
        "user_touch: mov (%rdi), %al\n"
        "user_unaligned: pushf\n orl $0x40000, (%rsp)\n popf\n mov -15(%rsp), %eax\n int $0x80\n");

static void stacks(void) {
    trap_hook = observe;
    check("ring 3 to 0: vector", run_user(user_int80, 0, 0), 0x80);
    check("ring 3 to 0: stack is TSS.RSP0", seen_rsp, tss.rsp[0]);
    check("ring 3 to 0: SS is null", seen_ss, 0);
    check("ring 3 to 0: saved CS", trap.frame.cs, USER_CS);
    check("ring 3 to 0: saved SS", trap.frame.ss, USER_DS);
    check("ring 3 to 0: saved RSP", trap.frame.rsp, USER_STACK_TOP);
    check("ring 3 to 0: saved RIP is after INT n", trap.frame.rip, user_code(user_int80) + 2);

    u64 rsp;
    check("ring 0: vector", TRY(__asm__ volatile("mov %%rsp, %0\n int $0x81" : "=&D"(rsp)::"memory")), 0x81);
    check("ring 0: saved RSP", trap.frame.rsp, trap.frame.rdi);
    check("ring 0: saved SS", trap.frame.ss, KERNEL_DS);
    check("ring 0: the frame's end is aligned to 16", seen_rsp & 15, 0);
    TRY(__asm__ volatile("sub $8, %%rsp\n and $-8, %%rsp\n or $8, %%rsp\n int $0x81" ::: "memory"));
    check("ring 0: aligned from an odd stack too", seen_rsp & 15, 0);
    idt[0x81].ist = 1;
    TRY(INT(0x81));
    check("IST 1: stack", seen_rsp, (u64)ist_stack_top);
    idt[0x81].ist = 0;

    const u64 flags = FLAG_IF | FLAG_NT | FLAG_AC | FLAG_DF;
    struct context context = {user_code(user_int80), USER_CS, flags | FLAG_ONE, USER_STACK_TOP, USER_DS, 0, 0};
    check("interrupt gate: vector", run_at(&context), 0x80);
    check("interrupt gate: NT and IF are clear in the handler", seen_rflags & (FLAG_IF | FLAG_NT | FLAG_TF | FLAG_RF), 0);
    check("interrupt gate: saved flags", trap.frame.rflags, flags | FLAG_ONE);
    idt[0x80].type = TRAP_GATE | 3 << 5;
    run_at(&context);
    check("trap gate: IF is kept", seen_rflags & (FLAG_IF | FLAG_NT), FLAG_IF);
    set_gate(0x80, (void *)(u64)((u64)idt[0x80].offset_low | (u64)idt[0x80].offset_mid << 16), 3, 0);
    trap_hook = NULL;
}

// ---- gates that are wrong ----
static void bad_gates(void) {
    const struct gate good = idt[0x90];
    check("INT n through a DPL 0 gate from ring 3: #GP", run_user(user_int81, 0, 0), GP);
    check("  error code", trap.error, IDT_ERROR(0x81));
    check("  rip is at INT n", trap.frame.rip, user_code(user_int81));
    idt[0x90].type &= 0x7f;
    check("gate not present: #NP", TRY(INT(0x90)), NP);
    check("  error code", trap.error, IDT_ERROR(0x90));
    idt[0x90] = good;
    idt[0x90].type = 0x85; // a task gate does not exist in long mode
    check("gate of a wrong type: #GP", TRY(INT(0x90)), GP);
    check("  error code", trap.error, IDT_ERROR(0x90));
    idt[0x90] = good;
    idt[0x90].selector = 0;
    check("gate with a null selector: #GP", TRY(INT(0x90)), GP);
    check("  error code", trap.error, 0);
    idt[0x90].selector = KERNEL_DS;
    check("gate to a data segment: #GP", TRY(INT(0x90)), GP);
    check("  error code", trap.error, KERNEL_DS);
    idt[0x90].selector = KERNEL_CS32;
    check("gate to a 32-bit code segment: #GP", TRY(INT(0x90)), GP);
    check("  error code", trap.error, KERNEL_CS32);
    gdt[SLOT(0) / 8] = 0x00af1b000000ffff; // kernel code, 64-bit, not present
    idt[0x90].selector = SLOT(0);
    check("gate to a code segment not present: #NP", TRY(INT(0x90)), NP);
    check("  error code", trap.error, SLOT(0));
    idt[0x90].selector = USER_CS;
    check("gate to an outer ring: #GP", TRY(INT(0x90)), GP);
    check("  error code", trap.error, USER_CS & ~3);
    idt[0x90].selector = 0x7f8;
    check("gate to a selector beyond the GDT: #GP", TRY(INT(0x90)), GP);
    check("  error code", trap.error, 0x7f8);
    idt[0x90] = good;
    idt[0x90].offset_high = 0x8000;
    check("gate to a non-canonical offset: #GP", TRY(INT(0x90)), GP);
    check("  error code", trap.error, 0);
    idt[0x90] = good;

    struct __attribute__((packed)) { u16 limit; u64 base; } pointer = {0x90 * 16 + 14, (u64)idt};
    __asm__ volatile("lidt %0" ::"m"(pointer));
    check("vector beyond the IDT's limit: #GP", TRY(INT(0x90)), GP);
    check("  error code", trap.error, IDT_ERROR(0x90));
    pointer.limit = sizeof idt - 1;
    __asm__ volatile("lidt %0" ::"m"(pointer));
}

static void nested(void) {
    const struct gate ud = idt[UD], gp = idt[GP];
    idt[UD].type &= 0x7f;
    check("#UD's gate not present: #NP", TRY(__asm__ volatile("ud2")), NP);
    check("  error code has EXT", trap.error, IDT_ERROR(UD) | CODE_EXT);
    idt[UD] = ud;

    idt[DF].ist = 1;
    idt[GP].type &= 0x7f;
    check("#NP while #GP is delivered: #DF", TRY(peek(0x800000000000)), DF);
    check("  error code", trap.error, 0);
    check("  on its IST stack", trap.handler_rsp, (u64)ist_stack_top);
    idt[GP] = gp;

    const u64 rsp0 = tss.rsp[0];
    map4k(0, frames[0], 0);
    tss.rsp[0] = PAGE4K(0) + 0x100;
    check("#PF while #PF is delivered (RSP0 not mapped): #DF", run_user(user_touch, 0, 0), DF);
    check("  error code", trap.error, 0);
    check("  saved rip is the user's", trap.frame.rip, user_code(user_touch));
    check("  saved cs is the user's", trap.frame.cs, USER_CS);
    idt[PF].ist = 1;
    check("#PF while #UD is delivered: #PF", run_user(user_ud2, 0, 0), PF);
    check("  error code: a supervisor write", trap.error, 2);
    check("  cr2", trap.cr2, PAGE4K(0) + 0xf8);
    check("  saved cs is the user's", trap.frame.cs, USER_CS);
    check("  saved rip is the user's", trap.frame.rip, user_code(user_ud2));
    idt[PF].ist = 0;
    idt[SS].ist = idt[GP].ist = 1;
    tss.rsp[0] = 0x800000001000;
    check("RSP0 is not canonical: #SS", run_user(user_int80, 0, 0), SS);
    check("  error code", trap.error, 0);
    idt[SS].ist = idt[GP].ist = 0;
    tss.rsp[0] = rsp0;
    idt[DF].ist = 0;
}

// ---- each exception's own rules ----
extern u8 compat_into[], compat_into_not[], compat_bound[], compat_bound_ok[], compat_int80[];
__asm__(".code32\n"
        "compat_into: mov $0x7f, %al\n add $1, %al\n into\n"
        "compat_into_end: int $0x80\n"
        "compat_into_not: xor %eax, %eax\n into\n"
        "compat_int80: int $0x80\n"
        "compat_bound: mov $5, %eax\n push $4\n push $1\n bound %eax, (%esp)\n int $0x80\n"
        "compat_bound_ok: mov $4, %eax\n push $4\n push $1\n bound %eax, (%esp)\n int $0x80\n"
        ".code64\n");

static void vectors(void) {
    check("DIV by zero: #DE", TRY(__asm__ volatile("xor %%ecx, %%ecx\n div %%ecx" ::: "rax", "rcx", "rdx")), DE);
    check("DIV overflow: #DE", TRY(__asm__ volatile("mov $1, %%edx\n mov $1, %%ecx\n div %%ecx" ::: "rax", "rcx", "rdx")), DE);
    check("IDIV of the smallest by -1: #DE", TRY(__asm__ volatile("mov $0x80000000, %%eax\n cltd\n mov $-1, %%ecx\n idiv %%ecx" ::: "rax", "rcx", "rdx")), DE);
    check("INT3 from ring 3: #BP", run_user(user_int3, 0, 0), BP);
    check("  saved rip is after it", trap.frame.rip, user_code(user_int3) + 1);
    check("INT 3 (CD 03) from ring 3: #BP", run_user(user_cd03, 0, 0), BP);
    check("  saved rip is after it", trap.frame.rip, user_code(user_cd03) + 2);
    idt[BP].type &= ~0x60;
    check("INT3 through a DPL 0 gate from ring 3: #GP", run_user(user_int3, 0, 0), GP);
    check("  error code", trap.error, IDT_ERROR(BP));
    idt[BP].type |= 0x60;
    check("ICEBP from ring 3 through a DPL 0 gate: #DB", run_user(user_icebp, 0, 0), DB);
    check("  saved rip is after it", trap.frame.rip, user_code(user_icebp) + 1);
    check("UD2: #UD", TRY(__asm__ volatile("ud2")), UD);
    check("INTO in 64-bit mode: #UD", TRY(__asm__ volatile(".byte 0xce")), UD);
    check("INTO with OF: #OF", run_user32(compat_into, 0, 0), OF);
    check("  saved rip is after it", trap.frame.rip, user_code(compat_into) + 5);
    check("INTO without OF: nothing", run_user32(compat_into_not, 0, 0), 0x80);
    check("BOUND out of range: #BR", run_user32(compat_bound, 0, 0), BR);
    check("  saved rip is at it", trap.frame.rip, user_code(compat_bound) + 9);
    check("BOUND in range: nothing", run_user32(compat_bound_ok, 0, 0), 0x80);
    check("PUSH ES in 64-bit mode: #UD", TRY(__asm__ volatile(".byte 0x06")), UD);
    check("AAM in 64-bit mode: #UD", TRY(__asm__ volatile(".byte 0xd4, 10")), UD);
    check("LOCK on what cannot be locked: #UD", TRY(__asm__ volatile(".byte 0xf0, 0x89, 0x44, 0x24, 0x80")), UD);
    check("LOCK on a register destination: #UD", TRY(__asm__ volatile(".byte 0xf0, 0x01, 0xc0")), UD);
    check("an instruction of 16 bytes: #GP", TRY(__asm__ volatile(".fill 15, 1, 0x66\n nop")), GP);
    check("an instruction of 15 bytes", TRY(__asm__ volatile(".fill 14, 1, 0x66\n nop")), NO_TRAP);
    write_cr0(read_cr0() | CR0_AM);
    check("unaligned access of ring 3 with AM and AC: #AC", run_user(user_unaligned, 0, 0), AC);
    write_cr0(read_cr0() & ~(u64)CR0_AM);
    check("unaligned access of ring 3 with AC only", run_user(user_unaligned, 0, 0), 0x80);
}

static void floating_point(void) {
    write_cr0(read_cr0() | CR0_TS);
    check("x87 with TS: #NM", TRY(__asm__ volatile("fninit")), NM);
    check("SSE with TS: #NM", TRY(__asm__ volatile("xorps %xmm0, %xmm0")), NM);
    check("FWAIT with TS and MP: #NM", TRY(__asm__ volatile("fwait")), NM);
    __asm__ volatile("clts");
    check("CLTS clears TS", read_cr0() & CR0_TS, 0);
    write_cr0((read_cr0() | CR0_EM) & ~(u64)CR0_MP);
    check("x87 with EM: #NM", TRY(__asm__ volatile("fninit")), NM);
    check("SSE with EM: #UD", TRY(__asm__ volatile("xorps %xmm0, %xmm0")), UD);
    write_cr0((read_cr0() & ~(u64)CR0_EM) | CR0_MP);
    write_cr4(read_cr4() & ~0x200ull);
    check("SSE without OSFXSR: #UD", TRY(__asm__ volatile("xorps %xmm0, %xmm0")), UD);
    write_cr4(read_cr4() | 0x200);
    u16 control = 0x37b; // ZE unmasked
    check("x87 division by zero, seen at FWAIT: #MF",
          TRY(__asm__ volatile("fninit\n fldcw %0\n fld1\n fldz\n fdivrp\n fwait" ::"m"(control))), MF);
    __asm__ volatile("fninit");
    u32 csr = 0x1d80; // ZM clear
    check("SSE division by zero: #XM",
          TRY(__asm__ volatile("ldmxcsr %0\n mov $1, %%eax\n cvtsi2ss %%eax, %%xmm0\n xorps %%xmm1, %%xmm1\n divss %%xmm1, %%xmm0" ::"m"(csr) : "rax")), XM);
    write_cr4(read_cr4() & ~0x400ull);
    check("SSE division by zero without OSXMMEXCPT: #UD",
          TRY(__asm__ volatile("mov $1, %%eax\n cvtsi2ss %%eax, %%xmm0\n xorps %%xmm1, %%xmm1\n divss %%xmm1, %%xmm0" ::: "rax")), UD);
    write_cr4(read_cr4() | 0x400);
    csr = 0x1f80;
    __asm__ volatile("ldmxcsr %0" ::"m"(csr));
    csr = 0x10000;
    check("LDMXCSR of a reserved bit: #GP", TRY(__asm__ volatile("ldmxcsr %0" ::"m"(csr))), GP);
    check("MOVAPS unaligned: #GP", TRY(__asm__ volatile("movaps 8(%0), %%xmm0" ::"r"((u64)frames[0]))), GP);
}

// ---- what ring 3 may not do ----
#define PRIVILEGED(F)                                                                                                  \
    F(hlt, "hlt") F(cli, "cli") F(sti, "sti") F(clts, "clts") F(in, "in $0x40, %al") F(out, "out %al, $0x80")             \
    F(insb, "insb") F(lgdt, "lgdt (%rsp)") F(lidt, "lidt (%rsp)") F(lldt, "lldt %ax") F(ltr, "ltr %ax")                  \
    F(lmsw, "lmsw %ax") F(read_cr0, "mov %cr0, %rax") F(write_cr3, "mov %rax, %cr3") F(read_cr8, "mov %cr8, %rax")       \
    F(read_dr7, "mov %dr7, %rax") F(write_dr0, "mov %rax, %dr0") F(rdmsr, "rdmsr") F(wrmsr, "wrmsr")                     \
    F(invlpg, "invlpg (%rsp)") F(wbinvd, "wbinvd") F(invd, "invd") F(swapgs, "swapgs") F(sysret, "sysretq")
#define LABEL(name, text) "priv_" #name ": " text "\n int $0x80\n"
__asm__(".align 64\n" PRIVILEGED(LABEL));
#define DECLARE(name, text) extern u8 priv_##name[];
PRIVILEGED(DECLARE)

static void privileges(void) {
#define ROW(name, text) {text, priv_##name},
    static const struct { const char *text; u8 *code; } rows[] = {PRIVILEGED(ROW)};
    for (unsigned i = 0; i < sizeof rows / sizeof *rows; ++i) {
        print("# ring 3: %s\n", rows[i].text);
        check("  #GP", run_user(rows[i].code, 0, 0), GP);
        check("  error code", trap.error, 0);
        check("  rip", trap.frame.rip, user_code(rows[i].code));
    }
    // I/O by IOPL, and by the TSS's permission bitmap.
    struct context context = {user_code(priv_in), USER_CS, FLAG_ONE | 3 << 12, USER_STACK_TOP, USER_DS, 0, 0};
    check("IN with IOPL 3", run_at(&context), 0x80);
    context.rip = user_code(priv_cli);
    check("CLI with IOPL 3", run_at(&context), 0x80);
    context.rip = user_code(priv_hlt);
    check("HLT with IOPL 3: #GP", run_at(&context), GP);
    static u8 area[sizeof(struct tss) + 16 + 1] __attribute__((aligned(16)));
    struct tss *with_map = (struct tss *)area;
    *with_map = tss;
    with_map->iomap = sizeof(struct tss);
    area[sizeof area - 1] = 0xff;
    const u64 base = (u64)area, old_low = gdt[TSS / 8], old_high = gdt[TSS / 8 + 1];
    gdt[TSS / 8] = (sizeof area - 1) | (base & 0xffffff) << 16 | 0x89ull << 40 | (base >> 24 & 0xff) << 56;
    __asm__ volatile("ltr %w0" ::"r"(TSS) : "memory");
    check("IN of a port that the bitmap allows", run_user(priv_in, 0, 0), 0x80);
    check("OUT of a port beyond the bitmap: #GP", run_user(priv_out, 0, 0), GP);
    area[sizeof(struct tss) + 0x40 / 8] = 1;
    check("IN of a port that the bitmap forbids: #GP", run_user(priv_in, 0, 0), GP);
    gdt[TSS / 8] = old_low & ~(2ull << 40);
    gdt[TSS / 8 + 1] = old_high;
    __asm__ volatile("ltr %w0" ::"r"(TSS) : "memory");
    check("LTR marks the TSS busy", gdt[TSS / 8] >> 40 & 0xf, 0xb);
    check("LTR of a busy TSS: #GP", TRY(__asm__ volatile("ltr %w0" ::"r"(TSS) : "memory")), GP);
    check("  error code", trap.error, TSS);
}

int main(void) {
    stacks();
    bad_gates();
    nested();
    vectors();
    floating_point();
    privileges();
    return failures();
}
