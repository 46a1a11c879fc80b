// IN and OUT, and who may use which port (SDM vol. 1, 19.5).
#include "vmm/soft/debug_register.h"
#include "vmm/soft/descriptor.h"
#include "vmm/soft/system.h"
#include "vmm/soft/system_handlers.h"
#include "vmm/soft/system_operand.h"

namespace vtrace::soft {
namespace {

/// The I/O permission bitmap of the TSS: all bits of the access must be 0. False with Cpu::fault.
bool bitmap_allows(Cpu& cpu, uint16_t port, unsigned size) {
    constexpr unsigned bitmap_pointer = 0x66;
    const bool tss32 = (cpu.tr.attributes & SegAttr::p) && (cpu.tr.attributes & 8);
    if (!tss32 || cpu.tr.limit < bitmap_pointer + 1)
        return set_fault(cpu, Vector::gp, 0);
    uint16_t start = 0;
    if (!cpu.system_read(linear_address(cpu, cpu.tr.base, bitmap_pointer), start))
        return false;
    // Always two bytes, so that an access of any alignment is covered; the limit must include both.
    const uint32_t offset = start + port / 8u;
    if (offset + 1 > cpu.tr.limit)
        return set_fault(cpu, Vector::gp, 0);
    uint16_t bits = 0;
    if (!cpu.system_read(linear_address(cpu, cpu.tr.base, offset), bits))
        return false;
    const unsigned wanted = ((1u << size) - 1) << (port & 7);
    return !(bits & wanted) || set_fault(cpu, Vector::gp, 0);
}

uint16_t port_of(const Cpu& cpu, const Op* op) {
    return op->aux & SystemAux::special ? cpu.get<uint16_t>(RDX * 8) : static_cast<uint8_t>(op->imm);
}

} // namespace

bool io_allowed(Cpu& cpu, const Op* op, uint16_t port, unsigned size) {
    const unsigned iopl = (cpu.system_flags & Rflags::iopl) >> Rflags::iopl_shift;
    if (!(cpu.cr0 & Cr0::pe) || cpu.cpl <= iopl)
        return true;
    begin_transfer(cpu);
    if (bitmap_allows(cpu, port, size))
        return true;
    failed_transfer(cpu, op);
    return false;
}

const Op* op_in(Cpu& cpu, const Op* op) {
    const uint16_t port = port_of(cpu, op);
    const unsigned size = op->reg;
    if (!io_allowed(cpu, op, port, size))
        return nullptr;
    cpu.sync_clock(op);
    write_register(cpu, RAX * 8, size, cpu.pins.io_read(port, size));
    cpu.pending_db |= io_breakpoints(cpu, port, size);
    return retire(cpu, op);
}

const Op* op_out(Cpu& cpu, const Op* op) {
    const uint16_t port = port_of(cpu, op);
    const unsigned size = op->reg;
    if (!io_allowed(cpu, op, port, size))
        return nullptr;
    cpu.sync_clock(op);
    cpu.pins.io_write(port, size, static_cast<uint32_t>(read_register(cpu, RAX * 8, size)));
    cpu.pending_db |= io_breakpoints(cpu, port, size);
    return retire(cpu, op);
}

} // namespace vtrace::soft
