// Segment loads, far transfers, returns, SYSCALL and SYSENTER.
#include <catch2/catch.hpp>

#include "tests/soft/system_machine.h"

using namespace vtrace;
using namespace vtrace::soft;

namespace {

/// The frame that IRETQ pops, below stack_top.
void push_iret_frame(SystemMachine& m, uint64_t rip, uint64_t cs, uint64_t flags, uint64_t rsp, uint64_t ss) {
    const uint64_t frame[] = {rip, cs, flags, rsp, ss};
    m.cpu().gpr[RSP] = SystemMachine::stack_top - sizeof frame;
    for (unsigned i = 0; i < 5; ++i)
        m.write(m.cpu().gpr[RSP] + i * 8, frame[i]);
}

} // namespace

TEST_CASE("MOV to a segment register checks what the SDM lists", "[segments]") {
    SystemMachine m(TestMode::long64);
    Cpu& cpu = m.cpu();
    auto load_ds = [&](uint16_t selector) { cpu.gpr[RAX] = selector; };
    load_ds(Sel::outside);
    CHECK(m.faults({0x8e, 0xd8}, Vector::gp, Sel::outside));
    load_ds(Sel::absent_data | 3);
    CHECK(m.faults({0x8e, 0xd8}, Vector::np, Sel::absent_data));
    load_ds(Sel::tss);
    CHECK(m.faults({0x8e, 0xd8}, Vector::gp, Sel::tss));
    load_ds(4 | Sel::data); // LDT, which there is none of
    CHECK(m.faults({0x8e, 0xd8}, Vector::gp, 4 | Sel::data));
    load_ds(0);
    CHECK(m.step({0x8e, 0xd8}));
    CHECK_FALSE(cpu.segments[DS].attributes & SegAttr::p);

    m.set_descriptor(Sel::unused, 0x00cf'f200'0000'ffff); // not accessed yet
    load_ds(Sel::unused | 3);
    CHECK(m.step({0x8e, 0xd8}));
    CHECK((m.read<uint8_t>(SystemMachine::gdt + Sel::unused + 5) & 1));
    CHECK(cpu.segments[DS].selector == (Sel::unused | 3));

    load_ds(Sel::data | 1); // SS: RPL must be CPL
    CHECK(m.faults({0x8e, 0xd0}, Vector::gp, Sel::data));
    load_ds(0); // null SS is allowed inside level 3 in 64-bit mode
    CHECK(m.step({0x8e, 0xd0}));
    CHECK(cpu.shadow == InterruptShadow::mov_ss);
    CHECK(m.faults({0x8e, 0xc8}, Vector::ud)); // CS

    m.set_level(3);
    cpu.gpr[RAX] = 3;
    CHECK(m.faults({0x8e, 0xd0}, Vector::gp, 0));
    cpu.gpr[RAX] = Sel::data; // DPL 0
    CHECK(m.faults({0x8e, 0xd8}, Vector::gp, Sel::data));
}

TEST_CASE("IRETQ: to user, null SS, flags, and what it refuses", "[segments]") {
    SystemMachine m(TestMode::long64);
    Cpu& cpu = m.cpu();
    SECTION("to level 3: inner segments become null, flags come from the frame") {
        cpu.nmi_blocked = true;
        push_iret_frame(m, 0x11110, Sel::user_code | 3, 0x40000 | Rflags::if_ | Rflags::rf | 2, 0x12340,
                        Sel::user_data | 3);
        cpu.segments[GS].base = 0x7777; // with DS's selector: level 0
        REQUIRE(m.step({0x48, 0xcf}));
        CHECK(cpu.cpl == 3);
        CHECK(cpu.rip == 0x11110);
        CHECK(cpu.gpr[RSP] == 0x12340);
        CHECK(cpu.rflags() == (0x40000 | Rflags::if_ | Rflags::rf | 2));
        CHECK(cpu.segments[DS].selector == 0);
        CHECK_FALSE(cpu.nmi_blocked);
        CHECK(m.records().size() == 1);
    }
    SECTION("a null segment keeps its base: it is not dropped again") {
        cpu.segments[GS] = {0x1234'5678, 0, 0, 0};
        push_iret_frame(m, 0x11110, Sel::user_code | 3, 2, 0x12340, Sel::user_data | 3);
        REQUIRE(m.step({0x48, 0xcf}));
        CHECK(cpu.segments[GS].base == 0x1234'5678);
        CHECK(cpu.segment_base[GS] == 0x1234'5678);
    }
    SECTION("to compatibility mode, with a 32-bit stack") {
        push_iret_frame(m, 0x11110, Sel::user_code32 | 3, 2, 0xffff'ffff'0001'2340, Sel::user_data | 3);
        REQUIRE(m.step({0x48, 0xcf}));
        CHECK(cpu.mode == CodeMode::bits32);
        CHECK(cpu.gpr[RSP] == 0x12340);
    }
    SECTION("same level pops SS too, and null will do") {
        push_iret_frame(m, 0x11110, Sel::code, 2, 0x12340, 0);
        REQUIRE(m.step({0x48, 0xcf}));
        CHECK(cpu.gpr[RSP] == 0x12340);
        CHECK(cpu.cpl == 0);
    }
    SECTION("refused before anything changes") {
        push_iret_frame(m, 0x8000'0000'0000, Sel::code, 2, 0x12340, 0);
        CHECK(m.faults({0x48, 0xcf}, Vector::gp, 0)); // not canonical
        push_iret_frame(m, 0x11110, Sel::user_code | 3, 2, 0x12340, 0);
        CHECK(m.faults({0x48, 0xcf}, Vector::gp, 0)); // null SS for level 3
        push_iret_frame(m, 0x11110, Sel::user_code | 3, 2, 0x12340, Sel::data);
        CHECK(m.faults({0x48, 0xcf}, Vector::gp, Sel::data));
        push_iret_frame(m, 0x11110, Sel::data, 2, 0x12340, 0);
        CHECK(m.faults({0x48, 0xcf}, Vector::gp, Sel::data));
        push_iret_frame(m, 0x11110, 0, 2, 0x12340, 0);
        CHECK(m.faults({0x48, 0xcf}, Vector::gp, 0));
        cpu.set_rflags(2 | Rflags::nt);
        push_iret_frame(m, 0x11110, Sel::code, 2, 0x12340, 0);
        CHECK(m.faults({0x48, 0xcf}, Vector::gp, 0));
        CHECK(cpu.cpl == 0);
        CHECK(m.records().empty());
    }
    SECTION("level 3 changes neither IOPL nor IF") {
        m.set_level(3);
        cpu.set_rflags(2 | Rflags::if_);
        push_iret_frame(m, 0x11110, Sel::user_code | 3, 2 | Rflags::iopl | Rflags::cf, 0x12340, Sel::user_data | 3);
        REQUIRE(m.step({0x48, 0xcf}));
        CHECK(cpu.rflags() == (2 | Rflags::if_ | Rflags::cf));
    }
}

TEST_CASE("far jumps, calls and returns", "[segments]") {
    SystemMachine m(TestMode::long64);
    Cpu& cpu = m.cpu();
    const uint64_t pointer = 0x19000;
    cpu.gpr[RAX] = pointer;
    m.write<uint32_t>(pointer, 0x12345);
    m.write<uint16_t>(pointer + 4, Sel::code);
    REQUIRE(m.step({0xff, 0x18})); // CALL m16:32
    CHECK(cpu.rip == 0x12345);
    CHECK(cpu.gpr[RSP] == SystemMachine::stack_top - 8);
    CHECK(m.read<uint32_t>(cpu.gpr[RSP]) == SystemMachine::code_at + 2);
    REQUIRE(m.step({0xcb})); // RETF, 32-bit operands
    CHECK(cpu.rip == SystemMachine::code_at + 2);
    CHECK(cpu.gpr[RSP] == SystemMachine::stack_top);

    m.write<uint64_t>(pointer, 0x12345);
    m.write<uint16_t>(pointer + 8, Sel::code32);
    REQUIRE(m.step({0x48, 0xff, 0x28})); // JMP m16:64 into compatibility mode
    CHECK(cpu.mode == CodeMode::bits32);
    m.set_level(0);
    m.write<uint16_t>(pointer + 8, Sel::user_code);
    CHECK(m.faults({0x48, 0xff, 0x28}, Vector::gp, Sel::user_code));
    m.write<uint64_t>(pointer, 0x8000'0000'0000);
    m.write<uint16_t>(pointer + 8, Sel::code);
    CHECK(m.faults({0x48, 0xff, 0x28}, Vector::gp, 0));
    CHECK(m.records().size() == 3);
}

TEST_CASE("a 64-bit call gate leads inwards and RETF back", "[segments]") {
    SystemMachine m(TestMode::long64);
    Cpu& cpu = m.cpu();
    m.set_descriptor(Sel::call_gate, 0x0000'ec00'0000'0000 | uint64_t{Sel::code} << 16 | 0x4444);
    m.write<uint64_t>(SystemMachine::gdt + Sel::call_gate + 8, 0);
    m.set_level(3);
    const uint64_t pointer = 0x19000;
    cpu.gpr[RAX] = pointer;
    m.write<uint32_t>(pointer, 0xffff); // ignored
    m.write<uint16_t>(pointer + 4, Sel::call_gate | 3);
    REQUIRE(m.step({0xff, 0x18}));
    CHECK(cpu.cpl == 0);
    CHECK(cpu.rip == 0x4444);
    CHECK(cpu.gpr[RSP] == SystemMachine::inner_stack - 32);
    CHECK(m.read<uint64_t>(SystemMachine::inner_stack - 16) == SystemMachine::stack_top);
    REQUIRE(m.step({0x48, 0xcb}));
    CHECK(cpu.cpl == 3);
    CHECK(cpu.rip == SystemMachine::code_at + 2);
    CHECK(cpu.gpr[RSP] == SystemMachine::stack_top);
    CHECK(cpu.segments[SS].selector == (Sel::user_data | 3));
    CHECK(m.records().size() == 2);
}

TEST_CASE("SYSCALL and SYSRET", "[segments]") {
    SystemMachine m(TestMode::long64);
    Cpu& cpu = m.cpu();
    cpu.star = uint64_t{Sel::user_code32} << 48 | uint64_t{Sel::code} << 32;
    cpu.lstar = 0x40000;
    cpu.sfmask = Rflags::if_ | Rflags::df;
    m.set_level(3);
    cpu.set_rflags(2 | Rflags::if_ | Rflags::df | Rflags::cf);
    REQUIRE(m.step({0x0f, 0x05}));
    CHECK(cpu.rip == 0x40000);
    CHECK(cpu.cpl == 0);
    CHECK(cpu.gpr[RCX] == SystemMachine::code_at + 2);
    CHECK(cpu.gpr[R11] == (2 | Rflags::if_ | Rflags::df | Rflags::cf));
    CHECK(cpu.rflags() == (2 | Rflags::cf));
    CHECK(cpu.segments[CS].selector == Sel::code);
    CHECK(cpu.segments[SS].selector == Sel::data);

    REQUIRE(m.step({0x48, 0x0f, 0x07}));
    CHECK(cpu.cpl == 3);
    CHECK(cpu.rip == SystemMachine::code_at + 2);
    CHECK(cpu.segments[CS] == Segment{0, 0xffff'ffff, Sel::user_code | 3, 0xa0fb});
    CHECK(cpu.segments[SS].selector == (Sel::user_data | 3));
    CHECK(cpu.system_flags == (Rflags::if_ | Rflags::df));
    CHECK(m.faults({0x48, 0x0f, 0x07}, Vector::gp, 0)); // not at level 3

    m.set_level(0);
    cpu.gpr[RCX] = 0x8000'0000'0000;
    CHECK(m.faults({0x48, 0x0f, 0x07}, Vector::gp, 0));
    CHECK(cpu.cpl == 0);
    REQUIRE(m.step({0x0f, 0x07})); // to compatibility mode, ECX
    CHECK(cpu.mode == CodeMode::bits32);
    CHECK(cpu.rip == 0);
    cpu.efer &= ~Efer::sce;
    m.set_level(0);
    CHECK(m.faults({0x0f, 0x05}, Vector::ud));
}

TEST_CASE("SYSENTER and SYSEXIT", "[segments]") {
    SystemMachine m(TestMode::long64);
    Cpu& cpu = m.cpu();
    m.set_user32();
    CHECK(m.faults({0x0f, 0x34}, Vector::gp, 0)); // SYSENTER_CS is null
    cpu.sysenter_cs = Sel::code;
    cpu.sysenter_esp = 0xffff'8000'0000'1000;
    cpu.sysenter_eip = 0xffff'8000'0000'2000;
    cpu.set_rflags(2 | Rflags::if_);
    REQUIRE(m.step({0x0f, 0x34}));
    CHECK(cpu.mode == CodeMode::bits64);
    CHECK(cpu.rip == 0xffff'8000'0000'2000);
    CHECK(cpu.gpr[RSP] == 0xffff'8000'0000'1000);
    CHECK_FALSE(cpu.system_flags & Rflags::if_);
    cpu.gpr[RDX] = 0x1'0000'5555;
    cpu.gpr[RCX] = 0x1'0000'6666;
    REQUIRE(m.step({0x0f, 0x35}));
    CHECK(cpu.mode == CodeMode::bits32);
    CHECK(cpu.rip == 0x5555);
    CHECK(cpu.gpr[RSP] == 0x6666);
    CHECK(cpu.segments[CS].selector == (Sel::code + 16 | 3));
}

TEST_CASE("real-mode far transfers and segment loads", "[segments]") {
    SystemMachine m(TestMode::real);
    Cpu& cpu = m.cpu();
    REQUIRE(m.step({0x9a, 0x34, 0x12, 0x00, 0x20})); // CALL 2000:1234
    CHECK(cpu.segments[CS].base == 0x20000);
    CHECK(cpu.rip == 0x1234);
    CHECK(m.records()[0].to == 0x21234);
    REQUIRE(m.step({0xcb}));
    CHECK(cpu.rip == 0x1005);
    cpu.gpr[RAX] = 0xb800;
    REQUIRE(m.step({0x8e, 0xc0}));
    CHECK(cpu.segment_base[ES] == 0xb8000);
    CHECK(cpu.segments[ES].limit == 0xffff);
}
