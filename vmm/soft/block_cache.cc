#include "vmm/soft/block_cache.h"

#include <algorithm>
#include <cassert>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <new>

#include "vmm/soft/cpu.h"
#include "vmm/soft/decode.h"
#include "vmm/soft/fuse.h"

namespace vtrace::soft {
namespace {

/// Leaves a block that ended for want of room or page; the last op of such a block, not an instruction.
const Op* end_of_block(Cpu& cpu, const Op* op) {
    uint64_t next = cpu.truncate_rip(cpu.op_rip(op));
    if (Block* linked = link_of(op))
        return enter_block(cpu, linked, next);
    cpu.link_request = op;
    return cpu.leave_at(next, Leave::lookup);
}

} // namespace

BlockCache::BlockCache(GuestMemory& memory)
    : memory_(memory), pages_(memory.pages()), logged_pages_(memory.pages()) {}

BlockCache::~BlockCache() {
    for (auto& page : pages_)
        if (page)
            for (Block* block : page->lines)
                while (block)
                    std::free(std::exchange(block, block->next));
    free_graveyard();
}

Block* BlockCache::get(Cpu& cpu, Gpa gpa) {
    auto& page = pages_[memory_.page_index(gpa)];
    const unsigned offset = gpa & page_mask;
    if (page)
        for (Block* block = page->lines[offset / line_size]; block; block = block->next)
            if (block->gpa == gpa && block->mode == cpu.mode)
                return block;

    if (live_ >= max_blocks)
        invalidate_all();

    Op ops[max_block_instructions + 1];
    ds::InstructionEvents events[max_block_instructions];
    unsigned count = 0, length = 0;
    bool ends = false;
    Decoded previous{};
    const uint8_t* bytes = memory_.at(gpa & ~page_mask, page_size) + offset;
    const unsigned available = page_size - offset;
    while (count < max_block_instructions && length < available && !ends) {
        bool complete;
        unsigned window = std::min(available - length, max_instruction_length);
        Decoded decoded = decode_instruction({bytes + length, window}, cpu.mode, cpu.cpuid, complete);
        if (!complete)
            break;
        Op& op = ops[count] = decoded.op;
        place_op(op, length);
        length += op.len;
        ends = decoded.ends_block;
        events[count] = decoded.events;
        if (count > 0)
            if (Handler fused = fused_handler(previous, decoded))
                ops[count - 1].fn = fused;
        previous = decoded;
        ++count;
    }
    if (count == 0)
        return nullptr;
    if (!ends) {
        Op& end = ops[count];
        end = Op{};
        end.fn = end_of_block;
        place_op(end, length);
    }
    const unsigned op_count = count + !ends;
    for (unsigned i = 0; i < op_count; ++i)
        ops[i].left = static_cast<uint8_t>(count - i);

    auto* block = static_cast<Block*>(std::malloc(Block::bytes(op_count, count)));
    if (!block)
        throw std::bad_alloc();
    block->gpa = gpa;
    block->count = count;
    block->length = static_cast<uint16_t>(length);
    block->mode = cpu.mode;
    block->op_count = static_cast<uint8_t>(op_count);
    std::copy_n(ops, op_count, block->ops);
    std::copy_n(events, count, block->events());

    if (!page) {
        page = std::make_unique<CodePage>();
        // From now on stores to this page must come through the slow path.
        Gpa page_gpa = gpa & ~page_mask;
        for (Cpu* user : users_)
            for (auto& table : user->tlbs)
                for (TlbEntry& entry : table)
                    if ((entry.gpa & ~page_mask) == page_gpa)
                        entry.write_tag = tlb_no_tag;
    }
    block->next = std::exchange(page->lines[offset / line_size], block);
    for (unsigned line = offset / line_size; line <= (offset + length - 1) / line_size; ++line)
        page->used.set(line);
    ++live_;
    ++built_;
    log_code(cpu, gpa, length);
    return block;
}

bool BlockCache::is_code(Gpa gpa, unsigned size) const {
    const auto& page = pages_[memory_.page_index(gpa)];
    if (!page)
        return false;
    unsigned offset = gpa & page_mask;
    for (unsigned line = offset / line_size; line <= (offset + size - 1) / line_size; ++line)
        if (page->used.test(line))
            return true;
    return false;
}

void BlockCache::invalidate_page(Gpa gpa) {
    auto& page = pages_[memory_.page_index(gpa)];
    if (!page)
        return;
    for (Cpu* user : users_) {
        user->link_request = nullptr;
        for (JumpTable& table : user->jump_tables)
            table.drop_blocks_of_page(gpa);
    }
    for (Block* block : page->lines)
        for (; block; block = block->next) {
            graveyard_.push_back(block);
            --live_;
        }
    page.reset();
    ++invalidations_;
}

void BlockCache::invalidate_all() {
    for (uint64_t index = 0; index < pages_.size(); ++index)
        if (pages_[index]) {
            Gpa gpa = index * page_size;
            invalidate_page(gpa < memory_.low_size() ? gpa : gpa - memory_.low_size() + GuestMemory::high_start);
        }
}

void BlockCache::free_graveyard() {
    for (Block* block : graveyard_)
        std::free(block);
    graveyard_.clear();
}

void BlockCache::forget_log() {
    for (auto& page : logged_pages_)
        page.reset();
}

void BlockCache::log_code(Cpu& cpu, Gpa gpa, unsigned length) {
    if (!cpu.recording.sink)
        return;
    auto& logged = logged_pages_[memory_.page_index(gpa)];
    if (!logged)
        logged = std::make_unique<uint8_t[]>(page_size);
    const uint8_t* now = memory_.at(gpa & ~page_mask, page_size);
    const unsigned begin = gpa & page_mask, end = begin + length;
    uint8_t news[page_size];
    bool any = false;
    for (unsigned line = begin / line_size * line_size; line < end; line += line_size) {
        const unsigned from = std::max(line, begin), to = std::min(line + line_size, end);
        if (std::memcmp(&logged[from], now + from, to - from) == 0)
            continue;
        if (!any)
            std::memset(news, 0, sizeof news);
        any = true;
        std::memcpy(&logged[line], now + line, line_size);
        std::memcpy(news + line, now + line, line_size);
    }
    if (!any)
        return;
    const Recording& recording = cpu.recording;
    recording.sink->code_page(recording.vcpu, recording.store->position(), gpa & ~page_mask, news);
}

} // namespace vtrace::soft
