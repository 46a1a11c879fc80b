#include "tests/soft/fp_machine.h"

namespace vtrace::soft {
namespace {

constexpr Gpa pml4 = 0x1000, pdpt = 0x2000, directory = 0x3000, table = 0x4000, data_gpa = 0x10000;
constexpr uint64_t present = 1, writable = 2, user = 4;

template <class T>
T must(Result<T> result) {
    if (!result)
        throw std::runtime_error(result.error().message);
    return std::move(*result);
}

const Op* end_of_test(Cpu& cpu, const Op*) {
    return cpu.leave_at(0, Leave::boundary);
}

} // namespace

FpMachine::FpMachine(std::string_view model)
    : memory_(must(GuestMemory::create(1 << 20))), model_(must(CpuidModel::by_name(model))),
      cpu_(std::make_unique<Cpu>(memory_, pins_, clock_, model_)), block_(64) {
    auto entry = [&](Gpa at, uint64_t index, uint64_t value) {
        std::memcpy(memory_.at(at + index * 8, 8), &value, sizeof value);
    };
    entry(pml4, 0, pdpt | present | writable | user);
    entry(pdpt, data >> 30 & 511, directory | present | writable | user);
    entry(directory, data >> 21 & 511, table | present | writable | user);
    for (unsigned i = 0; i < data_pages; i++)
        entry(table, i, (data_gpa + i * page_size) | present | writable | user);
    entry(table, data_pages + 1, (data_gpa + data_pages * page_size) | present | user);
    Cpu& cpu = *cpu_;
    cpu.cr0 = Cr0::pe | Cr0::pg | Cr0::ne | Cr0::mp | Cr0::et | Cr0::wp;
    cpu.cr3 = pml4;
    cpu.cr4 = Cr4::pae | Cr4::osfxsr | Cr4::osxmmexcpt | Cr4::osxsave;
    cpu.efer = Efer::lme | Efer::lma;
    cpu.xcr0 = 3;
    set_mode(CodeMode::bits64);
}

FpMachine::~FpMachine() = default;

void FpMachine::set_mode(CodeMode mode) {
    constexpr uint16_t flat =
        SegAttr::s | SegAttr::p | SegAttr::write_or_read | SegAttr::accessed | SegAttr::g | SegAttr::db;
    for (Segment& segment : cpu_->segments)
        segment = {0, ~0u, 8, flat};
    uint16_t size = mode == CodeMode::bits64 ? SegAttr::l : mode == CodeMode::bits32 ? SegAttr::db : 0;
    cpu_->segments[CS].attributes = static_cast<uint16_t>((flat & ~SegAttr::db) | SegAttr::code | size);
    cpu_->update_mode();
}

uint8_t* FpMachine::memory(uint64_t linear) {
    return memory_.at(data_gpa + (linear - data));
}

Op FpMachine::decode(std::span<const uint8_t> bytes, CodeMode mode) {
    bool complete;
    Decoded decoded = decode_instruction(bytes, mode, model_, complete);
    if (!complete)
        throw std::runtime_error("incomplete instruction in a test");
    place_op(decoded.op, 0);
    decoded.op.left = 1;
    return decoded.op;
}

Outcome FpMachine::run(const Op& op) {
    auto* block = reinterpret_cast<Block*>(block_.data());
    block->count = 1;
    block->mode = cpu_->mode;
    block->ops[0] = op;
    block->ops[1] = Op{};
    block->ops[1].fn = end_of_test;
    cpu_->block = block;
    cpu_->gpr[Cpu::rip_register] = data;
    cpu_->leave = Leave::lookup;
    for (const Op* next = block->ops; next;)
        next = next->fn(*cpu_, next);
    if (cpu_->leave == Leave::boundary)
        return {};
    if (cpu_->leave != Leave::fault)
        throw std::runtime_error("an instruction left its block");
    return {true, cpu_->fault};
}

Outcome FpMachine::run(std::initializer_list<int> bytes) {
    std::vector<uint8_t> code(bytes.begin(), bytes.end());
    return run(code, cpu_->mode);
}

} // namespace vtrace::soft
