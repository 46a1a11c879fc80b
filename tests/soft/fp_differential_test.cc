// Every x87, MMX and SSE instruction form against the host's own processor, on random and on awkward operands: register
// renaming, operand sizes, flags, exceptions taken and not taken.
#include <catch2/catch.hpp>

#include <csignal>

#include <sys/mman.h>

#include <iomanip>
#include <map>
#include <random>
#include <sstream>

#include "tests/soft/fp_machine.h"
#include "tests/soft/fp_native.h"
#include "vmm/soft/fp_handlers.h"
#include "vmm/soft/fp_host.h"

namespace vtrace::soft {
namespace {

constexpr unsigned memory_size = 64; // compared around the operand
constexpr uint64_t operand = FpMachine::data + page_size;

using Random = std::mt19937_64;

uint64_t awkward64(Random& random) {
    static constexpr uint64_t values[] = {0,
                                          0x8000000000000000,
                                          0x3ff0000000000000,
                                          0xbff0000000000000,
                                          0x7ff0000000000000, // infinity
                                          0x7ff8000000000001, // quiet NaN
                                          0x7ff0000000000001, // signalling NaN
                                          0x0000000000000001, // denormal
                                          0x800fffffffffffff,
                                          0x0010000000000000, // least normal
                                          0x7fefffffffffffff, // greatest
                                          0x41dfffffffc00000, // 2^31 - 1
                                          0x43e0000000000000, // 2^63
                                          0x3ff0000000000001,
                                          0x4008000000000000};
    static constexpr uint32_t singles[] = {0,          0x80000000, 0x3f800000, 0xbf800000, 0x7f800000, 0x7fc00001,
                                           0x7f800001, 0x00000001, 0x807fffff, 0x00800000, 0x7f7fffff, 0x4effffff,
                                           0x4f000000, 0x3f800001, 0x40400000, 0x1e000000};
    switch (random() % 4) {
    case 0:
        return values[random() % std::size(values)];
    case 1:
        return uint64_t{singles[random() % std::size(singles)]} << 32 | singles[random() % std::size(singles)];
    case 2: { // moderate numbers, so that arithmetic is mostly exact or inexact and no more
        double value = static_cast<double>(static_cast<int64_t>(random()) >> (40 + random() % 20)) / 7;
        return std::bit_cast<uint64_t>(value);
    }
    default:
        return random();
    }
}

void awkward80(Random& random, uint8_t* bytes) {
    uint64_t significand = random() | 1ull << 63;
    uint16_t exponent = static_cast<uint16_t>(16383 - 40 + random() % 80);
    switch (random() % 8) {
    case 0:
        significand = 0, exponent = 0;
        break;
    case 1:
        significand = 1ull << 63, exponent = 0x7fff;
        break;
    case 2:
        exponent = 0x7fff;
        break;
    case 3:
        exponent = static_cast<uint16_t>(random() % 2), significand &= random();
        break;
    case 4:
        exponent = static_cast<uint16_t>(16383 + random() % 3), significand = 1ull << 63 | (random() & 3) << 62;
        break;
    case 5:
        significand = random(), exponent = static_cast<uint16_t>(random() & 0x7fff);
        break;
    default:
        break;
    }
    exponent = static_cast<uint16_t>(exponent | (random() & 1) << 15);
    std::memcpy(bytes, &significand, sizeof significand);
    std::memcpy(bytes + sizeof significand, &exponent, sizeof exponent);
}

struct Situation {
    NativeState state;
    std::array<uint8_t, memory_size> memory;
};

/// `masked`: no exception will be taken.
Situation random_situation(Random& random, bool masked) {
    Situation s;
    FpuImage& fpu = s.state.fpu;
    for (unsigned i = Fx::xmm; i < Fx::xmm_end; i += 8)
        fx_set(fpu, i, awkward64(random));
    for (unsigned i = 0; i < 8; i++)
        awkward80(random, fpu.fxsave.data() + Fx::st + i * Fx::slot_size);
    uint32_t control = Mxcsr::supported & static_cast<uint32_t>(random());
    fx_set<uint32_t>(fpu, Fx::mxcsr, masked ? control | Mxcsr::masks : control & ~(random() & 1 ? Mxcsr::flags : 0));
    fx_set<uint32_t>(fpu, Fx::mxcsr_mask, Mxcsr::supported);
    auto fsw = static_cast<uint16_t>(random() & (random() & 1 ? 0x7f7f : 0x7f40)); // exception flags half of the time
    fx_set<uint16_t>(fpu, Fx::fsw, fsw);
    fx_set<uint16_t>(fpu, Fx::ftw, random() & 1 ? 0xff : random() & 0xff);
    fx_set_fcw(fpu, static_cast<uint16_t>(masked || random() & 1 ? random() | Fcw::masks : random()));
    for (uint64_t& gpr : s.state.gpr)
        gpr = random() & 1 ? random() : random() % 20;
    s.state.gpr[RBX] = operand;
    s.state.gpr[RDI] = operand + random() % 32;
    s.state.rflags = random() & Rflags::status;
    for (unsigned i = 0; i < memory_size; i += 8) {
        uint64_t value = awkward64(random);
        std::memcpy(s.memory.data() + i, &value, sizeof value);
    }
    if (random() & 1)
        awkward80(random, s.memory.data());
    return s;
}

/// What the host leaves in the image and the engine doesn't track.
FpuImage normalised(FpuImage image) {
    fx_clear_pointers(image);
    fx_set<uint32_t>(image, Fx::mxcsr_mask, 0);
    std::fill(image.fxsave.begin() + Fx::xmm_end, image.fxsave.end(), 0);
    return image;
}

std::string hex(std::span<const uint8_t> bytes) {
    std::ostringstream out;
    for (uint8_t byte : bytes)
        out << std::hex << std::setw(2) << std::setfill('0') << unsigned{byte} << ' ';
    return out.str();
}

std::string difference(const FpuImage& host, const FpuImage& ours) {
    std::string text;
    for (unsigned i = 0; i < Fx::xmm_end; i += 8)
        if (std::memcmp(host.fxsave.data() + i, ours.fxsave.data() + i, 8) != 0)
            text += "\n  at " + std::to_string(i) + ": host " + hex({host.fxsave.data() + i, 8}) + " ours " +
                    hex({ours.fxsave.data() + i, 8});
    return text;
}

/// The bytes at `operand` in the host's own address space, which are the guest's too.
uint8_t* host_memory() {
    static uint8_t* memory = [] {
        void* at = mmap(reinterpret_cast<void*>(FpMachine::data), FpMachine::data_pages * page_size,
                        PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
        REQUIRE(at == reinterpret_cast<void*>(FpMachine::data));
        return static_cast<uint8_t*>(at) + page_size;
    }();
    return memory;
}

/// Executes on both; an empty string if all agrees.
std::string compare(FpMachine& machine, std::span<const uint8_t> bytes, const Op& op, const Situation& given,
                    bool dot_product) {
    Situation s = given;
    Cpu& cpu = machine.cpu();
    std::copy(s.state.gpr.begin(), s.state.gpr.end(), cpu.gpr);
    cpu.flags.set(s.state.rflags);
    cpu.fpu = s.state.fpu;
    std::memcpy(machine.memory(operand), s.memory.data(), memory_size);
    std::memcpy(host_memory(), s.memory.data(), memory_size);
    Outcome outcome = machine.run(op);

    const NativeState before = s.state;
    int signal = run_native(s.state, bytes);
    int expected = !outcome.faulted                     ? 0
                   : outcome.fault.vector == Vector::xm ? SIGFPE
                   : outcome.fault.vector == Vector::mf ? SIGFPE
                   : outcome.fault.vector == Vector::ud ? SIGILL
                                                        : SIGSEGV;
    std::string text;
    if (signal != expected)
        text += "\n  host signal " + std::to_string(signal) + ", ours " + std::to_string(expected) + " (vector " +
                std::to_string(outcome.fault.vector) + ")";
    FpuImage host = normalised(s.state.fpu), ours = normalised(cpu.fpu);
    if (signal && outcome == Vector::xm) { // docs/undefined.md, "FPU": flags beside the exception that is taken
        auto flags = fx_get<uint32_t>(ours, Fx::mxcsr);
        bool range = flags & ~(flags >> Mxcsr::masks_shift) & (Mxcsr::oe | Mxcsr::ue);
        uint32_t free = dot_product ? Mxcsr::flags : range ? Mxcsr::pe : 0;
        fx_set<uint32_t>(host, Fx::mxcsr, fx_get<uint32_t>(host, Fx::mxcsr) & ~free);
        fx_set<uint32_t>(ours, Fx::mxcsr, flags & ~free);
    }
    text += difference(host, ours);
    if (!signal) {
        for (unsigned i = 0; i < 16; i++)
            if (cpu.gpr[i] != s.state.gpr[i])
                text += "\n  gpr " + std::to_string(i);
        if (cpu.flags.get() != s.state.rflags)
            text += "\n  flags host " + std::to_string(s.state.rflags) + " ours " + std::to_string(cpu.flags.get());
    }
    if (std::memcmp(machine.memory(operand), host_memory(), memory_size) != 0)
        text += "\n  memory host " + hex({host_memory(), 16}) + " ours " + hex({machine.memory(operand), 16});
    if (!text.empty())
        text += "\n  mxcsr before " + std::to_string(fx_get<uint32_t>(before.fpu, Fx::mxcsr)) + " fcw/fsw/ftw " +
                hex({before.fpu.fxsave.data(), 5});
    return text;
}

/// Instruction forms by mnemonic; each has been decoded by Zydis and belongs to the floating-point side.
struct Form {
    std::string name;
    std::vector<uint8_t> bytes;
};

struct RegisterPair {
    unsigned reg, rm;
};

bool judged_elsewhere(ZydisMnemonic mnemonic) {
    switch (mnemonic) {
    case ZYDIS_MNEMONIC_RCPPS: // by rule, see fp_state_test.cc
    case ZYDIS_MNEMONIC_RCPSS:
    case ZYDIS_MNEMONIC_RSQRTPS:
    case ZYDIS_MNEMONIC_RSQRTSS:
    case ZYDIS_MNEMONIC_FNSAVE: // store pointers, which are ours to choose
    case ZYDIS_MNEMONIC_FNSTENV:
    case ZYDIS_MNEMONIC_FLDENV:
    case ZYDIS_MNEMONIC_FRSTOR:
    case ZYDIS_MNEMONIC_POPCNT:
        return true;
    default:
        return false;
    }
}

class Forms {
  public:
    explicit Forms(Random& random) : random_(random) {
        ZydisDecoderInit(&decoder_, ZYDIS_MACHINE_MODE_LONG_64, ZYDIS_STACK_WIDTH_64);
    }
    /// `code` without imm8, which is random.
    void add(std::vector<uint8_t> code) {
        size_t length = code.size();
        code.resize(length + 15, static_cast<uint8_t>(random_()));
        ZydisDecodedInstruction instruction;
        ZydisDecodedOperand operands[ZYDIS_MAX_OPERAND_COUNT];
        if (!ZYAN_SUCCESS(ZydisDecoderDecodeFull(&decoder_, code.data(), code.size(), &instruction, operands)))
            return;
        bool vector = false, stack_pointer = false;
        for (unsigned i = 0; i < instruction.operand_count; i++) {
            ZydisRegisterClass kind = operands[i].type == ZYDIS_OPERAND_TYPE_REGISTER
                                          ? ZydisRegisterGetClass(operands[i].reg.value)
                                          : ZYDIS_REGCLASS_INVALID;
            vector |= kind == ZYDIS_REGCLASS_XMM || kind == ZYDIS_REGCLASS_MMX;
            bool general = kind == ZYDIS_REGCLASS_GPR32 || kind == ZYDIS_REGCLASS_GPR64;
            stack_pointer |= general && ZydisRegisterGetId(operands[i].reg.value) == RSP;
        }
        bool x87 = instruction.meta.isa_set == ZYDIS_ISA_SET_X87 || instruction.meta.isa_set == ZYDIS_ISA_SET_FCMOV ||
                   instruction.meta.isa_set == ZYDIS_ISA_SET_SSE3X87;
        if ((!vector && !x87) || stack_pointer || instruction.encoding != ZYDIS_INSTRUCTION_ENCODING_LEGACY ||
            judged_elsewhere(instruction.mnemonic) || !ours(instruction.meta.isa_set) ||
            (instruction.mnemonic == ZYDIS_MNEMONIC_CVTPI2PS && operands[1].type == ZYDIS_OPERAND_TYPE_MEMORY))
            return;
        code.resize(instruction.length);
        forms_.push_back({ZydisMnemonicGetString(instruction.mnemonic), code});
    }
    const std::vector<Form>& all() const { return forms_; }

  private:
    static bool ours(ZydisISASet set) {
        switch (set) {
        case ZYDIS_ISA_SET_AES:
        case ZYDIS_ISA_SET_GFNI:
        case ZYDIS_ISA_SET_KEYLOCKER:
        case ZYDIS_ISA_SET_KEYLOCKER_WIDE:
        case ZYDIS_ISA_SET_PCLMULQDQ:
        case ZYDIS_ISA_SET_SHA:
        case ZYDIS_ISA_SET_SSE4A:
            return false;
        default:
            return true;
        }
    }
    ZydisDecoder decoder_;
    Random& random_;
    std::vector<Form> forms_;
};

constexpr uint8_t memory_rbx_disp8 = 1 << 6 | RBX;
constexpr uint8_t displacement = 16;

std::vector<Form> simd_forms(Random& random) {
    static constexpr RegisterPair pairs[] = {{0, 0}, {1, 2}, {3, 1}, {0, 5}, {6, 0}, {9, 14}, {15, 8}, {8, 0}, {2, 13}};
    Forms forms(random);
    for (int map : {0, 0x38, 0x3a})
        for (int prefix : {0, 0x66, 0xf2, 0xf3})
            for (unsigned wide : {0, 1})
                for (unsigned opcode = 0; opcode < 256; opcode++) {
                    auto start = [&](unsigned reg, unsigned rm) {
                        std::vector<uint8_t> code;
                        if (prefix)
                            code.push_back(static_cast<uint8_t>(prefix));
                        unsigned rex = wide << 3 | (reg >> 3) << 2 | rm >> 3;
                        if (rex)
                            code.push_back(static_cast<uint8_t>(0x40 | rex));
                        code.push_back(0x0f);
                        if (map)
                            code.push_back(static_cast<uint8_t>(map));
                        code.push_back(static_cast<uint8_t>(opcode));
                        return code;
                    };
                    for (RegisterPair pair : pairs) {
                        auto code = start(pair.reg, pair.rm);
                        code.push_back(static_cast<uint8_t>(0xc0 | (pair.reg & 7) << 3 | (pair.rm & 7)));
                        forms.add(code);
                    }
                    for (unsigned reg : {0, 1, 4, 11, 15}) {
                        auto code = start(reg, 0);
                        code.push_back(static_cast<uint8_t>(memory_rbx_disp8 | (reg & 7) << 3));
                        code.push_back(displacement);
                        // An immediate may follow: the displacement stays, the rest is random.
                        forms.add(code);
                    }
                }
    // Shifts by immediate: the register is in modrm.rm, modrm.reg belongs to the opcode.
    for (int prefix : {0, 0x66})
        for (int opcode : {0x71, 0x72, 0x73})
            for (unsigned digit = 0; digit < 8; digit++)
                for (unsigned rm : {0, 3, 7})
                    forms.add(prefix ? std::vector<uint8_t>{0x66, 0x41, 0x0f, uint8_t(opcode),
                                                            uint8_t(0xc0 | digit << 3 | rm)}
                                     : std::vector<uint8_t>{0x0f, uint8_t(opcode), uint8_t(0xc0 | digit << 3 | rm)});
    return forms.all();
}

std::vector<Form> x87_forms(Random& random) {
    Forms forms(random);
    for (unsigned opcode = 0xd8; opcode <= 0xdf; opcode++) {
        for (unsigned digit = 0; digit < 8; digit++)
            forms.add({uint8_t(opcode), uint8_t(memory_rbx_disp8 | digit << 3), displacement});
        for (unsigned modrm = 0xc0; modrm < 0x100; modrm++)
            forms.add({uint8_t(opcode), uint8_t(modrm)});
    }
    forms.add({0x9b});
    return forms.all();
}

/// Runs each form `repeat` times; failures are grouped by mnemonic so that one error doesn't hide the others.
void judge(const std::vector<Form>& forms, unsigned repeat, uint64_t seed, bool masked) {
    Random random(seed);
    FpMachine machine;
    std::map<std::string, std::pair<unsigned, std::string>> failures;
    unsigned cases = 0;
    for (const Form& form : forms) {
        Op op = machine.decode(form.bytes);
        const bool dot_product = form.name == "dpps" || form.name == "dppd";
        for (unsigned i = 0; i < repeat; i++) {
            std::string text = compare(machine, form.bytes, op, random_situation(random, masked), dot_product);
            cases++;
            if (!text.empty()) {
                auto& failure = failures[form.name];
                if (failure.first++ == 0)
                    failure.second = hex(form.bytes) + text;
            }
        }
    }
    INFO(forms.size() << " forms, " << cases << " cases, seed " << seed);
    for (const auto& [name, failure] : failures)
        UNSCOPED_INFO(name << ", " << failure.first << " cases, the first: " << failure.second);
    CHECK(failures.empty());
    CHECK(forms.size() > 200);
}

TEST_CASE("SIMD instructions compute as on the host, exceptions masked") {
    Random random(1);
    judge(simd_forms(random), 6, 2, true);
}

TEST_CASE("SIMD instructions take and don't take exceptions as on the host") {
    Random random(3);
    judge(simd_forms(random), 8, 4, false);
}

TEST_CASE("x87 instructions compute as on the host") {
    Random random(5);
    judge(x87_forms(random), 60, 6, true);
}

TEST_CASE("x87 instructions take exceptions and leave memory as on the host") {
    Random random(7);
    judge(x87_forms(random), 60, 8, false);
}

TEST_CASE("registers are renamed right in all 256 pairs") {
    struct Template {
        uint8_t prefix, opcode;
    };
    Random random(9);
    Forms forms(random);
    for (Template t :
         {Template{0x66, 0xfc} /* PADDB */, Template{0xf2, 0x10} /* MOVSD */, Template{0xf2, 0x11},
          Template{0xf2, 0x2a} /* CVTSI2SD */, Template{0x66, 0xd7} /* PMOVMSKB */, Template{0xf3, 0x58} /* ADDSS */,
          Template{0x66, 0x2e} /* UCOMISD */, Template{0x66, 0x7f} /* MOVDQA */})
        for (unsigned reg = 0; reg < 16; reg++)
            for (unsigned rm = 0; rm < 16; rm++)
                forms.add({t.prefix, uint8_t(0x48 | (reg >> 3) << 2 | rm >> 3), 0x0f, t.opcode,
                           uint8_t(0xc0 | (reg & 7) << 3 | (rm & 7))});
    judge(forms.all(), 2, 10, true);
}

} // namespace
} // namespace vtrace::soft
