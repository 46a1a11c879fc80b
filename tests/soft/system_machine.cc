#include "tests/soft/system_machine.h"

#include <stdexcept>

#include "vmm/soft/decode.h"

namespace vtrace::soft {
namespace {

constexpr Gpa pml4 = 0x1000, pdpt = 0x2000, directory = 0x3000, table = 0x4000;
constexpr uint64_t present = 1, writable = 2, user = 4;

/// Flat segments: base 0, limit 4 GiB.
constexpr uint64_t code64_0 = 0x00af'9b00'0000'ffff, data_0 = 0x00cf'9300'0000'ffff, code32_0 = 0x00cf'9b00'0000'ffff,
                   code32_3 = 0x00cf'fb00'0000'ffff, data_3 = 0x00cf'f300'0000'ffff, code64_3 = 0x00af'fb00'0000'ffff,
                   absent_3 = 0x00cf'7300'0000'ffff, conforming64_0 = 0x00af'9f00'0000'ffff,
                   conforming32_0 = 0x00cf'9f00'0000'ffff;
constexpr uint16_t tss_limit = 0x67 + 0x20; // with a bitmap for the ports below 0xf8

template <class T>
T must(Result<T> result) {
    if (!result)
        throw std::runtime_error(result.error().message);
    return std::move(*result);
}

const Op* end_of_test(Cpu& cpu, const Op* op) {
    return cpu.leave_at(cpu.truncate_rip(cpu.op_rip(op)), Leave::boundary);
}

} // namespace

SystemMachine::SystemMachine(TestMode mode, std::string_view model)
    : mode_(mode), memory_(must(GuestMemory::create(1 << 21))), pins_(std::make_unique<Pins>()),
      model_(must(CpuidModel::by_name(model))), cpu_(std::make_unique<Cpu>(memory_, *pins_, clock_, model_)),
      block_(64), area_(1024) {
    cursor_ = {area_.data(), area_.data() + area_.size(), sizeof(ds::BtsRecord)};
    cpu_->bts = &cursor_;
    cpu_->gdtr = {gdt, 0xff};
    if (mode == TestMode::long64)
        build_long_mode();
    else if (mode == TestMode::protected32)
        build_protected_mode();
    else
        build_real_mode();
}

SystemMachine::~SystemMachine() = default;

void SystemMachine::build_long_mode() {
    write(pml4, pdpt | present | writable | user);
    write(pdpt, directory | present | writable | user);
    write(directory, table | present | writable | user);
    for (unsigned i = 0; i < 512; ++i)
        write(table + i * 8, i * page_size | present | writable | user);
    set_descriptor(Sel::code, code64_0);
    set_descriptor(Sel::data, data_0);
    set_descriptor(Sel::code32, code32_0);
    set_descriptor(Sel::user_code32, code32_3);
    set_descriptor(Sel::user_data, data_3);
    set_descriptor(Sel::user_code, code64_3);
    set_descriptor(Sel::absent_data, absent_3);
    set_descriptor(Sel::tss, uint64_t{tss_limit} | tss << 16 | 0x89ull << 40);
    set_descriptor(Sel::conforming, conforming64_0);
    write(tss + 4, inner_stack);
    write(tss + 36, ist1_stack);
    write<uint16_t>(tss + 0x66, 0x68);
    Cpu& cpu = *cpu_;
    cpu.cr0 = Cr0::pe | Cr0::pg | Cr0::ne | Cr0::et | Cr0::wp;
    cpu.cr3 = pml4;
    cpu.cr4 = Cr4::pae | Cr4::pge;
    cpu.efer = Efer::lme | Efer::lma | Efer::sce;
    cpu.idtr = {idt, 0xfff};
    cpu.tr = {tss, tss_limit, Sel::tss, 0x8b};
    for (unsigned vector = 0; vector < 256; ++vector)
        set_gate(vector, 0xe, 0);
    unmap(absent_page);
    set_level(0);
}

void SystemMachine::build_protected_mode() {
    set_descriptor(Sel::code, code32_0);
    set_descriptor(Sel::data, data_0);
    set_descriptor(Sel::user_code, code32_3);
    set_descriptor(Sel::user_data, data_3);
    set_descriptor(Sel::absent_data, absent_3);
    set_descriptor(Sel::tss, uint64_t{tss_limit} | tss << 16 | 0x89ull << 40);
    set_descriptor(Sel::conforming, conforming32_0);
    write<uint32_t>(tss + 4, inner_stack);
    write<uint16_t>(tss + 8, Sel::data);
    write<uint16_t>(tss + 0x66, 0x68);
    Cpu& cpu = *cpu_;
    cpu.cr0 = Cr0::pe | Cr0::ne | Cr0::et;
    cpu.idtr = {idt, 0x7ff};
    cpu.tr = {tss, tss_limit, Sel::tss, 0x8b};
    for (unsigned vector = 0; vector < 256; ++vector)
        set_gate(vector, 0xe, 0);
    set_level(0);
}

void SystemMachine::build_real_mode() {
    Cpu& cpu = *cpu_;
    cpu.idtr = {0, 0x3ff};
    cpu.segments[CS] = {0, 0xffff, 0, 0x9b};
    for (unsigned vector = 0; vector < 256; ++vector)
        write<uint32_t>(vector * 4, (0x3000u << 16) | (vector * handler_stride));
    cpu.gpr[RSP] = 0x7000;
    cpu.update_mode();
}

void SystemMachine::set_level(unsigned level) {
    Cpu& cpu = *cpu_;
    auto load = [&](Seg seg, uint16_t selector) {
        const auto low = read<uint64_t>(gdt + selector);
        cpu.segments[seg] = {0, 0xffff'ffff, static_cast<uint16_t>(selector | level),
                             static_cast<uint16_t>(low >> 40 & 0xf0ff)};
    };
    for (Seg seg : {ES, SS, DS, FS, GS})
        load(seg, level ? Sel::user_data : Sel::data);
    load(CS, level ? Sel::user_code : Sel::code);
    cpu.cpl = static_cast<uint8_t>(level);
    cpu.gpr[RSP] = stack_top;
    cpu.update_mode();
}

void SystemMachine::set_user32() {
    set_level(3);
    cpu_->segments[CS] = {0, 0xffff'ffff, Sel::user_code32 | 3, 0xc0fb};
    cpu_->update_mode();
}

void SystemMachine::set_gate(unsigned vector, unsigned type, unsigned dpl, unsigned ist, uint16_t selector) {
    const uint64_t offset = handler(vector);
    const uint64_t low = (offset & 0xffff) | uint64_t{selector} << 16 | uint64_t{ist} << 32 | uint64_t{type} << 40 |
                         uint64_t{dpl} << 45 | 1ull << 47 | (offset >> 16 & 0xffff) << 48;
    if (mode_ == TestMode::long64) {
        write(idt + vector * 16, low);
        write(idt + vector * 16 + 8, offset >> 32);
    } else {
        write(idt + vector * 8, low);
    }
}

void SystemMachine::unmap(uint64_t address) {
    write<uint64_t>(table + (address >> 12) * 8, 0);
    cpu_->flush_tlb();
}

bool SystemMachine::step(std::initializer_list<int> bytes) {
    Cpu& cpu = *cpu_;
    std::vector<uint8_t> code(bytes.begin(), bytes.end());
    bool complete;
    Decoded decoded = decode_instruction(code, cpu.mode, model_, complete);
    if (!complete || (decoded.op.fn != raise_undefined && decoded.op.len != code.size()))
        throw std::runtime_error("a test's instruction has another length");
    place_op(decoded.op, 0);
    decoded.op.left = 1;
    auto* block = reinterpret_cast<Block*>(block_.data());
    block->count = 1;
    block->mode = cpu.mode;
    block->ops[0] = decoded.op;
    block->ops[1] = Op{};
    block->ops[1].fn = end_of_test;
    block->ops[1].offset = decoded.op.len;
    cpu.block = block;
    cpu.rip = mode_ == TestMode::real ? 0x1000 : code_at;
    cpu.gpr[Cpu::rip_register] = cpu.rip;
    cpu.run_budget = 1;
    cpu.budget = 0;
    cpu.leave = Leave::lookup;
    for (const Op* next = block->ops; next;)
        next = next->fn(cpu, next);
    return cpu.leave == Leave::boundary || cpu.leave == Leave::lookup || cpu.leave == Leave::halted;
}

bool SystemMachine::faults(std::initializer_list<int> bytes, uint8_t vector) {
    return !step(bytes) && cpu_->leave == Leave::fault && cpu_->fault.vector == vector && !cpu_->fault.has_error_code;
}

bool SystemMachine::faults(std::initializer_list<int> bytes, uint8_t vector, uint32_t error_code) {
    return !step(bytes) && cpu_->leave == Leave::fault && cpu_->fault.vector == vector && cpu_->fault.has_error_code &&
           cpu_->fault.error_code == error_code;
}

std::vector<ds::BtsRecord> SystemMachine::records() const {
    const ds::BtsRecord* first = area_.data();
    return {first, static_cast<const ds::BtsRecord*>(cursor_.index)};
}

} // namespace vtrace::soft
