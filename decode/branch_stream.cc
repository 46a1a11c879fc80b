#include "decode/branch_stream.h"

#include <algorithm>

#include "decode/branch_line.h"

namespace vtrace {
namespace {

constexpr unsigned table_bits = 15;
constexpr uint64_t kernel_epoch_branches = 4u << 20;
constexpr uint64_t max_block_bytes = 64u << 10; // of straight-line code: more between two branches is not credible
constexpr uint64_t space_mask = 0x000f'ffff'ffff'f000; // CR3 without PCID and flags

size_t slot(uint64_t address) {
    return address * 0x9e37'79b9'7f4a'7c15 >> (64 - table_bits);
}

} // namespace

BranchStream::BranchStream(const TraceReader& reader, unsigned vcpu, uint64_t first, uint64_t last)
    : reader_(reader), vcpu_(vcpu), cursor_(reader.records(vcpu, first, last, true)), classes_(1u << table_bits),
      blocks_(1u << table_bits), in_user_(user_branches_only(reader)), start_known_(in_user_ || first == 0) {
    ZydisDecoderInit(&decoders_[0], ZYDIS_MACHINE_MODE_LONG_64, ZYDIS_STACK_WIDTH_64);
    ZydisDecoderInit(&decoders_[1], ZYDIS_MACHINE_MODE_LONG_COMPAT_32, ZYDIS_STACK_WIDTH_32);
    ZydisDecoderInit(&decoders_[2], ZYDIS_MACHINE_MODE_LONG_COMPAT_16, ZYDIS_STACK_WIDTH_16);
}

const StreamBranch* BranchStream::next() {
    const TraceRecord* record = cursor_.next();
    for (; record && !record->is_branch(); record = cursor_.next())
        note(*record);
    if (!record)
        return nullptr;
    if (next_number_ && record->number != *next_number_)
        gap_ = true;
    next_number_ = record->number + 1;
    if (record->number % kernel_epoch_branches == 0)
        ++kernel_epoch_;

    branch_.record = *record;
    branch_.cr3 = cr3();
    branch_.space = cr3() & space_mask;
    if (branch_.event_time != cursor_.state().time) {
        branch_.event_time = cursor_.state().time;
        branch_.since_event = 0;
    }
    classify(*record);
    set_privileges(*record);
    const bool fits = !gap_ && record->from >= last_to_ && record->from - last_to_ <= max_block_bytes;
    branch_.after_gap = gap_;
    branch_.block_start = fits ? last_to_ : record->from;
    count_instructions(*record);
    branch_.since_event += branch_.instructions;
    last_to_ = record->to;
    gap_ = false;
    return &branch_;
}

void BranchStream::note(const TraceRecord& event) {
    if (event.is_window())
        gap_ = true;
    else if (event.kind == ds::BtsKind::cr3)
        ++user_epoch_;
}

void BranchStream::classify(const TraceRecord& record) {
    if (record.kind != ds::BtsKind::branch) {
        branch_.instruction = classifier_.classify({}, to_bts_record(record));
        return;
    }
    Class& known = classes_[slot(record.from)];
    const bool fresh = known.epoch == epoch(record.from) && known.from == record.from;
    if (!fresh || (known.instruction.direct && known.instruction.target(record.from) != record.to)) {
        std::array<uint8_t, max_instruction> code;
        const size_t bytes = reader_.code_at(vcpu_, record.position, cr3(), record.from, code);
        known = {record.from, epoch(record.from),
                 classifier_.classify(std::span(code).first(bytes), to_bts_record(record))};
    }
    branch_.instruction = known.instruction;
}

void BranchStream::set_privileges(const TraceRecord& record) {
    if (!upper_half(record.from) && !in_user_ && !start_known_)
        in_user_ = first_user_branch(reader_, vcpu_, record.number + 1) <= record.number;
    if (!upper_half(record.from))
        start_known_ = true;
    const auto of = [this](uint64_t address) {
        return in_user_ && !upper_half(address) ? Privilege::user : Privilege::kernel;
    };
    branch_.from_privilege = of(record.from);
    in_user_ = in_user_ || enters_user(record.from, record.to);
    branch_.to_privilege = of(record.to);
}

void BranchStream::count_instructions(const TraceRecord& record) {
    const uint64_t start = branch_.block_start;
    const uint32_t itself = branch_.delivered() ? 0 : 1;
    if (start == record.from) {
        branch_.instructions = itself;
        return;
    }
    Block& block = blocks_[slot(start * 3 + record.from)];
    if (block.epoch != epoch(start) || block.start != start || block.from != record.from) {
        const auto count = decode_block(record.position, start, record.from);
        block = {start, record.from, epoch(start), count.value_or(0), count.has_value()};
    }
    branch_.instructions = block.known ? block.instructions + itself : 0;
    unknown_blocks_ += !block.known;
}

/// Instructions in [start, from). A trace does not say in which mode code ran: it is the one in which an instruction
/// begins at `from`.
std::optional<uint32_t> BranchStream::decode_block(uint64_t position, uint64_t start, uint64_t from) const {
    for (const ZydisDecoder& decoder : decoders_) {
        if (auto count = decode_block_as(decoder, position, start, from))
            return count;
        if (start >> 32)
            break; // 64-bit code, and nothing else
    }
    return std::nullopt;
}

std::optional<uint32_t> BranchStream::decode_block_as(const ZydisDecoder& decoder, uint64_t position, uint64_t start,
                                                      uint64_t from) const {
    std::array<uint8_t, 256> code;
    size_t at = 0, known = 0;
    uint32_t count = 0;
    for (uint64_t address = start; address < from; ++count) {
        if (known - at < max_instruction && (count == 0 || known == code.size())) {
            known = reader_.code_at(vcpu_, position, cr3(), address, code);
            at = 0;
        }
        ZydisDecodedInstruction instruction;
        if (!ZYAN_SUCCESS(ZydisDecoderDecodeInstruction(&decoder, nullptr, code.data() + at, known - at, &instruction)))
            return std::nullopt;
        at += instruction.length;
        address += instruction.length;
        if (address > from)
            return std::nullopt;
    }
    return count;
}

} // namespace vtrace
