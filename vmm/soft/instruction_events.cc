#include "vmm/soft/instruction_events.h"

#include <algorithm>

#include "vmm/soft/decode.h"

namespace vtrace::soft {
namespace {

using ds::InstructionEvents;

bool is_access(const ZydisDecodedOperand& operand) {
    return operand.type == ZYDIS_OPERAND_TYPE_MEMORY && operand.mem.type == ZYDIS_MEMOP_TYPE_MEM;
}

/// Hints name an address but load nothing that retires.
bool only_names_address(const ZydisDecodedInstruction& instruction) {
    switch (instruction.meta.category) {
    case ZYDIS_CATEGORY_NOP:
    case ZYDIS_CATEGORY_WIDENOP:
    case ZYDIS_CATEGORY_PREFETCH:
        return true;
    default:
        break;
    }
    switch (instruction.mnemonic) {
    case ZYDIS_MNEMONIC_CLFLUSH:
    case ZYDIS_MNEMONIC_CLFLUSHOPT:
    case ZYDIS_MNEMONIC_INVLPG:
        return true;
    default:
        return false;
    }
}

InstructionEvents branch_events(const ZydisDecodedInstruction& instruction, const ZydisDecodedOperand* operands) {
    using namespace ds::Retired;
    switch (instruction.meta.category) {
    case ZYDIS_CATEGORY_COND_BR:
        return branch | conditional;
    case ZYDIS_CATEGORY_UNCOND_BR:
    case ZYDIS_CATEGORY_CALL: {
        if (instruction.meta.branch_type == ZYDIS_BRANCH_TYPE_FAR)
            return branch | far;
        const bool direct = operands[0].type == ZYDIS_OPERAND_TYPE_IMMEDIATE;
        const bool call = instruction.meta.category == ZYDIS_CATEGORY_CALL;
        return static_cast<InstructionEvents>(branch | (call ? near_call : 0) | (direct ? 0 : indirect));
    }
    case ZYDIS_CATEGORY_RET:
        // IRET is of this category, too.
        return instruction.mnemonic == ZYDIS_MNEMONIC_RET && instruction.meta.branch_type != ZYDIS_BRANCH_TYPE_FAR
                   ? branch | near_return
                   : branch | far;
    case ZYDIS_CATEGORY_SYSCALL:
    case ZYDIS_CATEGORY_SYSRET:
    case ZYDIS_CATEGORY_INTERRUPT:
        return branch | far;
    default:
        return 0;
    }
}

/// A register's value, as wide as it is.
uint64_t value_of(const Cpu& cpu, ZydisRegister reg, uint64_t next_rip) {
    switch (ZydisRegisterGetClass(reg)) {
    case ZYDIS_REGCLASS_GPR16:
        return cpu.get<uint16_t>(gpr_offset(reg));
    case ZYDIS_REGCLASS_GPR32:
        return cpu.get<uint32_t>(gpr_offset(reg));
    case ZYDIS_REGCLASS_GPR64:
        return cpu.get<uint64_t>(gpr_offset(reg));
    case ZYDIS_REGCLASS_IP:
        return next_rip;
    default:
        return 0;
    }
}

uint64_t linear_of(const Cpu& cpu, const ZydisDecodedInstruction& instruction, const ZydisDecodedOperand& operand) {
    const ZydisDecodedOperandMem& memory = operand.mem;
    uint64_t offset = value_of(cpu, memory.base, cpu.rip + instruction.length) +
                      value_of(cpu, memory.index, 0) * memory.scale +
                      (memory.disp.has_displacement ? static_cast<uint64_t>(memory.disp.value) : 0);
    const bool pushes = operand.visibility == ZYDIS_OPERAND_VISIBILITY_HIDDEN &&
                        (operand.actions & ZYDIS_OPERAND_ACTION_MASK_WRITE) &&
                        ZydisRegisterGetId(memory.base) == RSP && ZydisRegisterGetClass(memory.base) != ZYDIS_REGCLASS_INVALID;
    if (pushes) // the operand's base is the pointer before the push
        offset -= operand.size / 8;
    if (instruction.address_width < 64)
        offset &= (uint64_t{1} << instruction.address_width) - 1;
    const auto seg = static_cast<unsigned>(memory.segment - ZYDIS_REGISTER_ES);
    const uint64_t linear = offset + (seg < 6 ? cpu.segment_base[seg] : 0);
    return cpu.code64() ? linear : static_cast<uint32_t>(linear);
}

/// The bytes at RIP that can be read, without any effect.
unsigned peek_code(const Cpu& cpu, uint8_t (&bytes)[max_instruction_length]) {
    unsigned have = 0;
    while (have < max_instruction_length) {
        const uint64_t address = cpu.code_linear(cpu.rip + have);
        const auto gpa = cpu.peek(address);
        const unsigned part = std::min<uint64_t>(max_instruction_length - have, page_size - (address & page_mask));
        const uint8_t* host = gpa ? cpu.memory.at(*gpa, part) : nullptr;
        if (!host)
            break;
        std::copy_n(host, part, bytes + have);
        have += part;
    }
    return have;
}

} // namespace

InstructionEvents instruction_events(const ZydisDecodedInstruction& instruction, const ZydisDecodedOperand* operands) {
    InstructionEvents events = branch_events(instruction, operands);
    if (only_names_address(instruction))
        return events;
    for (const auto& operand : std::span(operands, instruction.operand_count)) {
        if (!is_access(operand))
            continue;
        if (operand.actions & ZYDIS_OPERAND_ACTION_MASK_READ)
            events |= ds::Retired::load;
        if (operand.actions & ZYDIS_OPERAND_ACTION_MASK_WRITE)
            events |= ds::Retired::store;
    }
    return events;
}

DataAddresses data_addresses(const Cpu& cpu) {
    uint8_t bytes[max_instruction_length];
    const unsigned have = peek_code(cpu, bytes);
    const ZydisDecoder decoder = make_decoder(cpu.mode, cpu.cpuid);
    ZydisDecodedInstruction instruction;
    ZydisDecodedOperand operands[ZYDIS_MAX_OPERAND_COUNT];
    DataAddresses found;
    if (ZYAN_FAILED(ZydisDecoderDecodeFull(&decoder, bytes, have, &instruction, operands)) ||
        only_names_address(instruction))
        return found;
    for (const auto& operand : std::span(operands, instruction.operand_count)) {
        if (!is_access(operand))
            continue;
        if ((operand.actions & ZYDIS_OPERAND_ACTION_MASK_READ) && !found.load)
            found.load = linear_of(cpu, instruction, operand);
        if ((operand.actions & ZYDIS_OPERAND_ACTION_MASK_WRITE) && !found.store)
            found.store = linear_of(cpu, instruction, operand);
    }
    return found;
}

} // namespace vtrace::soft
