#include "vmm/soft/debug_register.h"
#include "vmm/soft/system.h"

namespace vtrace::soft {
namespace {

bool armed(const Cpu& cpu, unsigned n) {
    return cpu.dr7 >> (n * 2) & 3;
} // Ln or Gn
unsigned access_of(const Cpu& cpu, unsigned n) {
    return cpu.dr7 >> (Dr7::rw_shift + n * Dr7::field_width) & 3;
}

/// LEN encodes 1, 2, 8, 4 bytes.
unsigned length_of(const Cpu& cpu, unsigned n) {
    static constexpr unsigned lengths[] = {1, 2, 8, 4};
    return lengths[cpu.dr7 >> (Dr7::len_shift + n * Dr7::field_width) & 3];
}

/// Low address bits below LEN are ignored (SDM vol. 3, 17.2.5).
bool overlaps(const Cpu& cpu, unsigned n, uint64_t address, unsigned size) {
    const unsigned length = length_of(cpu, n);
    uint64_t start = cpu.dr[n] & ~uint64_t{length - 1};
    if (!cpu.long_mode())
        start = static_cast<uint32_t>(start);
    // Differences, so that ranges at the top of the address space need no case of their own.
    return address - start < length || start - address < size;
}

} // namespace

uint64_t code_breakpoints(const Cpu& cpu, uint64_t linear) {
    uint64_t hits = 0;
    for (unsigned n = 0; n < 4; ++n) {
        const uint64_t address = cpu.long_mode() ? cpu.dr[n] : static_cast<uint32_t>(cpu.dr[n]);
        if (armed(cpu, n) && access_of(cpu, n) == Dr7::rw_execute && address == linear)
            hits |= 1ull << n;
    }
    return hits;
}

uint64_t data_breakpoints(const Cpu& cpu, uint64_t linear, unsigned size, bool write) {
    uint64_t hits = 0;
    for (unsigned n = 0; n < 4; ++n) {
        const unsigned access = access_of(cpu, n);
        const bool watched = access == Dr7::rw_read_write || (access == Dr7::rw_write && write);
        if (armed(cpu, n) && watched && overlaps(cpu, n, linear, size))
            hits |= 1ull << n;
    }
    return hits;
}

uint64_t io_breakpoints(const Cpu& cpu, uint16_t port, unsigned size) {
    uint64_t hits = 0;
    if (!(cpu.cr4 & Cr4::de))
        return 0;
    for (unsigned n = 0; n < 4; ++n)
        if (armed(cpu, n) && access_of(cpu, n) == Dr7::rw_io && overlaps(cpu, n, port, size))
            hits |= 1ull << n;
    return hits;
}

bool page_watched(const Cpu& cpu, uint64_t linear) {
    if (!(cpu.dr7 & 0xff))
        return false;
    const uint64_t page = linear & ~page_mask;
    for (unsigned n = 0; n < 4; ++n) {
        const unsigned access = access_of(cpu, n);
        const bool data = access == Dr7::rw_write || access == Dr7::rw_read_write;
        if (armed(cpu, n) && data && overlaps(cpu, n, page, page_size))
            return true;
    }
    return false;
}

uint64_t read_debug_register(const Cpu& cpu, unsigned number) {
    return number == 6 ? cpu.dr6 : number == 7 ? cpu.dr7 : cpu.dr[number];
}

bool write_debug_register(Cpu& cpu, unsigned number, uint64_t value) {
    if (number >= 6 && value >> 32)
        return false;
    if (number == 6) {
        cpu.dr6 = (value & Dr6::writable) | Dr6::fixed1;
        return true;
    }
    if (number == 7)
        cpu.dr7 = (value & Dr7::writable) | Dr7::fixed1;
    else
        cpu.dr[number] = value;
    cpu.flush_tlb(); // pages that are watched now may be in it
    return true;
}

} // namespace vtrace::soft
