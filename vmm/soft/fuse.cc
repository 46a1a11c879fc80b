#include "vmm/soft/fuse.h"

#include "vmm/soft/select.h"

namespace vtrace::soft {
namespace {

/// The condition straight from the operands; the flags are stored all the same, for whoever reads them later.
template <bool Test, unsigned Code, class T>
bool holds(const LazyFlags& flags, T a, T b) {
    using Signed = std::make_signed_t<T>;
    const auto left = static_cast<Signed>(Test ? a & b : a), right = static_cast<Signed>(Test ? T{0} : b);
    bool value;
    switch (Code >> 1) {
    case 1: // B
        value = !Test && a < b;
        break;
    case 2: // Z
        value = left == right;
        break;
    case 3: // BE
        value = Test ? left == 0 : a <= b;
        break;
    case 4: // S
        value = static_cast<Signed>(static_cast<T>(left) - static_cast<T>(right)) < 0;
        break;
    case 6: // L
        value = left < right;
        break;
    case 7: // LE
        value = left <= right;
        break;
    default: // O, P
        return condition<Code>(flags);
    }
    return value != (Code & 1);
}

template <bool Test, bool Immediate, class T, unsigned Code>
const Op* compare_and_branch(Cpu& cpu, const Op* op) {
    const T a = cpu.get<T>(op->reg), b = Immediate ? static_cast<T>(op->imm) : cpu.get<T>(op->rm);
    if constexpr (Test)
        cpu.flags.logic(static_cast<T>(a & b));
    else
        cpu.flags.sub(a, b);
    const Op* branch = op + 1;
    if (holds<Test, Code>(cpu.flags, a, b))
        return take_jcc64(cpu, branch);
    VTRACE_NEXT(cpu, branch);
}

} // namespace

void note_fusion(const ZydisDecodedInstruction& instruction, const ZydisDecodedOperand* operands, CodeMode mode,
                 Decoded& decoded) {
    if (mode != CodeMode::bits64)
        return;
    if (instruction.meta.category == ZYDIS_CATEGORY_COND_BR && instruction.meta.branch_type != ZYDIS_BRANCH_TYPE_NONE &&
        (instruction.opcode_map == ZYDIS_OPCODE_MAP_0F || (instruction.opcode & 0xf0) == 0x70)) {
        decoded.condition = static_cast<int8_t>(instruction.opcode & 15);
        return;
    }
    const bool test = instruction.mnemonic == ZYDIS_MNEMONIC_TEST;
    if ((!test && instruction.mnemonic != ZYDIS_MNEMONIC_CMP) || !is_gpr(operands[0]) || is_memory(operands[1]))
        return;
    decoded.compare = is_immediate(operands[1]) ? (test ? Compare::test_immediate : Compare::cmp_immediate)
                                                : (test ? Compare::test_register : Compare::cmp_register);
    decoded.compare_width = static_cast<uint8_t>(operands[0].size);
}

Handler fused_handler(const Decoded& first, const Decoded& second) {
    if (first.compare == Compare::none || second.condition < 0)
        return nullptr;
    return by_condition(static_cast<unsigned>(second.condition), [&]<unsigned Code>() -> Handler {
        return by_width(first.compare_width, [&]<class T>() -> Handler {
            switch (first.compare) {
            case Compare::cmp_register:
                return compare_and_branch<false, false, T, Code>;
            case Compare::cmp_immediate:
                return compare_and_branch<false, true, T, Code>;
            case Compare::test_register:
                return compare_and_branch<true, false, T, Code>;
            case Compare::test_immediate:
                return compare_and_branch<true, true, T, Code>;
            case Compare::none:
                break;
            }
            return nullptr;
        });
    });
}

} // namespace vtrace::soft
