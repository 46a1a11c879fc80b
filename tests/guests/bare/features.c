// What CPUID does not offer does not work, what it offers does; reserved bits of control registers and MSRs raise #GP
// (SDM vol. 2 each instruction; vol. 3, 2.5 and chapter 35).
#include "runtime.h"

enum { LEAF_1_C, LEAF_1_D, LEAF_7_B, LEAF_7_C, LEAF_80000001_C, LEAF_80000001_D, LEAF_D_1_A };

static u64 leaf(unsigned which) {
    const u32 max = cpuid(0, 0).a, max_extended = cpuid(0x80000000, 0).a;
    switch (which) {
    case LEAF_1_C: return cpuid(1, 0).c;
    case LEAF_1_D: return cpuid(1, 0).d;
    case LEAF_7_B: return max >= 7 ? cpuid(7, 0).b : 0;
    case LEAF_7_C: return max >= 7 ? cpuid(7, 0).c : 0;
    case LEAF_D_1_A: return max >= 13 ? cpuid(13, 1).a : 0;
    case LEAF_80000001_C: return max_extended >= 0x80000001 ? cpuid(0x80000001, 0).c : 0;
    default: return max_extended >= 0x80000001 ? cpuid(0x80000001, 0).d : 0;
    }
}

// Memory operands are at rsi, which has room; registers may be lost.
#define FEATURES(F)                                                                                                    \
    F(monitor, "MONITOR", LEAF_1_C, 3, "mov %rsi, %rax\n xor %ecx, %ecx\n xor %edx, %edx\n monitor") \
    F(sse3_haddps, "SSE3 haddps", LEAF_1_C, 0, "haddps %xmm0, %xmm0") \
    F(ssse3_pshufb, "SSSE3 pshufb", LEAF_1_C, 9, "pshufb %xmm0, %xmm0") \
    F(sse4_1_ptest, "SSE4.1 ptest", LEAF_1_C, 19, "ptest %xmm0, %xmm0") \
    F(sse4_2_pcmpgtq, "SSE4.2 pcmpgtq", LEAF_1_C, 20, "pcmpgtq %xmm0, %xmm0") \
    F(sse4_2_crc32, "SSE4.2 crc32", LEAF_1_C, 20, "crc32b %al, %eax") \
    F(pclmulqdq, "PCLMULQDQ", LEAF_1_C, 1, "pclmulqdq $0, %xmm0, %xmm0") \
    F(aes, "AES", LEAF_1_C, 25, "aesenc %xmm0, %xmm0") \
    F(popcnt, "POPCNT", LEAF_1_C, 23, "popcnt %eax, %eax") \
    F(movbe, "MOVBE", LEAF_1_C, 22, "movbe (%rsi), %eax") \
    F(cmpxchg16b, "CMPXCHG16B", LEAF_1_C, 13, "cmpxchg16b (%rsi)") \
    F(rdrand, "RDRAND", LEAF_1_C, 30, "rdrand %eax") \
    F(cmpxchg8b, "CMPXCHG8B", LEAF_1_D, 8, "cmpxchg8b (%rsi)") \
    F(cmov, "CMOV", LEAF_1_D, 15, "cmovz %eax, %eax") \
    F(clflush, "CLFLUSH", LEAF_1_D, 19, "clflush (%rsi)") \
    F(mmx, "MMX", LEAF_1_D, 23, "emms") \
    F(fxsr, "FXSR", LEAF_1_D, 24, "fxsave (%rsi)") \
    F(sse2, "SSE2", LEAF_1_D, 26, "xorpd %xmm0, %xmm0") \
    F(bmi1_andn, "BMI1 andn", LEAF_7_B, 3, "andn %eax, %eax, %eax") \
    F(bmi2_rorx, "BMI2 rorx", LEAF_7_B, 8, "rorx $1, %eax, %eax") \
    F(adx, "ADX", LEAF_7_B, 19, "adcx %eax, %eax") \
    F(rdseed, "RDSEED", LEAF_7_B, 18, "rdseed %eax") \
    F(invpcid, "INVPCID", LEAF_7_B, 10, "mov $2, %eax\n invpcid (%rsi), %rax") \
    F(smap_clac, "SMAP clac", LEAF_7_B, 20, "clac") \
    F(clflushopt, "CLFLUSHOPT", LEAF_7_B, 23, "clflushopt (%rsi)") \
    F(clwb, "CLWB", LEAF_7_B, 24, "clwb (%rsi)") \
    F(sha, "SHA", LEAF_7_B, 29, "sha1msg1 %xmm0, %xmm0") \
    F(rdpid, "RDPID", LEAF_7_C, 22, "rdpid %rax") \
    F(lahf_in_64_bit_mode, "LAHF in 64-bit mode", LEAF_80000001_C, 0, "lahf") \
    F(sse4a, "SSE4A", LEAF_80000001_C, 6, "extrq %xmm0, %xmm0") \
    F(rdtscp, "RDTSCP", LEAF_80000001_D, 27, "rdtscp") \
    F(3dnow, "3DNow", LEAF_80000001_D, 31, "femms")
#define LABEL(id, name, which, bit, text) "feature_" #id ": " text "\n ret\n"
__asm__(FEATURES(LABEL));
#define DECLARE(id, name, which, bit, text) void feature_##id(void);
FEATURES(DECLARE)

static u8 area[1024] __attribute__((aligned(64)));

static void instructions(void) {
#define ROW(id, name, which, bit, text) {name, which, bit, feature_##id},
    static const struct { const char *name; unsigned leaf, bit; void (*code)(void); } rows[] = {FEATURES(ROW)};
    for (volatile unsigned i = 0; i < sizeof rows / sizeof *rows; ++i) {
        u64 vector = TRY(__asm__ volatile("call *%0" ::"r"(rows[i].code), "S"(area)
                                          : "rax", "rbx", "rcx", "rdx", "r8", "cc", "memory"));
        const bool there = leaf(rows[i].leaf) >> rows[i].bit & 1;
        print("# %s\n", rows[i].name);
        check(there ? "  offered: works" : "  not offered: #UD", vector, there ? NO_TRAP : UD);
    }
    const bool xsave = cpuid(1, 0).c >> 26 & 1;
    check("XGETBV with CR4.OSXSAVE clear: #UD", TRY(__asm__ volatile("xor %%ecx, %%ecx\n xgetbv" ::: "rax", "rcx", "rdx")), UD);
    check("XSAVE with CR4.OSXSAVE clear: #UD", TRY(__asm__ volatile("xsave (%0)" ::"r"(area) : "memory")), UD);
    check("VEX without OSXSAVE: #UD", TRY(__asm__ volatile("vxorps %xmm0, %xmm0, %xmm0")), UD);
    if (!xsave) {
        check("CR4.OSXSAVE not offered: #GP", TRY(write_cr4(read_cr4() | 1 << 18)), GP);
        return;
    }
    check("CPUID.OSXSAVE follows CR4: clear", cpuid(1, 0).c >> 27 & 1, 0);
    write_cr4(read_cr4() | 1 << 18);
    check("CPUID.OSXSAVE follows CR4: set", cpuid(1, 0).c >> 27 & 1, 1);
#define XSETBV(n, low) TRY(__asm__ volatile("xsetbv" ::"c"(n), "a"(low), "d"(0)))
    check("XSETBV of x87 and SSE", XSETBV(0, 3), NO_TRAP);
    check("XSETBV without x87: #GP", XSETBV(0, 2), GP);
    check("XSETBV of AVX without SSE: #GP", XSETBV(0, 5), GP);
    check("XSETBV of a reserved bit: #GP", XSETBV(0, 1 | 1 << 30), GP);
    check("XSETBV of register 1: #GP", XSETBV(1, 1), GP);
    check("XSAVE to an unaligned area: #GP", TRY(__asm__ volatile("xsave 8(%0)" ::"r"(area), "a"(3), "d"(0) : "memory")), GP);
    memset(area, 0, sizeof area);
    __asm__ volatile("fninit\n xsave (%0)" ::"r"(area), "a"(1), "d"(0) : "memory");
    check("XSAVE of x87 writes its control word", area[0] | area[1] << 8, 0x37f);
    area[512] = 0xff;
    check("XRSTOR of a state not in XCR0: #GP", TRY(__asm__ volatile("xrstor (%0)" ::"r"(area), "a"(3), "d"(0) : "memory")), GP);
    area[512] = 1;
    check("XRSTOR", TRY(__asm__ volatile("xrstor (%0)" ::"r"(area), "a"(3), "d"(0) : "memory")), NO_TRAP);
    area[512 + 8] = 1;
    check("XRSTOR with a bad header: #GP", TRY(__asm__ volatile("xrstor (%0)" ::"r"(area), "a"(3), "d"(0) : "memory")), GP);
    write_cr4(read_cr4() & ~(1ull << 18));
}

static void control_registers(void) {
    write_cr2(0xffff800012345678);
    check("CR2 keeps what is written", read_cr2(), 0xffff800012345678);
    check("CR1: #UD", TRY(__asm__ volatile(".byte 0x0f, 0x20, 0xc8")), UD);
    check("CR5: #UD", TRY(__asm__ volatile(".byte 0x0f, 0x20, 0xe8")), UD);
    u64 status = 0;
    __asm__ volatile("smsw %0" : "=r"(status));
    check("SMSW is CR0", status & 0xffff, read_cr0() & 0xffff);
    __asm__ volatile("lmsw %w0" ::"r"((u16)(read_cr0() | CR0_TS)));
    check("LMSW sets TS", read_cr0() & CR0_TS, CR0_TS);
    __asm__ volatile("clts");
    __asm__ volatile("lmsw %w0" ::"r"((u16)(read_cr0() & ~CR0_PE)));
    check("LMSW does not clear PE", read_cr0() & CR0_PE, CR0_PE);
    write_cr4(read_cr4() | CR4_TSD);
    check("RDTSC in ring 0 with CR4.TSD", TRY(__asm__ volatile("rdtsc" ::: "rax", "rdx")), NO_TRAP);
    extern u8 user_rdtsc[], user_rdpmc[], user_sidt[], user_smsw[];
    check("RDTSC in ring 3 with CR4.TSD: #GP", run_user(user_rdtsc, 0, 0), GP);
    write_cr4(read_cr4() & ~(u64)CR4_TSD);
    check("RDTSC in ring 3", run_user(user_rdtsc, 0, 0), 0x80);
    check("RDPMC in ring 3 with CR4.PCE clear: #GP", run_user(user_rdpmc, 0, 0), GP);
    check("SIDT in ring 3", run_user(user_sidt, 0, 0), 0x80);
    if (leaf(LEAF_7_C) >> 2 & 1) {
        write_cr4(read_cr4() | CR4_UMIP);
        check("SIDT in ring 3 with UMIP: #GP", run_user(user_sidt, 0, 0), GP);
        check("SMSW in ring 3 with UMIP: #GP", run_user(user_smsw, 0, 0), GP);
        write_cr4(read_cr4() & ~(u64)CR4_UMIP);
    } else
        check("CR4.UMIP not offered: #GP", TRY(write_cr4(read_cr4() | CR4_UMIP)), GP);
}
__asm__(".align 64\n user_rdtsc: rdtsc\n int $0x80\n"
        "user_rdpmc: xor %ecx, %ecx\n rdpmc\n int $0x80\n"
        "user_sidt: sidt -16(%rsp)\n int $0x80\n"
        "user_smsw: smsw %eax\n int $0x80\n");

static void msrs(void) {
    check("RDMSR of no MSR: #GP", TRY(rdmsr(0x12345678)), GP);
    check("  error code", trap.error, 0);
    check("WRMSR of no MSR: #GP", TRY(wrmsr(0x12345678, 0)), GP);
    const u64 efer = rdmsr(MSR_EFER);
    check("EFER: SCE, LME, LMA, NXE as set at the start", efer, 0xd01);
    check("EFER: a reserved bit: #GP", TRY(wrmsr(MSR_EFER, efer | 1 << 1)), GP);
    check("EFER: LME clear while paging: #GP", TRY(wrmsr(MSR_EFER, efer & ~(1ull << 8))), GP);
    wrmsr(MSR_EFER, efer & ~(1ull << 10));
    check("EFER: LMA is not for writing", rdmsr(MSR_EFER), efer);
    check("PAT: a reserved type: #GP", TRY(wrmsr(MSR_PAT, 2)), GP);
    check("PAT keeps its value", ({ wrmsr(MSR_PAT, 0x0007010600070406); rdmsr(MSR_PAT); }), 0x0007010600070406);
    wrmsr(MSR_PAT, 0x0007040600070406);
    u64 first, second;
    __asm__ volatile("rdtsc\n shl $32, %%rdx\n or %%rdx, %%rax" : "=a"(first)::"rdx");
    __asm__ volatile("rdtsc\n shl $32, %%rdx\n or %%rdx, %%rax" : "=a"(second)::"rdx");
    check("TSC goes on", second > first, 1);
    wrmsr(0x10, 0x100000000000);
    check("TSC can be written", rdmsr(0x10) >= 0x100000000000 && rdmsr(0x10) < 0x100100000000, 1);
    __asm__ volatile("mov $-1, %%rax\n mov $-1, %%rdx\n rdmsr\n mov %%rax, %0" : "=r"(first) : "c"(MSR_EFER) : "rax", "rdx");
    check("RDMSR clears the upper half of RAX", first, efer);
}

int main(void) {
    instructions();
    control_registers();
    msrs();
    return failures();
}
