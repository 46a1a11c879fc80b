// String instructions, with and without REP.
//
// A REP instruction retires as one instruction, however many iterations it makes, up to rep_chunk of them: then it
// gives way to events with RIP still at itself, having retired once, and goes on as a new one. So no guest can hold the
// engine for longer than that, and virtual time is defined (docs/time.md). Iterations are never branches.
#include "vmm/soft/select.h"
#include "vmm/soft/system.h"

namespace vtrace::soft {
namespace {

constexpr uint64_t rep_chunk = 65536;

enum class Rep : uint8_t { none, rep, repe, repne };

// Op::aux beside the address size: bit 2 for a 64-bit counter and so on follows from the size; the source segment is
// op->seg.
struct Index {
    /// RSI, RDI or RCX as wide as the address size.
    static uint64_t get(const Cpu& cpu, const Op* op, unsigned reg) { return truncate_offset(op, cpu.gpr[reg]); }
    static void set(Cpu& cpu, const Op* op, unsigned reg, uint64_t value) {
        switch (op->aux & op_address_size_mask) {
        case 0:
            cpu.set<uint16_t>(reg * 8, static_cast<uint16_t>(value));
            break;
        case 1:
            cpu.set<uint32_t>(reg * 8, static_cast<uint32_t>(value));
            break;
        default:
            cpu.gpr[reg] = value;
        }
    }
    static void add(Cpu& cpu, const Op* op, unsigned reg, uint64_t step) {
        set(cpu, op, reg, get(cpu, op, reg) + step);
    }
};

template <class T>
uint64_t direction(const Cpu& cpu) {
    return cpu.system_flags & Rflags::df ? uint64_t{0} - sizeof(T) : sizeof(T);
}

template <class T>
bool load_source(Cpu& cpu, const Op* op, T& value) {
    uint64_t linear;
    return segment_linear(cpu, op, static_cast<Seg>(op->seg), Index::get(cpu, op, RSI), sizeof(T), false, linear) &&
           cpu.load(op, linear, value);
}
bool destination(Cpu& cpu, const Op* op, unsigned size, bool write, uint64_t& linear) {
    return segment_linear(cpu, op, ES, Index::get(cpu, op, RDI), size, write, linear);
}

// Each step does one iteration and moves the index registers only when it has succeeded.

struct Movs {
    static constexpr bool compares = false;
    template <class T>
    static bool step(Cpu& cpu, const Op* op) {
        T value;
        uint64_t linear;
        if (!load_source(cpu, op, value) || !destination(cpu, op, sizeof(T), true, linear) ||
            !cpu.store(op, linear, value))
            return false;
        Index::add(cpu, op, RSI, direction<T>(cpu));
        Index::add(cpu, op, RDI, direction<T>(cpu));
        return true;
    }
};
struct Stos {
    static constexpr bool compares = false;
    template <class T>
    static bool step(Cpu& cpu, const Op* op) {
        uint64_t linear;
        if (!destination(cpu, op, sizeof(T), true, linear) || !cpu.store(op, linear, cpu.get<T>(RAX * 8)))
            return false;
        Index::add(cpu, op, RDI, direction<T>(cpu));
        return true;
    }
};
struct Lods {
    static constexpr bool compares = false;
    template <class T>
    static bool step(Cpu& cpu, const Op* op) {
        T value;
        if (!load_source(cpu, op, value))
            return false;
        cpu.set<T>(RAX * 8, value);
        Index::add(cpu, op, RSI, direction<T>(cpu));
        return true;
    }
};
struct Scas {
    static constexpr bool compares = true;
    template <class T>
    static bool step(Cpu& cpu, const Op* op) {
        T value;
        uint64_t linear;
        if (!destination(cpu, op, sizeof(T), false, linear) || !cpu.load(op, linear, value))
            return false;
        cpu.flags.sub(cpu.get<T>(RAX * 8), value);
        Index::add(cpu, op, RDI, direction<T>(cpu));
        return true;
    }
};
struct Cmps {
    static constexpr bool compares = true;
    template <class T>
    static bool step(Cpu& cpu, const Op* op) {
        T first, second;
        uint64_t linear;
        if (!load_source(cpu, op, first) || !destination(cpu, op, sizeof(T), false, linear) ||
            !cpu.load(op, linear, second))
            return false;
        cpu.flags.sub(first, second);
        Index::add(cpu, op, RSI, direction<T>(cpu));
        Index::add(cpu, op, RDI, direction<T>(cpu));
        return true;
    }
};

uint16_t io_port(const Cpu& cpu) {
    return cpu.get<uint16_t>(RDX * 8);
}

struct Ins {
    static constexpr bool compares = false;
    template <class T>
    static bool step(Cpu& cpu, const Op* op) {
        uint64_t linear;
        T probe;
        if (!io_allowed(cpu, op, io_port(cpu), sizeof(T)) || !destination(cpu, op, sizeof(T), true, linear) ||
            !cpu.load_for_write(op, linear, probe))
            return false;
        cpu.sync_clock(op);
        if (!cpu.store(op, linear, static_cast<T>(cpu.pins.io_read(io_port(cpu), sizeof(T)))))
            return false;
        Index::add(cpu, op, RDI, direction<T>(cpu));
        return true;
    }
};
struct Outs {
    static constexpr bool compares = false;
    template <class T>
    static bool step(Cpu& cpu, const Op* op) {
        T value;
        if (!io_allowed(cpu, op, io_port(cpu), sizeof(T)) || !load_source(cpu, op, value))
            return false;
        cpu.sync_clock(op);
        cpu.pins.io_write(io_port(cpu), sizeof(T), value);
        Index::add(cpu, op, RSI, direction<T>(cpu));
        return true;
    }
};

/// Host memory of `count` elements from the linear address on, as far as the fast path reaches in its page; null if
/// not.
template <class T>
uint8_t* fast_span(const Cpu& cpu, uint64_t address, bool write, uint64_t& count) {
    const TlbEntry& entry = cpu.tlb[address >> 12 & (tlb_entries - 1)];
    if ((address & ~page_mask) != (write ? entry.write_tag : entry.read_tag))
        return nullptr;
    count = std::min<uint64_t>(count, (page_size - (address & page_mask)) / sizeof(T));
    return count ? reinterpret_cast<uint8_t*>(address + entry.addend) : nullptr;
}

/// As many iterations as lie within the current pages, up to `most`; returns how many were made, 0 where the plain step
/// must do it (and find the fault). 64-bit addresses, forward, segments without base.
template <class Operation, class T>
uint64_t bulk(Cpu& cpu, uint64_t most) {
    uint64_t count = most;
    uint8_t* to = fast_span<T>(cpu, cpu.gpr[RDI], true, count);
    if (!to)
        return 0;
    if constexpr (std::is_same_v<Operation, Stos>) {
        T value = cpu.get<T>(RAX * 8);
        if constexpr (sizeof(T) == 1)
            std::memset(to, value, count);
        else
            for (uint64_t i = 0; i < count; ++i)
                std::memcpy(to + i * sizeof(T), &value, sizeof(T));
    } else {
        const uint8_t* from = fast_span<T>(cpu, cpu.gpr[RSI], false, count);
        if (!from)
            return 0;
        if (to > from && to < from + count * sizeof(T)) { // what is written is read again: the pattern repeats
            for (uint64_t i = 0; i < count; ++i)
                std::memmove(to + i * sizeof(T), from + i * sizeof(T), sizeof(T));
        } else {
            std::memmove(to, from, count * sizeof(T));
        }
        cpu.gpr[RSI] += count * sizeof(T);
    }
    cpu.gpr[RDI] += count * sizeof(T);
    cpu.gpr[RCX] -= count;
    return count;
}

/// Whether single-stepping or breakpoints want to see each iteration.
bool every_iteration(const Cpu& cpu) {
    return (cpu.system_flags & Rflags::tf) || (cpu.dr7 & 0xff);
}

template <class Operation, class T, Rep Repeat>
const Op* string_op(Cpu& cpu, const Op* op) {
    constexpr bool io = std::is_same_v<Operation, Ins> || std::is_same_v<Operation, Outs>;
    if constexpr (Repeat == Rep::none) {
        if (!Operation::template step<T>(cpu, op))
            return nullptr;
    } else {
        constexpr bool can_bulk = std::is_same_v<Operation, Movs> || std::is_same_v<Operation, Stos>;
        const bool flat =
            cpu.code64() && (op->aux & op_address_size_mask) == 2 && op->seg < FS && !(cpu.system_flags & Rflags::df);
        const uint64_t chunk = every_iteration(cpu) ? 1 : rep_chunk;
        uint64_t done = 0;
        while (uint64_t left = Index::get(cpu, op, RCX)) {
            if (done >= chunk) {
                cpu.budget += op->left - 1; // this much of it has retired
                return cpu.leave_at(cpu.op_rip(op), Leave::boundary);
            }
            if constexpr (can_bulk) {
                uint64_t bulked = flat ? bulk<Operation, T>(cpu, std::min(left, chunk - done)) : 0;
                if (bulked) {
                    done += bulked;
                    continue;
                }
            }
            if (!Operation::template step<T>(cpu, op))
                return nullptr;
            Index::set(cpu, op, RCX, left - 1);
            ++done;
            if constexpr (Operation::compares)
                if (cpu.flags.zf() != (Repeat == Rep::repe))
                    break;
        }
    }
    if constexpr (io)
        return cpu.leave_at(cpu.next_rip(op), Leave::boundary);
    else
        VTRACE_NEXT(cpu, op);
}

Rep rep_prefix(const DecodeInput& in, bool compares) {
    Rep result = Rep::none;
    for (unsigned i = 0; i < in.instruction.raw.prefix_count; ++i) {
        if (in.instruction.raw.prefixes[i].value == 0xf3)
            result = compares ? Rep::repe : Rep::rep;
        else if (in.instruction.raw.prefixes[i].value == 0xf2)
            result = compares ? Rep::repne : Rep::rep; // F2 repeats the others as F3 does
    }
    return result;
}

template <class Operation>
void select_string(const DecodeInput& in, Op& op, unsigned width) {
    op.aux = address_size_code(in.instruction);
    op.seg = DS;
    for (unsigned i = 0; i < in.instruction.operand_count; ++i)
        if (is_memory(in.operands[i]) && in.operands[i].mem.base != ZYDIS_REGISTER_NONE) {
            const ZydisRegister base = in.operands[i].mem.base;
            if (base == ZYDIS_REGISTER_RSI || base == ZYDIS_REGISTER_ESI || base == ZYDIS_REGISTER_SI)
                op.seg = static_cast<uint8_t>(in.operands[i].mem.segment - ZYDIS_REGISTER_ES);
        }
    const Rep rep = rep_prefix(in, Operation::compares);
    op.fn = by_width(width, [&]<class T>() -> Handler {
        if constexpr (Operation::compares)
            return rep == Rep::none   ? string_op<Operation, T, Rep::none>
                   : rep == Rep::repe ? string_op<Operation, T, Rep::repe>
                                      : string_op<Operation, T, Rep::repne>;
        else
            return rep == Rep::none ? string_op<Operation, T, Rep::none> : string_op<Operation, T, Rep::rep>;
    });
}

} // namespace

bool decode_string(const DecodeInput& in, Op& op, bool& ends_block) {
    if (in.instruction.meta.category != ZYDIS_CATEGORY_STRINGOP &&
        in.instruction.meta.category != ZYDIS_CATEGORY_IOSTRINGOP)
        return false;
    switch (in.instruction.mnemonic) {
    case ZYDIS_MNEMONIC_MOVSB:
    case ZYDIS_MNEMONIC_MOVSW:
    case ZYDIS_MNEMONIC_MOVSD:
    case ZYDIS_MNEMONIC_MOVSQ:
        select_string<Movs>(in, op, in.operands[0].size);
        return true;
    case ZYDIS_MNEMONIC_STOSB:
    case ZYDIS_MNEMONIC_STOSW:
    case ZYDIS_MNEMONIC_STOSD:
    case ZYDIS_MNEMONIC_STOSQ:
        select_string<Stos>(in, op, in.operands[0].size);
        return true;
    case ZYDIS_MNEMONIC_LODSB:
    case ZYDIS_MNEMONIC_LODSW:
    case ZYDIS_MNEMONIC_LODSD:
    case ZYDIS_MNEMONIC_LODSQ:
        select_string<Lods>(in, op, in.operands[0].size);
        return true;
    case ZYDIS_MNEMONIC_SCASB:
    case ZYDIS_MNEMONIC_SCASW:
    case ZYDIS_MNEMONIC_SCASD:
    case ZYDIS_MNEMONIC_SCASQ:
        select_string<Scas>(in, op, in.operands[0].size);
        return true;
    case ZYDIS_MNEMONIC_CMPSB:
    case ZYDIS_MNEMONIC_CMPSW:
    case ZYDIS_MNEMONIC_CMPSD:
    case ZYDIS_MNEMONIC_CMPSQ:
        select_string<Cmps>(in, op, in.operands[0].size);
        return true;
    case ZYDIS_MNEMONIC_INSB:
    case ZYDIS_MNEMONIC_INSW:
    case ZYDIS_MNEMONIC_INSD:
        select_string<Ins>(in, op, in.operands[0].size);
        ends_block = true;
        return true;
    case ZYDIS_MNEMONIC_OUTSB:
    case ZYDIS_MNEMONIC_OUTSW:
    case ZYDIS_MNEMONIC_OUTSD:
        select_string<Outs>(in, op, in.operands[1].size);
        ends_block = true;
        return true;
    default:
        return false;
    }
}

} // namespace vtrace::soft
