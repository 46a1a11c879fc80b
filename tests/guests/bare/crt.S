// Entry of a bare guest: from the state that Multiboot 1 gives (32-bit protected mode, paging off) to long mode with
// paging, then main(). Also the 256 interrupt gates' stubs and the escape from a trap (trap_catch).

#define MULTIBOOT_MAGIC 0x1badb002
#define MULTIBOOT_FLAGS 0x00000003 // page-align modules, memory information

    .section .multiboot, "a"
    .align 4
    .long MULTIBOOT_MAGIC
    .long MULTIBOOT_FLAGS
    .long -(MULTIBOOT_MAGIC + MULTIBOOT_FLAGS)

    .text
    .code32
    .global start
start:
    cld
    mov $stack_top, %esp
    movl %ebx, multiboot_info
    // Page tables: PML4 -> PDPT -> PD of 512 pages of 2 MiB, identity, supervisor, writable, global off.
    mov $boot_pdpt + 3, %eax
    mov %eax, boot_pml4
    mov $boot_pd + 3, %eax
    mov %eax, boot_pdpt
    mov $boot_pd_top + 3, %eax  // the fourth GiB, for the local APIC's page
    mov %eax, boot_pdpt + 24
    mov $boot_pd, %edi
    mov $0x83, %eax             // P, W, PS
    mov $512, %ecx
1:  mov %eax, (%edi)
    movl $0, 4(%edi)
    add $8, %edi
    add $0x200000, %eax
    loop 1b
    mov $boot_pd_top, %edi
    mov $0xc000009b, %eax       // P, W, PWT, PCD, PS
    mov $512, %ecx
1:  mov %eax, (%edi)
    movl $0, 4(%edi)
    add $8, %edi
    add $0x200000, %eax
    loop 1b

    mov %cr4, %eax
    or $0x620, %eax             // PAE, OSFXSR, OSXMMEXCPT
    mov %eax, %cr4
    mov $boot_pml4, %eax
    mov %eax, %cr3
    mov $0xc0000080, %ecx       // IA32_EFER
    rdmsr
    or $0x901, %eax             // LME, NXE, SCE
    wrmsr
    mov %cr0, %eax
    and $0x9fffffff, %eax       // CD, NW off
    or $0x80010033, %eax        // PG, WP, NE, ET, MP, PE
    mov %eax, %cr0
    lgdt gdt_pointer
    ljmp $0x08, $long_start

    .code64
long_start:
    mov $0x10, %eax
    mov %eax, %ds
    mov %eax, %es
    mov %eax, %ss
    xor %eax, %eax
    mov %eax, %fs
    mov %eax, %gs
    mov $stack_top, %rsp
    xor %ebp, %ebp
    call runtime_init
    call main
    mov %eax, %edi
    call guest_exit

// Stubs: each pushes an error code where the processor does not, and the vector.
    .altmacro
    .macro stub vector
    .align 16
    .if (\vector == 8) || (\vector >= 10 && \vector <= 14) || (\vector == 17) || (\vector == 21) || (\vector == 29) || (\vector == 30)
    .else
    pushq $0
    .endif
    pushq $\vector
    jmp trap_common
    .endm
    .align 16
    .global trap_stubs
trap_stubs:
    .set i, 0
    .rept 256
    stub %i
    .set i, i + 1
    .endr
    .noaltmacro

trap_common:
    push %rax; push %rbx; push %rcx; push %rdx; push %rsi; push %rdi; push %rbp
    push %r8; push %r9; push %r10; push %r11; push %r12; push %r13; push %r14; push %r15
    cld
    mov %rsp, %rdi
    mov %rsp, %rbp
    and $-16, %rsp
    call trap_dispatch
    mov %rbp, %rsp
    .global trap_return
trap_return:
    pop %r15; pop %r14; pop %r13; pop %r12; pop %r11; pop %r10; pop %r9; pop %r8
    pop %rbp; pop %rdi; pop %rsi; pop %rdx; pop %rcx; pop %rbx; pop %rax
    add $16, %rsp
    iretq

// int trap_catch(void): like setjmp; returns 0 now, and 1 when a trap that nobody else took comes.
    .global trap_catch
trap_catch:
    mov (%rsp), %rax
    mov %rax, catch_context
    lea 8(%rsp), %rax
    mov %rax, catch_context + 8
    mov %rbx, catch_context + 16
    mov %rbp, catch_context + 24
    mov %r12, catch_context + 32
    mov %r13, catch_context + 40
    mov %r14, catch_context + 48
    mov %r15, catch_context + 56
    xor %eax, %eax
    ret
// Leaves the trap handler for the last trap_catch(), in ring 0 with kernel segments and plain flags.
    .global trap_escape
trap_escape:
    mov $0x10, %eax
    mov %eax, %ss
    mov %eax, %ds
    mov %eax, %es
    mov catch_context + 8, %rsp
    mov catch_context + 16, %rbx
    mov catch_context + 24, %rbp
    mov catch_context + 32, %r12
    mov catch_context + 40, %r13
    mov catch_context + 48, %r14
    mov catch_context + 56, %r15
    push $2
    popf
    mov $1, %eax
    jmp *catch_context

// void enter(struct context *rdi): iretq to any ring; registers are undefined but rdi and rsi, given.
    .global enter_frame
enter_frame:
    pushq 32(%rdi)  // SS
    pushq 24(%rdi)  // RSP
    pushq 16(%rdi)  // RFLAGS
    pushq 8(%rdi)   // CS
    pushq 0(%rdi)   // RIP
    mov 48(%rdi), %rsi
    mov 40(%rdi), %rdi
    iretq

    .data
    .align 8
    .global gdt
gdt:
    .quad 0
    .quad 0x00af9b000000ffff // 08 kernel code, 64-bit
    .quad 0x00cf93000000ffff // 10 kernel data
    .quad 0x00cf9b000000ffff // 18 kernel code, 32-bit
    .quad 0x00cffb000000ffff // 20 user code, 32-bit
    .quad 0x00cff3000000ffff // 28 user data
    .quad 0x00affb000000ffff // 30 user code, 64-bit
    .quad 0                  // 38 TSS, filled in by runtime_init
    .quad 0
    .fill 16, 8, 0           // 48.. for tests
gdt_end:
    .global gdt_pointer
gdt_pointer:
    .word gdt_end - gdt - 1
    .quad gdt
    .global multiboot_info
multiboot_info:
    .long 0

    .bss
    .align 4096
    .global boot_pml4, boot_pdpt, boot_pd
boot_pml4: .skip 4096
boot_pdpt: .skip 4096
boot_pd:   .skip 4096
boot_pd_top: .skip 4096
    .skip 16384
    .global stack_top
stack_top:
catch_context: .skip 64
    .skip 4032
    .global ist_stack_top
ist_stack_top:

    .section .note.GNU-stack, "", @progbits
