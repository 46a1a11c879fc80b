// See runtime.h.
#include "runtime.h"

#include <stdarg.h>

enum { PIC_MASTER_MASK = 0x21, PIC_SLAVE_MASK = 0xa1, COM1 = 0x3f8, COM1_LINE_STATUS = COM1 + 5, TRANSMIT_EMPTY = 0x20, EXIT_PORT = 0xf4 };

volatile struct trap trap;
volatile bool catching;
bool (*volatile trap_hook)(struct frame *frame);
struct gate idt[256] __attribute__((aligned(16)));
struct tss tss __attribute__((aligned(16)));
u64 window_pdpt[512] __attribute__((aligned(4096)));
u64 window_pd[512] __attribute__((aligned(4096)));
u64 window_pt[512] __attribute__((aligned(4096)));
static u64 user_pd[512] __attribute__((aligned(4096)));
static u64 user_pt[512] __attribute__((aligned(4096)));
u8 frames[16][4096] __attribute__((aligned(4096)));

static u8 trap_stack[8192] __attribute__((aligned(16)));
static u8 user_stack[4096] __attribute__((aligned(4096)));
static int failed;

extern u8 trap_stubs[];
_Noreturn void trap_escape(void);

void *memset(void *to, int value, size_t n) {
    void *start = to;
    __asm__ volatile("rep stosb" : "+D"(to), "+c"(n) : "a"(value) : "memory");
    return start;
}

void *memcpy(void *to, const void *from, size_t n) {
    void *start = to;
    __asm__ volatile("rep movsb" : "+D"(to), "+S"(from), "+c"(n)::"memory");
    return start;
}

static void put(char c) {
    while (!(inb(COM1_LINE_STATUS) & TRANSMIT_EMPTY))
        ;
    outb(COM1, c);
}

static void put_number(u64 value, unsigned base) {
    char digits[20];
    int n = 0;
    do {
        digits[n++] = "0123456789abcdef"[value % base];
        value /= base;
    } while (value);
    while (n)
        put(digits[--n]);
}

void print(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    for (; *format; ++format) {
        if (*format != '%') {
            put(*format);
            continue;
        }
        switch (*++format) {
        case 's':
            for (const char *s = va_arg(arguments, const char *); *s; ++s)
                put(*s);
            break;
        case 'x': put_number(va_arg(arguments, u64), 16); break;
        case 'd': put_number(va_arg(arguments, u64), 10); break;
        case 'c': put(va_arg(arguments, int)); break;
        default: put(*format);
        }
    }
    va_end(arguments);
}

void check(const char *name, u64 got, u64 want) {
    if (got == want) {
        print("PASS %s\n", name);
        return;
    }
    ++failed;
    print("FAIL %s: got 0x%x want 0x%x\n", name, got, want);
}

void skip(const char *name, const char *reason) { print("SKIP %s: %s\n", name, reason); }

int failures(void) { return failed != 0; }

_Noreturn void guest_exit(int code) {
    outb(EXIT_PORT, code);
    for (;;)
        __asm__ volatile("cli\n\thlt");
}

void trap_dispatch(struct frame *frame) {
    if (trap_hook && trap_hook(frame))
        return;
    u64 vector = frame->vector;
    if (catching) {
        // The frame's addresses are what the test wants to see.
        __asm__ volatile("" ::: "memory");
        memcpy((void *)&trap.frame, frame, sizeof *frame);
        trap.vector = vector;
        trap.error = frame->error;
        trap.cr2 = read_cr2();
        trap.dr6 = read_dr6();
        trap.handler_rsp = (u64)(frame + 1);
        catching = false;
        trap_escape();
    }
    print("FAIL unexpected trap %d error 0x%x at 0x%x cs 0x%x rsp 0x%x cr2 0x%x\n", vector, frame->error, frame->rip,
          frame->cs, frame->rsp, read_cr2());
    guest_exit(1);
}

void set_gate(unsigned vector, void *handler, unsigned dpl, unsigned ist) {
    u64 offset = (u64)handler;
    idt[vector] = (struct gate){.offset_low = offset, .selector = KERNEL_CS, .ist = ist, .type = 0x8e | dpl << 5,
                                .offset_mid = offset >> 16, .offset_high = offset >> 32};
}

void window_init(void) {
    memset(window_pdpt, 0, 4096);
    memset(window_pd, 0, 4096);
    memset(window_pt, 0, 4096);
    boot_pml4[1] = (u64)window_pdpt | PTE_P | PTE_W | PTE_U;
    window_pdpt[0] = (u64)window_pd | PTE_P | PTE_W | PTE_U;
    window_pd[0] = (u64)window_pt | PTE_P | PTE_W | PTE_U;
    boot_pml4[0] |= PTE_U;
    boot_pdpt[1] = (u64)user_pd | PTE_P | PTE_W | PTE_U;
    user_pd[0] = (u64)user_pt | PTE_P | PTE_W | PTE_U;
    user_pt[(USER_STACK_TOP - USER_CODE) / 4096 - 1] = (u64)user_stack | PTE_P | PTE_W | PTE_U;
    write_cr3(read_cr3());
}

void map4k(unsigned n, const void *physical, u64 flags) {
    window_pt[n] = ((u64)physical & PTE_ADDRESS) | flags;
    invlpg(PAGE4K(n));
}

u64 user_code(const void *code) {
    for (unsigned i = 0; i < 2; ++i) {
        user_pt[i] = (((u64)code & PTE_ADDRESS) + 4096 * i) | PTE_P | PTE_U;
        invlpg(USER_CODE + 4096 * i);
    }
    return USER_CODE + ((u64)code & 4095);
}

unsigned run_at(const struct context *context) { return TRY(enter_frame(context)); }

unsigned run_user(const void *code, u64 rdi, u64 rsi) {
    struct context context = {user_code(code), USER_CS, FLAG_ONE, USER_STACK_TOP, USER_DS, rdi, rsi};
    return run_at(&context);
}

unsigned run_user32(const void *code, u64 rdi, u64 rsi) {
    struct context context = {user_code(code), USER_CS32, FLAG_ONE, USER_STACK_TOP, USER_DS, rdi, rsi};
    return run_at(&context);
}

void runtime_init(void) {
    // Firmware may have left the timer's interrupt on.
    outb(PIC_MASTER_MASK, 0xff);
    outb(PIC_SLAVE_MASK, 0xff);
    for (unsigned vector = 0; vector < 256; ++vector)
        set_gate(vector, trap_stubs + 16 * vector, vector == BP || vector == OF || vector == 0x80 ? 3 : 0, 0);
    struct __attribute__((packed)) { u16 limit; u64 base; } pointer = {sizeof idt - 1, (u64)idt};
    __asm__ volatile("lidt %0" ::"m"(pointer));

    tss.rsp[0] = (u64)(trap_stack + sizeof trap_stack);
    tss.ist[0] = (u64)ist_stack_top;
    tss.iomap = sizeof tss;
    u64 base = (u64)&tss, limit = sizeof tss - 1;
    gdt[TSS / 8] = (limit & 0xffff) | (base & 0xffffff) << 16 | 0x89ull << 40 | (base >> 24 & 0xff) << 56;
    gdt[TSS / 8 + 1] = base >> 32;
    __asm__ volatile("ltr %w0" ::"r"(TSS));
    window_init();
}
