// Self-modifying and cross-modified code: a store is seen by the very next instruction that is fetched (SDM vol. 3, 11.6:
// on all processors since the P6, without a jump, for the same linear address), and by another mapping after a jump.
#include "runtime.h"

// Code under change, on pages of its own, writable and executable.
extern u8 m_ahead[], m_far[], m_cross[], m_rep[], m_rep_target[], m_loop[], m_call[], m_page_end[];
__asm__(".section .selfmod, \"awx\"\n .align 4096\n"
        // The store rewrites the immediate of the instruction right after it.
        "m_ahead: movb $0x42, 1f+1(%rip)\n 1: mov $0x11, %al\n movzbl %al, %eax\n ret\n"
        // Further on in the same straight line.
        "m_far: movb $0x43, 1f+1(%rip)\n .fill 40, 1, 0x90\n 1: mov $0x11, %al\n movzbl %al, %eax\n ret\n"
        // rep movsb writes over what follows it, and over itself: the new bytes of the REP itself matter only when it ends.
        "m_rep: mov %rdi, %rsi\n lea m_rep_target(%rip), %rdi\n mov $7, %ecx\n rep movsb\n m_rep_target: xor %eax, %eax\n ret\n .fill 8, 1, 0x90\n"
        // A loop whose body counts its own immediate up.
        "m_loop: mov $100, %ecx\n xor %eax, %eax\n 1: add $1, %eax\n incb 1b+2(%rip)\n andb $15, 1b+2(%rip)\n loop 1b\n ret\n"
        "m_call: call *%rdi\n ret\n"
        ".align 4096\n .fill 4094, 1, 0x90\n"
        "m_cross: mov $0x01020304, %eax\n ret\n"
        ".align 4096\n m_page_end:\n .text\n");

static u32 run(const void *code) { return ((u32(*)(void))code)(); }
static u32 run1(const void *code, u64 argument) {
    u32 result;
    __asm__ volatile("call *%2" : "=a"(result), "+D"(argument) : "r"(code) : "rcx", "rsi", "memory");
    __asm__ volatile("" ::"r"(argument));
    return result;
}

static void same_block(void) {
    for (unsigned round = 0; round < 3; ++round) {
        m_ahead[8] = 0x11;
        check("a store into the next instruction", run(m_ahead), 0x42);
        check("a store further on in the same line", run(m_far), 0x43);
        m_far[48] = 0x11;
    }
    // The immediate goes 1, 2, .. 15, 0, 1, ..: 100 rounds sum up to this.
    u32 want = 0;
    for (u32 i = 0, immediate = m_loop[9]; i < 100; ++i, immediate = (immediate + 1) & 15)
        want += immediate;
    check("a loop that changes itself", run1(m_loop, 0), want);
}

static void crossing(void) {
    check("an instruction across two pages", run(m_cross), 0x01020304);
    m_cross[4] = 0x55; // its bytes on the second page
    check("  its second page changed", run(m_cross), 0x55020304);
    m_cross[1] = 0x66; // on the first
    check("  its first page changed", run(m_cross), 0x55020366);

    // The same through a mapping of which the second page then changes.
    static u8 *const first = frames[0], *const second = frames[1], *const other = frames[2];
    memcpy(first + 4094, m_cross, 2);
    memcpy(second, m_cross + 2, 4);
    memcpy(other, m_cross + 2, 4);
    other[2] = 0x77;
    map4k(0, first, PTE_P | PTE_W);
    map4k(1, second, PTE_P | PTE_W);
    const void *code = (void *)(PAGE4K(0) + 4094);
    check("  in a mapping", run(code), 0x55020366);
    map4k(1, other, PTE_P | PTE_W);
    check("  its second page mapped elsewhere", run(code), 0x77020366);
    map4k(1, other, 0);
    check("  its second page unmapped: #PF", TRY(run(code)), PF);
    check("  cr2", trap.cr2, PAGE4K(1));
}

static void other_mapping(void) {
    static const u8 code[] = {0xb8, 1, 0, 0, 0, 0xc3}; // mov $1, %eax; ret
    memcpy(frames[3], code, sizeof code);
    map4k(3, frames[3], PTE_P);          // executed here
    map4k(4, frames[3], PTE_P | PTE_W); // written there
    for (u8 i = 1; i < 5; ++i) {
        poke(PAGE4K(4) + 1, i);
        check("a store through another mapping of the page", run((void *)PAGE4K(3)), i);
    }
    frames[3][1] = 9;
    check("a store through the identity map", run((void *)PAGE4K(3)), 9);
    // Another page of the same content lies under the same address.
    memcpy(frames[4], code, sizeof code);
    frames[4][1] = 21;
    map4k(3, frames[4], PTE_P);
    check("another page under the same address", run((void *)PAGE4K(3)), 21);
    map4k(3, frames[3], PTE_P);
    check("and back", run((void *)PAGE4K(3)), 9);
    // The page is data in between: a stack, then code again.
    memset(frames[3], 0xcc, 4096);
    memcpy(frames[3], code, sizeof code);
    check("a page used for data in between", run((void *)PAGE4K(3)), 1);
}

static void wide_writes(void) {
    static const u8 patch[] = {0xb8, 0x78, 0x56, 0x34, 0x12, 0xc3, 0x90}; // mov $0x12345678, %eax; ret
    check("before: xor", run1(m_rep, (u64)m_rep_target), 0);
    check("rep movsb over the next instruction", run1(m_rep, (u64)patch), 0x12345678);
    static const u8 back[] = {0x31, 0xc0, 0xc3, 0x90, 0x90, 0x90, 0x90};
    check("and back", run1(m_rep, (u64)back), 0);

    u8 *code = frames[5];
    map4k(5, code, PTE_P | PTE_W);
    memcpy(code + 60, patch, sizeof patch);
    check("code across a cache line", run((void *)(PAGE4K(5) + 60)), 0x12345678);
    *(volatile u16 *)(PAGE4K(5) + 63) = 0xabcd;
    check("a store across the cache line into it", run((void *)(PAGE4K(5) + 60)), 0xabcd5678);
    __asm__ volatile("lock xaddb %b0, (%1)" ::"q"(1), "r"(PAGE4K(5) + 61) : "memory");
    check("a locked store into it", run((void *)(PAGE4K(5) + 60)), 0xabcd5679);
}

int main(void) {
    same_block();
    crossing();
    other_mapping();
    wide_writes();
    return failures();
}
