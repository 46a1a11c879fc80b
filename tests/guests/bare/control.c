// Values that control registers must refuse with #GP (SDM vol. 3, 2.5). QEMU's TCG accepts most of them, and cannot go on
// after some: so this guest is not run there.
#include "runtime.h"

int main(void) {
    check("CR0.PG without PE: #GP", TRY(write_cr0(read_cr0() & ~(u64)CR0_PE)), GP);
    check("CR0.NW without CD: #GP", TRY(write_cr0((read_cr0() | 1u << 29) & ~(1ull << 30))), GP);
    check("CR0 upper half: #GP", TRY(write_cr0(read_cr0() | 1ull << 32)), GP);
    write_cr0(read_cr0() | 1 << 6 | 1 << 17);
    check("CR0 reserved bits of the lower half are ignored", read_cr0() & (1 << 6 | 1 << 17), 0);
    check("CR0.PG clear in 64-bit mode: #GP", TRY(write_cr0(read_cr0() & ~(u64)CR0_PG)), GP);
    check("CR4.PAE clear in long mode: #GP", TRY(write_cr4(read_cr4() & ~0x20ull)), GP);
    check("CR4 bit 15: #GP", TRY(write_cr4(read_cr4() | 1 << 15)), GP);
    check("CR4 upper half: #GP", TRY(write_cr4(read_cr4() | 1ull << 32)), GP);
    check("CR4.LA57 in long mode: #GP", TRY(write_cr4(read_cr4() | 1 << 12)), GP);
    check("CR3 above MAXPHYADDR: #GP", TRY(write_cr3(read_cr3() | 1ull << 60)), GP);
    check("CR8 above 15: #GP", TRY(write_cr8(16)), GP);
    write_cr8(5);
    check("CR8 reads back", read_cr8(), 5);
    write_cr8(0);
    return failures();
}
