#include "decode/classify.h"

#include <array>
#include <cassert>
#include <cstring>

#include <capstone/capstone.h>

namespace vtrace {
namespace {

constexpr size_t max_cached = 1u << 20; // instructions; some 60 MB. Then the cache begins anew.
constexpr uint64_t top_of_32_bits = 0xffff'ffff;

/// How an opcode's prefixes bear on it here.
struct Prefixes {
    size_t length = 0;         // bytes of them, REX not included
    bool operand_size = false; // 66
    bool address_size = false; // 67
};

Prefixes scan_prefixes(std::span<const uint8_t> code) {
    Prefixes prefixes;
    for (; prefixes.length < code.size(); ++prefixes.length) {
        switch (code[prefixes.length]) {
        case 0x66:
            prefixes.operand_size = true;
            break;
        case 0x67:
            prefixes.address_size = true;
            break;
        case 0x26: // segments; 2E and 3E also as hints, 3E as NOTRACK
        case 0x2e:
        case 0x36:
        case 0x3e:
        case 0x64:
        case 0x65:
        case 0xf0: // LOCK
        case 0xf2: // REPNE, BND
        case 0xf3: // REP
            break;
        default:
            return prefixes;
        }
    }
    return prefixes;
}

/// Has the opcode an immediate or displacement whose size 66 changes, in 64-bit mode as well? XBEGIN alone.
bool is_xbegin(std::span<const uint8_t> opcode) {
    size_t rex = !opcode.empty() && (opcode[0] & 0xf0) == 0x40 ? 1 : 0;
    return opcode.size() >= rex + 2 && opcode[rex] == 0xc7 && opcode[rex + 1] == 0xf8;
}

BranchClass class_of(const cs_insn& instruction) {
    const cs_x86& x86 = instruction.detail->x86;
    bool direct = x86.op_count == 1 && x86.operands[0].type == X86_OP_IMM;
    switch (instruction.id) {
    case X86_INS_CALL:
        return direct ? BranchClass::call : BranchClass::indirect_call;
    case X86_INS_JMP:
        return direct ? BranchClass::jump : BranchClass::indirect_jump;
    case X86_INS_LCALL:
        return BranchClass::far_call;
    case X86_INS_LJMP:
        return BranchClass::far_jump;
    case X86_INS_RET:
        return BranchClass::ret;
    case X86_INS_RETF:
    case X86_INS_RETFQ:
        return BranchClass::far_ret;
    case X86_INS_IRET:
    case X86_INS_IRETD:
    case X86_INS_IRETQ:
        return BranchClass::iret;
    case X86_INS_INT:
    case X86_INS_INT1:
    case X86_INS_INT3:
    case X86_INS_INTO:
        return BranchClass::int_n;
    case X86_INS_SYSCALL:
        return BranchClass::syscall;
    case X86_INS_SYSRET:
        return BranchClass::sysret;
    case X86_INS_SYSENTER:
        return BranchClass::sysenter;
    case X86_INS_SYSEXIT:
        return BranchClass::sysexit;
    case X86_INS_XBEGIN:
    case X86_INS_XABORT:
        return BranchClass::transaction;
    case X86_INS_LOOP:
    case X86_INS_LOOPE:
    case X86_INS_LOOPNE:
    case X86_INS_JCXZ:
    case X86_INS_JECXZ:
    case X86_INS_JRCXZ:
    case X86_INS_JAE:
    case X86_INS_JA:
    case X86_INS_JBE:
    case X86_INS_JB:
    case X86_INS_JE:
    case X86_INS_JGE:
    case X86_INS_JG:
    case X86_INS_JLE:
    case X86_INS_JL:
    case X86_INS_JNE:
    case X86_INS_JNO:
    case X86_INS_JNP:
    case X86_INS_JNS:
    case X86_INS_JO:
    case X86_INS_JP:
    case X86_INS_JS:
        return BranchClass::conditional;
    default:
        return BranchClass::other;
    }
}

bool has_displacement(BranchClass branch_class) {
    return branch_class == BranchClass::conditional || branch_class == BranchClass::jump ||
           branch_class == BranchClass::call;
}

} // namespace

std::string_view branch_class_name(BranchClass branch_class) {
    constexpr std::array<std::string_view, branch_classes> names = {
        "unknown",       "other",    "conditional", "jump",        "call",      "return",   "indirect jump",
        "indirect call", "far jump", "far call",    "far return",  "syscall",   "sysret",   "sysenter",
        "sysexit",       "int",      "iret",        "transaction", "interrupt", "exception"};
    return names[static_cast<size_t>(branch_class)];
}

std::string_view exception_name(uint8_t vector) {
    constexpr std::array<std::string_view, 22> names = {"#DE", "#DB", "NMI", "#BP", "#OF", "#BR", "#UD", "#NM",
                                                        "#DF", "",    "#TS", "#NP", "#SS", "#GP", "#PF", "",
                                                        "#MF", "#AC", "#MC", "#XM", "#VE", "#CP"};
    return vector < names.size() ? names[vector] : std::string_view();
}

struct Classifier::Engine {
    std::array<csh, 3> handles{}; // by CodeSize
    std::array<cs_insn*, 3> instructions{};

    Engine() {
        constexpr std::array<cs_mode, 3> modes = {CS_MODE_64, CS_MODE_32, CS_MODE_16};
        for (size_t i = 0; i < modes.size(); ++i) {
            // These fail only where Capstone was built without x86 or memory is out: nothing that input can cause.
            [[maybe_unused]] cs_err error = cs_open(CS_ARCH_X86, modes[i], &handles[i]);
            assert(error == CS_ERR_OK);
            cs_option(handles[i], CS_OPT_DETAIL, CS_OPT_ON);
            instructions[i] = cs_malloc(handles[i]);
            assert(instructions[i]);
        }
    }
    Engine(const Engine&) = delete;
    Engine& operator=(const Engine&) = delete;
    ~Engine() {
        for (size_t i = 0; i < handles.size(); ++i) {
            cs_free(instructions[i], 1);
            cs_close(&handles[i]);
        }
    }
};

Classifier::Classifier() : engine_(std::make_unique<Engine>()) {}
Classifier::~Classifier() = default;
Classifier::Classifier(Classifier&&) noexcept = default;
Classifier& Classifier::operator=(Classifier&&) noexcept = default;

size_t Classifier::Hash::operator()(const Key& key) const {
    uint64_t hash = (key.low ^ key.high * 0x9e37'79b9'7f4a'7c15) * 0xff51'afd7'ed55'8ccd;
    return hash ^ hash >> 32;
}

BranchInstruction Classifier::decode_uncached(std::span<const uint8_t> code, CodeSize size) {
    Prefixes prefixes = scan_prefixes(code);
    std::span<const uint8_t> opcode = code.subspan(prefixes.length);
    // Capstone 4.0.2 takes 66 before a near branch in 64-bit mode for a change of its displacement's size, which Intel
    // CPUs ignore there, gets 67 with REX.W wrong, and stumbles over other prefixes that mean nothing to a branch. None
    // of them makes a branch of what is none, or the other way round, so all go but those that change lengths.
    std::array<uint8_t, max_instruction + 2> plain;
    size_t kept = 0;
    if (prefixes.operand_size && (size != CodeSize::bits64 || is_xbegin(opcode)))
        plain[kept++] = 0x66;
    if (prefixes.address_size && size != CodeSize::bits64)
        plain[kept++] = 0x67;
    size_t rest = std::min(opcode.size(), max_instruction);
    std::memcpy(plain.data() + kept, opcode.data(), rest);

    auto mode = static_cast<size_t>(size);
    const uint8_t* at = plain.data();
    size_t left = kept + rest;
    uint64_t address = 0;
    cs_insn* instruction = engine_->instructions[mode];
    if (!cs_disasm_iter(engine_->handles[mode], &at, &left, &address, instruction))
        return {code.size() < max_instruction ? BranchClass::unknown : BranchClass::other};
    size_t length = prefixes.length + instruction->size - kept;
    if (length > max_instruction)
        return {BranchClass::other};
    BranchInstruction result{class_of(*instruction), static_cast<uint8_t>(length)};
    switch (instruction->id) {
    case X86_INS_INT:
        result.vector = static_cast<uint8_t>(instruction->detail->x86.operands[0].imm);
        break;
    case X86_INS_INT1:
        result.vector = 1;
        break;
    case X86_INS_INT3:
        result.vector = 3;
        break;
    case X86_INS_INTO:
        result.vector = 4;
        break;
    default:
        break;
    }
    if (has_displacement(result.branch_class)) {
        // From the bytes, not from Capstone's operand, which in 16-bit mode is a target cut to 16 bits.
        size_t start = kept;
        if (size == CodeSize::bits64 && (plain[start] & 0xf0) == 0x40)
            ++start; // REX
        start += plain[start] == 0x0f ? 2 : 1;
        result.direct = true;
        switch (instruction->size - start) {
        case 1:
            result.displacement = static_cast<int8_t>(plain[start]);
            break;
        case 2: {
            int16_t displacement;
            std::memcpy(&displacement, plain.data() + start, sizeof displacement);
            result.displacement = displacement;
            break;
        }
        case 4:
            std::memcpy(&result.displacement, plain.data() + start, sizeof result.displacement);
            break;
        default:
            result.direct = false;
        }
    }
    return result;
}

BranchInstruction Classifier::decode(std::span<const uint8_t> code, CodeSize size) {
    size_t length = std::min(code.size(), max_instruction);
    if (length == 0)
        return {};
    std::array<uint8_t, 16> bytes{};
    std::memcpy(bytes.data(), code.data(), length);
    bytes[15] = static_cast<uint8_t>(length | static_cast<unsigned>(size) << 4);
    Key key;
    std::memcpy(&key.low, bytes.data(), 8);
    std::memcpy(&key.high, bytes.data() + 8, 8);
    if (auto known = cache_.find(key); known != cache_.end())
        return known->second;
    if (cache_.size() >= max_cached)
        cache_.clear();
    return cache_.emplace(key, decode_uncached(code.first(length), size)).first->second;
}

BranchInstruction Classifier::classify(std::span<const uint8_t> code, const ds::BtsRecord& record) {
    switch (ds::BtsFlags::kind(record.flags)) {
    case ds::BtsKind::interrupt:
        return {BranchClass::interrupt};
    case ds::BtsKind::exception:
        return {BranchClass::exception};
    default:
        break;
    }
    BranchInstruction first = decode(code, CodeSize::bits64);
    if (record.from > top_of_32_bits)
        return first;
    auto is_branch = [](const BranchInstruction& instruction) { return instruction.branch_class > BranchClass::other; };
    std::optional<BranchInstruction> any;
    for (CodeSize size : {CodeSize::bits64, CodeSize::bits32, CodeSize::bits16}) {
        BranchInstruction instruction = decode(code, size);
        if (instruction.direct && instruction.target(record.from) == record.to)
            return instruction;
        if (is_branch(instruction) && !any)
            any = instruction;
    }
    return any.value_or(first);
}

} // namespace vtrace
