#include "vmm/soft/soft_vcpu.h"

#include <algorithm>

#include "vmm/soft/decode.h"
#include "vmm/soft/monitor.h"
#include "vmm/soft/system.h"

namespace vtrace::soft {
namespace {

constexpr uint64_t dr6_single_step = 1 << 14; // DR6.BS
/// Mappings remembered at most; beyond, all are forgotten and told again.
constexpr size_t max_logged_mappings = 1 << 20;

} // namespace

struct SoftVcpu::SingleBlock {
    alignas(Block) unsigned char storage[Block::bytes(2, 1)];
    Block* block() { return reinterpret_cast<Block*>(storage); }
};

SoftVcpu::SoftVcpu(GuestMemory& memory, CpuPins& pins, Clock& clock, const CpuidModel& cpuid,
                   std::shared_ptr<BlockCache> blocks)
    : cpu_(std::make_unique<Cpu>(memory, pins, clock, cpuid)),
      blocks_(blocks ? std::move(blocks) : std::make_shared<BlockCache>(memory)), single_(std::make_unique<SingleBlock>()) {
    cpu_->blocks = blocks_.get();
    blocks_->add(*cpu_);
}

void SoftVcpu::record(const Recording& recording) {
    cpu_->record_to(recording);
    // Code and mappings are told as blocks are built and pages found.
    logged_mappings_.clear();
    blocks_->forget_log();
    forget_memory();
}

void SoftVcpu::forget_memory() {
    cpu_->flush_tlb();
    blocks_->invalidate_all();
}

void SoftVcpu::set_breakpoints(std::span<const Gva> addresses) {
    if (std::ranges::equal(breakpoints_, addresses))
        return;
    breakpoints_.assign(addresses.begin(), addresses.end());
    cpu_->flush_tlb(); // of what it knows about their pages
}

SoftVcpu::~SoftVcpu() { blocks_->remove(*cpu_); }

ds::Facility* SoftVcpu::facility() const { return cpu_->monitor ? &cpu_->monitor->facility() : nullptr; }

CpuState SoftVcpu::state() const { return cpu_->state(); }
void SoftVcpu::set_state(const CpuState& state) { cpu_->set_state(state); }

std::optional<Gpa> SoftVcpu::translate(Gva address) const { return cpu_->peek(address); }

// ---------------------------------------------------------------------------------------------------------------------
// Finding code

void SoftVcpu::note_code_page(uint64_t address, const Translation& where) {
    Cpu& cpu = *cpu_;
    const Recording& recording = cpu.recording;
    if (!recording.sink || !cpu.memory.at(where.gpa))
        return;
    const bool global = !where.user;
    const uint64_t space = global ? 0 : cpu.cr3 & 0x000f'ffff'ffff'f000;
    const uint64_t page = address & ~page_mask;
    const Gpa gpa = where.gpa & ~page_mask;
    if (logged_mappings_.size() >= max_logged_mappings)
        logged_mappings_.clear();
    auto [known, added] = logged_mappings_.try_emplace({space, page}, gpa);
    if (!added && known->second == gpa)
        return;
    known->second = gpa;
    recording.sink->code_mapping(recording.vcpu, recording.store->position(), space, page, gpa, global);
}

void SoftVcpu::note_address_space() {
    Cpu& cpu = *cpu_;
    if (cpu.recording.store && cpu.recording.store->set_cr3(cpu.cr3))
        cpu.drain_records();
}

bool SoftVcpu::breakpoint_in_page(Gva page) const {
    return std::any_of(breakpoints_.begin(), breakpoints_.end(), [&](Gva at) { return (at & ~page_mask) == page; });
}

/// True: to be reported now.
bool SoftVcpu::at_breakpoint() {
    const Gva address = cpu_->code_linear(cpu_->rip);
    if (std::exchange(passing_, std::nullopt) == address)
        return false;
    if (std::find(breakpoints_.begin(), breakpoints_.end(), address) == breakpoints_.end())
        return false;
    passing_ = address;
    return true;
}

/// The block at cpu.rip, or null with cpu.leave: fault, or restart_single where it can't be a block.
Block* SoftVcpu::find_block() {
    Cpu& cpu = *cpu_;
    const uint64_t address = cpu.code_linear(cpu.rip);
    const uint64_t page = address & ~page_mask;
    const bool user = cpu.cpl == 3;
    CodeTlbEntry& entry = cpu.code_tlb[address >> 12 & (code_tlb_entries - 1)];
    if (entry.tag != (page | user)) {
        Translation where;
        if (!cpu.translate(address, Access::fetch, user ? MmuContext::user : MmuContext::supervisor, where)) {
            cpu.leave = Leave::fault;
            return nullptr;
        }
        note_code_page(address, where);
        entry = {page | user, (where.gpa & ~page_mask) | TlbMark::make(where.global, where.page_shift)};
        if (where.page_shift > 12)
            cpu.note_large_page(address, where.page_shift);
    }
    if (VTRACE_UNLIKELY(!breakpoints_.empty()) && breakpoint_in_page(page)) {
        // No block may run past one. Nothing else leads into the page: what is found here alone gets into the jump table,
        // and links stay within a page.
        cpu.link_request = nullptr;
        cpu.leave = Leave::restart_single;
        return nullptr;
    }
    const Gpa gpa = (entry.gpa & ~page_mask) | (address & page_mask);
    Block* block = cpu.memory.at(gpa) ? blocks_->get(cpu, gpa) : nullptr;
    if (!block) {
        cpu.leave = Leave::restart_single;
        return nullptr;
    }
    const bool global = entry.gpa & TlbMark::global;
    cpu.jump_table->insert(address, block, global);
    if (const Op* request = std::exchange(cpu.link_request, nullptr); request && cpu.code64()) {
        const uint64_t from = cpu.gpr[Cpu::rip_register] + request->offset;
        // A block's end may lie at its page's end: then what follows is on another page, and a link would outlive it.
        if (((cpu.block->gpa ^ gpa) & ~page_mask) == 0 && (((from - (request->len == 0)) ^ address) & ~page_mask) == 0)
            set_link(request, block);
    }
    return block;
}

/// Decodes the instruction at cpu.rip into the single block. False: its bytes can't be fetched, cpu.fault says why.
bool SoftVcpu::decode_single() {
    Cpu& cpu = *cpu_;
    const MmuContext context = cpu.cpl == 3 ? MmuContext::user : MmuContext::supervisor;
    uint8_t bytes[max_instruction_length];
    unsigned have = 0;
    Decoded decoded;
    // Bytes are fetched page by page, and the second page only if the instruction reaches into it.
    for (;;) {
        const uint64_t address = cpu.code_linear(cpu.rip + have);
        Translation where;
        if (!cpu.translate(address, Access::fetch, context, where))
            return false;
        note_code_page(address, where);
        const unsigned part = std::min<uint64_t>(max_instruction_length - have, page_size - (address & page_mask));
        if (const uint8_t* host = cpu.memory.at(where.gpa, part)) {
            std::memcpy(bytes + have, host, part);
            blocks_->log_code(cpu, where.gpa, part);
        } else {
            std::memset(bytes + have, 0xff, part); // nobody answers
        }
        have += part;
        bool complete;
        decoded = decode_instruction({bytes, have}, cpu.mode, cpu.cpuid, complete);
        if (complete)
            break;
    }
    Block* block = single_->block();
    block->next = nullptr;
    block->gpa = 0;
    block->count = 1;
    block->length = decoded.op.len;
    block->mode = cpu.mode;
    block->op_count = 2;
    block->events()[0] = decoded.events;
    block->ops[0] = decoded.op;
    place_op(block->ops[0], 0);
    block->ops[0].left = 1;
    block->ops[1] = Op{};
    block->ops[1].fn = [](Cpu& c, const Op* op) -> const Op* {
        return c.leave_at(c.truncate_rip(c.op_rip(op)), Leave::lookup);
    };
    block->ops[1].offset = decoded.op.len;
    return true;
}

// ---------------------------------------------------------------------------------------------------------------------
// Executing

void SoftVcpu::execute_block(Block* block) {
    Cpu& cpu = *cpu_;
    cpu.link_request = nullptr;
    cpu.leave = Leave::lookup;
    cpu.budget -= block->count;
    cpu.block = block;
    cpu.gpr[Cpu::rip_register] = cpu.rip;
    const Op* op = block->ops;
    while (op)
        op = op->fn(cpu, op);
    if (VTRACE_UNLIKELY(cpu.monitor != nullptr))
        cpu.monitor->after_block(*block);
}

/// Executes the instruction at cpu.rip alone; device accesses and stores to code are then in order. False: it faulted.
bool SoftVcpu::run_alone() {
    Cpu& cpu = *cpu_;
    if (!decode_single()) {
        cpu.leave = Leave::fault;
        return false;
    }
    // With a budget of just this instruction no branch goes on into another block.
    const int64_t rest = cpu.budget - 1;
    cpu.budget = 1;
    // Time of a device access counts from run_budget: keep the difference.
    const int64_t run_budget = cpu.run_budget;
    cpu.run_budget = run_budget - rest;
    if (cpu.monitor)
        cpu.monitor->before_alone();
    cpu.single = true;
    execute_block(single_->block());
    cpu.single = false;
    cpu.link_request = nullptr;
    cpu.run_budget = run_budget;
    cpu.budget += rest;
    return cpu.leave != Leave::fault;
}

/// One instruction with everything that can happen around it: shadows, breakpoints, single-step.
void SoftVcpu::execute_single() {
    Cpu& cpu = *cpu_;
    if (VTRACE_UNLIKELY(!breakpoints_.empty()) && at_breakpoint()) {
        cpu.leave = Leave::breakpoint;
        return;
    }
    if (cpu.event.by_instruction()) // it is executed now
        cpu.event = {};
    const InterruptShadow shadow = std::exchange(cpu.shadow, InterruptShadow::none);
    const bool resume = cpu.system_flags & Rflags::rf;
    if ((cpu.dr7 & 0xff) && !resume && shadow != InterruptShadow::mov_ss) {
        if (uint64_t hits = code_breakpoints(cpu, cpu.code_linear(cpu.rip))) {
            cpu.dr6 = (cpu.dr6 & ~uint64_t{0xf}) | hits;
            cpu.fault = Fault{Vector::db, false, 0, 0};
            cpu.leave = Leave::fault;
            return;
        }
    }
    const bool trap_flag = cpu.system_flags & Rflags::tf;
    const bool traps_branches = cpu.monitor && cpu.monitor->facility().steps_on_branches();
    if (traps_branches)
        cpu.monitor->take_branch_taken();
    const uint64_t retired_before = cpu.retired_in_run();
    cpu.system_flags &= ~Rflags::rf; // holds for one instruction; IRET may set it for the next
    cpu.no_step_trap = false;
    if (!run_alone()) {
        if (resume)
            cpu.system_flags |= Rflags::rf;
        cpu.pending_db = 0; // it will be executed again, and meet them again
        return;
    }
    const bool retired = cpu.retired_in_run() != retired_before;
    if (!retired)
        return;
    if (cpu.shadow == InterruptShadow::mov_ss)
        return; // debug traps wait for the next instruction
    uint64_t bits = std::exchange(cpu.pending_db, 0);
    if (trap_flag && !cpu.no_step_trap && (!traps_branches || cpu.monitor->take_branch_taken()))
        bits |= dr6_single_step;
    if (bits && cpu.leave != Leave::shutdown && cpu.leave != Leave::unsupported) {
        cpu.dr6 |= bits;
        cpu.fault = Fault{Vector::db, false, 0, 0};
        deliver_event(cpu, EventKind::exception, cpu.fault, cpu.code_linear(cpu.rip));
    }
}

/// False: triple fault or unsupported.
bool SoftVcpu::deliver_interrupt(uint8_t vector) {
    Cpu& cpu = *cpu_;
    cpu.activity = ActivityState::running;
    cpu.clock.set_now(cpu.run_started + cpu.retired_in_run());
    cpu.record(cpu.clock.now(), cpu.run_retired_base + cpu.retired_in_run(), ds::BtsFlags::make(ds::BtsKind::time));
    return deliver_event(cpu, EventKind::external_interrupt, Fault{vector, false, 0, 0}, cpu.code_linear(cpu.rip));
}

bool SoftVcpu::deliver_nmi() {
    Cpu& cpu = *cpu_;
    cpu.activity = ActivityState::running;
    const bool delivered =
        deliver_event(cpu, EventKind::nmi, Fault{Vector::nmi, false, 0, 0}, cpu.code_linear(cpu.rip));
    cpu.nmi_blocked = true; // also if it became a double fault
    return delivered;
}

/// Cpu::event, which isn't by_instruction(). False: as above.
bool SoftVcpu::deliver_pending_event() {
    Cpu& cpu = *cpu_;
    const PendingEvent event = std::exchange(cpu.event, {});
    cpu.activity = ActivityState::running;
    switch (event.kind) {
    case PendingEvent::Kind::none:
    case PendingEvent::Kind::software_interrupt:
        return true;
    case PendingEvent::Kind::external_interrupt:
        return deliver_interrupt(event.vector);
    case PendingEvent::Kind::nmi:
        return deliver_nmi();
    case PendingEvent::Kind::exception:
        return deliver_event(cpu, EventKind::exception,
                             Fault{event.vector, event.has_error_code, event.error_code, cpu.cr2},
                             cpu.code_linear(cpu.rip));
    }
    return true;
}

/// Interrupts and the like, in the order of SDM vol. 3, table 6-2; then how to go on.
SoftVcpu::Boundary SoftVcpu::at_boundary() {
    Cpu& cpu = *cpu_;
    if (cpu.activity == ActivityState::shutdown) {
        cpu.leave = Leave::shutdown;
        return Boundary::ended;
    }
    if (VTRACE_UNLIKELY(cpu.event.kind != PendingEvent::Kind::none)) {
        if (cpu.event.by_instruction())
            return Boundary::execute_single;
        const bool waits = cpu.event.kind == PendingEvent::Kind::nmi &&
                           (cpu.nmi_blocked || cpu.shadow == InterruptShadow::mov_ss);
        if (!waits && !deliver_pending_event())
            return Boundary::ended;
    }
    // SYSCALL and SYSRET decide by the flags that they load: a trap may be due here outside execute_single().
    // (After MOV SS they wait for the next instruction.)
    if (cpu.pending_db && cpu.shadow != InterruptShadow::mov_ss) {
        const uint64_t bits = std::exchange(cpu.pending_db, 0);
        cpu.dr6 |= bits;
        if (!deliver_event(cpu, EventKind::exception, Fault{Vector::db, false, 0, 0}, cpu.code_linear(cpu.rip)))
            return Boundary::ended;
    }
    if (hold_interrupts_) {
        // They wait.
    } else if (cpu.pins.nmi_pending() && !cpu.nmi_blocked && cpu.shadow != InterruptShadow::mov_ss) {
        cpu.pins.acknowledge_nmi();
        if (!deliver_nmi())
            return Boundary::ended;
    } else if ((cpu.system_flags & Rflags::if_) && cpu.shadow == InterruptShadow::none && cpu.pins.interrupt_pending()) {
        cpu.clock.set_now(cpu.run_started + cpu.retired_in_run());
        if (!deliver_interrupt(cpu.pins.acknowledge_interrupt()))
            return Boundary::ended;
    }
    if (cpu.activity != ActivityState::running)
        return Boundary::halted;
    const bool alone = (cpu.system_flags & (Rflags::tf | Rflags::rf)) || cpu.shadow != InterruptShadow::none ||
                       (cpu.dr7 & 0xff);
    return alone ? Boundary::execute_single : Boundary::execute;
}

/// Takes from the budget what may not retire before the guest's counters are looked at, and returns it. What a counter may
/// take a record of is executed alone: then `block` becomes null.
int64_t SoftVcpu::hold_back(Block*& block) {
    Cpu& cpu = *cpu_;
    if (!cpu.monitor || !cpu.monitor->facility().counting())
        return 0;
    const uint64_t most = cpu.monitor->most_instructions(block);
    if (most == 1)
        block = nullptr;
    if (most >= static_cast<uint64_t>(cpu.budget))
        return 0;
    const int64_t held_back = cpu.budget - static_cast<int64_t>(most);
    cpu.budget -= held_back;
    cpu.run_budget -= held_back;
    return held_back;
}

VcpuRun SoftVcpu::run(uint64_t budget) {
    Cpu& cpu = *cpu_;
    cpu.run_started = cpu.clock.now();
    cpu.run_budget = cpu.budget = static_cast<int64_t>(std::min<uint64_t>(budget, INT64_MAX));
    cpu.touched_device = false;

    VcpuExit exit = VcpuExit::budget;
    for (;;) {
        blocks_->free_graveyard();
        if (cpu.stop_requested.exchange(false, std::memory_order_relaxed)) {
            exit = VcpuExit::stopped;
            break;
        }
        note_address_space();
        const Boundary boundary = at_boundary();
        if (boundary == Boundary::ended) {
            exit = cpu.leave == Leave::unsupported ? VcpuExit::unsupported : VcpuExit::shutdown;
            break;
        }
        if (boundary == Boundary::halted) {
            exit = VcpuExit::halted;
            break;
        }
        if (cpu.touched_device) {
            exit = VcpuExit::device;
            break;
        }
        if (cpu.budget <= 0)
            break;
        if (cpu.monitor)
            cpu.monitor->at_boundary();

        cpu.leave = Leave::lookup;
        Block* block = boundary == Boundary::execute ? find_block() : nullptr;
        const int64_t held_back = hold_back(block);
        if (block && block->count <= static_cast<uint64_t>(cpu.budget))
            execute_block(block);
        else if (cpu.leave != Leave::fault)
            execute_single();
        if (cpu.leave == Leave::restart_single)
            execute_single();
        cpu.budget += held_back;
        cpu.run_budget += held_back;
        if (cpu.leave == Leave::breakpoint) {
            exit = VcpuExit::breakpoint;
            break;
        }

        const bool faulted = cpu.leave == Leave::fault;
        if (faulted) // if that fails, `leave` says how
            deliver_event(cpu, EventKind::exception, cpu.fault, cpu.code_linear(cpu.rip));
        if (cpu.leave == Leave::halted)
            cpu.activity = ActivityState::halted;
        if (cpu.leave == Leave::shutdown) {
            exit = VcpuExit::shutdown;
            break;
        }
        if (cpu.leave == Leave::unsupported) {
            exit = VcpuExit::unsupported;
            break;
        }
        if (faulted && hold_interrupts_)
            break;
    }
    VcpuRun result{exit, cpu.retired_in_run(), {}};
    if (exit == VcpuExit::shutdown) {
        cpu.activity = ActivityState::shutdown;
        result.detail = cpu.detail;
    } else if (exit == VcpuExit::unsupported) {
        result.detail = cpu.detail;
    }
    cpu.clock.set_now(cpu.run_started + result.retired);
    cpu.run_retired_base += result.retired;
    cpu.run_started += result.retired;
    cpu.run_budget = cpu.budget;
    return result;
}

} // namespace vtrace::soft
