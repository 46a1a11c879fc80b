#include "vmm/soft/cpu.h"

#include <algorithm>

#include "vmm/soft/block_cache.h"
#include "vmm/soft/monitor.h"

namespace vtrace::soft {
Cpu::Cpu(GuestMemory& guest_memory, CpuPins& cpu_pins, Clock& machine_clock, const CpuidModel& model)
    : memory(guest_memory), pins(cpu_pins), clock(machine_clock), cpuid(model) {
    gpr[two_gib_register] = 1ull << 31;
    bts = &scratch_cursor;
    if (const ds::CpuModel* processor = model.debug_store())
        monitor = std::make_unique<Monitor>(*this, *processor);
    flush_tlb();
    set_state(CpuState{});
}

Cpu::~Cpu() = default;

void Cpu::set_rflags(uint64_t value) {
    flags.set(value);
    system_flags = value & ~(Rflags::status | Rflags::reserved1);
    select_tlb();
}

void Cpu::select_tlb() {
    static constinit auto never_hits = [] {
        std::array<TlbEntry, tlb_entries> table{};
        table.fill({tlb_no_tag, tlb_no_tag, 0, 0});
        return table;
    }();
    tlb = alignment_checked() ? never_hits.data() : tlbs[static_cast<unsigned>(data_context())];
}

void Cpu::update_mode() {
    const Segment& cs = segments[CS];
    if (long_mode() && (cs.attributes & SegAttr::l))
        mode = CodeMode::bits64;
    else
        mode = cs.attributes & SegAttr::db ? CodeMode::bits32 : CodeMode::bits16;

    for (unsigned seg = ES; seg <= GS; ++seg)
        segment_base[seg] = code64() && seg < FS ? 0 : segments[seg].base;

    select_tlb();

    JumpKind kind = !code64() ? JumpKind::other : cpl == 3 ? JumpKind::user64 : JumpKind::supervisor64;
    if (kind == JumpKind::other) {
        unsigned now = static_cast<unsigned>(mode) << 1 | (cpl == 3);
        if (now != other_jumps_are) {
            jump_tables[static_cast<unsigned>(JumpKind::other)].flush();
            other_jumps_are = now;
        }
    }
    jump_table = &jump_tables[static_cast<unsigned>(kind)];
    jumps = jump_table->entries.get();

    fp_blocked = (cr0 & Cr0::em ? FpBlock::em : 0) | (cr0 & Cr0::ts ? FpBlock::ts : 0) |
                 (cr4 & Cr4::osfxsr ? 0 : FpBlock::no_fxsr);
    update_recording();
}

void Cpu::record_to(const Recording& where) {
    recording = where;
    run_started = clock.now(); // time may have passed without this engine
    bts = where.store ? &where.store->cursor() : &scratch_cursor;
    update_recording();
    watch_branches(monitor && monitor->watches_branches());
}

void Cpu::update_recording() {
    if (recording.store)
        recording.store->set_cpl(cpl);
}

void Cpu::drain_records() {
    if (recording.store)
        recording.store->drain(time_at_boundary(), retired_ever());
}

void Cpu::after_append() {
    if (monitor && monitor->watches_branches()) {
        const ds::BtsRecord* last = bts->stride ? bts->index - 1 : bts->index;
        monitor->on_record(*last);
    }
    if (recording.store && recording.store->drain_due())
        drain_records();
}

void Cpu::watch_branches(bool on) {
    scratch_cursor.threshold = on ? &scratch_record : &scratch_record + 1;
    if (recording.store)
        recording.store->watch(on);
}

bool needs_run_loop(const Cpu& cpu) { return cpu.monitor && cpu.monitor->attention(); }

const Op* drain_and_enter(Cpu& cpu, Block* next, uint64_t rip) {
    cpu.after_append();
    if (needs_run_loop(cpu))
        return cpu.leave_at(rip, Leave::boundary);
    return enter_block(cpu, next, rip);
}

// ---------------------------------------------------------------------------------------------------------------------

void JumpTable::flush() {
    for (uint16_t slot : used)
        entries[slot] = {};
    used.clear();
    pages.reset();
    any_not_global = false;
}

template <class Predicate>
void JumpTable::drop_if(Predicate predicate) {
    std::erase_if(used, [&](uint16_t slot) {
        const bool drop = predicate(entries[slot]);
        if (drop)
            entries[slot] = {};
        return drop;
    });
}

void JumpTable::drop_linear(uint64_t address, unsigned page_shift) {
    if (page_shift > 12 || pages.test(page_bit(address)))
        drop_if([&](const JumpEntry& entry) { return (entry.address ^ address) >> page_shift == 0; });
}

void JumpTable::drop_blocks_of_page(Gpa gpa) {
    drop_if([&](const JumpEntry& entry) { return ((entry.block->gpa ^ gpa) & ~page_mask) == 0; });
}

void JumpTable::insert(uint64_t address, Block* block, bool global) {
    unsigned slot = jump_slot(address);
    if (!entries[slot].block)
        used.push_back(static_cast<uint16_t>(slot));
    entries[slot] = {address, block};
    pages.set(page_bit(address));
    any_not_global |= !global;
}

void Cpu::flush_tlb() {
    for (auto& regions : large_pages)
        regions.reset();
    for (auto& table : tlbs)
        std::fill(std::begin(table), std::end(table), TlbEntry{tlb_no_tag, tlb_no_tag, 0, 0});
    std::fill(std::begin(code_tlb), std::end(code_tlb), CodeTlbEntry{tlb_no_tag, 0});
    for (JumpTable& table : jump_tables)
        table.flush();
}

void Cpu::flush_tlb_not_global() {
    for (auto& table : tlbs)
        for (TlbEntry& entry : table)
            if (!(entry.gpa & TlbMark::global))
                entry.read_tag = entry.write_tag = tlb_no_tag;
    for (CodeTlbEntry& entry : code_tlb)
        if (!(entry.gpa & TlbMark::global))
            entry.tag = tlb_no_tag;
    for (JumpTable& table : jump_tables)
        if (table.any_not_global)
            table.flush();
}

void Cpu::flush_tlb_page(uint64_t address) {
    uint64_t page = address & ~page_mask;
    for (auto& table : tlbs)
        table[page >> 12 & (tlb_entries - 1)].read_tag = table[page >> 12 & (tlb_entries - 1)].write_tag = tlb_no_tag;
    code_tlb[page >> 12 & (code_tlb_entries - 1)].tag = tlb_no_tag;
    for (JumpTable& table : jump_tables)
        table.drop_linear(address, 12);

    for (unsigned i = 0; i < std::size(large_page_shifts); ++i) {
        const unsigned shift = large_page_shifts[i];
        if (!large_pages[i].test((address >> shift) % large_pages[i].size()))
            continue;
        for (auto& table : tlbs)
            for (TlbEntry& entry : table)
                if (TlbMark::page_shift(entry.gpa) == shift && (entry.read_tag ^ address) >> shift == 0)
                    entry.read_tag = entry.write_tag = tlb_no_tag;
        for (CodeTlbEntry& entry : code_tlb)
            if (TlbMark::page_shift(entry.gpa) == shift && (entry.tag ^ address) >> shift == 0)
                entry.tag = tlb_no_tag;
        for (JumpTable& table : jump_tables)
            table.drop_linear(address, shift);
    }
}

void Cpu::note_large_page(uint64_t address, unsigned page_shift) {
    for (unsigned i = 0; i < std::size(large_page_shifts); ++i)
        if (large_page_shifts[i] == page_shift)
            large_pages[i].set((address >> page_shift) % large_pages[i].size());
}

void Cpu::memory_written(Gpa gpa, unsigned size) {
    if (blocks && memory.at(gpa, size) && blocks->is_code(gpa, size))
        blocks->invalidate_page(gpa);
}

// ---------------------------------------------------------------------------------------------------------------------

CpuState Cpu::state() const {
    CpuState s;
    std::copy_n(gpr, s.gpr.size(), s.gpr.begin());
    s.rip = rip;
    s.rflags = rflags();
    s.segments = segments;
    s.ldtr = ldtr;
    s.tr = tr;
    s.gdtr = gdtr;
    s.idtr = idtr;
    s.cr0 = cr0;
    s.cr2 = cr2;
    s.cr3 = cr3;
    s.cr4 = cr4;
    s.cr8 = pins.read_cr8();
    s.xcr0 = xcr0;
    s.dr = dr;
    s.dr6 = dr6;
    s.dr7 = dr7;
    s.efer = efer;
    s.star = star;
    s.lstar = lstar;
    s.cstar = cstar;
    s.sfmask = sfmask;
    s.kernel_gs_base = kernel_gs_base;
    s.sysenter_cs = sysenter_cs;
    s.sysenter_esp = sysenter_esp;
    s.sysenter_eip = sysenter_eip;
    s.pat = pat;
    s.tsc_aux = tsc_aux;
    s.tsc = clock.tsc_ticks(clock.now()) + tsc_offset;
    s.misc_enable = misc_enable;
    s.shadow = shadow;
    s.activity = activity;
    s.nmi_blocked = nmi_blocked;
    s.msrs = msrs;
    s.event = event;
    s.pending_debug = pending_db;
    s.fpu = fpu;
    return s;
}

void Cpu::set_state(const CpuState& s) {
    bool paging_changed = cr0 != s.cr0 || cr3 != s.cr3 || cr4 != s.cr4 || efer != s.efer;
    std::copy(s.gpr.begin(), s.gpr.end(), gpr);
    rip = s.rip;
    segments = s.segments;
    ldtr = s.ldtr;
    tr = s.tr;
    gdtr = s.gdtr;
    idtr = s.idtr;
    cr0 = s.cr0;
    cr2 = s.cr2;
    cr3 = s.cr3;
    cr4 = s.cr4;
    xcr0 = s.xcr0;
    dr = s.dr;
    dr6 = s.dr6;
    dr7 = s.dr7;
    efer = s.efer;
    star = s.star;
    lstar = s.lstar;
    cstar = s.cstar;
    sfmask = s.sfmask;
    kernel_gs_base = s.kernel_gs_base;
    sysenter_cs = s.sysenter_cs;
    sysenter_esp = s.sysenter_esp;
    sysenter_eip = s.sysenter_eip;
    pat = s.pat;
    tsc_aux = s.tsc_aux;
    tsc_offset = s.tsc - clock.tsc_ticks(clock.now());
    misc_enable = s.misc_enable;
    shadow = s.shadow;
    activity = s.activity;
    nmi_blocked = s.nmi_blocked;
    msrs = s.msrs;
    event = s.event;
    pending_db = s.pending_debug;
    fpu = s.fpu;
    pins.write_cr8(static_cast<uint8_t>(s.cr8));
    cpl = static_cast<uint8_t>(s.cpl());
    set_rflags(s.rflags);
    if (paging_changed)
        flush_tlb();
    update_mode();
}

} // namespace vtrace::soft
