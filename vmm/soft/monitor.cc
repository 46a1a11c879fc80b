#include "vmm/soft/monitor.h"

#include <algorithm>

#include "vmm/soft/block_cache.h"
#include "vmm/soft/cpu.h"
#include "vmm/soft/fp_image.h"
#include "vmm/soft/instruction_events.h"

namespace vtrace::soft {

Monitor::Monitor(Cpu& cpu, const ds::CpuModel& model) : cpu_(cpu), facility_(model, *this, *this) {}

void Monitor::raise_pmi() {
    cpu_.pins.raise_pmi();
    attention_ = true;
}

// ---------------------------------------------------------------------------------------------------------------------
// Guest memory

struct Monitor::Pieces {
    struct Piece {
        uint8_t* host;
        Gpa gpa;
        size_t size;
    } piece[2];
    unsigned count = 0;
};

/// By the supervisor's TLB.
uint8_t* Monitor::place(uint64_t linear, size_t size, bool for_write) const {
    const TlbEntry& entry =
        cpu_.tlbs[static_cast<unsigned>(MmuContext::supervisor)][linear >> 12 & (tlb_entries - 1)];
    const uint64_t last_page = (linear + (size - 1)) & ~page_mask;
    if (last_page != (linear & ~page_mask) || last_page != (for_write ? entry.write_tag : entry.read_tag))
        return nullptr;
    return reinterpret_cast<uint8_t*>(linear + entry.addend);
}

uint8_t* Monitor::fast(uint64_t linear, size_t size) {
    return place(linear, size, true);
}

bool Monitor::find(uint64_t linear, size_t size, bool for_write, Pieces& pieces) {
    const Fault fault = cpu_.fault; // no fault of the guest's comes of this
    bool found = true;
    while (size && found) {
        auto& piece = pieces.piece[pieces.count++];
        piece.size = std::min<uint64_t>(size, page_size - (linear & page_mask));
        Translation where;
        found = cpu_.translate(linear, for_write ? Access::write : Access::read, MmuContext::supervisor, where);
        piece.gpa = where.gpa;
        piece.host = found ? cpu_.memory.at(where.gpa, static_cast<unsigned>(piece.size)) : nullptr;
        found = piece.host;
        if (found)
            cpu_.remember_translation(linear, where, MmuContext::supervisor);
        linear += piece.size;
        if (!cpu_.long_mode())
            linear = static_cast<uint32_t>(linear);
        size -= piece.size;
    }
    cpu_.fault = fault;
    return found;
}

bool Monitor::read(uint64_t linear, void* bytes, size_t size) {
    if (const uint8_t* host = place(linear, size, false); VTRACE_LIKELY(host)) {
        std::memcpy(bytes, host, size);
        return true;
    }
    Pieces pieces;
    if (!find(linear, size, false, pieces))
        return false;
    auto* out = static_cast<uint8_t*>(bytes);
    for (const auto& piece : std::span(pieces.piece, pieces.count)) {
        std::memcpy(out, piece.host, piece.size);
        out += piece.size;
    }
    return true;
}

bool Monitor::write(uint64_t linear, const void* bytes, size_t size) {
    if (uint8_t* host = place(linear, size, true); VTRACE_LIKELY(host)) {
        std::memcpy(host, bytes, size);
        return true;
    }
    Pieces pieces;
    if (!find(linear, size, true, pieces))
        return false;
    const auto* in = static_cast<const uint8_t*>(bytes);
    for (const auto& piece : std::span(pieces.piece, pieces.count)) {
        std::memcpy(piece.host, in, piece.size);
        in += piece.size;
        const uint64_t invalidations = cpu_.blocks->invalidations();
        cpu_.memory_written(piece.gpa, static_cast<unsigned>(piece.size));
        attention_ |= cpu_.blocks->invalidations() != invalidations;
    }
    return true;
}

// ---------------------------------------------------------------------------------------------------------------------
// Branches

void Monitor::on_record(const ds::BtsRecord& record) {
    using namespace ds;
    if (BtsFlags::is_event(record.flags))
        return;
    Branch branch{record.from, record.to, record.from, Retired::branch | Retired::far | Retired::taken, cpu_.cpl};
    const bool by_instruction = BtsFlags::kind(record.flags) == BtsKind::branch;
    if (by_instruction && facility_.wants_branch_kinds()) {
        const uint64_t offset = record.from - cpu_.code_linear(cpu_.gpr[Cpu::rip_register]);
        const Block& block = *cpu_.block;
        for (unsigned i = 0; i < block.count; ++i)
            if (block.ops[i].offset == offset) {
                branch.events = block.events()[i] | Retired::taken;
                branch.next = record.from + block.ops[i].len;
            }
    }
    const bool mispredicted = facility_.branch(branch);
    branch_taken_ = true;
    // The budget that a taken branch gives back must not let it into another block, uncounted.
    attention_ |= facility_.wants_events();
    if (by_instruction) {
        taken_ = true;
        mispredicted_ = mispredicted;
    }
}

void Monitor::at_boundary() {
    facility_.set_cpl(cpu_.cpl);
    facility_.set_ia32e(cpu_.long_mode());
    attention_ = false;
    const bool watch = facility_.wants_branches() || facility_.wants_events();
    if (watch != watches_branches_) {
        watches_branches_ = watch;
        cpu_.watch_branches(watch);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Retirement

uint64_t Monitor::most_instructions(const Block* block) const {
    const uint64_t left = facility_.instructions_left();
    if (!facility_.wants_events())
        return left;
    return block && block->count < left ? block->count : 1;
}

void Monitor::forget_retired() { counted_ = cpu_.retired_ever(); }

/// What follows from whether branches were taken: only the last one can have been.
void Monitor::count_not_taken(const Block& block, std::span<ds::InstructionEvents> events) {
    using namespace ds;
    for (size_t i = 0; i < events.size(); ++i) {
        if (!(events[i] & Retired::branch))
            continue;
        if (i + 1 == events.size() && taken_) {
            events[i] |= Retired::taken | (mispredicted_ ? Retired::mispredicted : 0);
        } else if (events[i] & Retired::conditional) {
            const Op& op = block.ops[i];
            const uint64_t from = cpu_.gpr[Cpu::rip_register] + op.offset;
            if (Predictor::not_taken(from, from + op.len + static_cast<int64_t>(op.disp)))
                events[i] |= Retired::mispredicted;
        }
    }
}

void Monitor::after_block(const Block& block) {
    const uint64_t now = cpu_.retired_ever();
    const uint64_t retired = now - std::exchange(counted_, now);
    const bool taken = std::exchange(taken_, false);
    if (!retired || !facility_.counting())
        return;
    if (!facility_.wants_events()) {
        facility_.retire(retired);
    } else {
        ds::InstructionEvents events[max_block_instructions];
        const auto count = std::min<uint64_t>(retired, block.count);
        std::copy_n(block.events(), count, events);
        taken_ = taken;
        count_not_taken(block, {events, count});
        taken_ = false;
        facility_.retire(std::span<const ds::InstructionEvents>(events, count));
    }
    if (VTRACE_UNLIKELY(facility_.records_due()))
        take_pebs_records();
}

void Monitor::before_alone() {
    if (!facility_.counting() || facility_.instructions_left() != 1)
        return;
    const DataAddresses data = data_addresses(cpu_);
    before_ = {cpu_.code_linear(cpu_.rip), data.load, data.store};
}

void Monitor::take_pebs_records() {
    facility_.take_pebs_records([this](const ds::Event& event) {
        ds::PebsState state{.rflags = cpu_.rflags(),
                            .rip = cpu_.rip,
                            .gpr = {},
                            .eventing_ip = before_.rip,
                            .tsc = cpu_.clock.tsc_ticks(cpu_.time_at_boundary()) + cpu_.tsc_offset,
                            .xmm = std::span<const uint8_t, 256>(cpu_.fpu.fxsave.data() + Fx::xmm, 256)};
        std::copy_n(cpu_.gpr, state.gpr.size(), state.gpr.begin());
        // The only source modelled: a hit in the first-level cache. Both encodings, of loads and of stores, have 1 for it.
        if (event.precise_load || event.precise_store) {
            state.data_address = event.precise_load ? before_.load_address : before_.store_address;
            state.data_source = 1;
            state.latency = event.precise_load ? ds::load_latency_cycles : 0;
        }
        return state;
    });
}

} // namespace vtrace::soft
