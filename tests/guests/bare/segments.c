// Segment registers and descriptors in 64-bit and compatibility mode (SDM vol. 3, chapters 3 and 5).
#include "runtime.h"

#define BAD_ADDRESS 0x800000000000ull

#define LOAD(register, selector) TRY(__asm__ volatile("mov %0, %%" #register ::"r"(selector)))
static u64 lar_rights, access_ok;

static bool lar(u64 selector) {
    u64 value = 0;
    __asm__ volatile("lar %2, %0" : "=r"(value), "=@ccz"(access_ok) : "r"(selector));
    lar_rights = value;
    return access_ok;
}
static bool lsl(u64 selector, u64 *limit) {
    bool ok;
    __asm__ volatile("lsl %2, %0" : "=r"(*limit), "=@ccz"(ok) : "r"(selector));
    return ok;
}
static bool verr(u16 selector) {
    bool ok;
    __asm__ volatile("verr %1" : "=@ccz"(ok) : "r"(selector));
    return ok;
}
static bool verw(u16 selector) {
    bool ok;
    __asm__ volatile("verw %1" : "=@ccz"(ok) : "r"(selector));
    return ok;
}

enum { ABSENT = SLOT(0), READ_ONLY = SLOT(1), EXECUTE_ONLY = SLOT(2), CONFORMING = SLOT(3), LOW_BASE = SLOT(4),
       SMALL = SLOT(5), FREE = SLOT(6), LDT = SLOT(7), HIGH = SLOT(10), DOWN = SLOT(11), BYTES = SLOT(12) };

static void descriptors(void) {
    __asm__ volatile("lldt %w0" ::"r"(0)); // after RESET it is a table of 64 KiB at 0
    gdt[ABSENT / 8] = 0x00cf73000000ffff;       // user data, not present
    gdt[READ_ONLY / 8] = 0x00cff1000000ffff;    // user data, read-only
    gdt[EXECUTE_ONLY / 8] = 0x00cff9000000ffff; // user code, not readable, 32-bit
    gdt[CONFORMING / 8] = 0x00af9f000000ffff;   // kernel code, conforming, 64-bit
    gdt[LOW_BASE / 8] = 0x00cff3100000ffff;     // user data, base 0x100000
    gdt[SMALL / 8] = 0x0040f30000000fff;        // user data, limit 0xfff bytes
    gdt[HIGH / 8] = 0x40cff3000000ffff;         // user data, base 0x40000000
    gdt[DOWN / 8] = 0x0040f70000000fff;         // user data, expand-down: offsets above 0xfff
}

static void loads(void) {
    check("DS: null", LOAD(ds, 0), NO_TRAP);
    check("DS: null with RPL 3", LOAD(ds, 3), NO_TRAP);
    check("DS: user data from ring 0", LOAD(ds, USER_DS), NO_TRAP);
    check("DS: not present: #NP", LOAD(ds, ABSENT | 3), NP);
    check("  error code", trap.error, ABSENT);
    check("DS: beyond the GDT: #GP", LOAD(ds, 0x7f8), GP);
    check("  error code", trap.error, 0x7f8);
    check("DS: an LDT selector without an LDT: #GP", LOAD(ds, 0xc), GP);
    check("  error code", trap.error, 0xc);
    check("DS: execute-only code: #GP", LOAD(ds, EXECUTE_ONLY | 3), GP);
    check("DS: readable code", LOAD(ds, USER_CS), NO_TRAP);
    check("DS: a TSS: #GP", LOAD(ds, TSS), GP);
    check("  error code", trap.error, TSS);
    check("DS: RPL above DPL: #GP", LOAD(ds, KERNEL_DS | 3), GP);
    check("  error code", trap.error, KERNEL_DS);
    check("SS: null in ring 0, 64-bit mode", TRY(__asm__ volatile("mov %0, %%ss\n mov %1, %%ss" ::"r"(0), "r"(KERNEL_DS))), NO_TRAP);
    check("SS: null with RPL 3 in ring 0: #GP", LOAD(ss, 3), GP);
    check("  error code", trap.error, 0);
    check("SS: user data in ring 0: #GP", LOAD(ss, USER_DS), GP);
    check("  error code", trap.error, USER_DS & ~3);
    check("SS: code: #GP", LOAD(ss, KERNEL_CS), GP);
    gdt[FREE / 8] = 0x00cf13000000ffff; // kernel data, not present
    check("SS: not present: #SS", LOAD(ss, FREE), SS);
    check("  error code", trap.error, FREE);
    check("CS by mov: #UD", TRY(__asm__ volatile(".byte 0x8e, 0xc8")), UD);
    check("segment register 6 by mov: #UD", TRY(__asm__ volatile(".byte 0x8e, 0xf0")), UD);
    gdt[FREE / 8] = 0x00cff2000000ffff;
    LOAD(es, FREE | 3);
    check("a load sets the descriptor's accessed bit", ((volatile u64 *)gdt)[FREE / 8] >> 40 & 1, 1);
    __asm__ volatile("mov %0, %%ds\n mov %0, %%es" ::"r"(KERNEL_DS));
}

extern u8 user_load_kernel[], user_null_ss[], compat_small[], compat_read_only[], compat_arith[];
__asm__(".align 64\n"
        "user_load_kernel: mov %edi, %ds\n int $0x80\n"
        "user_null_ss: mov %edi, %ss\n int $0x80\n"
        ".code32\n"
        "compat_small: mov %edi, %es\n mov %es:(%esi), %eax\n int $0x80\n"
        "compat_read_only: mov %edi, %es\n movb $1, %es:(%esi)\n int $0x80\n"
        "compat_arith: mov $5, %eax\n .byte 0x48\n nop\n int $0x80\n" // 48: DEC EAX here, REX.W in 64-bit mode
        ".code64\n");

static void rings(void) {
    check("ring 3 loads kernel data: #GP", run_user(user_load_kernel, KERNEL_DS, 0), GP);
    check("  error code", trap.error, KERNEL_DS);
    check("ring 3 loads a null SS: #GP", run_user(user_null_ss, 0, 0), GP);
    check("  error code", trap.error, 0);
    check("ring 3 loads a null SS with RPL 3: #GP", run_user(user_null_ss, 3, 0), GP);

    // Limits and rights hold in compatibility mode.
    const u64 small = SMALL | 3;
    check("compatibility mode: inside the limit", run_user32(compat_small, HIGH | 3, 0), 0x80);
    check("compatibility mode: beyond the limit: #GP", run_user32(compat_small, small, 0xffd), GP);
    check("  error code", trap.error, 0);
    check("compatibility mode: through a null ES: #GP", run_user32(compat_small, 0, 0), GP);
    check("compatibility mode: write to read-only: #GP", run_user32(compat_read_only, READ_ONLY | 3, USER_STACK_TOP - 64), GP);
    check("compatibility mode: a write", run_user32(compat_read_only, USER_DS, USER_STACK_TOP - 64), 0x80);
    check("compatibility mode: base", run_user32(compat_small, HIGH | 3, 0), 0x80);
    u32 want;
    memcpy(&want, (void *)((u64)compat_small & ~0xfffull), 4);
    check("  reads at base + offset", trap.frame.rax & 0xffffffff, want);
    check("compatibility mode: expand-down, below: #GP", run_user32(compat_small, DOWN | 3, 0xffc), GP);
    check("compatibility mode: expand-down, above", run_user32(compat_small, DOWN | 3, USER_STACK_TOP - 64), 0x80);
    check("compatibility mode: a user address of the kernel: #PF", run_user32(compat_small, USER_DS, 0x100000), PF);
    check("  error code", trap.error, 5);
    run_user32(compat_arith, 0, 0);
    check("compatibility mode: 48 is DEC", trap.frame.rax, 4);
}

static void bases(void) {
    frames[0][0x10] = 0x5a;
    map4k(0, frames[0], PTE_P | PTE_W);
    u8 value;
    wrmsr(MSR_FS_BASE, PAGE4K(0));
    __asm__ volatile("movb %%fs:0x10, %0" : "=q"(value));
    check("FS base by MSR", value, 0x5a);
    wrmsr(MSR_GS_BASE, PAGE4K(0) + 8);
    __asm__ volatile("movb %%gs:8, %0" : "=q"(value));
    check("GS base by MSR", value, 0x5a);
    wrmsr(MSR_KERNEL_GS_BASE, 0x1234);
    __asm__ volatile("swapgs");
    check("SWAPGS: GS base", rdmsr(MSR_GS_BASE), 0x1234);
    check("SWAPGS: KERNEL_GS base", rdmsr(MSR_KERNEL_GS_BASE), PAGE4K(0) + 8);
    __asm__ volatile("swapgs");
    check("FS base not canonical: #GP", TRY(wrmsr(MSR_FS_BASE, BAD_ADDRESS)), GP);
    check("GS base not canonical: #GP", TRY(wrmsr(MSR_GS_BASE, BAD_ADDRESS)), GP);
    check("KERNEL_GS base not canonical: #GP", TRY(wrmsr(MSR_KERNEL_GS_BASE, BAD_ADDRESS)), GP);
    LOAD(fs, HIGH | 3);
    check("a load of FS sets its base from the descriptor", rdmsr(MSR_FS_BASE), 0x40000000);
    LOAD(fs, LOW_BASE | 3);
    __asm__ volatile("movb %%fs:0, %0" : "=q"(value));
    check("  and an access uses it", value, *(u8 *)0x100000);
    LOAD(es, LOW_BASE | 3);
    const u64 address = (u64)&frames[0][0x10];
    __asm__ volatile("movb %%es:(%1), %0" : "=q"(value) : "r"(address));
    check("ES base is ignored in 64-bit mode", value, 0x5a);
    LOAD(es, SMALL | 3);
    __asm__ volatile("movb %%es:(%1), %0" : "=q"(value) : "r"(address));
    check("ES limit is ignored in 64-bit mode", value, 0x5a);
    __asm__ volatile("mov %0, %%es" ::"r"(KERNEL_DS));
    wrmsr(MSR_FS_BASE, BAD_ADDRESS - 16);
    check("FS: base + offset not canonical: #GP", TRY(__asm__ volatile("movb %%fs:0x10, %%al" ::: "rax")), GP);

    const bool fsgsbase = cpuid(0, 0).a >= 7 && cpuid(7, 0).b & 1;
    if (!fsgsbase) {
        check("CR4.FSGSBASE where CPUID has none: #GP", TRY(write_cr4(read_cr4() | CR4_FSGSBASE)), GP);
        return;
    }
    check("WRFSBASE with CR4.FSGSBASE clear: #UD", TRY(__asm__ volatile("wrfsbase %0" ::"r"(0ull))), UD);
    write_cr4(read_cr4() | CR4_FSGSBASE);
    u64 base;
    __asm__ volatile("wrfsbase %1\n rdfsbase %0" : "=r"(base) : "r"(PAGE4K(0)));
    check("WRFSBASE, RDFSBASE", base, PAGE4K(0));
    check("  is the MSR", rdmsr(MSR_FS_BASE), PAGE4K(0));
    check("WRGSBASE of a non-canonical address: #GP", TRY(__asm__ volatile("wrgsbase %0" ::"r"(BAD_ADDRESS))), GP);
    write_cr4(read_cr4() & ~(u64)CR4_FSGSBASE);
}

static void queries(void) {
    u64 limit;
    check("LAR of kernel code", lar(KERNEL_CS), 1);
    check("  rights", lar_rights, 0xaf9b00 & 0xf0ff00);
    check("LAR of user data", lar(USER_DS), 1);
    check("  rights", lar_rights, 0xc0f300);
    check("LAR of a null selector", lar(0), 0);
    check("LAR of the TSS", lar(TSS), 1);
    check("  rights", lar_rights, 0x008b00);
    check("LAR of a selector beyond the GDT", lar(0x7f8), 0);
    check("LAR of kernel data with RPL 3", lar(KERNEL_DS | 3), 0);
    check("LAR of conforming code with RPL 3", lar(CONFORMING | 3), 1);
    check("LSL of a page-granular segment", lsl(USER_DS, &limit), 1);
    check("  limit", limit, 0xffffffff);
    check("LSL of a byte-granular segment", lsl(SMALL, &limit), 1);
    check("  limit", limit, 0xfff);
    check("LSL of the TSS", lsl(TSS, &limit), 1);
    check("  limit", limit, sizeof(struct tss) - 1);
    check("LSL of a null selector", lsl(0, &limit), 0);
    check("VERR of user data", verr(USER_DS), 1);
    check("VERR of execute-only code", verr(EXECUTE_ONLY | 3), 0);
    check("VERR of readable code", verr(USER_CS), 1);
    check("VERR of a TSS", verr(TSS), 0);
    check("VERR of null", verr(0), 0);
    check("VERW of user data", verw(USER_DS), 1);
    check("VERW of read-only data", verw(READ_ONLY | 3), 0);
    check("VERW of code", verw(USER_CS), 0);
    check("VERW of kernel data with RPL 3", verw(KERNEL_DS | 3), 0);
}

static void ldt(void) {
    static u64 table[2] = {0, 0x20cff3000000ffff};
    const u64 base = (u64)table;
    gdt[LDT / 8] = (sizeof table - 1) | (base & 0xffffff) << 16 | 0x82ull << 40 | (base >> 24 & 0xff) << 56;
    gdt[LDT / 8 + 1] = base >> 32;
    check("LLDT", TRY(__asm__ volatile("lldt %w0" ::"r"(LDT))), NO_TRAP);
    u64 selector = 0;
    __asm__ volatile("sldt %0" : "=r"(selector));
    check("SLDT", selector, LDT);
    check("a load through the LDT", LOAD(fs, 8 | 4 | 3), NO_TRAP);
    check("  base", rdmsr(MSR_FS_BASE), 0x20000000);
    check("beyond the LDT: #GP", LOAD(fs, 16 | 4 | 3), GP);
    check("  error code", trap.error, 16 | 4);
    check("LLDT of null", TRY(__asm__ volatile("lldt %w0" ::"r"(0))), NO_TRAP);
    check("  and the LDT is gone: #GP", LOAD(fs, 8 | 4 | 3), GP);
    check("LLDT of a TSS: #GP", TRY(__asm__ volatile("lldt %w0" ::"r"(TSS))), GP);
    check("  error code", trap.error, TSS);
    __asm__ volatile("str %0" : "=r"(selector));
    check("STR", selector, TSS);
    check("LTR of null: #GP", TRY(__asm__ volatile("ltr %w0" ::"r"(0))), GP);
    check("  error code", trap.error, 0);
    LOAD(fs, 0);
}

int main(void) {
    descriptors();
    loads();
    rings();
    bases();
    queries();
    ldt();
    return failures();
}
