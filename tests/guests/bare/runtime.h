// The runtime of the bare guests: serial output, checks, traps, page tables, rings.
//
// A guest is one C file with a main() that calls check() and returns failures(). Each check prints one line on the serial
// port, "PASS name" or "FAIL name: got 0x.. want 0x..", and the guest leaves through the exit port with 0 or 1.
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;

// Output and result.
void print(const char *format, ...); // %s %x %d %c, all integers as 64 bits
void check(const char *name, u64 got, u64 want);
void skip(const char *name, const char *reason);
int failures(void);
_Noreturn void guest_exit(int code);

// Selectors of the GDT in crt.S; SLOT(n) is the n-th one free for tests.
enum { KERNEL_CS = 0x08, KERNEL_DS = 0x10, KERNEL_CS32 = 0x18, USER_CS32 = 0x23, USER_DS = 0x2b, USER_CS = 0x33, TSS = 0x38 };
#define SLOT(n) (0x48 + 8 * (n))
extern u64 gdt[];

enum { DE, DB, NMI, BP, OF, BR, UD, NM, DF, TS = 10, NP, SS, GP, PF, MF = 16, AC, MC, XM };
enum { NO_TRAP = 0x100 };

// The stack of a trap handler, lowest address first.
struct frame {
    u64 r15, r14, r13, r12, r11, r10, r9, r8, rbp, rdi, rsi, rdx, rcx, rbx, rax;
    u64 vector, error, rip, cs, rflags, rsp, ss;
};

// The last trap that TRY caught.
struct trap {
    struct frame frame;
    u64 vector, error, cr2, dr6, handler_rsp;
};
extern volatile struct trap trap;

// Runs a statement; its value is the vector that ended it, or NO_TRAP. `trap` has the details.
#define TRY(statement)                                                                                                 \
    ({                                                                                                                 \
        trap.vector = NO_TRAP;                                                                                         \
        trap.error = ~0ull;                                                                                            \
        catching = true;                                                                                               \
        if (!trap_catch()) {                                                                                           \
            statement;                                                                                                 \
        }                                                                                                              \
        catching = false;                                                                                              \
        __asm__ volatile("" ::: "memory");                                                                             \
        trap.vector;                                                                                                   \
    })
extern volatile bool catching;
int trap_catch(void) __attribute__((returns_twice));

// If set, sees each trap first; true means "handled: return to the frame as it now stands".
extern bool (*volatile trap_hook)(struct frame *frame);

struct __attribute__((packed)) gate {
    u16 offset_low, selector;
    u8 ist, type;
    u16 offset_mid;
    u32 offset_high, reserved;
};
extern struct gate idt[256];
void set_gate(unsigned vector, void *handler, unsigned dpl, unsigned ist);
// IST 1 is ready for use: idt[vector].ist = 1. It begins below this address.
extern u8 ist_stack_top[];

struct __attribute__((packed)) tss {
    u32 reserved0;
    u64 rsp[3];
    u64 reserved1;
    u64 ist[7];
    u64 reserved2;
    u16 reserved3, iomap;
};
extern struct tss tss;

// Enters (rip, cs, rflags, rsp, ss) by IRETQ, with rdi and rsi; comes back only by a trap.
struct context {
    u64 rip, cs, rflags, rsp, ss, rdi, rsi;
};
_Noreturn void enter_frame(const struct context *context);

// Paging. The identity map of the first GiB is the kernel's; below WINDOW is room for tests, one table of each level.
enum {
    PTE_P = 1, PTE_W = 2, PTE_U = 4, PTE_PWT = 8, PTE_PCD = 16, PTE_A = 32, PTE_D = 64, PTE_PS = 128, PTE_G = 256,
    PTE_NX = 1ull << 63, PTE_ADDRESS = 0x000ffffffffff000
};
#define WINDOW 0x8000000000ull // PML4 slot 1
extern u64 boot_pml4[512], boot_pdpt[512], boot_pd[512];
extern u64 window_pdpt[512], window_pd[512], window_pt[512];
// Window page n of 4 KiB is at page4k(n); its entry is window_pt[n]. Also 2 MiB pages: window_pd[1..], 1 GiB: window_pdpt[1..]
#define PAGE4K(n) (WINDOW + 4096ull * (n))
#define PAGE2M(n) (WINDOW + (2ull << 20) * (n))
#define PAGE1G(n) (WINDOW + (1ull << 30) * (n))
extern u8 frames[16][4096]; // physical memory to map
void window_init(void);     // all entries user, writable, nothing mapped in the table; may be called again
void map4k(unsigned n, const void *physical, u64 flags);
// Ring 3's own pages, below 4 GiB for the sake of compatibility mode: two pages of code, one of stack.
#define USER_CODE 0x40000000ull
#define USER_STACK_TOP 0x40010000ull
u64 user_code(const void *code); // maps the two pages at `code` (user, executable, read-only); returns its user address
// Runs a piece of code (asm, position independent, at most a page long) in ring 3, until it traps. Value: the vector.
unsigned run_user(const void *code, u64 rdi, u64 rsi);
unsigned run_user32(const void *code, u64 rdi, u64 rsi); // in compatibility mode
unsigned run_at(const struct context *context);          // any ring and mode

// Instructions.
static inline void outb(u16 port, u8 value) { __asm__ volatile("outb %0, %1" ::"a"(value), "Nd"(port)); }
static inline u8 inb(u16 port) { u8 value; __asm__ volatile("inb %1, %0" : "=a"(value) : "Nd"(port)); return value; }
#define CR_ACCESS(n)                                                                                                   \
    static inline u64 read_cr##n(void) { u64 v; __asm__ volatile("mov %%cr" #n ", %0" : "=r"(v)); return v; }            \
    static inline void write_cr##n(u64 v) { __asm__ volatile("mov %0, %%cr" #n ::"r"(v) : "memory"); }
CR_ACCESS(0) CR_ACCESS(2) CR_ACCESS(3) CR_ACCESS(4) CR_ACCESS(8)
#define DR_ACCESS(n)                                                                                                   \
    static inline u64 read_dr##n(void) { u64 v; __asm__ volatile("mov %%dr" #n ", %0" : "=r"(v)); return v; }            \
    static inline void write_dr##n(u64 v) { __asm__ volatile("mov %0, %%dr" #n ::"r"(v) : "memory"); }
DR_ACCESS(0) DR_ACCESS(1) DR_ACCESS(2) DR_ACCESS(3) DR_ACCESS(6) DR_ACCESS(7)
static inline u64 rdmsr(u32 msr) { u32 a, d; __asm__ volatile("rdmsr" : "=a"(a), "=d"(d) : "c"(msr)); return a | (u64)d << 32; }
static inline void wrmsr(u32 msr, u64 v) { __asm__ volatile("wrmsr" ::"c"(msr), "a"((u32)v), "d"((u32)(v >> 32)) : "memory"); }
static inline void invlpg(u64 address) { __asm__ volatile("invlpg (%0)" ::"r"(address) : "memory"); }
static inline u64 rflags(void) { u64 v; __asm__ volatile("pushf\n\tpop %0" : "=r"(v)); return v; }
struct cpuid { u32 a, b, c, d; };
static inline struct cpuid cpuid(u32 leaf, u32 sub) {
    struct cpuid r;
    __asm__ volatile("cpuid" : "=a"(r.a), "=b"(r.b), "=c"(r.c), "=d"(r.d) : "a"(leaf), "c"(sub));
    return r;
}
static inline u8 peek(u64 address) { u8 v; __asm__ volatile("movb (%1), %0" : "=q"(v) : "r"(address) : "memory"); return v; }
static inline void poke(u64 address, u8 v) { __asm__ volatile("movb %0, (%1)" ::"q"(v), "r"(address) : "memory"); }

enum {
    CR0_PE = 1, CR0_MP = 2, CR0_EM = 4, CR0_TS = 8, CR0_NE = 32, CR0_WP = 1 << 16, CR0_AM = 1 << 18, CR0_PG = 1u << 31,
    CR4_TSD = 4, CR4_DE = 8, CR4_PGE = 1 << 7, CR4_UMIP = 1 << 11, CR4_FSGSBASE = 1 << 16, CR4_PCIDE = 1 << 17,
    CR4_SMEP = 1 << 20, CR4_SMAP = 1 << 21,
    FLAG_CF = 1, FLAG_ONE = 2, FLAG_ZF = 64, FLAG_TF = 0x100, FLAG_IF = 0x200, FLAG_DF = 0x400, FLAG_OF = 0x800, FLAG_NT = 0x4000,
    FLAG_RF = 0x10000, FLAG_VM = 0x20000, FLAG_AC = 0x40000,
    MSR_EFER = 0xc0000080, MSR_STAR = 0xc0000081, MSR_LSTAR = 0xc0000082, MSR_CSTAR = 0xc0000083, MSR_SFMASK = 0xc0000084,
    MSR_FS_BASE = 0xc0000100, MSR_GS_BASE = 0xc0000101, MSR_KERNEL_GS_BASE = 0xc0000102,
    MSR_SYSENTER_CS = 0x174, MSR_SYSENTER_ESP = 0x175, MSR_SYSENTER_EIP = 0x176, MSR_APIC_BASE = 0x1b, MSR_PAT = 0x277
};

void *memset(void *to, int value, size_t n);
void *memcpy(void *to, const void *from, size_t n);
