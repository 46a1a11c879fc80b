// Down to real mode and back, as the trampoline of a second processor goes up: 64-bit, compatibility, 32-bit, 16-bit protected
// and real mode (SDM vol. 3, 9.8 and 9.9; real mode: 20.1). The 16-bit code is assembled here and copied to LOW; it leaves
// one 32-bit result for each check at RESULTS.
#include "runtime.h"

#define LOW 0x7000
#define RESULTS 0x6000
// Linear address and offset in segment 0x700 of a label.
#define AT(label) "(" #label " - low_start + 0x7000)"
#define OFF(label) "(" #label " - low_start)"
#define RESULT "stosl\n"

extern u8 low_start[], low_end[], low_enter[];
__asm__(
    ".section .rodata\n low_start:\n"
    "low_enter: push %rbx\n push %rbp\n push %r12\n push %r13\n push %r14\n push %r15\n"
    "mov %rsp, " AT(saved_rsp) "\n sgdt " AT(saved_gdt) "\n sidt " AT(saved_idt) "\n lgdt " AT(low_gdt_pointer) "\n"
    "push $0x18\n push $" AT(down_32) "\n lretq\n"

    ".code32\n down_32: mov $0x10, %eax\n mov %eax, %ds\n mov %eax, %es\n mov %eax, %ss\n"
    "mov %cr0, %eax\n and $0x7fffffff, %eax\n mov %eax, %cr0\n" // PG off: LMA goes
    "mov $0xc0000080, %ecx\n rdmsr\n mov %eax, " AT(efer_without_paging) "\n"
    "lidt " AT(real_idt_pointer) "\n ljmp $0x20, $" OFF(down_16) "\n"

    ".code16\n down_16: mov $0x28, %ax\n mov %ax, %ds\n mov %ax, %es\n mov %ax, %fs\n mov %ax, %gs\n mov %ax, %ss\n mov $0x0e00, %sp\n"
    // 16-bit protected mode: a push takes two bytes, the stack pointer is SP alone.
    "mov $0x12340e00, %esp\n push %ax\n mov %esp, " OFF(protected_esp) "\n"
    "lea " OFF(protected_operand) ", %bx\n mov (%bx), %eax\n mov %eax, " OFF(protected_value) "\n"
    "mov %cr0, %eax\n and $0xfe, %al\n mov %eax, %cr0\n ljmp $0x700, $" OFF(real) "\n"

    "real: mov %cs, %ax\n mov %ax, %ds\n xor %ax, %ax\n mov %ax, %ss\n mov $0x5ff0, %sp\n mov $0x600, %ax\n mov %ax, %es\n"
    "xor %di, %di\n cld\n"
    /* 0 */ "mov " OFF(efer_without_paging) ", %eax\n" RESULT
    /* 1 */ "mov " OFF(protected_esp) ", %eax\n" RESULT
    /* 2 */ "mov " OFF(protected_value) ", %eax\n" RESULT
    /* 3 */ "xor %eax, %eax\n mov %cs, %ax\n" RESULT
    /* 4 */ "mov %cr0, %eax\n and $1, %eax\n" RESULT
    /* 5: two segments, one address */
    "mov $0x610, %ax\n mov %ax, %fs\n movl $0x12345678, %fs:0x20\n mov %es:0x120, %eax\n" RESULT
    /* 6: INT through the vector table */
    "xor %ax, %ax\n mov %ax, %gs\n movw $" OFF(on_int60) ", %gs:0x180\n movw $0x700, %gs:0x182\n"
    "xor %ebx, %ebx\n int $0x60\n int $0x60\n mov %ebx, %eax\n" RESULT
    /* 7: the divide error is a fault */
    "movw $" OFF(on_divide) ", %gs:0\n movw $0x700, %gs:2\n xor %edx, %edx\n xor %ecx, %ecx\n mov $7, %eax\n"
    "here_divide: div %cx\n mov %edx, %eax\n" RESULT
    /* 8: a word at 0xffff is beyond the limit: vector 13, no error code */
    "movw $" OFF(on_limit) ", %gs:52\n movw $0x700, %gs:54\n xor %edx, %edx\n mov %sp, %bp\n mov $0xffff, %bx\n"
    "here_limit: movw (%bx), %ax\n after_limit: mov %edx, %eax\n" RESULT
    /* 9: and the stack is as before */ "xor %eax, %eax\n mov %sp, %ax\n sub %bp, %ax\n" RESULT
    /* 10, 11: operand sizes of the stack */
    "mov %sp, %bx\n pushf\n sub %sp, %bx\n movzwl %bx, %eax\n" RESULT "popf\n"
    "mov %sp, %bx\n pushfl\n sub %sp, %bx\n movzwl %bx, %eax\n" RESULT "popfl\n"
    /* 12: far call and return */ "xor %ebx, %ebx\n lcall $0x700, $" OFF(far_leaf) "\n mov %ebx, %eax\n" RESULT
    /* 13: LOOP counts CX alone */ "mov $0x10003, %ecx\n 1: loop 1b\n mov %ecx, %eax\n" RESULT
    /* 14: 32-bit addresses */ "mov $" OFF(protected_operand) ", %esi\n addr32 mov (%esi), %eax\n" RESULT
    /* 15: above 1 MiB by 0xffff:0x10 */
    "push %ds\n mov $0xffff, %ax\n mov %ax, %ds\n mov 0x10, %eax\n pop %ds\n" RESULT
    /* 16: SP wraps */
    "mov %sp, %bp\n mov $0x500, %ax\n mov %ax, %ss\n mov $2, %sp\n push %ax\n push %ax\n movzwl %sp, %eax\n xor %bx, %bx\n mov %bx, %ss\n mov %bp, %sp\n" RESULT
    /* 17: PUSHA */ "mov %sp, %bx\n pusha\n sub %sp, %bx\n movzwl %bx, %eax\n add $16, %sp\n" RESULT
    /* 18: AAM */ "mov $123, %eax\n aam\n" RESULT
    /* 19: DAA */ "mov $0x3b, %eax\n clc\n daa\n movzbl %al, %eax\n" RESULT
    /* 20: LES */ "push %es\n les " OFF(far_pointer) ", %bx\n mov %es, %ax\n pop %es\n shl $16, %eax\n mov %bx, %ax\n" RESULT
    /* 21: a jump far through memory */
    "ljmp *" OFF(far_target) "\n movl $0, %eax\n jmp 1f\n far_jumped: mov $0x77, %eax\n 1:\n" RESULT
    /* 22: REP MOVSB, SI and DI 16 bits */
    "push %di\n push %ds\n push %es\n mov %ds, %ax\n mov %ax, %es\n mov $0xabcd0000 + " OFF(protected_operand) ", %esi\n"
    "mov $0xabcd0000 + " OFF(copied) ", %edi\n mov $4, %ecx\n rep movsb\n mov %esi, %ebx\n pop %es\n pop %ds\n pop %di\n"
    "mov " OFF(copied) ", %eax\n" RESULT
    /* 23: their upper halves stay */ "mov %ebx, %eax\n shr $16, %eax\n" RESULT
    /* 24: ENTER, LEAVE */ "mov %sp, %bx\n enter $8, $0\n sub %sp, %bx\n leave\n movzwl %bx, %eax\n" RESULT
    /* 25: an IRET with TF steps one instruction */
    "movw $" OFF(on_step) ", %gs:4\n movw $0x700, %gs:6\n xor %edx, %edx\n pushf\n"
    "mov %sp, %bp\n orw $0x100, (%bp)\n push %cs\n push $" OFF(stepped) "\n iret\n stepped: inc %dx\n inc %dx\n mov %edx, %eax\n" RESULT

    "lgdtl " OFF(low_gdt_pointer) "\n mov %cr0, %eax\n or $1, %al\n mov %eax, %cr0\n ljmpl $0x18, $" AT(up_32) "\n"
    "on_int60: inc %bx\n iret\n"
    "on_divide: push %bp\n mov %sp, %bp\n mov 2(%bp), %dx\n sub $" OFF(here_divide) ", %dx\n inc %dx\n addw $2, 2(%bp)\n pop %bp\n iret\n"
    "on_limit: pop %dx\n sub $" OFF(here_limit) ", %dx\n add $0x0d, %dx\n push $" OFF(after_limit) "\n iret\n"
    "on_step: push %bp\n mov %sp, %bp\n mov %dx, %dx\n add $0x100, %dx\n andw $0xfeff, 6(%bp)\n pop %bp\n iret\n"
    "far_leaf: mov $0x55, %bx\n lret\n"

    ".code32\n up_32: mov $0x10, %eax\n mov %eax, %ds\n mov %eax, %es\n mov %eax, %ss\n"
    "mov %cr0, %eax\n or $0x80000000, %eax\n mov %eax, %cr0\n ljmp $0x08, $" AT(up_64) "\n"
    ".code64\n up_64: mov " AT(saved_rsp) ", %rsp\n lgdt " AT(saved_gdt) "\n lidt " AT(saved_idt) "\n"
    "mov $0x10, %eax\n mov %eax, %ds\n mov %eax, %es\n mov %eax, %ss\n xor %eax, %eax\n mov %eax, %fs\n mov %eax, %gs\n"
    "pop %r15\n pop %r14\n pop %r13\n pop %r12\n pop %rbp\n pop %rbx\n ret\n"

    ".align 8\n low_gdt: .quad 0\n .quad 0x00af9b000000ffff\n .quad 0x00cf93000000ffff\n .quad 0x00cf9b000000ffff\n"
    ".quad 0x00009b007000ffff\n .quad 0x000093007000ffff\n low_gdt_end:\n"
    "low_gdt_pointer: .word low_gdt_end - low_gdt - 1\n .quad " AT(low_gdt) "\n"
    "real_idt_pointer: .word 0x3ff\n .quad 0\n"
    "far_pointer: .word 0x4321, 0x8765\n far_target: .word " OFF(far_jumped) ", 0x700\n"
    ".align 4\n protected_operand: .long 0xcafef00d\n protected_value: .long 0\n protected_esp: .long 0\n copied: .long 0\n"
    "efer_without_paging: .long 0\n"
    ".align 8\n saved_rsp: .quad 0\n saved_gdt: .skip 10\n saved_idt: .skip 10\n low_end:\n .text\n");

int main(void) {
    static const struct { const char *name; u32 want; } checks[] = {
        {"paging off: LMA clear, LME kept", 0x901},
        {"16-bit protected mode: PUSH moves SP alone", 0x12340dfe},
        {"16-bit protected mode: a 16-bit address with a base", 0xcafef00d},
        {"real mode: CS", 0x700},
        {"real mode: CR0.PE", 0},
        {"real mode: two segments, one address", 0x12345678},
        {"real mode: INT by the vector table", 2},
        {"real mode: #DE saves the address of the DIV", 1},
        {"real mode: word at 0xffff: vector 13, saved IP", 13},
        {"  no error code", 0},
        {"real mode: PUSHF takes 2 bytes", 2},
        {"real mode: PUSHFD takes 4 bytes", 4},
        {"real mode: far call and return", 0x55},
        {"real mode: LOOP counts CX alone", 0x10000},
        {"real mode: 32-bit address", 0xcafef00d},
        {"real mode: above 1 MiB", 0x1badb002},
        {"real mode: SP wraps", 0xfffe},
        {"real mode: PUSHA takes 16 bytes", 16},
        {"real mode: AAM", 12 << 8 | 3},
        {"real mode: DAA", 0x41},
        {"real mode: LES", 0x87654321},
        {"real mode: far jump through memory", 0x77},
        {"real mode: REP MOVSB", 0xcafef00d},
        {"  keeps the upper halves of ESI", 0xabcd},
        {"real mode: ENTER", 10},
        {"real mode: IRET with TF traps after one instruction", 0x102},
    };
    memcpy((void *)LOW, low_start, low_end - low_start);
    ((void (*)(void))(LOW + (low_enter - low_start)))();
    for (unsigned i = 0; i < sizeof checks / sizeof *checks; ++i)
        check(checks[i].name, ((volatile u32 *)RESULTS)[i], checks[i].want);
    check("long mode again: EFER", rdmsr(MSR_EFER), 0xd01);
    check("  a trap", TRY(__asm__ volatile("ud2")), UD);
    return failures();
}
