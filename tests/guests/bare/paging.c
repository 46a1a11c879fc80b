// Paging: fault error codes, CR2, accessed and dirty bits, WP, NX, SMEP, SMAP, global pages (SDM vol. 3, chapter 4).
#include "runtime.h"

enum { PF_P = 1, PF_W = 2, PF_U = 4, PF_RSVD = 8, PF_I = 16 };

extern u8 user_read[], user_write[], user_ret[], user_jump[], user_pushes[];
__asm__(".align 64\n"
        "user_read: mov (%rdi), %al\n int $0x80\n"
        "user_write: movb $1, (%rdi)\n int $0x80\n"
        "user_jump: jmp *%rdi\n"
        "user_pushes: mov %rdi, %rsp\n push %rax\n push %rax\n int $0x80\n");

static u8 *const frame0 = frames[0], *const frame1 = frames[1];

static void call(u64 address) { ((void (*)(void))address)(); }

static void fault(const char *name, u64 vector, u64 error, u64 cr2) {
    print("# %s\n", name);
    check("  vector", vector, PF);
    check("  error code", trap.error, error);
    check("  cr2", trap.cr2, cr2);
}

static void error_codes(void) {
    const u64 address = PAGE4K(0) + 0x123;
    map4k(0, frame0, 0);
    fault("kernel reads a page not present", TRY(peek(address)), 0, address);
    fault("kernel writes a page not present", TRY(poke(address, 1)), PF_W, address);
    fault("kernel executes a page not present", TRY(call(address)), PF_I, address);
    check("  rip is the target", trap.frame.rip, address);
    fault("user reads a page not present", run_user(user_read, address, 0), PF_U, address);
    fault("user writes a page not present", run_user(user_write, address, 0), PF_U | PF_W, address);
    fault("user executes a page not present", run_user(user_jump, address, 0), PF_U | PF_I, address);

    map4k(0, frame0, PTE_P);
    fault("kernel writes a read-only page, WP=1", TRY(poke(address, 1)), PF_P | PF_W, address);
    fault("user reads a page that is not his (supervisor, read)", ({
              map4k(0, frame0, PTE_P | PTE_W);
              run_user(user_read, address, 0);
          }), PF_P | PF_U, address);
    fault("user writes a supervisor page", run_user(user_write, address, 0), PF_P | PF_U | PF_W, address);
    fault("user executes a supervisor page", run_user(user_jump, address, 0), PF_P | PF_U | PF_I, address);
    map4k(0, frame0, PTE_P | PTE_U);
    fault("user writes a read-only page", run_user(user_write, address, 0), PF_P | PF_U | PF_W, address);
    map4k(0, frame0, PTE_P | PTE_U | PTE_W);
    check("user writes his own page", run_user(user_write, address, 0), 0x80);

    map4k(0, frame0, PTE_P | PTE_W | PTE_NX);
    fault("kernel executes an NX page", TRY(call(address)), PF_P | PF_I, address);
    map4k(0, frame0, PTE_P | PTE_W | PTE_U | PTE_NX);
    fault("user executes an NX page", run_user(user_jump, address, 0), PF_P | PF_U | PF_I, address);
    check("user reads an NX page", run_user(user_read, address, 0), 0x80);

    // Bit 51 is above MAXPHYADDR of all but the largest machines, and is then reserved.
    if ((cpuid(0x80000008, 0).a & 0xff) < 52) {
        map4k(0, frame0, PTE_P | PTE_W | PTE_U | 1ull << 51);
        fault("reserved bit in the PTE, kernel read", TRY(peek(address)), PF_P | PF_RSVD, address);
        fault("reserved bit in the PTE, user write", run_user(user_write, address, 0), PF_P | PF_RSVD | PF_U | PF_W, address);
    } else
        skip("reserved bit", "MAXPHYADDR is 52");
    // Bit 13 of a 2 MiB entry is reserved (bit 12 is PAT), SDM 4.5.4.
    window_pd[1] = ((u64)frame0 & ~0x1fffffull) | PTE_P | PTE_W | PTE_PS | 1 << 13;
    invlpg(PAGE2M(1));
    fault("reserved bit in a 2 MiB PDE", TRY(peek(PAGE2M(1))), PF_P | PF_RSVD, PAGE2M(1));
    window_pd[1] = 0;

    // Levels combine: a read-only or supervisor entry above restricts all below.
    map4k(0, frame0, PTE_P | PTE_W | PTE_U);
    window_pdpt[0] &= ~(u64)PTE_W;
    write_cr3(read_cr3());
    fault("W clear in the PDPTE only", TRY(poke(address, 1)), PF_P | PF_W, address);
    window_pdpt[0] |= PTE_W;
    window_pd[0] |= PTE_NX;
    write_cr3(read_cr3());
    fault("NX set in the PDE only", TRY(call(address)), PF_P | PF_I, address);
    window_pd[0] &= ~PTE_NX;
    write_cr3(read_cr3());
}

static void not_canonical(void) {
    check("read of a non-canonical address: #GP", TRY(peek(0x800000000000)), GP);
    check("  error code", trap.error, 0);
    idt[SS].ist = idt[GP].ist = 1; // the stack in use is the one that is wrong
    check("push to a non-canonical stack: #SS", TRY(__asm__ volatile("mov %%rsp, %%rcx\n mov %0, %%rsp\n push %%rax\n mov %%rcx, %%rsp" ::"r"(0x800000000008ull) : "rcx")), SS);
    check("  error code", trap.error, 0);
    idt[SS].ist = idt[GP].ist = 0;
    check("jump to a non-canonical address: #GP", TRY(call(0x800000000000)), GP);
    check("read through rbp of a non-canonical address: #SS", TRY(__asm__ volatile("push %%rbp\n mov %0, %%rbp\n mov (%%rbp), %%al\n pop %%rbp" ::"r"(0x800000000000ull) : "rax")), SS);
}

static void crossing(void) {
    const u64 last = PAGE4K(0) + 4095;
    map4k(0, frame0, PTE_P | PTE_W);
    map4k(1, frame1, 0);
    fault("a read that crosses into a missing page", TRY(*(volatile u32 *)last), 0, PAGE4K(1));
    frame0[4095] = 0x55;
    fault("a write that crosses into a missing page", TRY(*(volatile u32 *)last = 0), PF_W, PAGE4K(1));
    check("  writes nothing", frame0[4095], 0x55);
    map4k(1, frame1, PTE_P);
    fault("a write that crosses into a read-only page", TRY(*(volatile u32 *)last = 0), PF_W | PF_P, PAGE4K(1));
    check("  writes nothing", frame0[4095], 0x55);
    frame0[4095] = 0xb8; // mov $imm32, %eax
    map4k(1, frame1, 0);
    fault("an instruction that crosses into a missing page", TRY(call(last)), PF_I, PAGE4K(1));
    check("  rip is its first byte", trap.frame.rip, last);
    // REP MOVSB leaves its registers at the element that faults.
    u64 di = PAGE4K(0) + 4090, cx = 10, si = (u64)frame1;
    TRY(__asm__ volatile("rep movsb" : "+D"(di), "+S"(si), "+c"(cx)::"memory"));
    check("rep movsb into a missing page: rcx left", trap.frame.rcx, 4);
    check("  rdi", trap.frame.rdi, PAGE4K(1));
    check("  rsi", trap.frame.rsi, (u64)frame1 + 6);
    check("  cr2", trap.cr2, PAGE4K(1));
}

static void accessed_dirty(void) {
    const u64 address = PAGE4K(2);
    window_pd[0] &= ~(u64)PTE_A;
    window_pdpt[0] &= ~(u64)PTE_A;
    boot_pml4[1] &= ~(u64)PTE_A;
    write_cr3(read_cr3());
    map4k(2, frame0, PTE_P);
    check("4K: A and D before", window_pt[2] & (PTE_A | PTE_D), 0);
    TRY(poke(address, 1));
    check("4K: a write that faults does not set D", window_pt[2] & PTE_D, 0);
    map4k(2, frame0, PTE_P | PTE_W);
    peek(address);
    check("4K: a read sets A", window_pt[2] & (PTE_A | PTE_D), PTE_A);
    check("4K: a read sets A in the PDE", window_pd[0] & (PTE_A | PTE_D), PTE_A);
    check("4K: a read sets A in the PDPTE", window_pdpt[0] & PTE_A, PTE_A);
    check("4K: a read sets A in the PML4E", boot_pml4[1] & PTE_A, PTE_A);
    poke(address, 1);
    check("4K: a write after a read sets D", window_pt[2] & (PTE_A | PTE_D), PTE_A | PTE_D);
    check("4K: D is not set in the PDE", window_pd[0] & PTE_D, 0);
    window_pt[2] &= ~(u64)(PTE_A | PTE_D);
    invlpg(address);
    poke(address, 2);
    check("4K: a write sets A and D", window_pt[2] & (PTE_A | PTE_D), PTE_A | PTE_D);
    window_pt[2] &= ~(u64)(PTE_A | PTE_D);
    invlpg(address);
    u8 old = 3;
    __asm__ volatile("lock cmpxchgb %2, (%1)" : "+a"(old) : "r"(address), "q"((u8)9) : "memory");
    check("4K: a cmpxchg that fails sets D all the same", window_pt[2] & (PTE_A | PTE_D), PTE_A | PTE_D);
    frame0[0] = 0xc3; // ret
    map4k(2, frame0, PTE_P);
    call(address);
    check("4K: execution sets A", window_pt[2] & (PTE_A | PTE_D), PTE_A);

    window_pd[2] = PTE_P | PTE_W | PTE_PS;
    invlpg(PAGE2M(2));
    peek(PAGE2M(2));
    check("2M: a read sets A", window_pd[2] & (PTE_A | PTE_D), PTE_A);
    poke(PAGE2M(2) + 0x1000, 1);
    check("2M: a write sets D", window_pd[2] & (PTE_A | PTE_D), PTE_A | PTE_D);
    check("2M: the address reaches through", ((volatile u8 *)0x1000)[0], 1);

    if (cpuid(0x80000001, 0).d & 1 << 26) {
        window_pdpt[1] = PTE_P | PTE_W | PTE_PS;
        peek(PAGE1G(1));
        check("1G: a read sets A", window_pdpt[1] & (PTE_A | PTE_D), PTE_A);
        poke(PAGE1G(1) + 0x2001, 7);
        check("1G: a write sets D", window_pdpt[1] & (PTE_A | PTE_D), PTE_A | PTE_D);
        check("1G: the address reaches through", ((volatile u8 *)0x2001)[0], 7);
        window_pdpt[1] = 0;
        write_cr3(read_cr3());
    } else {
        window_pdpt[1] = PTE_P | PTE_W | PTE_PS;
        fault("1 GiB page where CPUID has none: reserved bit", TRY(peek(PAGE1G(1))), PF_P | PF_RSVD, PAGE1G(1));
        window_pdpt[1] = 0;
        write_cr3(read_cr3());
    }
}

static void write_protect(void) {
    map4k(3, frame0, PTE_P);
    write_cr0(read_cr0() & ~(u64)CR0_WP);
    check("WP=0: the kernel writes a read-only page", TRY(poke(PAGE4K(3), 5)), NO_TRAP);
    check("  D set", window_pt[3] & PTE_D, PTE_D);
    map4k(3, frame0, PTE_P | PTE_U);
    check("WP=0: the user does not", run_user(user_write, PAGE4K(3), 0), PF);
    write_cr0(read_cr0() | CR0_WP);
    check("WP=1 again: the kernel does not", TRY(poke(PAGE4K(3), 5)), PF);
}

static void smep_smap(void) {
    struct cpuid features = cpuid(7, 0);
    const u64 address = PAGE4K(4);
    frame0[0] = 0xc3;
    map4k(4, frame0, PTE_P | PTE_W | PTE_U);
    if (cpuid(0, 0).a >= 7 && features.b & 1 << 7) {
        check("SMEP off: the kernel executes a user page", TRY(call(address)), NO_TRAP);
        write_cr4(read_cr4() | CR4_SMEP);
        fault("SMEP: the kernel executes a user page", TRY(call(address)), PF_P | PF_I, address);
        check("SMEP: the kernel reads a user page", TRY(peek(address)), NO_TRAP);
        check("SMEP: the user executes his page", run_user(user_read, address, 0), 0x80);
        write_cr4(read_cr4() & ~(u64)CR4_SMEP);
    } else {
        skip("SMEP", "not in CPUID");
        check("CR4.SMEP where CPUID has none: #GP", TRY(write_cr4(read_cr4() | CR4_SMEP)), GP);
    }
    if (cpuid(0, 0).a >= 7 && features.b & 1 << 20) {
        write_cr4(read_cr4() | CR4_SMAP);
        fault("SMAP: the kernel reads a user page, AC=0", TRY(peek(address)), PF_P, address);
        fault("SMAP: the kernel writes a user page, AC=0", TRY(poke(address, 1)), PF_P | PF_W, address);
        check("SMAP: AC=1 by stac", TRY(__asm__ volatile("stac"); peek(address); poke(address, 0xc3); __asm__ volatile("clac")), NO_TRAP);
        check("SMAP: after clac", TRY(peek(address)), PF);
        check("SMAP: AC=1 by popf", TRY(__asm__ volatile("pushf\n orl $0x40000, (%%rsp)\n popf" ::: "cc"); peek(address)), NO_TRAP);
        __asm__ volatile("clac");
        check("SMAP: the user reads his page", run_user(user_read, address, 0), 0x80);
        check("SMAP: execution by the kernel is SMEP's matter", TRY(call(address)), NO_TRAP);
        // An implicit supervisor access (here: the GDT on a user page) does not look at AC.
        write_cr4(read_cr4() & ~(u64)CR4_SMAP);
    } else {
        skip("SMAP", "not in CPUID");
        check("CR4.SMAP where CPUID has none: #GP", TRY(write_cr4(read_cr4() | CR4_SMAP)), GP);
        check("stac where CPUID has none: #UD", TRY(__asm__ volatile("stac")), UD);
        check("clac where CPUID has none: #UD", TRY(__asm__ volatile("clac")), UD);
    }
}

static void global_pages(void) {
    frame0[0] = 1;
    frame1[0] = 2;
    const u64 address = PAGE4K(5);
    map4k(5, frame0, PTE_P | PTE_W);
    peek(address);
    window_pt[5] = (u64)frame1 | PTE_P | PTE_W;
    write_cr3(read_cr3());
    check("mov to CR3 drops a translation", peek(address), 2);
    map4k(5, frame0, PTE_P | PTE_W);
    check("invlpg drops a translation", peek(address), 1);
    if (!(cpuid(1, 0).d & 1 << 13)) {
        skip("global pages", "no PGE in CPUID");
        return;
    }
    write_cr4(read_cr4() | CR4_PGE);
    map4k(5, frame0, PTE_P | PTE_W | PTE_G);
    peek(address);
    window_pt[5] = (u64)frame1 | PTE_P | PTE_W | PTE_G;
    invlpg(address);
    check("invlpg drops a global translation", peek(address), 2);
    window_pt[5] = (u64)frame0 | PTE_P | PTE_W | PTE_G;
    write_cr4(read_cr4() & ~(u64)CR4_PGE);
    check("a change of CR4.PGE drops global translations", peek(address), 1);
}

/// INVLPG takes a large page whole, whichever of its addresses is named.
static void invlpg_large(void) {
    const u64 first = 32ull << 20, second = 34ull << 20, page = PAGE2M(3), flags = PTE_P | PTE_W | PTE_PS;
    window_pd[3] = second | flags;
    invlpg(page);
    poke(page + 0x5000, 2);
    poke(page + 0x1ff000, 2);
    window_pd[3] = first | flags;
    invlpg(page);
    poke(page + 0x5000, 1);
    poke(page + 0x1ff000, 1);
    window_pd[3] = second | flags;
    invlpg(page + 0x1000);
    check("2M: invlpg drops the page's other addresses", peek(page + 0x5000), 2);
    check("2M: invlpg drops the page's last address", peek(page + 0x1ff000), 2);
    window_pd[3] = 0;
    invlpg(page);
}

static void pcid(void) {
    if (!(cpuid(1, 0).c & 1 << 17)) {
        skip("PCID", "not in CPUID");
        check("CR4.PCIDE where CPUID has none: #GP", TRY(write_cr4(read_cr4() | CR4_PCIDE)), GP);
        return;
    }
    const u64 table = (u64)boot_pml4, keep = 1ull << 63, address = PAGE4K(6);
    check("CR4.PCIDE with CR3[11:0] not 0: #GP", ({
              write_cr3(table | 0x10); // PCD
              TRY(write_cr4(read_cr4() | CR4_PCIDE));
          }), GP);
    write_cr3(table);
    write_cr4(read_cr4() | CR4_PCIDE);
    frame0[0] = 1;
    frame1[0] = 2;
    map4k(6, frame0, PTE_P | PTE_W);
    write_cr3(table | 1);
    check("CR3 reads back with its PCID", read_cr3(), table | 1);
    check("translation under PCID 1", peek(address), 1);
    window_pt[6] = (u64)frame1 | PTE_P | PTE_W;
    write_cr3(table | 2);
    check("PCID 2 after a mov to CR3 that flushes it", peek(address), 2);
    write_cr3(table | 1);
    check("PCID 1 after a mov to CR3 that flushes it", peek(address), 2);
    write_cr3(table | 1 | keep);
    check("CR3 reads back without bit 63", read_cr3(), table | 1);
    window_pt[6] = (u64)frame0 | PTE_P | PTE_W;
    if (cpuid(7, 0).b & 1 << 10) {
        struct { u64 pcid, address; } descriptor = {1, address};
        __asm__ volatile("invpcid %0, %1" ::"m"(descriptor), "r"(0ull) : "memory");
        check("invpcid of one address", peek(address), 1);
        window_pt[6] = (u64)frame1 | PTE_P | PTE_W;
        __asm__ volatile("invpcid %0, %1" ::"m"(descriptor), "r"(1ull) : "memory");
        check("invpcid of one PCID", peek(address), 2);
        window_pt[6] = (u64)frame0 | PTE_P | PTE_W;
        __asm__ volatile("invpcid %0, %1" ::"m"(descriptor), "r"(2ull) : "memory");
        check("invpcid of all", peek(address), 1);
        check("invpcid type 4: #GP", TRY(__asm__ volatile("invpcid %0, %1" ::"m"(descriptor), "r"(4ull) : "memory")), GP);
        descriptor.pcid = 0x1000;
        check("invpcid with a PCID above 0xfff: #GP", TRY(__asm__ volatile("invpcid %0, %1" ::"m"(descriptor), "r"(1ull) : "memory")), GP);
    } else
        skip("INVPCID", "not in CPUID");
    write_cr3(table);
    write_cr4(read_cr4() & ~(u64)CR4_PCIDE);
}

int main(void) {
    error_codes();
    not_canonical();
    crossing();
    accessed_dirty();
    write_protect();
    smep_smap();
    global_pages();
    invlpg_large();
    pcid();
    return failures();
}
