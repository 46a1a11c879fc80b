#include "tests/oracle/native/compare.h"

#include <cmath>

#include <fmt/format.h>

namespace vtrace::oracle {

namespace {

constexpr const char* gpr_names[16] = {"rax", "rcx", "rdx", "rbx", "rsp", "rbp", "rsi", "rdi",
                                       "r8",  "r9",  "r10", "r11", "r12", "r13", "r14", "r15"};

/// The shift count as the processor masks it, or -1 if the instruction has none.
int shift_count(const Instruction& i, const UserState& in) {
    const ZydisDecodedOperand& op = i.operands[i.info.operand_count_visible - 1];
    uint64_t count = op.type == ZYDIS_OPERAND_TYPE_IMMEDIATE ? op.imm.value.u : in.gpr[RCX];
    return static_cast<int>(count & (i.operands[0].size == 64 ? 63 : 31));
}

void shift_flags(const Instruction& i, const UserState& in, Undefined& u) {
    int count = shift_count(i, in), size = i.operands[0].size;
    u.rflags &= ~Rflags::status;
    switch (i.mnemonic()) {
    case ZYDIS_MNEMONIC_SHL:
    case ZYDIS_MNEMONIC_SHR:
    case ZYDIS_MNEMONIC_SAR:
        if (count != 0)
            u.rflags |= Rflags::af;
        if (count > 1)
            u.rflags |= Rflags::of;
        if (count >= size && i.mnemonic() != ZYDIS_MNEMONIC_SAR)
            u.rflags |= Rflags::cf;
        break;
    case ZYDIS_MNEMONIC_SHLD:
    case ZYDIS_MNEMONIC_SHRD:
        if (count != 0)
            u.rflags |= Rflags::af;
        if (count > 1)
            u.rflags |= Rflags::of;
        if (count > size) {
            u.rflags |= Rflags::status;
            u.destination = true;
        }
        break;
    default: // rotates
        if (count > 1)
            u.rflags |= Rflags::of;
    }
}

void line(std::string& out, const char* what, uint64_t before, uint64_t host, uint64_t got) {
    out += fmt::format("    {:<8} in {:016x}  host {:016x}  vtrace {:016x}\n", what, before, host, got);
}

template <class T>
T word(const FpuImage& image, unsigned at) {
    T value;
    std::memcpy(&value, image.fxsave.data() + at, sizeof value);
    return value;
}

std::string hex(const uint8_t* bytes, unsigned count) {
    std::string text;
    while (count--)
        text += fmt::format("{:02x}", bytes[count]);
    return text;
}

} // namespace

Undefined undefined_by(const Instruction& i, const UserState& in, const Answer& host) {
    Undefined u;
    if (i.info.cpu_flags)
        u.rflags |= i.info.cpu_flags->undefined;
    if (i.info.fpu_flags) {
        uint32_t c = i.info.fpu_flags->undefined;
        u.fsw = static_cast<uint16_t>((c & 7) << 8 | (c & 8) << 11);
    }
    switch (i.mnemonic()) {
    case ZYDIS_MNEMONIC_SHL:
    case ZYDIS_MNEMONIC_SHR:
    case ZYDIS_MNEMONIC_SAR:
    case ZYDIS_MNEMONIC_SHLD:
    case ZYDIS_MNEMONIC_SHRD:
    case ZYDIS_MNEMONIC_ROL:
    case ZYDIS_MNEMONIC_ROR:
    case ZYDIS_MNEMONIC_RCL:
    case ZYDIS_MNEMONIC_RCR:
        shift_flags(i, in, u);
        break;
    case ZYDIS_MNEMONIC_CVTPI2PS: // Intel's manual has a memory operand switch to MMX, AMD's processors don't
        u.x87 = i.visible_memory() != nullptr;
        break;
    case ZYDIS_MNEMONIC_MASKMOVQ: // AMD switches to MMX even when it faults
        u.x87 = host.vector != completed;
        u.fault_address = true;
        break;
    case ZYDIS_MNEMONIC_POPA:
    case ZYDIS_MNEMONIC_POPAD:
        u.fault_registers = true;
        u.fault_address = true;
        break;
    case ZYDIS_MNEMONIC_CMPSB:
    case ZYDIS_MNEMONIC_CMPSW:
    case ZYDIS_MNEMONIC_CMPSD:
    case ZYDIS_MNEMONIC_CMPSQ:
    case ZYDIS_MNEMONIC_PUSHA:
    case ZYDIS_MNEMONIC_PUSHAD:
    case ZYDIS_MNEMONIC_ENTER:
    case ZYDIS_MNEMONIC_BOUND:
    case ZYDIS_MNEMONIC_FNSTENV:
    case ZYDIS_MNEMONIC_FNSAVE:
    case ZYDIS_MNEMONIC_FLDENV:
    case ZYDIS_MNEMONIC_FRSTOR:
    case ZYDIS_MNEMONIC_FXSAVE:
    case ZYDIS_MNEMONIC_FXSAVE64:
    case ZYDIS_MNEMONIC_FXRSTOR:
    case ZYDIS_MNEMONIC_FXRSTOR64:
    case ZYDIS_MNEMONIC_MASKMOVDQU:
        u.fault_address = true;
        break;
    default:
        break;
    }
    if (host.vector == Vector::xm) {
        // Whether a result that over- or underflows is inexact is asked of different results when that is unmasked, and
        // a dot product stops at its first step that raises something.
        constexpr uint32_t oe = 1 << 3, ue = 1 << 4, pe = 1 << 5, exceptions = 0x3f;
        constexpr unsigned masks = 7;
        uint32_t mxcsr = word<uint32_t>(host.state.fpu, Fxsave::mxcsr);
        if (mxcsr & ~(mxcsr >> masks) & (oe | ue))
            u.mxcsr = pe;
        if (i.mnemonic() == ZYDIS_MNEMONIC_DPPS || i.mnemonic() == ZYDIS_MNEMONIC_DPPD)
            u.mxcsr = exceptions;
    }
    if (host.vector == completed)
        u.fault_registers = false;
    else
        u.destination = false;
    return u;
}

void blank_undefined_memory(const Case& c, uint64_t fs_base, uint8_t* data) {
    const ZydisDecodedOperand* memory = c.instruction.visible_memory();
    if (!memory)
        return;
    const auto& mem = memory->mem;
    uint64_t at = register_value(c.in, c.instruction, mem.base) +
                  register_value(c.in, c.instruction, mem.index) * mem.scale +
                  static_cast<uint64_t>(mem.disp.has_displacement ? mem.disp.value : 0);
    if (c.instruction.info.address_width < 64)
        at = static_cast<uint32_t>(at);
    at += mem.segment == ZYDIS_REGISTER_FS ? fs_base : mem.segment == ZYDIS_REGISTER_GS ? Arena::gs_base : 0;
    auto blank = [&](unsigned first, unsigned last) {
        for (unsigned n = first; n < last; n++)
            if (at + n >= Arena::data && at + n < Arena::data + Arena::writable)
                data[at + n - Arena::data] = 0;
    };
    switch (c.instruction.mnemonic()) {
    case ZYDIS_MNEMONIC_FNSTENV:
    case ZYDIS_MNEMONIC_FNSAVE: // instruction and operand pointers; upper halves of 32-bit words are reserved
        if (c.instruction.info.operand_width == 16) {
            blank(6, 14);
        } else {
            blank(2, 4);
            blank(6, 8);
            blank(10, 28);
        }
        break;
    case ZYDIS_MNEMONIC_FXSAVE:
    case ZYDIS_MNEMONIC_FXSAVE64:
        blank(Fxsave::fop, Fxsave::mxcsr);
        blank(Fxsave::mxcsr_mask, Fxsave::st);
        break;
    default:
        break;
    }
}

std::string differences(const Undefined& u, const UserState& in, const Answer& host, const Answer& got) {
    std::string out;
    const UserState &h = host.state, &g = got.state;
    if (host.vector != got.vector)
        out += fmt::format("    exception: host {}  vtrace {}\n", host.vector, got.vector);
    else if (host.vector != completed && host.error_code != got.error_code && !u.fault_address)
        out += fmt::format("    error code: host {:#x}  vtrace {:#x}\n", host.error_code, got.error_code);
    else if (host.vector == Vector::pf && host.cr2 != got.cr2 && !u.fault_address)
        out += fmt::format("    cr2: host {:#x}  vtrace {:#x}\n", host.cr2, got.cr2);
    if (h.rip != g.rip)
        line(out, "rip", in.rip, h.rip, g.rip);
    if (!u.destination && !u.fault_registers)
        for (unsigned i = 0; i < 16; i++)
            if (h.gpr[i] != g.gpr[i])
                line(out, gpr_names[i], in.gpr[i], h.gpr[i], g.gpr[i]);
    constexpr uint64_t seen =
        Rflags::status | Rflags::tf | Rflags::if_ | Rflags::df | Rflags::nt | Rflags::ac | Rflags::id;
    if ((h.rflags ^ g.rflags) & seen & ~u.rflags)
        line(out, "rflags", in.rflags, h.rflags & seen & ~u.rflags, g.rflags & seen & ~u.rflags);

    struct Field {
        const char* name;
        unsigned offset;
        uint16_t mask;
    };
    for (const Field& f : {Field{"fcw", Fxsave::fcw, 0xffff}, Field{"fsw", Fxsave::fsw, static_cast<uint16_t>(~u.fsw)},
                           Field{"ftw", Fxsave::ftw, 0xff}}) {
        unsigned a = word<uint16_t>(h.fpu, f.offset) & f.mask, b = word<uint16_t>(g.fpu, f.offset) & f.mask;
        if (a != b && !u.x87)
            line(out, f.name, word<uint16_t>(in.fpu, f.offset), a, b);
    }
    if ((word<uint32_t>(h.fpu, Fxsave::mxcsr) ^ word<uint32_t>(g.fpu, Fxsave::mxcsr)) & ~u.mxcsr)
        line(out, "mxcsr", word<uint32_t>(in.fpu, Fxsave::mxcsr), word<uint32_t>(h.fpu, Fxsave::mxcsr),
             word<uint32_t>(g.fpu, Fxsave::mxcsr));
    auto bytes = [&](std::string name, unsigned at, unsigned size) {
        if (std::memcmp(h.fpu.fxsave.data() + at, g.fpu.fxsave.data() + at, size) != 0)
            out += fmt::format("    {:<8} in {}\n           host {}\n         vtrace {}\n", name,
                               hex(in.fpu.fxsave.data() + at, size), hex(h.fpu.fxsave.data() + at, size),
                               hex(g.fpu.fxsave.data() + at, size));
    };
    for (unsigned i = 0; i < 8 && !u.x87; i++)
        bytes(fmt::format("st{}", i), Fxsave::st + i * 16, 10);
    for (unsigned i = 0; i < 16; i++)
        bytes(fmt::format("xmm{}", i), Fxsave::xmm + i * 16, 16);
    return out;
}

std::string memory_differences(const uint8_t* before, const uint8_t* host, const uint8_t* got) {
    std::string out;
    if (std::memcmp(host, got, Arena::size) == 0)
        return out;
    for (unsigned at = 0, shown = 0; at < Arena::size && shown < 8; at += 8) {
        uint64_t b, h, g;
        std::memcpy(&b, before + at, 8);
        std::memcpy(&h, host + at, 8);
        std::memcpy(&g, got + at, 8);
        if (h != g) {
            line(out, fmt::format("[{:x}]", Arena::data + at).c_str(), b, h, g);
            shown++;
        }
    }
    return out;
}

void accept_approximation(const Instruction& i, const Answer& host, Answer& got) {
    if (!is_approximate(i.mnemonic()) || i.operands[0].type != ZYDIS_OPERAND_TYPE_REGISTER)
        return;
    unsigned at = Fxsave::xmm + static_cast<unsigned>(i.operands[0].reg.value - ZYDIS_REGISTER_XMM0) * 16;
    bool scalar = i.mnemonic() == ZYDIS_MNEMONIC_RCPSS || i.mnemonic() == ZYDIS_MNEMONIC_RSQRTSS;
    for (unsigned n = 0; n < (scalar ? 1 : 4); n++, at += 4) {
        float h = word<float>(host.state.fpu, at), g = word<float>(got.state.fpu, at);
        // Each is within 1.5 * 2^-12 of the true value (SDM vol. 2, RCPPS).
        if (std::isfinite(h) && std::isfinite(g) && std::fabs(h - g) <= 3.0f / 4096 * std::fabs(h))
            std::memcpy(got.state.fpu.fxsave.data() + at, &h, sizeof h);
    }
}

} // namespace vtrace::oracle
