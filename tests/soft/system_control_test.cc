// Control registers, MSRs, CPUID, flags, ports, debug registers.
#include <catch2/catch.hpp>

#include "tests/soft/system_machine.h"
#include "vmm/soft/debug_register.h"
#include "vmm/msr_index.h"

using namespace vtrace;
using namespace vtrace::soft;

namespace {

bool wrmsr(SystemMachine& m, uint32_t msr, uint64_t value) {
    m.cpu().gpr[RCX] = msr;
    m.cpu().gpr[RAX] = static_cast<uint32_t>(value);
    m.cpu().gpr[RDX] = value >> 32;
    return m.step({0x0f, 0x30});
}

std::optional<uint64_t> rdmsr(SystemMachine& m, uint32_t msr) {
    m.cpu().gpr[RCX] = msr;
    if (!m.step({0x0f, 0x32}))
        return std::nullopt;
    return m.cpu().gpr[RDX] << 32 | m.cpu().gpr[RAX];
}

bool mov_cr(SystemMachine& m, unsigned number, uint64_t value) {
    m.cpu().gpr[RAX] = value;
    return number == 8 ? m.step({0x44, 0x0f, 0x22, 0xc0}) : m.step({0x0f, 0x22, static_cast<int>(0xc0 | number << 3)});
}

} // namespace

TEST_CASE("CR0 and CR4 refuse what contradicts itself", "[control]") {
    SystemMachine m(TestMode::long64);
    Cpu& cpu = m.cpu();
    const uint64_t cr0 = cpu.cr0;
    CHECK_FALSE(mov_cr(m, 0, cr0 | 1ull << 32));
    CHECK_FALSE(mov_cr(m, 0, cr0 & ~Cr0::pg)); // from 64-bit code
    CHECK_FALSE(mov_cr(m, 0, cr0 & ~Cr0::pe));
    CHECK_FALSE(mov_cr(m, 0, cr0 | Cr0::nw));
    CHECK(cpu.cr0 == cr0);
    CHECK(mov_cr(m, 0, (cr0 | Cr0::cd | Cr0::nw) & ~Cr0::et));
    CHECK(cpu.cr0 == (cr0 | Cr0::cd | Cr0::nw)); // ET stays 1

    CHECK_FALSE(mov_cr(m, 4, 0)); // PAE in long mode
    CHECK_FALSE(mov_cr(m, 4, Cr4::pae | Cr4::la57));
    CHECK_FALSE(mov_cr(m, 4, Cr4::pae | Cr4::vme));
    CHECK(mov_cr(m, 4, Cr4::pae | Cr4::pcide));
    cpu.cr4 = Cr4::pae;
    cpu.cr3 |= 5;
    CHECK_FALSE(mov_cr(m, 4, Cr4::pae | Cr4::pcide)); // a PCID is there already
    cpu.cr3 &= ~0xfffull;

    CHECK_FALSE(mov_cr(m, 3, cpu.cr3 | 1ull << 40));
    CHECK_FALSE(mov_cr(m, 3, cpu.cr3 | 1ull << 63));
    cpu.cr4 |= Cr4::pcide;
    const uint64_t cr3 = cpu.cr3;
    CHECK(mov_cr(m, 3, cr3 | 1ull << 63));
    CHECK(cpu.cr3 == cr3);

    CHECK_FALSE(mov_cr(m, 8, 16));
    CHECK(mov_cr(m, 8, 9));
    CHECK(m.pins().cr8 == 9);
    m.set_level(3);
    CHECK(m.faults({0x0f, 0x20, 0xc0}, Vector::gp, 0));
}

TEST_CASE("long mode is entered through compatibility mode and left the same way", "[control]") {
    SystemMachine m(TestMode::protected32);
    Cpu& cpu = m.cpu();
    CHECK(wrmsr(m, Msr::efer, Efer::lme));
    CHECK_FALSE(mov_cr(m, 0, cpu.cr0 | Cr0::pg)); // without PAE
    CHECK(mov_cr(m, 4, Cr4::pae));
    CHECK(mov_cr(m, 0, cpu.cr0 | Cr0::pg));
    CHECK(cpu.efer == (Efer::lme | Efer::lma));
    CHECK(cpu.mode == CodeMode::bits32);
    cpu.cr0 &= ~Cr0::pg; // leave it by hand: there are no page tables to look in
    cpu.efer = 0;
    cpu.update_mode();
    // PAE paging: reserved bits of a PDPTE.
    m.write<uint64_t>(0x5000, 0x6001 | 2);
    cpu.cr3 = 0x5000;
    CHECK_FALSE(mov_cr(m, 0, cpu.cr0 | Cr0::pg));
    m.write<uint64_t>(0x5000, 0x6001);
    CHECK(mov_cr(m, 0, cpu.cr0 | Cr0::pg));
}

TEST_CASE("MSRs check what is written", "[control]") {
    SystemMachine m(TestMode::long64);
    Cpu& cpu = m.cpu();
    CHECK_FALSE(wrmsr(m, Msr::efer, 0)); // LME while paging
    CHECK_FALSE(wrmsr(m, Msr::efer, Efer::lme | 1 << 12));
    CHECK(wrmsr(m, Msr::efer, Efer::lme | Efer::nxe));
    CHECK(rdmsr(m, Msr::efer) == (Efer::lme | Efer::lma | Efer::nxe));
    CHECK_FALSE(wrmsr(m, Msr::lstar, 0x8000'0000'0000));
    CHECK_FALSE(wrmsr(m, Msr::pat, 0x02));
    CHECK(wrmsr(m, Msr::pat, 0x0007'0406'0007'0406));
    CHECK_FALSE(wrmsr(m, Msr::mtrr_cap, 0));
    CHECK_FALSE(wrmsr(m, Msr::mtrr_default, 2));
    CHECK(wrmsr(m, Msr::mtrr_variable_first + 1, 0xff'f000'0800));
    CHECK_FALSE(wrmsr(m, Msr::mtrr_variable_first + 1, 1ull << 40));
    CHECK(rdmsr(m, Msr::mtrr_cap) == 0x508);
    CHECK((*rdmsr(m, Msr::misc_enable) & (MiscEnable::bts_unavailable | MiscEnable::pebs_unavailable)) ==
          (MiscEnable::bts_unavailable | MiscEnable::pebs_unavailable));
    CHECK((*rdmsr(m, Msr::misc_enable) & MiscEnable::fast_strings));
    CHECK_FALSE(wrmsr(m, Msr::debugctl, 1 << 7)); // BTS
    CHECK_FALSE(rdmsr(m, 0x3a));
    CHECK(wrmsr(m, Msr::gs_base, 0xffff'8000'0000'0000));
    CHECK(cpu.segment_base[GS] == 0xffff'8000'0000'0000);
    CHECK(m.step({0x0f, 0x01, 0xf8})); // SWAPGS
    CHECK(cpu.segment_base[GS] == 0);
    CHECK(cpu.kernel_gs_base == 0xffff'8000'0000'0000);
    CHECK(wrmsr(m, Msr::tsc, 1000));
    CHECK(rdmsr(m, Msr::tsc) == 1000);
    CHECK(rdmsr(m, Msr::tsc_adjust) == 1000);
    m.set_level(3);
    CHECK_FALSE(rdmsr(m, Msr::efer));
}

TEST_CASE("CPUID tells the state, and only what there is", "[control]") {
    SystemMachine m(TestMode::long64, "atom");
    Cpu& cpu = m.cpu();
    auto leaf = [&](uint32_t eax, uint32_t ecx = 0) {
        cpu.gpr[RAX] = eax;
        cpu.gpr[RCX] = ecx;
        REQUIRE(m.step({0x0f, 0xa2}));
        return std::array{cpu.gpr[RAX], cpu.gpr[RBX], cpu.gpr[RCX], cpu.gpr[RDX]};
    };
    CHECK(leaf(0) == std::array<uint64_t, 4>{0x16, 0x756e6547, 0x6c65746e, 0x49656e69});
    CHECK(leaf(1)[0] == 0x106ca);
    CHECK((leaf(1)[3] >> 9 & 1) == 1);
    m.pins().apic_base = 0xfee0'0000;
    CHECK((leaf(1)[3] >> 9 & 1) == 0);
    CHECK((leaf(1)[3] >> 21 & 1) == 1); // DS
    CHECK((leaf(1)[2] & (1 << 2 | 1 << 4 | 1 << 15)) == (1 << 2 | 1 << 4 | 1 << 15)); // DTES64, DS-CPL, PDCM
    CHECK(leaf(0xa) == std::array<uint64_t, 4>{0x07280203, 0, 0, 3 | 40 << 5});
    CHECK(leaf(0x8000'0008)[0] == 0x3028);
    CHECK(leaf(0x15) == std::array<uint64_t, 4>{1, 40, 25'000'000, 0});
    CHECK(leaf(0x20) == leaf(0x16));                 // beyond the last
    CHECK(m.faults({0x0f, 0x01, 0xf9}, Vector::ud)); // RDTSCP
    CHECK(m.faults({0x0f, 0xc7, 0xf0}, Vector::ud)); // RDRAND
    CHECK(m.faults({0x0f, 0x01, 0xc8}, Vector::ud)); // MONITOR
    CHECK_FALSE(CpuidModel::by_name("i486"));
}

TEST_CASE("the interrupt flag and IOPL", "[control]") {
    SystemMachine m(TestMode::long64);
    Cpu& cpu = m.cpu();
    REQUIRE(m.step({0xfb}));
    CHECK(cpu.shadow == InterruptShadow::sti);
    cpu.shadow = InterruptShadow::none;
    REQUIRE(m.step({0xfb})); // IF was set: no shadow
    CHECK(cpu.shadow == InterruptShadow::none);
    m.set_level(3);
    CHECK(m.faults({0xfa}, Vector::gp, 0));
    CHECK(m.faults({0xf4}, Vector::gp, 0));
    // POPFQ at level 3: IF and IOPL stay.
    m.write<uint64_t>(SystemMachine::stack_top, Rflags::iopl | Rflags::tf | Rflags::id | Rflags::zf | Rflags::rf);
    REQUIRE(m.step({0x9d}));
    CHECK(cpu.rflags() == (Rflags::reserved1 | Rflags::if_ | Rflags::tf | Rflags::id | Rflags::zf));
    CHECK(cpu.gpr[RSP] == SystemMachine::stack_top + 8);
}

TEST_CASE("ports are allowed by IOPL or the TSS's bitmap", "[control]") {
    SystemMachine m(TestMode::long64);
    Cpu& cpu = m.cpu();
    m.set_level(3);
    m.pins().ports[0x70] = 0xab;
    cpu.gpr[RAX] = 0x1111'2222'3333'4444;
    REQUIRE(m.step({0xe4, 0x70})); // IN AL: the bitmap has zeros
    CHECK(cpu.gpr[RAX] == 0x1111'2222'3333'44ab);
    m.write<uint8_t>(SystemMachine::tss + 0x68 + 0x70 / 8, 1 << 3); // port 0x73
    CHECK(m.step({0xe4, 0x70}));
    CHECK(m.faults({0xe5, 0x70}, Vector::gp, 0)); // four ports
    cpu.gpr[RDX] = 0x3f8;                         // beyond the limit
    CHECK(m.faults({0xee}, Vector::gp, 0));
    cpu.set_rflags(2 | Rflags::iopl);
    REQUIRE(m.step({0xee}));
    CHECK(m.pins().ports[0x3f8] == 0xab);
}

TEST_CASE("debug registers", "[control]") {
    SystemMachine m(TestMode::long64);
    Cpu& cpu = m.cpu();
    cpu.gpr[RAX] = ~0ull;
    CHECK(m.faults({0x0f, 0x23, 0xf8}, Vector::gp, 0)); // DR7, upper half
    cpu.gpr[RAX] = 0;
    REQUIRE(m.step({0x0f, 0x23, 0xf0}));
    CHECK(cpu.dr6 == 0xffff'0ff0);
    REQUIRE(m.step({0x0f, 0x21, 0xe0})); // DR4 is DR6
    CHECK(cpu.gpr[RAX] == 0xffff'0ff0);
    cpu.cr4 |= Cr4::de;
    CHECK(m.faults({0x0f, 0x21, 0xe0}, Vector::ud));

    cpu.dr = {0x5000, 0x6004, 0x7000, 0x80};
    // 0: execute; 1: write, 4 bytes; 2: read or write, 8 bytes; 3: ports, 2 bytes.
    cpu.dr7 = 0x400 | 0x55 | 0xdull << 20 | 0xbull << 24 | 0x6ull << 28;
    CHECK(code_breakpoints(cpu, 0x5000) == 1);
    CHECK(code_breakpoints(cpu, 0x6004) == 0);
    CHECK(data_breakpoints(cpu, 0x6000, 8, true) == 2);
    CHECK(data_breakpoints(cpu, 0x6000, 4, true) == 0);
    CHECK(data_breakpoints(cpu, 0x6004, 4, false) == 0);
    CHECK(data_breakpoints(cpu, 0x7007, 1, false) == 4);
    CHECK(data_breakpoints(cpu, 0x7008, 1, false) == 0);
    CHECK(page_watched(cpu, 0x7abc));
    CHECK_FALSE(page_watched(cpu, 0x5000));
    REQUIRE(m.step({0xe4, 0x81}));
    CHECK(cpu.pending_db == 8);

    cpu.dr7 |= Dr7::gd;
    CHECK(m.faults({0x0f, 0x21, 0xf0}, Vector::db));
    CHECK((cpu.dr6 & Dr6::bd));
    REQUIRE(deliver_event(cpu, EventKind::exception, cpu.fault, cpu.rip));
    CHECK_FALSE(cpu.dr7 & Dr7::gd);
    CHECK((m.read<uint64_t>(cpu.gpr[RSP] + 16) & Rflags::rf)); // a fault: it must restart
}

TEST_CASE("descriptor tables and the task register", "[control]") {
    SystemMachine m(TestMode::long64);
    Cpu& cpu = m.cpu();
    cpu.gpr[RAX] = 0x19000;
    REQUIRE(m.step({0x0f, 0x01, 0x00})); // SGDT
    CHECK(m.read<uint16_t>(0x19000) == 0xff);
    CHECK(m.read<uint64_t>(0x19002) == SystemMachine::gdt);
    m.write<uint64_t>(0x19002, 0x8000'0000'0000);
    CHECK(m.faults({0x0f, 0x01, 0x10}, Vector::gp, 0)); // LGDT
    CHECK(cpu.gdtr.base == SystemMachine::gdt);
    cpu.gpr[RAX] = Sel::tss;
    REQUIRE(m.step({0x0f, 0x00, 0xd8})); // LTR
    CHECK((cpu.tr.attributes & 15) == 11);
    CHECK(m.faults({0x0f, 0x00, 0xd8}, Vector::gp, Sel::tss)); // busy now
    cpu.gpr[RAX] = 0;
    CHECK(m.faults({0x0f, 0x00, 0xd8}, Vector::gp, 0));

    cpu.gpr[RAX] = Sel::user_data | 3;
    REQUIRE(m.step({0x0f, 0x02, 0xc8})); // LAR ECX, EAX
    CHECK(cpu.flags.zf());
    CHECK(cpu.gpr[RCX] == 0xc0f300);
    REQUIRE(m.step({0x0f, 0x03, 0xc8})); // LSL
    CHECK(cpu.gpr[RCX] == 0xffff'ffff);
    cpu.gpr[RAX] = Sel::outside;
    REQUIRE(m.step({0x0f, 0x02, 0xc8}));
    CHECK_FALSE(cpu.flags.zf());
    cpu.gpr[RAX] = Sel::code;
    REQUIRE(m.step({0x0f, 0x00, 0xe8})); // VERW of code
    CHECK_FALSE(cpu.flags.zf());

    m.set_level(3);
    cpu.cr4 |= Cr4::umip;
    CHECK(m.faults({0x0f, 0x00, 0xc8}, Vector::gp, 0)); // STR
    CHECK(m.faults({0x0f, 0x01, 0xca}, Vector::ud));    // CLAC outside of level 0
}
