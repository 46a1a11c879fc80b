// What can't be judged by comparing instructions with the host: control bits that block, memory at its limits, layouts
// of saved state, features that CPUID doesn't offer, results by rule.
#include <catch2/catch.hpp>

#include <cmath>

#include "tests/soft/fp_machine.h"
#include "vmm/soft/fp_approximate.h"
#include "vmm/soft/fp_environment.h"
#include "vmm/soft/fp_stub.h"

namespace vtrace::soft {
namespace {

constexpr uint64_t base = FpMachine::data; // RBX points here unless a test moves it

struct Fixture {
    FpMachine machine;
    Cpu& cpu = machine.cpu();
    Fixture() {
        fx_set<uint16_t>(cpu.fpu, Fx::fcw, Fcw::initial);
        fx_set<uint32_t>(cpu.fpu, Fx::mxcsr, Mxcsr::initial);
        cpu.gpr[RBX] = base;
    }
    void set(uint64_t cr0_bits, uint64_t cr4_clear = 0) {
        cpu.cr0 |= cr0_bits;
        cpu.cr4 &= ~cr4_clear;
        cpu.update_mode();
    }
    template <class T>
    T memory(uint64_t linear) {
        T value;
        std::memcpy(&value, machine.memory(linear), sizeof value);
        return value;
    }
    template <class T>
    void set_memory(uint64_t linear, T value) {
        std::memcpy(machine.memory(linear), &value, sizeof value);
    }
    void set_st(unsigned i, uint64_t significand, uint16_t exponent) {
        fx_set(cpu.fpu, Fx::st + i * Fx::slot_size, significand);
        fx_set(cpu.fpu, Fx::st + i * Fx::slot_size + 8, exponent);
    }
    uint64_t significand(unsigned i) { return fx_get<uint64_t>(cpu.fpu, Fx::st + i * Fx::slot_size); }
    uint16_t fsw() { return fx_get<uint16_t>(cpu.fpu, Fx::fsw); }
};

// One instruction of each group.
#define ADDPS_XMM1_XMM2                                                                                                \
    { 0x0f, 0x58, 0xca }
#define PADDB_MM1_MM2                                                                                                  \
    { 0x0f, 0xfc, 0xca }
#define CVTPI2PS_XMM1_MM2                                                                                              \
    { 0x0f, 0x2a, 0xca }
#define FADD_ST1                                                                                                       \
    { 0xd8, 0xc1 }
#define FNSTCW_RBX                                                                                                     \
    { 0xd9, 0x3b }
#define FWAIT                                                                                                          \
    { 0x9b }
#define FXSAVE_RBX                                                                                                     \
    { 0x0f, 0xae, 0x03 }
#define FXRSTOR_RBX                                                                                                    \
    { 0x0f, 0xae, 0x0b }
#define LDMXCSR_RBX                                                                                                    \
    { 0x0f, 0xae, 0x13 }
#define XSAVE_RBX                                                                                                      \
    { 0x0f, 0xae, 0x23 }
#define XRSTOR_RBX                                                                                                     \
    { 0x0f, 0xae, 0x2b }
#define XSAVEOPT_RBX                                                                                                   \
    { 0x0f, 0xae, 0x33 }

TEST_CASE_METHOD(Fixture, "CR0.TS makes all but hints raise #NM") {
    set(Cr0::ts);
    CHECK(machine.run(ADDPS_XMM1_XMM2) == Vector::nm);
    CHECK(machine.run(PADDB_MM1_MM2) == Vector::nm);
    CHECK(machine.run(CVTPI2PS_XMM1_MM2) == Vector::nm);
    CHECK(machine.run(FADD_ST1) == Vector::nm);
    CHECK(machine.run(FNSTCW_RBX) == Vector::nm);
    CHECK(machine.run(FWAIT) == Vector::nm);
    CHECK(machine.run(FXSAVE_RBX) == Vector::nm);
    CHECK(machine.run(LDMXCSR_RBX) == Vector::nm);
    CHECK(machine.run(XSAVE_RBX) == Vector::nm);
    CHECK_FALSE(machine.run({0x0f, 0x18, 0x0b}).faulted);             // PREFETCHT0
    CHECK_FALSE(machine.run({0x0f, 0x0d, 0x0b}).faulted);             // PREFETCHW
    CHECK_FALSE(machine.run({0x0f, 0xae, 0xe8}).faulted);             // LFENCE
    CHECK_FALSE(machine.run({0x0f, 0xc3, 0x03}).faulted);             // MOVNTI
    CHECK_FALSE(machine.run({0xf3, 0x0f, 0xb8, 0xc1}).faulted);       // POPCNT
    CHECK_FALSE(machine.run({0xf2, 0x0f, 0x38, 0xf1, 0xc1}).faulted); // CRC32
    cpu.cr0 &= ~Cr0::mp;
    CHECK_FALSE(machine.run(FWAIT).faulted);
}

TEST_CASE_METHOD(Fixture, "CR0.EM makes x87 raise #NM and the others #UD") {
    set(Cr0::em);
    CHECK(machine.run(ADDPS_XMM1_XMM2) == Vector::ud);
    CHECK(machine.run(PADDB_MM1_MM2) == Vector::ud);
    CHECK(machine.run(FADD_ST1) == Vector::nm);
    CHECK(machine.run({0xdb, 0xe3}) == Vector::nm); // FNINIT
    CHECK(machine.run(FXSAVE_RBX) == Vector::nm);
    CHECK(machine.run(LDMXCSR_RBX) == Vector::ud);
    CHECK_FALSE(machine.run(FWAIT).faulted);
}

TEST_CASE_METHOD(Fixture, "without CR4.OSFXSR there is MMX but no SSE") {
    set(0, Cr4::osfxsr);
    CHECK(machine.run(ADDPS_XMM1_XMM2) == Vector::ud);
    CHECK(machine.run({0x0f, 0x28, 0x0b}) == Vector::ud); // MOVAPS load
    CHECK(machine.run({0x0f, 0x53, 0xca}) == Vector::ud); // RCPPS
    CHECK(machine.run(CVTPI2PS_XMM1_MM2) == Vector::ud);
    CHECK(machine.run(LDMXCSR_RBX) == Vector::ud);
    CHECK_FALSE(machine.run(PADDB_MM1_MM2).faulted);
    CHECK_FALSE(machine.run({0x0f, 0x38, 0x00, 0xca}).faulted); // PSHUFB mm1, mm2
    CHECK_FALSE(machine.run(FXSAVE_RBX).faulted);
}

TEST_CASE_METHOD(Fixture, "a pending x87 exception stops what waits, and only that") {
    fx_set<uint16_t>(cpu.fpu, Fx::fcw, Fcw::initial & ~Fsw::ze);
    fx_set<uint16_t>(cpu.fpu, Fx::fsw, Fsw::ze);
    fx_update_summary(cpu.fpu);
    CHECK((fsw() & (Fsw::es | Fsw::b)) == (Fsw::es | Fsw::b));
    CHECK(machine.run(FADD_ST1) == Vector::mf);
    CHECK(machine.run(FWAIT) == Vector::mf);
    CHECK(machine.run(PADDB_MM1_MM2) == Vector::mf);
    CHECK(machine.run(CVTPI2PS_XMM1_MM2) == Vector::mf);
    CHECK(machine.run({0x0f, 0x77}) == Vector::mf); // EMMS
    CHECK(machine.run({0xd9, 0x2b}) == Vector::mf); // FLDCW
    CHECK_FALSE(machine.run(ADDPS_XMM1_XMM2).faulted);
    CHECK_FALSE(machine.run(FNSTCW_RBX).faulted);
    CHECK_FALSE(machine.run(FXSAVE_RBX).faulted);
    CHECK_FALSE(machine.run({0xdf, 0xe0}).faulted); // FNSTSW AX
    CHECK((cpu.gpr[RAX] & 0xffff) == fsw());
    SECTION("FNCLEX ends it") {
        CHECK_FALSE(machine.run({0xdb, 0xe2}).faulted);
        CHECK(fsw() == 0);
        CHECK_FALSE(machine.run(FWAIT).faulted);
    }
    SECTION("CR0.NE clear ignores it, and the flag stays") {
        cpu.cr0 &= ~Cr0::ne;
        CHECK_FALSE(machine.run({0xd9, 0xe8}).faulted); // FLD1
        CHECK((fsw() & (Fsw::ze | Fsw::es)) == (Fsw::ze | Fsw::es));
        CHECK(significand(0) == 1ull << 63);
    }
}

TEST_CASE_METHOD(Fixture, "aligned operands are demanded where the manual demands them") {
    cpu.gpr[RBX] = base + 8;
    CHECK(machine.run({0x0f, 0x28, 0x0b}) == Vector::gp);             // MOVAPS load
    CHECK(machine.run({0x0f, 0x29, 0x0b}) == Vector::gp);             // MOVAPS store
    CHECK(machine.run({0x0f, 0x2b, 0x0b}) == Vector::gp);             // MOVNTPS
    CHECK(machine.run({0x66, 0x0f, 0xe7, 0x0b}) == Vector::gp);       // MOVNTDQ
    CHECK(machine.run({0x66, 0x0f, 0x38, 0x2a, 0x0b}) == Vector::gp); // MOVNTDQA
    CHECK(machine.run({0x0f, 0x58, 0x0b}) == Vector::gp);             // ADDPS
    CHECK(machine.run({0x0f, 0x53, 0x0b}) == Vector::gp);             // RCPPS
    CHECK(machine.run({0x66, 0x0f, 0x2d, 0x0b}) == Vector::gp);       // CVTPD2PI
    CHECK(machine.run(FXSAVE_RBX) == Vector::gp);
    CHECK(machine.run(FXRSTOR_RBX) == Vector::gp);
    CHECK_FALSE(machine.run({0x0f, 0x10, 0x0b}).faulted);                   // MOVUPS
    CHECK_FALSE(machine.run({0xf3, 0x0f, 0x7f, 0x0b}).faulted);             // MOVDQU store
    CHECK_FALSE(machine.run({0xf2, 0x0f, 0xf0, 0x0b}).faulted);             // LDDQU
    CHECK_FALSE(machine.run({0x66, 0x0f, 0x3a, 0x63, 0x0b, 0x0c}).faulted); // PCMPISTRI
    cpu.gpr[RBX] = base + 1;
    CHECK_FALSE(machine.run({0xf3, 0x0f, 0x58, 0x0b}).faulted);       // ADDSS
    CHECK_FALSE(machine.run({0x0f, 0x16, 0x0b}).faulted);             // MOVHPS
    CHECK_FALSE(machine.run({0x66, 0x0f, 0x38, 0x20, 0x0b}).faulted); // PMOVSXBW
    cpu.gpr[RBX] = base + 16;
    CHECK(machine.run(XSAVE_RBX) == Vector::gp);
    CHECK(machine.run(XRSTOR_RBX) == Vector::gp);
}

struct Access {
    std::vector<uint8_t> code;
    unsigned size;
    bool write;
};

TEST_CASE_METHOD(Fixture, "operands end where they end, and a fault commits nothing") {
    const Access accesses[] = {
        {{0xf3, 0x0f, 0x10, 0x0b}, 4, false},             // MOVSS
        {{0xf2, 0x0f, 0x10, 0x0b}, 8, false},             // MOVSD
        {{0x0f, 0x12, 0x0b}, 8, false},                   // MOVLPS
        {{0xf2, 0x0f, 0x12, 0x0b}, 8, false},             // MOVDDUP
        {{0x0f, 0x5a, 0x0b}, 8, false},                   // CVTPS2PD
        {{0xf3, 0x0f, 0xe6, 0x0b}, 8, false},             // CVTDQ2PD
        {{0x66, 0x0f, 0xc4, 0x0b, 0x01}, 2, false},       // PINSRW
        {{0x66, 0x0f, 0x3a, 0x20, 0x0b, 0x01}, 1, false}, // PINSRB
        {{0x66, 0x0f, 0x3a, 0x21, 0x0b, 0x10}, 4, false}, // INSERTPS
        {{0x66, 0x0f, 0x38, 0x22, 0x0b}, 2, false},       // PMOVSXBQ
        {{0x66, 0x0f, 0x38, 0x35, 0x0b}, 8, false},       // PMOVZXDQ
        {{0x0f, 0x60, 0x0b}, 4, false},                   // PUNPCKLBW mm
        {{0x0f, 0x10, 0x0b}, 16, false},                  // MOVUPS
        {{0xdb, 0x2b}, 10, false},                        // FLD m80
        {{0xdf, 0x23}, 10, false},                        // FBLD
        {{0xdf, 0x03}, 2, false},                         // FILD m16
        {{0xdf, 0x2b}, 8, false},                         // FILD m64
        {{0xd9, 0x23}, 28, false},                        // FLDENV
        {{0xdd, 0x23}, 108, false},                       // FRSTOR
        {{0x66, 0xd9, 0x23}, 14, false},                  // FLDENV, 16-bit
        {{0x66, 0xdd, 0x23}, 94, false},                  // FRSTOR, 16-bit
        {{0xf2, 0x0f, 0x38, 0xf0, 0x03}, 1, false},       // CRC32 m8
        {{0xf3, 0x48, 0x0f, 0xb8, 0x03}, 8, false},       // POPCNT m64
        {{0xf3, 0x0f, 0x11, 0x0b}, 4, true},              // MOVSS store
        {{0x0f, 0x13, 0x0b}, 8, true},                    // MOVLPS store
        {{0x66, 0x0f, 0xd6, 0x0b}, 8, true},              // MOVQ store
        {{0x0f, 0x11, 0x0b}, 16, true},                   // MOVUPS store
        {{0x66, 0x0f, 0x3a, 0x14, 0x0b, 0x02}, 1, true},  // PEXTRB
        {{0x66, 0x0f, 0x3a, 0x15, 0x0b, 0x02}, 2, true},  // PEXTRW
        {{0x66, 0x0f, 0x3a, 0x17, 0x0b, 0x02}, 4, true},  // EXTRACTPS
        {{0x0f, 0x7f, 0x0b}, 8, true},                    // MOVQ mm store
        {{0xdb, 0x3b}, 10, true},                         // FSTP m80
        {{0xdf, 0x33}, 10, true},                         // FBSTP
        {{0xd9, 0x33}, 28, true},                         // FNSTENV
        {{0xdd, 0x33}, 108, true},                        // FNSAVE
        {{0x66, 0xdd, 0x33}, 94, true},                   // FNSAVE, 16-bit
        {{0x0f, 0xc3, 0x0b}, 4, true},                    // MOVNTI
        {{0x0f, 0xae, 0x1b}, 4, true},                    // STMXCSR
    };
    for (const Access& access : accesses) {
        INFO("opcode bytes " << int{access.code[0]} << ' ' << int{access.code[1]} << ' '
                             << int{access.code[2 % access.code.size()]});
        Op op = machine.decode(access.code);
        const FpuImage initial = cpu.fpu;
        std::array<uint64_t, 16> registers;
        std::copy(cpu.gpr, cpu.gpr + 16, registers.begin());
        auto last_page = machine.memory(FpMachine::data_end - page_size);
        std::fill(last_page, last_page + page_size, 0x11);

        cpu.gpr[RBX] = FpMachine::data_end - access.size;
        CHECK_FALSE(machine.run(op).faulted);
        if (access.write)
            CHECK(last_page[page_size - access.size - 1] == 0x11);
        std::fill(last_page, last_page + page_size, 0x11);

        cpu.fpu = initial;
        std::copy(registers.begin(), registers.end(), cpu.gpr);
        cpu.gpr[RBX] = FpMachine::data_end - access.size + 1;
        Outcome outcome = machine.run(op);
        CHECK(outcome == Vector::pf);
        CHECK(outcome.fault.cr2 == FpMachine::data_end);
        CHECK(bool(outcome.fault.error_code & PfError::w) == access.write);
        CHECK(cpu.fpu == initial);
        registers[RBX] = cpu.gpr[RBX];
        CHECK(std::equal(registers.begin(), registers.end(), cpu.gpr));
        CHECK(std::count(last_page, last_page + page_size, 0x11) == page_size);

        cpu.gpr[RBX] = FpMachine::read_only;
        CHECK(machine.run(op).faulted == access.write);
        cpu.fpu = initial;
        std::copy(registers.begin(), registers.end(), cpu.gpr);
    }
}

TEST_CASE_METHOD(Fixture, "masked stores touch the selected bytes only") {
    for (unsigned i = 0; i < 16; i++) {
        cpu.fpu.fxsave[Fx::xmm + 16 + i] = static_cast<uint8_t>(i + 1);              // XMM1: source
        cpu.fpu.fxsave[Fx::xmm + 32 + i] = i == 2 || i == 3 || i == 7 ? 0x80 : 0x7f; // XMM2: mask
    }
    const std::initializer_list<int> maskmovdqu = {0x66, 0x0f, 0xf7, 0xca};
    std::fill(machine.memory(base), machine.memory(base) + 16, 0xee);
    cpu.gpr[RDI] = base;
    REQUIRE_FALSE(machine.run(maskmovdqu).faulted);
    for (unsigned i = 0; i < 16; i++)
        CHECK(*machine.memory(base + i) == (i == 2 || i == 3 || i == 7 ? i + 1 : 0xee));
    SECTION("bytes beyond the last selected one needn't exist") {
        cpu.gpr[RDI] = FpMachine::data_end - 8;
        CHECK_FALSE(machine.run(maskmovdqu).faulted);
        CHECK(*machine.memory(FpMachine::data_end - 1) == 8);
    }
    SECTION("a fault on one of them leaves the others unwritten") {
        std::fill(machine.memory(FpMachine::data_end - 8), machine.memory(FpMachine::data_end - 8) + 8, 0xee);
        cpu.gpr[RDI] = FpMachine::data_end - 7;
        CHECK(machine.run(maskmovdqu) == Vector::pf);
        CHECK(*machine.memory(FpMachine::data_end - 5) == 0xee);
    }
    SECTION("an empty mask makes no access") {
        std::fill_n(cpu.fpu.fxsave.begin() + Fx::xmm + 32, 16, 0);
        cpu.gpr[RDI] = FpMachine::data_end;
        CHECK_FALSE(machine.run(maskmovdqu).faulted);
    }
}

TEST_CASE_METHOD(Fixture, "unmasked SIMD exceptions are #XM, or #UD without CR4.OSXMMEXCPT") {
    const float one[4] = {1, 1, 1, 1}, zero[4] = {};
    std::memcpy(cpu.fpu.fxsave.data() + Fx::xmm + 16, one, sizeof one);
    std::memcpy(cpu.fpu.fxsave.data() + Fx::xmm + 32, zero, sizeof zero);
    fx_set<uint32_t>(cpu.fpu, Fx::mxcsr, Mxcsr::initial & ~(Mxcsr::ze << Mxcsr::masks_shift));
    const FpuImage before = cpu.fpu;
    const std::initializer_list<int> divps = {0x0f, 0x5e, 0xca};
    uint8_t vector = Vector::xm;
    SECTION("with") {}
    SECTION("without") {
        cpu.cr4 &= ~Cr4::osxmmexcpt;
        vector = Vector::ud;
    }
    CHECK(machine.run(divps) == vector);
    CHECK(fx_get<uint32_t>(cpu.fpu, Fx::mxcsr) == (fx_get<uint32_t>(before, Fx::mxcsr) | Mxcsr::ze));
    CHECK(std::equal(before.fxsave.begin() + Fx::xmm, before.fxsave.end(), cpu.fpu.fxsave.begin() + Fx::xmm));
}

TEST_CASE_METHOD(Fixture, "MXCSR takes its own bits only") {
    set_memory<uint32_t>(base, Mxcsr::supported);
    CHECK_FALSE(machine.run(LDMXCSR_RBX).faulted);
    set_memory<uint32_t>(base, 0x10000);
    CHECK(machine.run(LDMXCSR_RBX) == Vector::gp);
    CHECK(fx_get<uint32_t>(cpu.fpu, Fx::mxcsr) == Mxcsr::supported);
    set_memory<uint32_t>(base + Fx::mxcsr, 0x80000000);
    CHECK(machine.run(FXRSTOR_RBX) == Vector::gp);
    CHECK(fx_get<uint32_t>(cpu.fpu, Fx::mxcsr) == Mxcsr::supported);
}

TEST_CASE_METHOD(Fixture, "FXSAVE and FXRSTOR round-trip, in 64-bit mode and outside") {
    for (unsigned i = 0; i < Fx::xmm_end - Fx::xmm; i++)
        cpu.fpu.fxsave[Fx::xmm + i] = static_cast<uint8_t>(i * 7 + 1);
    set_st(3, 0x123456789abcdef0, 0x4001);
    fx_set<uint16_t>(cpu.fpu, Fx::ftw, 0x08);
    const FpuImage before = cpu.fpu;
    std::fill(machine.memory(base), machine.memory(base) + 512, 0xee);
    SECTION("64-bit") {
        REQUIRE_FALSE(machine.run(FXSAVE_RBX).faulted);
        CHECK(memory<uint32_t>(base + Fx::mxcsr_mask) == Mxcsr::supported);
        CHECK(memory<uint64_t>(base + Fx::xmm + 15 * 16) == fx_get<uint64_t>(before, Fx::xmm + 15 * 16));
        CHECK(memory<uint8_t>(base + Fx::xmm_end) == 0xee);
        cpu.fpu = FpuImage{};
        REQUIRE_FALSE(machine.run(FXRSTOR_RBX).faulted);
        CHECK(cpu.fpu == before);
    }
    SECTION("32-bit: XMM8 to XMM15 don't take part") {
        machine.set_mode(CodeMode::bits32);
        REQUIRE_FALSE(machine.run(FXSAVE_RBX).faulted);
        CHECK(memory<uint64_t>(base + Fx::xmm + 7 * 16) == fx_get<uint64_t>(before, Fx::xmm + 7 * 16));
        CHECK(memory<uint8_t>(base + Fx::xmm_end32) == 0xee);
        std::fill(cpu.fpu.fxsave.begin() + Fx::xmm, cpu.fpu.fxsave.begin() + Fx::xmm_end, 0x55);
        REQUIRE_FALSE(machine.run(FXRSTOR_RBX).faulted);
        CHECK(fx_get<uint64_t>(cpu.fpu, Fx::xmm) == fx_get<uint64_t>(before, Fx::xmm));
        CHECK(fx_get<uint8_t>(cpu.fpu, Fx::xmm_end32) == 0x55);
    }
    SECTION("REX.W keeps 64-bit pointers, the plain form 32 bits of them") {
        fx_set<uint64_t>(cpu.fpu, Fx::fip, 0xffffffff81234567);
        REQUIRE_FALSE(machine.run({0x48, 0x0f, 0xae, 0x03}).faulted);
        CHECK(memory<uint64_t>(base + Fx::fip) == 0xffffffff81234567);
        REQUIRE_FALSE(machine.run(FXSAVE_RBX).faulted);
        CHECK(memory<uint64_t>(base + Fx::fip) == 0x81234567);
    }
}

TEST_CASE_METHOD(Fixture, "changes of TOP turn the image") {
    for (unsigned i = 0; i < 8; i++)
        set_st(i, 100 + i, 0x4000);
    fx_set<uint16_t>(cpu.fpu, Fx::fsw, 3 << Fsw::top_shift); // ST(0) is R3
    fx_set<uint16_t>(cpu.fpu, Fx::ftw, 0xff);
    SECTION("FNINIT: R0 was ST(5)") {
        REQUIRE_FALSE(machine.run({0xdb, 0xe3}).faulted);
        CHECK(significand(0) == 105);
        CHECK(significand(3) == 100);
    }
    SECTION("MMX: MM3 is R3") {
        REQUIRE_FALSE(machine.run({0x0f, 0x7f, 0x1b}).faulted); // MOVQ [rbx], mm3
        CHECK(memory<uint64_t>(base) == 100);
        CHECK(fx_top(cpu.fpu) == 0);
        CHECK(significand(3) == 100);
        REQUIRE_FALSE(machine.run({0x0f, 0x6f, 0xcb}).faulted); // MOVQ mm1, mm3
        CHECK(significand(1) == 100);
        CHECK(fx_get<uint16_t>(cpu.fpu, Fx::st + 16 + 8) == 0xffff);
        REQUIRE_FALSE(machine.run({0x0f, 0x77}).faulted); // EMMS
        CHECK(fx_get<uint8_t>(cpu.fpu, Fx::ftw) == 0);
    }
    SECTION("CVTPI2PS switches to MMX with a memory operand, CVTPI2PD doesn't") {
        REQUIRE_FALSE(machine.run({0x66, 0x0f, 0x2a, 0x0b}).faulted);
        CHECK(fx_top(cpu.fpu) == 3);
        REQUIRE_FALSE(machine.run({0x0f, 0x2a, 0x0b}).faulted);
        CHECK(fx_top(cpu.fpu) == 0);
    }
    SECTION("a faulting MMX store doesn't") {
        cpu.gpr[RBX] = FpMachine::data_end;
        CHECK(machine.run({0x0f, 0x7f, 0x1b}) == Vector::pf);
        CHECK(fx_top(cpu.fpu) == 3);
        CHECK(significand(0) == 100);
    }
}

TEST_CASE_METHOD(Fixture, "environments have the manual's layouts") {
    set_st(0, 0, 0);               // R6: zero
    set_st(1, 1ull << 63, 0x3fff); // R7: valid
    set_st(2, 1ull << 63, 0x7fff); // R0: special
    fx_set<uint16_t>(cpu.fpu, Fx::fsw, 6 << Fsw::top_shift);
    fx_set<uint16_t>(cpu.fpu, Fx::ftw, 0xc1);
    fx_set<uint64_t>(cpu.fpu, Fx::fip, 0x12345678);
    fx_set<uint64_t>(cpu.fpu, Fx::fdp, 0x000abcde);
    fx_set<uint16_t>(cpu.fpu, Fx::fop, 0x2d9);
    const FpuImage before = cpu.fpu;
    const uint16_t tags = 0x1ffe; // R7 valid, R6 zero, R5..R1 empty, R0 special
    CHECK(full_tag_word(cpu.fpu) == tags);
    SECTION("32-bit protected") {
        REQUIRE_FALSE(machine.run({0xd9, 0x33}).faulted);
        CHECK(memory<uint32_t>(base) == 0xffff037f);
        CHECK(memory<uint32_t>(base + 4) == 0xffff3000);
        CHECK(memory<uint32_t>(base + 8) == (0xffff0000 | tags));
        CHECK(memory<uint32_t>(base + 12) == 0x12345678);
        CHECK(memory<uint32_t>(base + 16) == 0x02d90000);
        CHECK(memory<uint32_t>(base + 20) == 0x000abcde);
        CHECK(memory<uint32_t>(base + 24) == 0xffff0000);
        cpu.fpu = FpuImage{};
        REQUIRE_FALSE(machine.run({0xd9, 0x23}).faulted); // FLDENV
        CHECK(fx_get<uint64_t>(cpu.fpu, 0) == fx_get<uint64_t>(before, 0));
        CHECK(fx_get<uint64_t>(cpu.fpu, Fx::fip) == 0x12345678);
        CHECK(fx_get<uint64_t>(cpu.fpu, Fx::fdp) == 0x000abcde);
    }
    SECTION("16-bit protected") {
        REQUIRE_FALSE(machine.run({0x66, 0xd9, 0x33}).faulted);
        CHECK(memory<uint16_t>(base) == 0x037f);
        CHECK(memory<uint16_t>(base + 4) == tags);
        CHECK(memory<uint16_t>(base + 6) == 0x5678);
        CHECK(memory<uint16_t>(base + 10) == 0xbcde);
    }
    SECTION("real mode, both widths") {
        uint8_t bytes[environment_max];
        store_environment(cpu.fpu, {false, false}, bytes);
        uint16_t fields[7];
        std::memcpy(fields, bytes, sizeof fields);
        CHECK(fields[3] == 0x5678);
        CHECK(fields[4] == (0x4000 | 0x2d9));
        CHECK(fields[5] == 0xbcde);
        CHECK(fields[6] == 0xa000);
        store_environment(cpu.fpu, {true, false}, bytes);
        FpuImage loaded{};
        load_environment(loaded, {true, false}, bytes);
        CHECK(fx_get<uint64_t>(loaded, 0) == fx_get<uint64_t>(before, 0));
        CHECK(fx_get<uint64_t>(loaded, Fx::fip) == 0x12345678);
        CHECK(fx_get<uint64_t>(loaded, Fx::fdp) == 0x000abcde);
    }
    SECTION("FNSAVE initialises, FRSTOR brings all back") {
        REQUIRE_FALSE(machine.run({0xdd, 0x33}).faulted);
        CHECK(fx_get<uint64_t>(cpu.fpu, 0) == Fcw::initial);
        CHECK(memory<uint16_t>(base + 28 + 8) == 0);           // ST(0)
        CHECK(memory<uint16_t>(base + 28 + 10 + 8) == 0x3fff); // ST(1)
        REQUIRE_FALSE(machine.run({0xdd, 0x23}).faulted);
        CHECK(cpu.fpu == before);
    }
    SECTION("an x87 instruction forgets the pointers") {
        REQUIRE_FALSE(machine.run({0xd9, 0xe1}).faulted); // FABS
        CHECK(fx_get<uint64_t>(cpu.fpu, Fx::fip) == 0);
        CHECK(fx_get<uint16_t>(cpu.fpu, Fx::fop) == 0);
    }
}

TEST_CASE_METHOD(Fixture, "XSAVE writes what is asked for and says what is in use") {
    cpu.gpr[RAX] = 3;
    cpu.gpr[RDX] = 0;
    auto area = machine.memory(base);
    std::fill(area, area + 576, 0xee);
    std::fill(area + 512, area + 576, 0);
    SECTION("all initial") {
        REQUIRE_FALSE(machine.run(XSAVE_RBX).faulted);
        CHECK(memory<uint64_t>(base + 512) == 0);
        CHECK(memory<uint16_t>(base) == Fcw::initial);
        CHECK(memory<uint64_t>(base + Fx::xmm) == 0);
    }
    SECTION("XSAVEOPT leaves initial components out") {
        REQUIRE_FALSE(machine.run(XSAVEOPT_RBX).faulted);
        CHECK(memory<uint64_t>(base + 512) == 0);
        CHECK(memory<uint16_t>(base) == 0xeeee);
        CHECK(memory<uint8_t>(base + Fx::xmm) == 0xee);
        CHECK(memory<uint32_t>(base + Fx::mxcsr) == Mxcsr::initial);
    }
    SECTION("SSE alone") {
        cpu.gpr[RAX] = 2;
        cpu.fpu.fxsave[Fx::xmm + 5] = 9;
        set_memory<uint64_t>(base + 512, 1); // x87's bit stays
        REQUIRE_FALSE(machine.run(XSAVE_RBX).faulted);
        CHECK(memory<uint64_t>(base + 512) == 3);
        CHECK(memory<uint16_t>(base) == 0xeeee);
        CHECK(memory<uint8_t>(base + Fx::xmm + 5) == 9);
    }
    SECTION("XRSTOR loads, or initialises what the header leaves out") {
        cpu.fpu.fxsave[Fx::xmm + 5] = 9;
        set_st(0, 77, 0x4000);
        const FpuImage before = cpu.fpu;
        REQUIRE_FALSE(machine.run(XSAVE_RBX).faulted);
        CHECK(memory<uint64_t>(base + 512) == 3);
        cpu.fpu = FpuImage{};
        REQUIRE_FALSE(machine.run(XRSTOR_RBX).faulted);
        CHECK(cpu.fpu == before);
        set_memory<uint64_t>(base + 512, 1);
        REQUIRE_FALSE(machine.run(XRSTOR_RBX).faulted);
        CHECK(cpu.fpu.fxsave[Fx::xmm + 5] == 0);
        CHECK(significand(0) == 77);
    }
    SECTION("XRSTOR rejects headers it doesn't know") {
        std::fill(area, area + 576, 0);
        set_memory<uint64_t>(base + 512, 4);
        CHECK(machine.run(XRSTOR_RBX) == Vector::gp);
        set_memory<uint64_t>(base + 512, 0);
        set_memory<uint64_t>(base + 520, 1ull << 63);
        CHECK(machine.run(XRSTOR_RBX) == Vector::gp);
        set_memory<uint64_t>(base + 520, 0);
        set_memory<uint32_t>(base + Fx::mxcsr, 0x10000);
        CHECK(machine.run(XRSTOR_RBX) == Vector::gp);
        cpu.gpr[RAX] = 1;
        CHECK_FALSE(machine.run(XRSTOR_RBX).faulted);
    }
    SECTION("without CR4.OSXSAVE there is none") {
        set(0, Cr4::osxsave);
        CHECK(machine.run(XSAVE_RBX) == Vector::ud);
        CHECK(machine.run({0x0f, 0x01, 0xd0}) == Vector::ud);
    }
}

TEST_CASE_METHOD(Fixture, "XSETBV takes valid values of XCR0 at CPL 0") {
    const std::initializer_list<int> xsetbv = {0x0f, 0x01, 0xd1}, xgetbv = {0x0f, 0x01, 0xd0};
    cpu.gpr[RAX] = 1;
    cpu.gpr[RCX] = cpu.gpr[RDX] = 0;
    CHECK_FALSE(machine.run(xsetbv).faulted);
    cpu.gpr[RAX] = ~0ull;
    CHECK_FALSE(machine.run(xgetbv).faulted);
    CHECK(cpu.gpr[RAX] == 1);
    for (uint64_t wrong : {0, 2, 7}) {
        cpu.gpr[RAX] = wrong;
        CHECK(machine.run(xsetbv) == Vector::gp);
    }
    cpu.gpr[RAX] = 3;
    cpu.gpr[RCX] = 1;
    CHECK(machine.run(xsetbv) == Vector::gp);
    CHECK(machine.run(xgetbv) == Vector::gp);
    cpu.gpr[RCX] = 0;
    cpu.cpl = 3;
    CHECK(machine.run(xsetbv) == Vector::gp);
    CHECK(cpu.xcr0 == 1);
}

TEST_CASE("what CPUID doesn't offer is #UD, and what nobody offers too") {
    FpMachine atom("atom"), all("x86-64-v2");
    const std::vector<uint8_t> sse42[] = {{0x66, 0x0f, 0x3a, 0x63, 0xca, 0x00}, // PCMPISTRI
                                          {0x66, 0x0f, 0x38, 0x37, 0xca},       // PCMPGTQ
                                          {0xf2, 0x0f, 0x38, 0xf1, 0xc1},       // CRC32
                                          {0xf3, 0x0f, 0xb8, 0xc1},             // POPCNT
                                          {0x66, 0x0f, 0x38, 0x17, 0xca}};      // PTEST
    for (const auto& code : sse42) {
        CHECK(atom.run(code) == Vector::ud);
        CHECK_FALSE(all.run(code).faulted);
    }
    const std::vector<uint8_t> never[] = {{0x66, 0x0f, 0x38, 0xdc, 0xca},       // AESENC
                                          {0x66, 0x0f, 0x3a, 0x44, 0xca, 0x00}, // PCLMULQDQ
                                          {0xc5, 0xf8, 0x58, 0xca},             // VADDPS
                                          {0xf2, 0x0f, 0x79, 0xca},             // INSERTQ
                                          {0x0f, 0x38, 0xc9, 0xca}};            // SHA1MSG1
    for (const auto& code : never)
        CHECK(all.run(code) == Vector::ud);
}

TEST_CASE_METHOD(Fixture, "POPCNT and CRC32 in all widths") {
    cpu.gpr[RCX] = 0xffff'0000'00ff'0103;
    cpu.flags.set(Rflags::status);
    REQUIRE_FALSE(machine.run({0xf3, 0x48, 0x0f, 0xb8, 0xc1}).faulted);
    CHECK(cpu.gpr[RAX] == 27);
    CHECK(cpu.flags.get() == 0);
    cpu.gpr[RAX] = ~0ull;
    REQUIRE_FALSE(machine.run({0x66, 0xf3, 0x0f, 0xb8, 0xc1}).faulted);
    CHECK(cpu.gpr[RAX] == 0xffff'ffff'ffff'0003);
    cpu.gpr[RCX] = 0;
    REQUIRE_FALSE(machine.run({0xf3, 0x0f, 0xb8, 0xc1}).faulted);
    CHECK(cpu.gpr[RAX] == 0);
    CHECK(cpu.flags.get() == Rflags::zf);
    // The check value of CRC-32C: "123456789" gives E3069283.
    const char text[] = "123456789";
    uint64_t eight;
    std::memcpy(&eight, text, sizeof eight);
    cpu.gpr[RAX] = 0xffffffff;
    cpu.gpr[RCX] = eight;
    REQUIRE_FALSE(machine.run({0xf2, 0x48, 0x0f, 0x38, 0xf1, 0xc1}).faulted);
    cpu.gpr[RCX] = static_cast<uint64_t>('9') << 8;
    REQUIRE_FALSE(machine.run({0xf2, 0x0f, 0x38, 0xf0, 0xc5}).faulted); // CRC32 eax, ch
    CHECK((cpu.gpr[RAX] ^ 0xffffffff) == 0xe3069283);
}

TEST_CASE("reciprocals keep to the manual's error bound and special cases") {
    constexpr double bound = 1.5 / 4096;
    for (uint64_t i = 0; i < 1 << 16; i++) {
        auto bits = static_cast<uint32_t>(0x00800000 + i * 0x7e00); // normal numbers below 2^126
        auto x = std::bit_cast<float>(bits);
        if (x > 0x1p125f)
            break;
        double reciprocal = std::bit_cast<float>(approximate_reciprocal(bits));
        double root = std::bit_cast<float>(approximate_reciprocal_sqrt(bits));
        REQUIRE(std::abs(reciprocal * x - 1) <= bound);
        REQUIRE(std::abs(root * std::sqrt(static_cast<double>(x)) - 1) <= bound);
        REQUIRE(approximate_reciprocal(bits | 1u << 31) == (approximate_reciprocal(bits) | 1u << 31));
    }
    CHECK(approximate_reciprocal(0x00000000) == 0x7f800000);
    CHECK(approximate_reciprocal(0x80000001) == 0xff800000);
    CHECK(approximate_reciprocal(0xff800000) == 0x80000000);
    CHECK(approximate_reciprocal(0x7f800001) == 0x7fc00001);
    CHECK(approximate_reciprocal(0x3f800000) == 0x3f800000);
    CHECK(approximate_reciprocal(0x7f7fffff) == 0);
    CHECK(approximate_reciprocal_sqrt(0xbf800000) == 0xffc00000);
    CHECK(approximate_reciprocal_sqrt(0x80000000) == 0xff800000);
    CHECK(approximate_reciprocal_sqrt(0x40800000) == 0x3f000000);
    CHECK(approximate_reciprocal_sqrt(0x7f800000) == 0);
}

TEST_CASE("the process may make stubs, and a stub is made once") {
    REQUIRE(fp_stub_memory());
    FpMachine machine;
    Op first = machine.decode(std::vector<uint8_t>{0x66, 0x0f, 0xfc, 0xca});        // PADDB xmm1, xmm2
    Op second = machine.decode(std::vector<uint8_t>{0x66, 0x45, 0x0f, 0xfc, 0xfe}); // PADDB xmm15, xmm14
    Op other = machine.decode(std::vector<uint8_t>{0x66, 0x0f, 0xfd, 0xca});        // PADDW xmm1, xmm2
    CHECK(first.imm == second.imm);
    CHECK(first.imm != other.imm);
}

} // namespace
} // namespace vtrace::soft
