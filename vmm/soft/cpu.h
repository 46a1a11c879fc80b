// Cpu: the state of the software processor while it executes, and the memory fast path that every handler uses.
//
// Hot fields first. Handlers live in handlers_*.cc; slow paths in mmu.cc, exceptions.cc, segments.cc, control.cc. All of
// it belongs to one thread at a time.
#pragma once

#include <array>
#include <atomic>
#include <bit>
#include <bitset>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "ds/bts.h"
#include "vmm/cpu_state.h"
#include "vmm/guest_memory.h"
#include "vmm/soft/cpuid.h"
#include "vmm/soft/flags.h"
#include "vmm/soft/op.h"
#include "vmm/soft/recording.h"
#include "vmm/vcpu.h"

namespace vtrace::soft {

class BlockCache;
class Monitor;

// ---------------------------------------------------------------------------------------------------------------------
// Software TLB

/// A tag is the page's linear address, or tlb_no_tag where this kind of access must take the slow path: not present, not
/// allowed, MMIO, watched by a debug register; for writes also a clean page or one that holds translated code.
struct TlbEntry {
    uint64_t read_tag;
    uint64_t write_tag;
    uintptr_t addend; // host address = linear address + addend
    Gpa gpa;          // of the page, and in the low bits the marks of TlbMark
};
inline constexpr uint64_t tlb_no_tag = ~0ull;
inline constexpr unsigned tlb_entries = 1024;

/// Which rules an access obeys; one TLB each. `supervisor_ac` is the supervisor while SMAP is lifted by RFLAGS.AC.
enum class MmuContext : uint8_t { user, supervisor, supervisor_ac };
inline constexpr unsigned mmu_contexts = 3;

struct CodeTlbEntry {
    uint64_t tag; // linear page | 1 for user; tlb_no_tag
    Gpa gpa;      // as in TlbEntry
};

/// Low bits of an entry's gpa: whether the mapping is global, and the size of the guest's page that the entry is a 4 KiB
/// piece of (INVLPG takes all pieces).
namespace TlbMark {
inline constexpr Gpa global = 1;
inline constexpr unsigned shift_at = 1; // bits 6:1, the page's size as a power of two
constexpr Gpa make(bool is_global, unsigned page_shift) { return Gpa{is_global} | Gpa{page_shift} << shift_at; }
constexpr unsigned page_shift(Gpa gpa) { return gpa >> shift_at & 0x3f; }
} // namespace TlbMark
inline constexpr unsigned code_tlb_entries = 512;

enum class Access : uint8_t { read, write, fetch };

/// Blocks by linear address; one table for each of 64-bit supervisor, 64-bit user, and all else.
struct JumpEntry {
    uint64_t address;
    Block* block; // null: empty
};
inline constexpr unsigned jump_entries = 16384;
enum class JumpKind : uint8_t { supervisor64, user64, other };
inline constexpr unsigned jump_kinds = 3;

struct JumpTable {
    std::unique_ptr<JumpEntry[]> entries = std::make_unique<JumpEntry[]>(jump_entries);
    std::vector<uint16_t> used;  // slots filled since the last flush, so that a flush costs what was used
    std::bitset<4096> pages;     // linear pages (hashed) that entries are of
    bool any_not_global = false; // holds something that a CR3 write must flush

    void insert(uint64_t address, Block* block, bool global);
    void flush();
    void drop_linear(uint64_t address, unsigned page_shift);
    void drop_blocks_of_page(Gpa gpa);

  private:
    template <class Predicate>
    void drop_if(Predicate predicate);
    size_t page_bit(uint64_t address) const { return (address >> 12 ^ address >> 24) % pages.size(); }
};
inline unsigned jump_slot(uint64_t address) { return (address ^ address >> 14) & (jump_entries - 1); }

// ---------------------------------------------------------------------------------------------------------------------

/// What a page walk found.
struct Translation {
    Gpa gpa = 0; // of the byte
    bool user = false, global = false, writable_now = false; // writable_now: a store needs no further check or D bit
    uint8_t page_shift = 12; // of the page's size
};

/// Why the handlers gave control back to the run loop.
enum class Leave : uint8_t {
    lookup,         // Cpu::rip is the next instruction: find its block
    fault,          // Cpu::fault is to be delivered; the instruction at Cpu::rip has not retired
    restart_single, // the instruction at Cpu::rip must be executed alone (device access, store to code)
    boundary,       // an instruction has retired after which interrupts or timers may have changed
    halted,         // HLT has retired
    breakpoint,     // a breakpoint of the machine's is at Cpu::rip
    shutdown,       // triple fault
    unsupported,    // Cpu::detail says what
};

/// An exception on its way to delivery (SDM vol. 3, chapter 6).
struct Fault {
    uint8_t vector = 0;
    bool has_error_code = false;
    uint32_t error_code = 0;
    uint64_t cr2 = 0; // for #PF: becomes CR2 at delivery
};

/// Page-fault error code bits (SDM vol. 3, 4.7).
namespace PfError {
inline constexpr uint32_t p = 1, w = 2, u = 4, rsvd = 8, i = 16;
}

struct Cpu {
    // --- hot ---------------------------------------------------------------------------------------------------------
    static constexpr unsigned zero_register = 16, rip_register = 17, two_gib_register = 18;
    // 16 registers, a constant 0, the RIP of the current block's start, and a constant 2^31 (for RIP-relative operands
    // whose displacement from the block's start doesn't fit 32 bits).
    uint64_t gpr[19] = {};
    LazyFlags flags;
    int64_t budget = 0; // instructions that may still retire; the current block's are already taken off
    Block* block = nullptr;
    TlbEntry* tlb = nullptr; // of the current context
    JumpEntry* jumps = nullptr; // entries of jump_table
    ds::BtsCursor* bts = nullptr; // never null: where nothing is recorded it leads to scratch_record
    uint64_t segment_base[6] = {}; // 0 for ES, CS, SS, DS in 64-bit mode
    uint32_t fp_blocked = 0;       // FpBlock bits: why an FPU/SSE instruction faults now; 0 = none
    CodeMode mode = CodeMode::bits16;
    uint8_t cpl = 0;
    bool single = false; // executing one instruction alone: device accesses and stores to code are allowed
    Leave leave = Leave::lookup;
    uint64_t rip = 0xfff0; // valid at boundaries only; within a block it is gpr[rip_register] + op->offset

    // --- architectural state beside the above ------------------------------------------------------------------------
    uint64_t system_flags = 0; // RFLAGS without the six status flags and bit 1
    std::array<Segment, 6> segments;
    Segment ldtr, tr;
    DescriptorTable gdtr, idtr;
    uint64_t cr0 = 0, cr2 = 0, cr3 = 0, cr4 = 0, xcr0 = 1;
    std::array<uint64_t, 4> dr{};
    uint64_t dr6 = 0xffff0ff0, dr7 = 0x400;
    uint64_t efer = 0, star = 0, lstar = 0, cstar = 0, sfmask = 0, kernel_gs_base = 0;
    uint64_t sysenter_cs = 0, sysenter_esp = 0, sysenter_eip = 0;
    uint64_t pat = 0, tsc_aux = 0, tsc_offset = 0, misc_enable = 0;
    MsrStorage msrs; // what only stores: MTRRs and the like
    InterruptShadow shadow = InterruptShadow::none;
    ActivityState activity = ActivityState::running;
    bool nmi_blocked = false;
    FpuImage fpu; // the one home of x87, MMX, XMM and MXCSR

    // --- events ------------------------------------------------------------------------------------------------------
    Fault fault;
    bool no_step_trap = false;   // this instruction gives no single-step trap (SYSCALL, INT n, MOV SS: see run loop)
    bool touched_device = false; // the machine's timers or interrupts may have changed
    PendingEvent event;          // that another engine was left with
    uint64_t pending_db = 0; // DR6 bits of debug traps that the current instruction has met (data and I/O breakpoints)
    std::string detail;      // for Leave::shutdown and unsupported
    std::atomic<bool> stop_requested{false};

    // --- what it is connected to -------------------------------------------------------------------------------------
    GuestMemory& memory;
    CpuPins& pins;
    Clock& clock;
    BlockCache* blocks = nullptr;
    Recording recording;
    std::unique_ptr<Monitor> monitor; // null: the model has no Debug Store and no counters
    ds::BtsRecord scratch_record{};
    ds::BtsCursor scratch_cursor{&scratch_record, &scratch_record + 1, 0};
    const Op* link_request = nullptr; // an op that left for want of a link: the run loop may fill it
    const CpuidModel& cpuid;
    VirtualTime run_started = 0; // virtual time at the start of this run(), when budget was run_budget
    int64_t run_budget = 0;
    uint64_t run_retired_base = 0; // instructions retired before this run()

    // --- TLBs --------------------------------------------------------------------------------------------------------
    TlbEntry tlbs[mmu_contexts][tlb_entries];
    CodeTlbEntry code_tlb[code_tlb_entries];
    JumpTable jump_tables[jump_kinds];
    JumpTable* jump_table = nullptr; // the one for the current mode and privilege
    // Linear regions (hashed, by page size) of which a piece of a large page may be in a TLB.
    static constexpr unsigned large_page_shifts[] = {21, 22, 30};
    std::bitset<1024> large_pages[std::size(large_page_shifts)];
    unsigned other_jumps_are = ~0u; // CPL and mode that the table JumpKind::other was filled under

    Cpu(GuestMemory& memory, CpuPins& pins, Clock& clock, const CpuidModel& cpuid);
    ~Cpu();

    // --- registers ---------------------------------------------------------------------------------------------------
    template <class T>
    T get(unsigned offset) const {
        T value;
        std::memcpy(&value, reinterpret_cast<const char*>(gpr) + offset, sizeof value);
        return value;
    }
    /// Writes a register as instructions do: 32-bit writes clear the upper half, 8- and 16-bit ones leave the rest.
    template <class T>
    void set(unsigned offset, T value) {
        if constexpr (sizeof(T) == 4) {
            uint64_t wide = value;
            std::memcpy(reinterpret_cast<char*>(gpr) + offset, &wide, sizeof wide);
        } else {
            std::memcpy(reinterpret_cast<char*>(gpr) + offset, &value, sizeof value);
        }
    }
    uint64_t rflags() const { return flags.get() | system_flags | Rflags::reserved1; }
    /// Takes all bits as they are (the caller has masked what may not change) and updates what depends on them (AC).
    void set_rflags(uint64_t value);

    // --- place and time ----------------------------------------------------------------------------------------------
    uint64_t op_rip(const Op* op) const { return gpr[rip_register] + op->offset; }
    uint64_t next_rip(const Op* op) const { return truncate_rip(op_rip(op) + op->len); }
    uint64_t truncate_rip(uint64_t address) const {
        return mode == CodeMode::bits64 ? address : mode == CodeMode::bits32 ? uint32_t(address) : uint16_t(address);
    }
    /// Linear address of an offset in the code segment.
    uint64_t code_linear(uint64_t offset) const {
        return mode == CodeMode::bits64 ? offset : uint32_t(segment_base[CS] + offset);
    }
    bool long_mode() const { return efer & Efer::lma; }
    bool code64() const { return mode == CodeMode::bits64; }
    /// Instructions retired in this run(), at a boundary or the end of a block.
    uint64_t retired_in_run() const { return run_budget - budget; }
    /// Instructions retired since construction, and virtual time, there.
    uint64_t retired_ever() const { return run_retired_base + retired_in_run(); }
    VirtualTime time_at_boundary() const { return run_started + retired_in_run(); }
    /// Instructions retired in this run() before `op`.
    uint64_t retired_before(const Op* op) const { return run_budget - (budget + op->left); }
    /// Virtual time of `op`, and its TSC, for those that only read it: no device learns of it, as with sync_clock().
    VirtualTime time_of(const Op* op) const { return run_started + retired_before(op); }
    uint64_t tsc(const Op* op) const { return clock.tsc_ticks(time_of(op)) + tsc_offset; }
    /// Sets the clock to the time of `op`; before any access to a device, the APIC or the TSC.
    void sync_clock(const Op* op) {
        clock.set_now(time_of(op));
        touched_device = true;
    }

    // --- leaving a block ---------------------------------------------------------------------------------------------
    /// Gives back the budget of `op` and all after it and leaves with RIP at `op`.
    const Op* leave_before(const Op* op, Leave why) {
        budget += op->left;
        rip = op_rip(op);
        leave = why;
        return nullptr;
    }
    /// After the block's last instruction: continue at `next` (offset in CS) through the run loop.
    const Op* leave_at(uint64_t next, Leave why) {
        rip = next;
        leave = why;
        return nullptr;
    }
    const Op* raise(const Op* op, uint8_t vector) {
        fault = Fault{vector, false, 0, 0};
        return leave_before(op, Leave::fault);
    }
    const Op* raise(const Op* op, uint8_t vector, uint32_t error_code) {
        fault = Fault{vector, true, error_code, 0};
        return leave_before(op, Leave::fault);
    }

    // --- data memory -------------------------------------------------------------------------------------------------
    // Each returns false when the handler must `return nullptr` at once: leave_before() was already called. Nothing may
    // be committed before the last access of an instruction has succeeded.

    /// The fast path alone: false means only that the slow path must decide.
    template <class T>
    bool try_load(uint64_t address, T& value) const {
        const TlbEntry& entry = tlb[address >> 12 & (tlb_entries - 1)];
        if (VTRACE_UNLIKELY(((address + (sizeof(T) - 1)) & ~page_mask) != entry.read_tag))
            return false;
        std::memcpy(&value, reinterpret_cast<const void*>(address + entry.addend), sizeof value);
        return true;
    }
    /// Where a T may be written (and read) right away; null: the slow path must decide.
    template <class T>
    uint8_t* try_write(uint64_t address) const {
        const TlbEntry& entry = tlb[address >> 12 & (tlb_entries - 1)];
        if (VTRACE_UNLIKELY(((address + (sizeof(T) - 1)) & ~page_mask) != entry.write_tag))
            return nullptr;
        return reinterpret_cast<uint8_t*>(address + entry.addend);
    }
    template <class T>
    bool try_store(uint64_t address, T value) const {
        uint8_t* host = try_write<T>(address);
        if (!host)
            return false;
        std::memcpy(host, &value, sizeof value);
        return true;
    }

    template <class T>
    bool load(const Op* op, uint64_t address, T& value) {
        if (VTRACE_LIKELY(try_load(address, value)))
            return true;
        return take(value, load_slow_value(op, address, sizeof value));
    }
    template <class T>
    bool store(const Op* op, uint64_t address, T value) {
        if (VTRACE_LIKELY(try_store(address, value)))
            return true;
        if constexpr (sizeof(T) <= 8) {
            uint64_t wide = 0;
            std::memcpy(&wide, &value, sizeof value);
            return store_slow_value(op, address, wide, sizeof value);
        } else {
            std::memcpy(scratch, &value, sizeof value);
            return store_slow(op, address, scratch, sizeof value);
        }
    }
    /// A load that will be followed by a store to the same place: faults as a write does.
    template <class T>
    bool load_for_write(const Op* op, uint64_t address, T& value) {
        if (const uint8_t* host = try_write<T>(address); VTRACE_LIKELY(host)) {
            std::memcpy(&value, host, sizeof value);
            return true;
        }
        return take(value, load_for_write_slow_value(op, address, sizeof value));
    }
    // The slow paths hand values over in registers (or, above 8 bytes, in `scratch`): a handler whose local's address was
    // taken could not end in a tail call.
    struct Loaded {
        uint64_t value; // if at most 8 bytes
        bool ok;
    };
    alignas(16) uint8_t scratch[64];
    template <class T>
    bool take(T& value, Loaded loaded) {
        if constexpr (sizeof(T) <= 8)
            std::memcpy(&value, &loaded.value, sizeof value);
        else
            std::memcpy(&value, scratch, sizeof value);
        return loaded.ok;
    }
    Loaded load_slow_value(const Op* op, uint64_t address, unsigned size);
    Loaded load_for_write_slow_value(const Op* op, uint64_t address, unsigned size);
    bool store_slow_value(const Op* op, uint64_t address, uint64_t value, unsigned size);
    bool load_as(const Op* op, uint64_t address, void* value, unsigned size, Access access);
    bool load_slow(const Op* op, uint64_t address, void* value, unsigned size) {
        return load_as(op, address, value, size, Access::read);
    }
    bool load_for_write_slow(const Op* op, uint64_t address, void* value, unsigned size) {
        return load_as(op, address, value, size, Access::write);
    }
    bool store_slow(const Op* op, uint64_t address, const void* value, unsigned size);
    /// Blocks of any size (FXSAVE areas), at most a page: all or nothing.
    bool load_bytes(const Op* op, uint64_t address, void* bytes, unsigned size) {
        return load_slow(op, address, bytes, size);
    }
    bool store_bytes(const Op* op, uint64_t address, const void* bytes, unsigned size) {
        return store_slow(op, address, bytes, size);
    }

    // --- system memory: descriptor tables, TSS, stacks in event delivery; `fault` is set on failure, nothing left --------
    /// Walks the page tables as the access would, with its effects (A and D bits). False: `fault` says why.
    bool translate(uint64_t address, Access access, MmuContext context, Translation& result);
    /// Where a supervisor's read of `address` would go, without any effect.
    std::optional<Gpa> peek(uint64_t address) const;
    /// Gives the TLB of this context what translate() found.
    void remember_translation(uint64_t address, const Translation& where, MmuContext context);
    bool system_read(uint64_t address, void* bytes, unsigned size, MmuContext context = MmuContext::supervisor);
    bool system_write(uint64_t address, const void* bytes, unsigned size, MmuContext context = MmuContext::supervisor);
    template <class T>
    bool system_read(uint64_t address, T& value, MmuContext context = MmuContext::supervisor) {
        return system_read(address, &value, sizeof value, context);
    }
    template <class T>
    bool system_write_value(uint64_t address, T value, MmuContext context = MmuContext::supervisor) {
        return system_write(address, &value, sizeof value, context);
    }
    bool is_canonical(uint64_t address) const { return static_cast<int64_t>(address << 16) >> 16 == int64_t(address); }
    MmuContext data_context() const {
        return cpl == 3 ? MmuContext::user
               : (system_flags & Rflags::ac) && (cr4 & Cr4::smap) ? MmuContext::supervisor_ac
                                                                   : MmuContext::supervisor;
    }

    /// CR0.AM and RFLAGS.AC make misaligned user accesses fault: no access may then take the fast path.
    bool alignment_checked() const { return cpl == 3 && (cr0 & Cr0::am) && (system_flags & Rflags::ac); }
    void select_tlb();
    void flush_tlb();            // everything
    void flush_tlb_not_global(); // what a CR3 write flushes
    void flush_tlb_page(uint64_t address); // the guest's page, of whatever size: INVLPG
    void note_large_page(uint64_t address, unsigned page_shift);
    /// After anything that `mode`, `cpl`, `tlb`, `jumps`, `segment_base` or `fp_blocked` depend on has changed.
    void update_mode();
    /// Physical memory was written other than through store(): forget code that lay there.
    void memory_written(Gpa gpa, unsigned size);

    // --- branch records ----------------------------------------------------------------------------------------------
    /// At the retirement of a block's last instruction, or in event delivery. Linear addresses.
    void record(uint64_t from, uint64_t to, uint64_t kind_flags = 0) {
        if (VTRACE_UNLIKELY(bts->append(from, to, kind_flags)))
            after_append();
    }
    /// append() has asked: the area is full, or the monitor wants to see each record.
    void after_append();
    /// Every append() is to ask. For the monitor.
    void watch_branches(bool on);
    void record_to(const Recording& where); // at a boundary
    void drain_records();
    void update_recording(); // CPL changed; before the branch that changes it is recorded

    CpuState state() const;
    void set_state(const CpuState& state);
};

/// Bits of Cpu::fp_blocked; the handlers of each instruction group test those that concern it.
namespace FpBlock {
inline constexpr uint32_t em = 1,      // CR0.EM: x87 -> #NM, MMX/SSE -> #UD
    ts = 2,                            // CR0.TS: #NM
    no_fxsr = 4;                       // CR4.OSFXSR clear: SSE -> #UD
}

// ---------------------------------------------------------------------------------------------------------------------
// Effective addresses. Three shapes, chosen by the decoder, so that the common ones cost no tests.

/// base + disp, and base + index*scale + disp, in 64-bit mode with no segment base.
struct EaBase {
    static bool get(Cpu& cpu, const Op* op, unsigned, bool, uint64_t& linear) {
        linear = cpu.get<uint64_t>(op->base) + static_cast<int64_t>(op->disp);
        return true;
    }
};
struct EaIndex {
    static bool get(Cpu& cpu, const Op* op, unsigned, bool, uint64_t& linear) {
        linear = cpu.get<uint64_t>(op->base) + (cpu.get<uint64_t>(op->index) << op->scale) +
                 static_cast<int64_t>(op->disp);
        return true;
    }
};
/// Everything else: FS/GS, 16- and 32-bit addresses, segment checks outside 64-bit mode. Op::aux bits 1:0 of such an op
/// hold the address size (0: 16, 1: 32, 2: 64). False as for load(): a segment fault was raised.
struct EaAny {
    static bool get(Cpu& cpu, const Op* op, unsigned size, bool write, uint64_t& linear);
};
inline constexpr uint16_t op_address_size_mask = 3;

/// A linear address, or none: a fault was raised.
struct Linear {
    uint64_t address;
    bool ok;
};

/// An offset as wide as the address size in Op::aux.
inline uint64_t truncate_offset(const Op* op, uint64_t offset) {
    switch (op->aux & op_address_size_mask) {
    case 0:
        return static_cast<uint16_t>(offset);
    case 1:
        return static_cast<uint32_t>(offset);
    default:
        return offset;
    }
}
/// Offset part only (LEA), truncated to the address size in Op::aux.
uint64_t effective_offset(const Cpu& cpu, const Op* op);
/// Segment checks (null, type, limit; canonical comes with the access) and base for `offset` in `seg`. False: raised.
Linear checked_linear(Cpu& cpu, const Op* op, Seg seg, uint64_t offset, unsigned size, bool write);
inline bool segment_linear(Cpu& cpu, const Op* op, Seg seg, uint64_t offset, unsigned size, bool write,
                           uint64_t& linear) {
    const Linear result = checked_linear(cpu, op, seg, offset, size, write);
    linear = result.address;
    return result.ok;
}
inline bool EaAny::get(Cpu& cpu, const Op* op, unsigned size, bool write, uint64_t& linear) {
    return segment_linear(cpu, op, static_cast<Seg>(op->seg), effective_offset(cpu, op), size, write, linear);
}

// ---------------------------------------------------------------------------------------------------------------------
// From block to block

/// The run loop is wanted before the next block.
bool needs_run_loop(const Cpu& cpu);

/// Enters `next` at linear address `address` (== RIP in 64-bit mode; `rip` otherwise the offset in CS).
inline const Op* enter_block(Cpu& cpu, Block* next, uint64_t rip) {
    if (VTRACE_UNLIKELY((cpu.budget -= next->count) < 0)) {
        cpu.budget += next->count;
        return cpu.leave_at(rip, Leave::lookup);
    }
    cpu.block = next;
    cpu.gpr[Cpu::rip_register] = rip;
    VTRACE_RUN_OP(cpu, next->ops);
}
/// The record of a near branch, and what follows it: out of line where the area is full.
const Op* drain_and_enter(Cpu& cpu, Block* next, uint64_t rip);
inline const Op* record_and_enter(Cpu& cpu, uint64_t from, uint64_t to, Block* next, uint64_t rip) {
    if (VTRACE_UNLIKELY(cpu.bts->append(from, to, 0)))
        return drain_and_enter(cpu, next, rip);
    return enter_block(cpu, next, rip);
}
/// Continues at `rip` (offset in CS) by the table of recent targets.
inline const Op* continue_at(Cpu& cpu, uint64_t rip) {
    uint64_t address = cpu.code_linear(rip);
    const JumpEntry& entry = cpu.jumps[jump_slot(address)];
    if (VTRACE_LIKELY(entry.address == address && entry.block))
        return enter_block(cpu, entry.block, rip);
    return cpu.leave_at(rip, Leave::lookup);
}

} // namespace vtrace::soft
