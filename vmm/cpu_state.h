// CpuState: all architectural state of one virtual CPU at an instruction boundary, the common coin of every vCPU engine.
//
// A guest moves between engines by taking the state out of one and putting it into another; tests compare engines by it.
#pragma once

#include <array>
#include <cstdint>

#include "vmm/msr_storage.h"

namespace vtrace {

enum Gpr : uint8_t { RAX, RCX, RDX, RBX, RSP, RBP, RSI, RDI, R8, R9, R10, R11, R12, R13, R14, R15 };
enum Seg : uint8_t { ES, CS, SS, DS, FS, GS };

/// Segment attributes in the layout of a descriptor's bytes 5 and 6 (SDM vol. 3, 3.4.5): type 3:0, S 4, DPL 6:5, P 7,
/// AVL 12, L 13, D/B 14, G 15. `limit` is in bytes, already scaled. A null selector loaded has P clear.
struct Segment {
    uint64_t base = 0;
    uint32_t limit = 0xffff;
    uint16_t selector = 0;
    uint16_t attributes = 0;
    bool operator==(const Segment&) const = default;
};
namespace SegAttr {
inline constexpr uint16_t type = 0xf, accessed = 1, write_or_read = 2, conforming_or_down = 4, code = 8, s = 1 << 4,
                          p = 1 << 7, avl = 1 << 12, l = 1 << 13, db = 1 << 14, g = 1 << 15;
inline constexpr unsigned dpl_shift = 5;
} // namespace SegAttr

struct DescriptorTable {
    uint64_t base = 0;
    uint16_t limit = 0xffff;
    bool operator==(const DescriptorTable&) const = default;
};

/// FXSAVE image (SDM vol. 1, table 10-2) followed by an XSAVE header and extended area; bytes 0..511 hold x87/MMX/SSE.
struct alignas(64) FpuImage {
    std::array<uint8_t, 512> fxsave = after_reset();
    static constexpr std::array<uint8_t, 512> after_reset() {
        std::array<uint8_t, 512> image{};
        image[0] = 0x40;  // FCW 0040h
        image[24] = 0x80; // MXCSR 1f80h
        image[25] = 0x1f;
        return image;
    }
    bool operator==(const FpuImage&) const = default;
};

namespace Rflags {
inline constexpr uint64_t cf = 1 << 0, reserved1 = 1 << 1, pf = 1 << 2, af = 1 << 4, zf = 1 << 6, sf = 1 << 7, tf = 1 << 8,
                          if_ = 1 << 9, df = 1 << 10, of = 1 << 11, iopl = 3 << 12, nt = 1 << 14, rf = 1 << 16,
                          vm = 1 << 17, ac = 1 << 18, vif = 1 << 19, vip = 1 << 20, id = 1 << 21;
inline constexpr uint64_t status = cf | pf | af | zf | sf | of;
inline constexpr unsigned iopl_shift = 12;
} // namespace Rflags

namespace Cr0 {
inline constexpr uint64_t pe = 1u << 0, mp = 1u << 1, em = 1u << 2, ts = 1u << 3, et = 1u << 4, ne = 1u << 5,
                          wp = 1u << 16, am = 1u << 18, nw = 1u << 29, cd = 1u << 30, pg = 1u << 31;
}
namespace Cr4 {
inline constexpr uint64_t vme = 1 << 0, pvi = 1 << 1, tsd = 1 << 2, de = 1 << 3, pse = 1 << 4, pae = 1 << 5, mce = 1 << 6,
                          pge = 1 << 7, pce = 1 << 8, osfxsr = 1 << 9, osxmmexcpt = 1 << 10, umip = 1 << 11,
                          la57 = 1 << 12, vmxe = 1 << 13, fsgsbase = 1 << 16, pcide = 1 << 17, osxsave = 1 << 18,
                          smep = 1 << 20, smap = 1 << 21, pke = 1 << 22;
}
namespace Efer {
inline constexpr uint64_t sce = 1 << 0, lme = 1 << 8, lma = 1 << 10, nxe = 1 << 11;
}

/// Exception vectors (SDM vol. 3, table 6-1).
namespace Vector {
inline constexpr uint8_t de = 0, db = 1, nmi = 2, bp = 3, of = 4, br = 5, ud = 6, nm = 7, df = 8, ts = 10, np = 11, ss = 12,
                         gp = 13, pf = 14, mf = 16, ac = 17, mc = 18, xm = 19;
}

/// What blocks events at this boundary (SDM vol. 3, 6.8.3): at most one of the shadows, for one instruction.
enum class InterruptShadow : uint8_t { none, sti, mov_ss };
enum class ActivityState : uint8_t { running, halted, wait_for_sipi, shutdown };

/// An event that the processor has accepted (for an interrupt: acknowledged) but whose delivery isn't done: an engine was
/// left in the midst of it, because of a fault of its own. Whoever goes on delivers it before anything else.
///
/// RIP is what will be pushed, but for those that an instruction causes by its own (`software_interrupt`, and `exception`
/// with #BP or #OF): there it is at the instruction, which hasn't retired. An NMI waits while NMIs are blocked. A #PF's
/// address is in CR2 already, a #DB's bits are in DR6.
struct PendingEvent {
    enum class Kind : uint8_t { none, exception, nmi, external_interrupt, software_interrupt };

    Kind kind = Kind::none;
    uint8_t vector = 0;
    bool has_error_code = false;
    uint32_t error_code = 0;
    uint8_t instruction_length = 0; // of what causes a software event; 0: not known

    bool operator==(const PendingEvent&) const = default;
    /// Executing the instruction at RIP (again) is what brings it about.
    bool by_instruction() const {
        return kind == Kind::software_interrupt ||
               (kind == Kind::exception && (vector == Vector::bp || vector == Vector::of));
    }
};

/// Power-on defaults are those of a processor after RESET (SDM vol. 3, table 9-1).
struct CpuState {
    std::array<uint64_t, 16> gpr{};
    uint64_t rip = 0xfff0;
    uint64_t rflags = Rflags::reserved1;

    std::array<Segment, 6> segments = {
        Segment{0, 0xffff, 0, 0x93},      Segment{0xffff0000, 0xffff, 0xf000, 0x9b}, Segment{0, 0xffff, 0, 0x93},
        Segment{0, 0xffff, 0, 0x93},      Segment{0, 0xffff, 0, 0x93},               Segment{0, 0xffff, 0, 0x93}};
    Segment ldtr{0, 0xffff, 0, 0x82};
    Segment tr{0, 0xffff, 0, 0x8b};
    DescriptorTable gdtr, idtr;

    uint64_t cr0 = Cr0::cd | Cr0::nw | Cr0::et;
    uint64_t cr2 = 0, cr3 = 0, cr4 = 0;
    uint64_t cr8 = 0; // mirrors bits 7:4 of the local APIC's TPR
    uint64_t xcr0 = 1;
    std::array<uint64_t, 4> dr{}; // DR0..DR3
    uint64_t dr6 = 0xffff0ff0, dr7 = 0x400;

    uint64_t efer = 0, star = 0, lstar = 0, cstar = 0, sfmask = 0, kernel_gs_base = 0;
    uint64_t sysenter_cs = 0, sysenter_esp = 0, sysenter_eip = 0;
    uint64_t pat = 0x0007040600070406, tsc_aux = 0;
    uint64_t tsc = 0; // value at this boundary
    uint64_t misc_enable = 1; // fast strings
    MsrStorage msrs;

    InterruptShadow shadow = InterruptShadow::none;
    ActivityState activity = ActivityState::running;
    bool nmi_blocked = false; // from NMI delivery to the next IRET
    PendingEvent event;
    uint64_t pending_debug = 0; // DR6 bits of debug traps that wait for the next boundary without a MOV SS shadow

    FpuImage fpu;

    bool operator==(const CpuState&) const = default;

    /// Current privilege level: DPL of SS (SDM vol. 3, 5.5).
    unsigned cpl() const { return segments[SS].attributes >> SegAttr::dpl_shift & 3; }
    bool long_mode() const { return efer & Efer::lma; }
};

} // namespace vtrace
