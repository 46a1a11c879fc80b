// Interrupts and what makes them: PIC, PIT, RTC, serial port, local APIC, I/O APIC, NMI; HLT and the STI shadow
// (SDM vol. 3, 6.8 and chapter 10; Intel 8254, 8259A, 82093AA, MC146818 data sheets).
#include "runtime.h"

enum {
    PIC1 = 0x20, PIC1_DATA = 0x21, PIC2 = 0xa0, PIC2_DATA = 0xa1, PIC_EOI = 0x20, PIC_READ_IRR = 0x0a,
    PIT_0 = 0x40, PIT_2 = 0x42, PIT_CONTROL = 0x43, PORT_61 = 0x61,
    RTC_INDEX = 0x70, RTC_DATA = 0x71, RTC_A = 10, RTC_B = 11, RTC_C = 12, RTC_B_PIE = 0x40,
    IRQ_BASE = 0x20, IRQ_TIMER = 0, IRQ_CASCADE = 2, IRQ_SERIAL = 4, IRQ_RTC = 8
};
enum { APIC = 0xfee00000u, APIC_ID = 0x20, APIC_VERSION = 0x30, APIC_TPR = 0x80, APIC_PPR = 0xa0, APIC_EOI = 0xb0, APIC_SVR = 0xf0, APIC_ISR = 0x100,
       APIC_IRR = 0x200, APIC_ICR = 0x300, APIC_ICR_HIGH = 0x310, APIC_LVT_TIMER = 0x320, APIC_LVT_LINT0 = 0x350, APIC_TIMER_INITIAL = 0x380,
       APIC_TIMER_CURRENT = 0x390, APIC_TIMER_DIVIDE = 0x3e0, ICR_SELF = 1 << 18, ICR_NMI = 4 << 8, LVT_MASKED = 1 << 16,
       LVT_PERIODIC = 1 << 17, LVT_TSC_DEADLINE = 2 << 17 };
#define IOAPIC 0xfec00000ull

static u32 apic_read(u32 offset) { return *(volatile u32 *)(u64)(APIC + offset); }
static void apic_write(u32 offset, u32 value) { *(volatile u32 *)(u64)(APIC + offset) = value; }
static u32 ioapic_read(u8 index) { *(volatile u32 *)IOAPIC = index; return *(volatile u32 *)(IOAPIC + 0x10); }
static void ioapic_write(u8 index, u32 value) { *(volatile u32 *)IOAPIC = index; *(volatile u32 *)(IOAPIC + 0x10) = value; }
static u8 rtc_read(u8 index) { outb(RTC_INDEX, index); return inb(RTC_DATA); }
static void rtc_write(u8 index, u8 value) { outb(RTC_INDEX, index); outb(RTC_DATA, value); }

// ---- each interrupt is logged; the end of interrupt is sent by its kind ----
static volatile unsigned count, order[16], nmi_depth, nmi_worst;
static volatile u64 rip_of_last;
static volatile bool hold_eoi, x2apic, nmi_again;

static void send_nmi(void) {
    apic_write(APIC_ICR_HIGH, apic_read(APIC_ID));
    apic_write(APIC_ICR, ICR_NMI);
}

static bool on_interrupt(struct frame *frame) {
    const u64 vector = frame->vector;
    if (vector == NMI) {
        ++nmi_depth;
        if (nmi_depth > nmi_worst)
            nmi_worst = nmi_depth;
        ++count;
        if (nmi_again) {
            nmi_again = false;
            send_nmi();
            for (volatile int i = 0; i < 100; ++i)
                ;
        }
        --nmi_depth;
        return true;
    }
    if (vector < IRQ_BASE)
        return false;
    if (count < 16)
        order[count] = vector;
    ++count;
    rip_of_last = frame->rip;
    if (vector == IRQ_BASE + IRQ_SERIAL)
        outb(0x3f9, 0);
    if (vector == IRQ_BASE + IRQ_RTC)
        rtc_read(RTC_C);
    if (vector < IRQ_BASE + 16) {
        if (vector >= IRQ_BASE + 8)
            outb(PIC2, PIC_EOI);
        outb(PIC1, PIC_EOI);
    } else if (!hold_eoi) {
        if (x2apic)
            wrmsr(0x800 + APIC_EOI / 16, 0);
        else
            apic_write(APIC_EOI, 0);
    }
    return true;
}

static void pic_init(void) {
    outb(PIC1, 0x11), outb(PIC2, 0x11);
    outb(PIC1_DATA, IRQ_BASE), outb(PIC2_DATA, IRQ_BASE + 8);
    outb(PIC1_DATA, 1 << IRQ_CASCADE), outb(PIC2_DATA, IRQ_CASCADE);
    outb(PIC1_DATA, 1), outb(PIC2_DATA, 1);
}
static void pic_unmask(u16 irqs) { outb(PIC1_DATA, ~irqs), outb(PIC2_DATA, ~irqs >> 8); }
static void pit_rate(u16 divisor) { outb(PIT_CONTROL, 0x34), outb(PIT_0, divisor), outb(PIT_0, divisor >> 8); }
static void pit_once(u16 divisor) { outb(PIT_CONTROL, 0x30), outb(PIT_0, divisor), outb(PIT_0, divisor >> 8); }
static void wait_for(unsigned n) {
    while (count < n)
        __asm__ volatile("sti\n hlt\n cli" ::: "memory");
}

static void pic_and_pit(void) {
    pic_init();
    pic_unmask(1 << IRQ_TIMER);
    count = 0;
    pit_rate(1193);
    wait_for(3);
    check("PIT: periodic through the PIC, HLT wakes", order[2], IRQ_BASE + IRQ_TIMER);

    // One interrupt pending with IF=0, as the PIC's IRR shows.
    extern u8 after_sti_nop[], after_popf[], after_hlt[];
#define PENDING()                                                                                                      \
    do {                                                                                                               \
        count = 0;                                                                                                     \
        pit_once(100);                                                                                                 \
        outb(PIC1, PIC_READ_IRR);                                                                                      \
        while (!(inb(PIC1) & 1 << IRQ_TIMER))                                                                          \
            ;                                                                                                          \
    } while (0)
    PENDING();
    check("PIT: one-shot is pending while IF=0", count, 0);
    __asm__ volatile("sti\n nop\n after_sti_nop: nop\n cli" ::: "memory");
    check("STI: the interrupt comes after the next instruction", rip_of_last, (u64)after_sti_nop);
    PENDING();
    __asm__ volatile("sti\n cli\n nop\n nop" ::: "memory");
    check("STI then CLI: no interrupt", count, 0);
    __asm__ volatile("pushf\n orl $0x200, (%%rsp)\n popf\n after_popf: nop\n cli" ::: "memory");
    check("POPF: the interrupt comes at once", rip_of_last, (u64)after_popf);
    count = 0;
    pit_once(2000);
    __asm__ volatile("sti\n hlt\n after_hlt: cli" ::: "memory");
    check("HLT: saved rip is after it", rip_of_last, (u64)after_hlt);
    PENDING();
    __asm__ volatile("sti\n hlt\n cli" ::: "memory");
    check("STI, HLT with one pending: does not sleep for ever", count, 1);
    pic_unmask(0);
    PENDING();
    __asm__ volatile("sti\n nop\n nop\n cli" ::: "memory");
    check("masked in the PIC: no interrupt", count, 0);
    pic_unmask(1 << IRQ_TIMER);
    __asm__ volatile("sti\n nop\n nop\n cli" ::: "memory");
    check("unmasked: it comes", count, 1);

    outb(PIT_CONTROL, 0x34), outb(PIT_0, 0), outb(PIT_0, 0);
    outb(PIT_CONTROL, 0x00); // latch
    u16 first = inb(PIT_0), second;
    first |= inb(PIT_0) << 8;
    for (volatile int i = 0; i < 1000; ++i)
        ;
    outb(PIT_CONTROL, 0x00);
    second = inb(PIT_0);
    second |= inb(PIT_0) << 8;
    const u16 passed = first - second; // 65536 reads as 0
    check("PIT: the count goes down", passed > 0 && passed < 0x8000, 1);
    pic_unmask(0);

    // Channel 2 by its gate and output in port 0x61, as an operating system calibrates with.
    outb(PORT_61, (inb(PORT_61) & ~2) | 1);
    outb(PIT_CONTROL, 0xb0), outb(PIT_2, 0xe8), outb(PIT_2, 3);
    check("PIT channel 2: output low at the start", inb(PORT_61) & 0x20, 0);
    unsigned polls = 0;
    while (!(inb(PORT_61) & 0x20) && ++polls < 10000000)
        ;
    check("PIT channel 2: output goes high", inb(PORT_61) & 0x20, 0x20);
}

static void serial_and_rtc(void) {
    pic_unmask(1 << IRQ_SERIAL);
    count = 0;
    outb(0x3fc, 0x0b); // DTR, RTS, OUT2
    outb(0x3f9, 2);    // interrupt when the transmitter is empty
    for (volatile int i = 0; i < 1000 && !count; ++i)
        __asm__ volatile("sti\n nop\n cli" ::: "memory");
    check("serial: transmitter empty interrupt", order[0], IRQ_BASE + IRQ_SERIAL);
    check("serial: one of them", count, 1);

    pic_unmask(1 << IRQ_RTC | 1 << IRQ_CASCADE);
    count = 0;
    rtc_read(RTC_C);
    rtc_write(RTC_A, 0x26); // 1024 Hz
    rtc_write(RTC_B, (rtc_read(RTC_B) | RTC_B_PIE));
    wait_for(2);
    check("RTC: periodic interrupt through the second PIC", order[1], IRQ_BASE + IRQ_RTC);
    rtc_write(RTC_B, rtc_read(RTC_B) & ~RTC_B_PIE);
    rtc_read(RTC_C);
    check("RTC: seconds are BCD", (rtc_read(0) & 0xf) < 10 && rtc_read(0) < 0x60, 1);
    pic_unmask(0);
}

static void local_apic(void) {
    check("APIC base: enabled, boot processor", rdmsr(MSR_APIC_BASE) & 0xfffffffffffff900, APIC | 0x900);
    check("APIC version", (apic_read(APIC_VERSION) & 0xf0), 0x10);
    count = 0;
    apic_write(APIC_ICR, ICR_SELF | 0x31);
    apic_write(APIC_ICR, ICR_SELF | 0x51);
    apic_write(APIC_ICR, ICR_SELF | 0x41);
    check("self IPI: in the IRR", apic_read(APIC_IRR + 0x10) >> 17 & 1, 1);
    hold_eoi = true;
    __asm__ volatile("sti\n nop\n nop\n cli" ::: "memory");
    check("priority: the highest first", order[0], 0x51);
    check("  and none below it before its EOI", count, 1);
    check("  in the ISR", apic_read(APIC_ISR + 0x20) >> 17 & 1, 1);
    check("  PPR", apic_read(APIC_PPR), 0x50);
    hold_eoi = false;
    apic_write(APIC_EOI, 0);
    __asm__ volatile("sti\n nop\n nop\n nop\n cli" ::: "memory");
    check("priority: then the next", order[1], 0x41);
    check("priority: and the last", order[2], 0x31);
    count = 0;
    write_cr8(5);
    check("CR8 is the TPR", apic_read(APIC_TPR), 0x50);
    apic_write(APIC_ICR, ICR_SELF | 0x5f);
    __asm__ volatile("sti\n nop\n nop\n cli" ::: "memory");
    check("TPR holds its own class back", count, 0);
    apic_write(APIC_ICR, ICR_SELF | 0x60);
    __asm__ volatile("sti\n nop\n nop\n cli" ::: "memory");
    check("  not the class above", count, 1);
    write_cr8(4);
    __asm__ volatile("sti\n nop\n nop\n cli" ::: "memory");
    check("  lowered: it comes", order[1], 0x5f);
    write_cr8(0);

    apic_write(APIC_TIMER_DIVIDE, 0xb); // by 1
    count = 0;
    apic_write(APIC_LVT_TIMER, 0x71);
    apic_write(APIC_TIMER_INITIAL, 50000);
    wait_for(1);
    check("timer: one-shot", order[0], 0x71);
    check("  count stays 0", apic_read(APIC_TIMER_CURRENT), 0);
    count = 0;
    apic_write(APIC_LVT_TIMER, LVT_PERIODIC | 0x72);
    apic_write(APIC_TIMER_INITIAL, 100000);
    wait_for(3);
    check("timer: periodic", order[2], 0x72);
    check("  count runs", apic_read(APIC_TIMER_CURRENT) <= 100000, 1);
    apic_write(APIC_TIMER_INITIAL, 0);
    apic_write(APIC_LVT_TIMER, LVT_MASKED);
    __asm__ volatile("sti\n nop\n nop\n cli" ::: "memory"); // one that was under way
    if (cpuid(1, 0).c >> 24 & 1) {
        count = 0;
        apic_write(APIC_LVT_TIMER, LVT_TSC_DEADLINE | 0x73);
        wrmsr(0x6e0, rdmsr(0x10) + 100000);
        check("timer: TSC deadline reads back", rdmsr(0x6e0) != 0, 1);
        wait_for(1);
        check("timer: TSC deadline", order[0], 0x73);
        check("  is disarmed", rdmsr(0x6e0), 0);
        apic_write(APIC_LVT_TIMER, LVT_MASKED);
    } else
        skip("timer: TSC deadline", "not in CPUID");

    count = 0;
    send_nmi();
    for (volatile int i = 0; i < 100; ++i)
        ;
    check("NMI comes with IF=0", count, 1);
    count = 0, nmi_worst = 0, nmi_again = true;
    send_nmi();
    for (volatile int i = 0; i < 100; ++i)
        ;
    check("NMI in an NMI handler: both come", count, 2);
    check("  the second after IRET", nmi_worst, 1);
}

static void io_apic(void) {
    check("I/O APIC: 24 entries", ioapic_read(1) >> 16 & 0xff, 23);
    count = 0;
    ioapic_write(0x10 + 2 * 2 + 1, apic_read(APIC_ID));
    ioapic_write(0x10 + 2 * 2, 0x61); // pin 2: the PIT; fixed, physical, edge
    check("I/O APIC: an entry reads back", ioapic_read(0x10 + 2 * 2) & 0x1ffff, 0x61);
    pit_once(1193);
    wait_for(1);
    check("I/O APIC: PIT on pin 2", order[0], 0x61);
    ioapic_write(0x10 + 2 * 2, LVT_MASKED);
}

static void x2apic_mode(void) {
    if (!(cpuid(1, 0).c >> 21 & 1)) {
        skip("x2APIC", "not in CPUID");
        check("x2APIC not offered: #GP", TRY(wrmsr(MSR_APIC_BASE, rdmsr(MSR_APIC_BASE) | 0x400)), GP);
        return;
    }
    check("x2APIC MSR in xAPIC mode: #GP", TRY(rdmsr(0x802)), GP);
    const u32 id = apic_read(APIC_ID) >> 24;
    wrmsr(MSR_APIC_BASE, rdmsr(MSR_APIC_BASE) | 0x400);
    x2apic = true;
    check("x2APIC: ID", rdmsr(0x802), id);
    count = 0;
    wrmsr(0x83f, 0x81);
    __asm__ volatile("sti\n nop\n nop\n cli" ::: "memory");
    check("x2APIC: self IPI", order[0], 0x81);
    wrmsr(0x830, (u64)id << 32 | 0x82);
    __asm__ volatile("sti\n nop\n nop\n cli" ::: "memory");
    check("x2APIC: ICR", order[1], 0x82);
    check("x2APIC: EOI of a value not 0: #GP", TRY(wrmsr(0x80b, 1)), GP);
    check("x2APIC: write to the ID: #GP", TRY(wrmsr(0x802, 1)), GP);
    check("x2APIC: DFR is not there: #GP", TRY(rdmsr(0x80e)), GP);
    check("x2APIC back to xAPIC: #GP", TRY(wrmsr(MSR_APIC_BASE, rdmsr(MSR_APIC_BASE) & ~0x400ull)), GP);
}

int main(void) {
    trap_hook = on_interrupt;
    apic_write(APIC_SVR, 0x1ff);
    apic_write(APIC_LVT_LINT0, 0x700); // the PIC's interrupts pass through, as firmware sets it up
    pic_and_pit();
    serial_and_rtc();
    local_apic();
    io_apic();
    x2apic_mode();
    return failures();
}
