// Classifier against Zydis: all branch opcodes, behind all prefixes, in all modes.
#define CATCH_CONFIG_MAIN
#include <catch2/catch.hpp>

#include <array>
#include <map>
#include <string>
#include <vector>

#include <Zydis/Zydis.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "decode/classify.h"

using namespace vtrace;

namespace {

/// What Zydis says, in our terms; nullopt: no valid instruction.
class Judge {
  public:
    explicit Judge(CodeSize size) {
        constexpr std::array<std::pair<ZydisMachineMode, ZydisStackWidth>, 3> modes = {
            {{ZYDIS_MACHINE_MODE_LONG_64, ZYDIS_STACK_WIDTH_64},
             {ZYDIS_MACHINE_MODE_LEGACY_32, ZYDIS_STACK_WIDTH_32},
             {ZYDIS_MACHINE_MODE_LEGACY_16, ZYDIS_STACK_WIDTH_16}}};
        auto [mode, width] = modes[static_cast<size_t>(size)];
        REQUIRE(ZYAN_SUCCESS(ZydisDecoderInit(&decoder_, mode, width)));
    }

    std::optional<BranchInstruction> decode(std::span<const uint8_t> code) const {
        ZydisDecodedInstruction instruction;
        std::array<ZydisDecodedOperand, ZYDIS_MAX_OPERAND_COUNT> operands;
        if (!ZYAN_SUCCESS(ZydisDecoderDecodeFull(&decoder_, code.data(), code.size(), &instruction, operands.data())))
            return std::nullopt;
        BranchInstruction result{class_of(instruction, operands[0]), instruction.length};
        if (instruction.mnemonic == ZYDIS_MNEMONIC_INT)
            result.vector = static_cast<uint8_t>(operands[0].imm.value.u);
        if (result.branch_class == BranchClass::conditional || result.branch_class == BranchClass::jump ||
            result.branch_class == BranchClass::call) {
            result.direct = true;
            result.displacement = static_cast<int32_t>(operands[0].imm.value.s);
        }
        return result;
    }

  private:
    static BranchClass class_of(const ZydisDecodedInstruction& instruction, const ZydisDecodedOperand& operand) {
        bool far = instruction.meta.branch_type == ZYDIS_BRANCH_TYPE_FAR;
        bool direct = operand.type == ZYDIS_OPERAND_TYPE_IMMEDIATE && operand.imm.is_relative;
        switch (instruction.mnemonic) {
        case ZYDIS_MNEMONIC_CALL:
            return far ? BranchClass::far_call : direct ? BranchClass::call : BranchClass::indirect_call;
        case ZYDIS_MNEMONIC_JMP:
            return far ? BranchClass::far_jump : direct ? BranchClass::jump : BranchClass::indirect_jump;
        case ZYDIS_MNEMONIC_RET:
            return far ? BranchClass::far_ret : BranchClass::ret;
        case ZYDIS_MNEMONIC_IRET:
        case ZYDIS_MNEMONIC_IRETD:
        case ZYDIS_MNEMONIC_IRETQ:
            return BranchClass::iret;
        case ZYDIS_MNEMONIC_INT:
        case ZYDIS_MNEMONIC_INT1:
        case ZYDIS_MNEMONIC_INT3:
        case ZYDIS_MNEMONIC_INTO:
            return BranchClass::int_n;
        case ZYDIS_MNEMONIC_SYSCALL:
            return BranchClass::syscall;
        case ZYDIS_MNEMONIC_SYSRET:
            return BranchClass::sysret;
        case ZYDIS_MNEMONIC_SYSENTER:
            return BranchClass::sysenter;
        case ZYDIS_MNEMONIC_SYSEXIT:
            return BranchClass::sysexit;
        case ZYDIS_MNEMONIC_XBEGIN:
        case ZYDIS_MNEMONIC_XABORT:
            return BranchClass::transaction;
        default:
            break;
        }
        return instruction.meta.category == ZYDIS_CATEGORY_COND_BR ? BranchClass::conditional : BranchClass::other;
    }

    ZydisDecoder decoder_;
};

constexpr std::array<CodeSize, 3> sizes = {CodeSize::bits64, CodeSize::bits32, CodeSize::bits16};

/// None, each single, and each ordered pair of legacy prefixes, and some triples.
std::vector<std::vector<uint8_t>> prefix_sets() {
    constexpr std::array<uint8_t, 11> all = {0x66, 0x67, 0x26, 0x2e, 0x36, 0x3e, 0x64, 0x65, 0xf0, 0xf2, 0xf3};
    std::vector<std::vector<uint8_t>> sets = {{}, {0x66, 0x66, 0x66}, {0x66, 0x67, 0xf2}, {0x3e, 0x66, 0xf2}};
    for (uint8_t a : all) {
        sets.push_back({a});
        for (uint8_t b : {0x66, 0x67, 0x2e, 0xf2, 0xf3})
            sets.push_back({a, b});
    }
    return sets;
}

std::string hex(std::span<const uint8_t> bytes) {
    return fmt::format("{:02x}", fmt::join(bytes, " "));
}

} // namespace

TEST_CASE("every opcode behind every prefix, as Zydis decodes it") {
    Classifier classifier;
    std::map<std::string, std::string> differences; // the first of each sort
    size_t compared = 0, branches = 0;
    for (CodeSize size : sizes) {
        Judge judge(size);
        for (const auto& prefixes : prefix_sets())
            for (int rex : {-1, 0x41, 0x48, 0x4f}) {
                if (rex >= 0 && size != CodeSize::bits64)
                    continue;
                for (unsigned opcode = 0; opcode < 512; ++opcode)
                    for (unsigned modrm : {0x05u, 0x06u, 0x10u, 0x14u, 0x18u, 0x1du, 0x20u, 0x2cu, 0x54u, 0x68u, 0x90u,
                                           0xa8u, 0xd0u, 0xe4u, 0xf8u}) {
                        std::vector<uint8_t> code = prefixes;
                        if (rex >= 0)
                            code.push_back(static_cast<uint8_t>(rex));
                        if (opcode >= 256)
                            code.push_back(0x0f);
                        code.push_back(static_cast<uint8_t>(opcode));
                        code.push_back(static_cast<uint8_t>(modrm));
                        for (uint8_t tail : {0x91, 0x32, 0x54, 0x86, 0xa1, 0x03, 0x04, 0x05, 0x06, 0x07, 0x08})
                            code.push_back(tail);
                        code.resize(max_instruction);
                        auto expected = judge.decode(code);
                        if (!expected)
                            continue;
                        ++compared;
                        BranchInstruction found = classifier.decode(code, size);
                        bool is_branch = expected->branch_class != BranchClass::other;
                        branches += is_branch;
                        bool same =
                            found.branch_class == expected->branch_class &&
                            (!is_branch || (found.length == expected->length && found.direct == expected->direct &&
                                            (!expected->vector || found.vector == expected->vector) &&
                                            found.displacement == expected->displacement));
                        if (!same)
                            differences.try_emplace(
                                fmt::format("{} bits, {:x}", 64 >> static_cast<int>(size), opcode),
                                fmt::format("{}: {} length {} displacement {:#x}, Zydis {} {} {:#x}", hex(code),
                                            branch_class_name(found.branch_class), found.length, found.displacement,
                                            branch_class_name(expected->branch_class), expected->length,
                                            expected->displacement));
                    }
            }
    }
    for (const auto& [sort, text] : differences)
        UNSCOPED_INFO(sort + ": " + text);
    CHECK(differences.empty());
    CHECK(compared > 1'000'000);
    CHECK(branches > 100'000);
}

TEST_CASE("the record's kind comes before the code") {
    Classifier classifier;
    constexpr std::array<uint8_t, 1> ret = {0xc3};
    using ds::BtsFlags::make;
    auto classify = [&](std::span<const uint8_t> code, uint64_t flags) {
        return classifier.classify(code, {0xffff'ffff'8100'0000, 0x1000, flags}).branch_class;
    };
    CHECK(classify(ret, 0) == BranchClass::ret);
    CHECK(classify(ret, ds::BtsFlags::predicted) == BranchClass::ret);
    CHECK(classify(ret, make(ds::BtsKind::interrupt, 0x20)) == BranchClass::interrupt);
    CHECK(classify(ret, make(ds::BtsKind::exception, 14, 2)) == BranchClass::exception);
    CHECK(classify({}, 0) == BranchClass::unknown);
}

TEST_CASE("code that ends within the instruction is unknown, code that is no branch is other") {
    Classifier classifier;
    constexpr std::array<uint8_t, 5> call = {0xe8, 1, 2, 3, 4};
    for (size_t length = 0; length < call.size(); ++length)
        CHECK(classifier.decode(std::span(call).first(length), CodeSize::bits64).branch_class == BranchClass::unknown);
    BranchInstruction whole = classifier.decode(call, CodeSize::bits64);
    CHECK(whole.branch_class == BranchClass::call);
    CHECK(whole.target(0x1000) == 0x1000 + 5 + 0x04030201);
    constexpr std::array<uint8_t, 3> mov = {0x48, 0x89, 0xc3};
    CHECK(classifier.decode(mov, CodeSize::bits64).branch_class == BranchClass::other);
    // Nothing but prefixes, and an undefined opcode.
    std::array<uint8_t, 15> prefixes;
    prefixes.fill(0x66);
    CHECK(classifier.decode(prefixes, CodeSize::bits64).branch_class == BranchClass::other);
    CHECK(classifier.decode(std::array<uint8_t, 15>{0x06}, CodeSize::bits64).branch_class == BranchClass::other);
}

TEST_CASE("below 4 GiB the mode follows from where the branch went") {
    Classifier classifier;
    auto classify = [&](std::vector<uint8_t> code, uint64_t from, uint64_t to) {
        code.resize(max_instruction);
        return classifier.classify(code, {from, to, 0});
    };
    // 16-bit: jmp rel16 (E9 with two bytes of displacement), as in an AP's trampoline.
    BranchInstruction jump = classify({0xe9, 0x10, 0x00}, 0x9'a000, 0x9'a013);
    CHECK(jump.branch_class == BranchClass::jump);
    CHECK(jump.length == 3);
    // 32-bit: a far jump with an immediate pointer exists in 16- and 32-bit code only.
    CHECK(classify({0xea, 0, 0, 0x10, 0, 0x10, 0}, 0x10'0000, 0x10'0000).branch_class == BranchClass::far_jump);
    // INC EAX is a REX prefix in 64-bit mode: 40 E9 is a branch there only.
    CHECK(classify({0x40, 0xe9, 0, 1, 0, 0}, 0x10'0000, 0x10'0106).length == 6);
    // Above 4 GiB nothing else comes into question.
    CHECK(classify({0xea, 0, 0, 0x10, 0, 0x10, 0}, 0xffff'ffff'8100'0000, 0x10'0000).branch_class ==
          BranchClass::other);
}
