// Instructions for single flags, and those that do nothing: NOP, PAUSE, ENDBR, CLFLUSH; and their handlers.
#include "vmm/soft/select.h"

namespace vtrace::soft {
namespace {

const Op* clc(Cpu& cpu, const Op* op) {
    cpu.flags.set_cf(false);
    VTRACE_NEXT(cpu, op);
}
const Op* stc(Cpu& cpu, const Op* op) {
    cpu.flags.set_cf(true);
    VTRACE_NEXT(cpu, op);
}
const Op* cmc(Cpu& cpu, const Op* op) {
    cpu.flags.set_cf(!cpu.flags.cf());
    VTRACE_NEXT(cpu, op);
}
const Op* cld(Cpu& cpu, const Op* op) {
    cpu.system_flags &= ~Rflags::df;
    VTRACE_NEXT(cpu, op);
}
const Op* std_(Cpu& cpu, const Op* op) {
    cpu.system_flags |= Rflags::df;
    VTRACE_NEXT(cpu, op);
}
constexpr uint64_t lahf_flags = Rflags::sf | Rflags::zf | Rflags::af | Rflags::pf | Rflags::cf;
const Op* lahf(Cpu& cpu, const Op* op) {
    cpu.set<uint8_t>(RAX * 8 + 1, static_cast<uint8_t>((cpu.flags.get() & lahf_flags) | Rflags::reserved1));
    VTRACE_NEXT(cpu, op);
}
const Op* sahf(Cpu& cpu, const Op* op) {
    cpu.flags.set((cpu.flags.get() & Rflags::of) | (cpu.get<uint8_t>(RAX * 8 + 1) & lahf_flags));
    VTRACE_NEXT(cpu, op);
}
const Op* salc(Cpu& cpu, const Op* op) {
    cpu.set<uint8_t>(RAX * 8, cpu.flags.cf() ? 0xff : 0);
    VTRACE_NEXT(cpu, op);
}
const Op* nop(Cpu& cpu, const Op* op) {
    VTRACE_NEXT(cpu, op);
}

/// CLFLUSH: there is no cache to flush, but it is checked as a load of a byte (SDM vol. 2).
template <class Ea>
const Op* clflush(Cpu& cpu, const Op* op) {
    uint64_t address;
    uint8_t value;
    if (!Ea::get(cpu, op, sizeof value, false, address) || !cpu.load(op, address, value))
        return nullptr;
    VTRACE_NEXT(cpu, op);
}

} // namespace

bool decode_flags(const DecodeInput& in, Op& op) {
    switch (in.instruction.mnemonic) {
    case ZYDIS_MNEMONIC_CLC:
        op.fn = clc;
        return true;
    case ZYDIS_MNEMONIC_STC:
        op.fn = stc;
        return true;
    case ZYDIS_MNEMONIC_CMC:
        op.fn = cmc;
        return true;
    case ZYDIS_MNEMONIC_CLD:
        op.fn = cld;
        return true;
    case ZYDIS_MNEMONIC_STD:
        op.fn = std_;
        return true;
    case ZYDIS_MNEMONIC_LAHF:
        op.fn = lahf;
        return true;
    case ZYDIS_MNEMONIC_SAHF:
        op.fn = sahf;
        return true;
    case ZYDIS_MNEMONIC_SALC:
        op.fn = salc;
        return true;
    case ZYDIS_MNEMONIC_CLFLUSH:
    case ZYDIS_MNEMONIC_CLFLUSHOPT:
        op.fn = by_shape(in.shape, []<class Ea>() -> Handler { return clflush<Ea>; });
        return true;
    case ZYDIS_MNEMONIC_NOP:
    case ZYDIS_MNEMONIC_PAUSE:
    case ZYDIS_MNEMONIC_ENDBR32:
    case ZYDIS_MNEMONIC_ENDBR64:
        op.fn = nop;
        return true;
    default:
        return false;
    }
}

} // namespace vtrace::soft
