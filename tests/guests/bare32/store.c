// The Debug Store from real mode to 64-bit mode, in the layout of whatever processor this is: a guest in 32-bit code, since
// the oldest models have nothing wider.
//
// Each part switches BTS on, runs a few branches whose addresses are labels, switches it off, and compares the records. It
// prints as the guests of ../bare do: "PASS name", "FAIL name: got .. want ..", and leaves by the exit port.
#include <stdbool.h>
#include <stdint.h>

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;

enum { MSR_DEBUGCTL = 0x1d9, MSR_DS_AREA = 0x600, MSR_MISC_ENABLE = 0x1a0, MSR_EFER = 0xc0000080 };
enum { COM1 = 0x3f8, EXIT_PORT = 0xf4 };

static void outb(u16 port, u8 value) { __asm__ volatile("outb %0, %1" ::"a"(value), "Nd"(port)); }
static u64 rdmsr(u32 msr) {
    u64 value;
    __asm__ volatile("rdmsr" : "=A"(value) : "c"(msr));
    return value;
}
static void wrmsr(u32 msr, u64 value) { __asm__ volatile("wrmsr" ::"c"(msr), "A"(value) : "memory"); }

// --- output ----------------------------------------------------------------------------------------------------------

static void print(const char *text) {
    for (; *text; ++text)
        outb(COM1, (u8)*text);
}
static void print_hex(u64 value) {
    print("0x");
    bool any = false;
    for (int shift = 60; shift >= 0; shift -= 4) {
        const unsigned digit = (unsigned)(value >> shift) & 15;
        if (!digit && !any && shift)
            continue;
        any = true;
        outb(COM1, (u8)"0123456789abcdef"[digit]);
    }
}
static int failed;
static void check(const char *name, u64 got, u64 want) {
    print(got == want ? "PASS " : "FAIL ");
    print(name);
    if (got != want) {
        ++failed;
        print(": got ");
        print_hex(got);
        print(" want ");
        print_hex(want);
    }
    print("\n");
}

// --- the processor ---------------------------------------------------------------------------------------------------

static struct {
    bool long_mode, netburst;
    unsigned field;                       // bytes of a DS field
    u32 tr, bts, btint, off_os, off_usr; // of DEBUGCTL; 0: not there
} cpu;

static void identify(void) {
    u32 a, b, c, d;
    __asm__ volatile("cpuid" : "=a"(a), "=b"(b), "=c"(c), "=d"(d) : "a"(1), "c"(0));
    check("CPUID has DS", d >> 21 & 1, 1);
    cpu.netburst = (a >> 8 & 15) == 15;
    cpu.field = c & 4 ? 8 : 4; // DTES64
    cpu.tr = cpu.netburst ? 1 << 2 : 1 << 6;
    cpu.bts = cpu.tr << 1;
    cpu.btint = cpu.tr << 2;
    if (c & 16) { // DS-CPL
        cpu.off_os = cpu.tr << 3;
        cpu.off_usr = cpu.tr << 4;
    }
    __asm__ volatile("cpuid" : "=a"(a), "=b"(b), "=c"(c), "=d"(d) : "a"(0x80000001), "c"(0));
    cpu.long_mode = d >> 29 & 1;
    check("BTS is available", rdmsr(MSR_MISC_ENABLE) >> 11 & 1, 0);
}

// --- the DS area -----------------------------------------------------------------------------------------------------

enum { ROOM = 16 };
static u8 area[128] __attribute__((aligned(64)));
static u8 buffer[ROOM * 24] __attribute__((aligned(64)));

static u64 get(const void *place) { return cpu.field == 8 ? *(const u64 *)place : *(const u32 *)place; }
static void put(void *place, u64 value) {
    if (cpu.field == 8)
        *(u64 *)place = value;
    else
        *(u32 *)place = (u32)value;
}
static unsigned record_size(void) { return 3 * cpu.field; }

static void set_area(u32 base, unsigned records, unsigned threshold) {
    put(area, base);
    put(area + cpu.field, base);
    put(area + 2 * cpu.field, base + records * record_size());
    put(area + 3 * cpu.field, base + threshold * record_size());
    wrmsr(MSR_DS_AREA, (u32)area);
}
static unsigned stored(void) { return (unsigned)(get(area + cpu.field) - get(area)) / record_size(); }

/// The records are these branches, pairs of from and to, and no more.
static void expect(const char *name, const u32 *pairs, unsigned count) {
    print("# ");
    print(name);
    print("\n");
    check("records", stored(), count);
    for (unsigned i = 0; i < count && i < stored(); ++i) {
        const u8 *record = buffer + i * record_size();
        check("from", get(record), pairs[2 * i]);
        check("to", get(record + cpu.field), pairs[2 * i + 1]);
        check("reserved flags", get(record + 2 * cpu.field) & ~(cpu.netburst ? 16ull : 0ull), 0);
    }
}

// --- interrupts ------------------------------------------------------------------------------------------------------

struct gate {
    u16 offset_low, selector, type, offset_high;
};
static struct gate idt[256];
static volatile u32 *const lapic = (volatile u32 *)0xfee00000;
enum { LAPIC_EOI = 0xb0 / 4, LAPIC_SVR = 0xf0 / 4, LAPIC_LVT_PC = 0x340 / 4, PMI_VECTOR = 0x40, INT_VECTOR = 0x30, MASKED = 1 << 16 };

volatile u32 pmis;
extern u8 on_pmi[], on_int[];
__asm__("on_pmi: push %eax\n incl pmis\n movl $0, 0xfee000b0\n pop %eax\n iret\n"
        "on_int: iret\n");

static void set_gate(unsigned vector, const void *handler) {
    const u32 offset = (u32)handler;
    idt[vector] = (struct gate){(u16)offset, 0x08, 0x8e00, (u16)(offset >> 16)};
}
static void set_up_interrupts(void) {
    set_gate(PMI_VECTOR, on_pmi);
    set_gate(INT_VECTOR, on_int);
    const struct __attribute__((packed)) {
        u16 limit;
        u32 base;
    } pointer = {sizeof idt - 1, (u32)idt};
    __asm__ volatile("lidt %0" ::"m"(pointer));
    lapic[LAPIC_SVR] = 0x1ff;
}

// --- 32-bit protected mode -------------------------------------------------------------------------------------------

/// WRMSR of `value` to DEBUGCTL, the branches, and WRMSR of 0.
void run_protected(u32 value);
extern u8 p1[], p2[], p3[], p4[], p5[], p6[], p7[], p8[], p9[];
__asm__(".globl run_protected\n run_protected: push %ebx\n mov 8(%esp), %eax\n xor %edx, %edx\n mov $0x1d9, %ecx\n wrmsr\n"
        "p1: jmp p2\n nop\n"
        "p2: call p3\n p4: mov $2, %ebx\n p5: dec %ebx\n p6: jnz p5\n"
        "p7: int $0x30\n p8: jmp p9\n nop\n"
        "p3: ret\n"
        "p9: mov $0x1d9, %ecx\n xor %eax, %eax\n xor %edx, %edx\n wrmsr\n pop %ebx\n ret\n");

static void protected_mode(void) {
    const u32 want[] = {(u32)p1, (u32)p2,     (u32)p2, (u32)p3,     (u32)p3,     (u32)p4, (u32)p6,
                        (u32)p5, (u32)p7, (u32)on_int, (u32)on_int, (u32)p8, (u32)p8, (u32)p9};
    const u32 on = cpu.tr | cpu.bts | cpu.btint;
    set_area((u32)buffer, ROOM, ROOM + 1);
    run_protected(on);
    expect("protected mode", want, 7);

    set_area((u32)buffer, ROOM, ROOM + 1);
    run_protected(cpu.tr);
    check("TR alone stores nothing", stored(), 0);
    if (cpu.off_os) {
        run_protected(on | cpu.off_os);
        check("BTS_OFF_OS: nothing at CPL 0", stored(), 0);
        run_protected(on | cpu.off_usr);
        check("BTS_OFF_USR: CPL 0 only", stored(), 7);
    }

    set_area((u32)buffer, 4, ROOM);
    run_protected(on);
    check("a full buffer keeps the first ones", get(buffer), (u32)p1);
    check("and its index at the maximum", stored(), 4);

    set_area((u32)buffer, 4, ROOM);
    run_protected(on & ~cpu.btint);
    check("a circular buffer goes round", stored(), 7 % 4);
    check("over the oldest", get(buffer), (u32)p7);

    // One interrupt at the threshold; LVT PC then masks itself.
    set_area((u32)buffer, ROOM, 3);
    pmis = 0;
    lapic[LAPIC_LVT_PC] = PMI_VECTOR;
    __asm__ volatile("sti");
    run_protected(on);
    __asm__ volatile("cli");
    check("one PMI at the threshold", pmis, 1);
    check("LVT PC is masked by it", lapic[LAPIC_LVT_PC], PMI_VECTOR | MASKED);
    check("the branches, the interrupt and its return", stored(), 9);
    check("the interrupt comes after the third branch", get(buffer + 3 * record_size()), (u32)p4);
    check("and goes to its handler", get(buffer + 3 * record_size() + cpu.field), (u32)on_pmi);
    lapic[LAPIC_LVT_PC] = MASKED;
}

// --- paging ----------------------------------------------------------------------------------------------------------

static u32 page_directory[1024] __attribute__((aligned(4096)));
enum { P = 1, W = 2, A = 32, D = 64, PS = 128, UNMAPPED = 0x40000000 };

static void paging(void) {
    for (u32 i = 0; i < 1024; ++i)
        page_directory[i] = i << 22 | P | W | PS;
    page_directory[UNMAPPED >> 22] = 0;
    __asm__ volatile("mov %%cr4, %%eax\n or $0x10, %%eax\n mov %%eax, %%cr4\n mov %0, %%cr3\n"
                     "mov %%cr0, %%eax\n or $0x80000000, %%eax\n mov %%eax, %%cr0" ::"r"(page_directory) : "eax", "memory");
    print("# paging\n");
    const u32 on = cpu.tr | cpu.bts | cpu.btint;
    set_area(UNMAPPED, ROOM, ROOM);
    run_protected(on);
    check("a buffer that isn't there drops, without a fault", stored(), 0);
    page_directory[UNMAPPED >> 22] = ((u32)buffer & 0xffc00000) | P | W | PS;
    set_area(UNMAPPED + ((u32)buffer & 0x3fffff), ROOM, ROOM);
    buffer[0] = 0;
    run_protected(on);
    check("a linear address", stored(), 7);
    check("leads to its page", get(buffer), (u32)p1);
    check("which is accessed and dirty", page_directory[UNMAPPED >> 22] & (A | D), A | D);
    page_directory[UNMAPPED >> 22] = ((u32)buffer & 0xffc00000) | P | PS;
    __asm__ volatile("mov %%cr0, %%eax\n or $0x10000, %%eax\n mov %%eax, %%cr0\n mov %%cr3, %%eax\n mov %%eax, %%cr3" ::: "eax", "memory");
    set_area(UNMAPPED + ((u32)buffer & 0x3fffff), ROOM, ROOM);
    run_protected(on);
    check("a page that may not be written drops", stored(), 0);
    put(area, 0xfffffff0);
    put(area + cpu.field, 0xfffffff0);
    put(area + 2 * cpu.field, 0xffffffff);
    run_protected(on);
    check("a buffer at the end of memory wraps nowhere", get(area + cpu.field), 0xfffffff0);
    __asm__ volatile("mov %%cr0, %%eax\n and $0x7ffeffff, %%eax\n mov %%eax, %%cr0" ::: "eax", "memory");
}

// --- real mode -------------------------------------------------------------------------------------------------------

// Runs at LOW, segment 0x700; what it needs of the processor it finds at LOW's end.
#define OFF(label) "(" #label " - low_start)"
enum { LOW = 0x7000 };
extern u8 low_start[], low_end[], low_debugctl[], r1[], r2[], r3[], r4[], r5[], r6[];
void run_low(void);
__asm__(".section .rodata\n low_start:\n .code16\n"
        "mov $0x10, %ax\n mov %cr0, %eax\n and $0xfe, %al\n mov %eax, %cr0\n ljmp $0x700, $" OFF(real) "\n"
        "real: xor %ax, %ax\n mov %ax, %ss\n mov $0x6ff0, %sp\n mov %ax, %es\n mov %cs, %ax\n mov %ax, %ds\n"
        "lidtl " OFF(real_idt) "\n movw $" OFF(r6) ", %es:0x180\n movw $0x700, %es:0x182\n"
        "mov " OFF(low_debugctl) ", %eax\n xor %edx, %edx\n mov $0x1d9, %ecx\n wrmsr\n"
        "r1: jmp r2\n nop\n r2: int $0x60\n r3: ljmp $0x701, $(" OFF(r4) " - 0x10)\n nop\n"
        "r4: call r5\n r7: xor %eax, %eax\n xor %edx, %edx\n mov $0x1d9, %ecx\n wrmsr\n"
        "lgdtl %cs:(" OFF(low_gdt) " - 0x10)\n mov %cr0, %eax\n or $1, %al\n mov %eax, %cr0\n ljmpl $0x08, $back_32\n"
        "r5: ret\n r6: iret\n"
        ".balign 4\n low_debugctl: .long 0\n real_idt: .word 0x3ff\n .long 0\n low_gdt: .word 0x3f\n .long gdt\n low_end:\n"
        ".code32\n .text\n"
        ".globl run_low\n run_low: pusha\n mov %esp, saved_esp\n sidt saved_idt\n mov $0x28, %eax\n mov %eax, %ds\n mov %eax, %es\n mov %eax, %ss\n"
        "ljmp $0x20, $0\n"
        "back_32: mov $0x10, %eax\n mov %eax, %ds\n mov %eax, %es\n mov %eax, %ss\n mov saved_esp, %esp\n lidt saved_idt\n popa\n ret\n"
        ".data\n saved_esp: .long 0\n saved_idt: .word 0, 0, 0\n .text\n");
extern u8 r7[];

static void real_mode(void) {
    for (u32 i = 0; i < (u32)(low_end - low_start); ++i)
        ((u8 *)LOW)[i] = low_start[i];
    *(u32 *)(LOW + (low_debugctl - low_start)) = cpu.tr | cpu.bts | cpu.btint;
    set_area((u32)buffer, ROOM, ROOM + 1);
    run_low();
#define AT(label) (LOW + (u32)(label - low_start))
    const u32 want[] = {AT(r1), AT(r2), AT(r2), AT(r6), AT(r6), AT(r3), AT(r3), AT(r4), AT(r4), AT(r5), AT(r5), AT(r7)};
    expect("real mode", want, 6);
}

// --- 64-bit mode -----------------------------------------------------------------------------------------------------

u64 pml4[512] __attribute__((aligned(4096)));
static u64 pdpt[512] __attribute__((aligned(4096))), pd[512] __attribute__((aligned(4096)));
void run_long(u32 value);
extern u8 l1[], l2[], l3[], l4[], l5[];
__asm__(".globl run_long\n run_long: pusha\n mov 36(%esp), %esi\n mov $pml4, %eax\n mov %eax, %cr3\n mov %cr4, %eax\n or $0x20, %eax\n mov %eax, %cr4\n"
        "mov $0xc0000080, %ecx\n rdmsr\n or $0x100, %eax\n wrmsr\n mov %cr0, %eax\n or $0x80000000, %eax\n mov %eax, %cr0\n"
        "ljmp $0x30, $1f\n .code64\n 1: mov %esi, %eax\n xor %edx, %edx\n mov $0x1d9, %ecx\n wrmsr\n"
        "l1: jmp l2\n nop\n l2: call l3\n l4: lea l5(%rip), %rax\n l6: jmp *%rax\n nop\n l3: ret\n"
        "l5: xor %eax, %eax\n xor %edx, %edx\n mov $0x1d9, %ecx\n wrmsr\n"
        "ljmp *2f(%rip)\n 2: .long 3f, 0x08\n .code32\n"
        "3: mov %cr0, %eax\n and $0x7fffffff, %eax\n mov %eax, %cr0\n mov $0xc0000080, %ecx\n rdmsr\n and $~0x100, %eax\n wrmsr\n"
        "mov %cr4, %eax\n and $~0x20, %eax\n mov %eax, %cr4\n popa\n ret\n");
extern u8 l6[];

static void long_mode(void) {
    pml4[0] = (u32)pdpt | P | W;
    pdpt[0] = (u32)pd | P | W;
    for (u32 i = 0; i < 512; ++i)
        pd[i] = (u64)i << 21 | P | W | PS;
    set_area((u32)buffer, ROOM, ROOM + 1);
    run_long(cpu.tr | cpu.bts | cpu.btint);
    const u32 want[] = {(u32)l1, (u32)l2, (u32)l2, (u32)l3, (u32)l3, (u32)l4, (u32)l6, (u32)l5};
    expect("64-bit mode", want, 4);
}

// --- start -----------------------------------------------------------------------------------------------------------

__asm__(".section .multiboot, \"a\"\n .balign 4\n .long 0x1badb002, 0, -0x1badb002\n .text\n"
        ".globl start\n start: cli\n mov $stack_top, %esp\n lgdt gdt_pointer\n ljmp $0x08, $1f\n"
        "1: mov $0x10, %eax\n mov %eax, %ds\n mov %eax, %es\n mov %eax, %ss\n mov %eax, %fs\n mov %eax, %gs\n call main\n 2: hlt\n jmp 2b\n"
        // null, code, data, (unused), 16-bit code at LOW, 16-bit data, 64-bit code
        ".data\n .balign 8\n gdt: .quad 0, 0x00cf9b000000ffff, 0x00cf93000000ffff, 0, 0x00009b007000ffff, 0x000093000000ffff, 0x00af9b000000ffff, 0\n"
        "gdt_pointer: .word 0x3f\n .long gdt\n"
        ".bss\n .balign 16\n .skip 8192\n stack_top:\n .text\n");

void main(void) {
    identify();
    set_up_interrupts();
    protected_mode();
    real_mode();
    paging();
    if (cpu.long_mode)
        long_mode();
    outb(EXIT_PORT, failed != 0);
}
