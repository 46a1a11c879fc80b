// Event delivery (SDM vol. 3, chapter 6): frames, levels, stacks, faults in the delivery, records.
#include <catch2/catch.hpp>

#include "tests/soft/system_machine.h"

using namespace vtrace;
using namespace vtrace::soft;

namespace {

constexpr uint64_t from = 0x1234;

bool deliver(SystemMachine& m, uint8_t vector, EventKind kind = EventKind::exception) {
    m.cpu().rip = SystemMachine::code_at;
    return deliver_event(m.cpu(), kind, Fault{vector, false, 0, 0}, from);
}

} // namespace

TEST_CASE("a 64-bit fault pushes an aligned frame and is recorded once", "[events]") {
    SystemMachine m(TestMode::long64);
    Cpu& cpu = m.cpu();
    cpu.gpr[RSP] = SystemMachine::stack_top - 3; // not aligned
    cpu.set_rflags(Rflags::reserved1 | Rflags::if_ | Rflags::tf | Rflags::nt | Rflags::cf);
    cpu.rip = SystemMachine::code_at;
    REQUIRE(deliver_event(cpu, EventKind::exception, Fault{Vector::gp, true, 0x50, 0}, from));

    const uint64_t top = SystemMachine::stack_top - 16;
    CHECK(cpu.gpr[RSP] == top - 48);
    CHECK(m.read<uint64_t>(top - 8) == Sel::data);
    CHECK(m.read<uint64_t>(top - 16) == SystemMachine::stack_top - 3);
    CHECK(m.read<uint64_t>(top - 24) ==
          (Rflags::reserved1 | Rflags::if_ | Rflags::tf | Rflags::nt | Rflags::cf | Rflags::rf));
    CHECK(m.read<uint64_t>(top - 32) == Sel::code);
    CHECK(m.read<uint64_t>(top - 40) == SystemMachine::code_at);
    CHECK(m.read<uint64_t>(top - 48) == 0x50);
    CHECK(cpu.rip == m.handler(Vector::gp));
    CHECK(cpu.rflags() == (Rflags::reserved1 | Rflags::cf));
    CHECK(cpu.segments[SS].selector == Sel::data); // same level: SS stays
    const auto records = m.records();
    REQUIRE(records.size() == 1);
    CHECK(records[0].from == from);
    CHECK(records[0].to == m.handler(Vector::gp));
    CHECK(records[0].flags == ds::BtsFlags::make(ds::BtsKind::exception, Vector::gp, 0x50));
}

TEST_CASE("an interrupt from level 3 takes the TSS's stack, a trap gate leaves IF", "[events]") {
    SystemMachine m(TestMode::long64);
    Cpu& cpu = m.cpu();
    m.set_gate(0x40, 0xf, 0);
    m.set_level(3);
    cpu.set_rflags(Rflags::reserved1 | Rflags::if_);
    REQUIRE(deliver(m, 0x40, EventKind::external_interrupt));
    CHECK(cpu.cpl == 0);
    CHECK(cpu.gpr[RSP] == SystemMachine::inner_stack - 40);
    CHECK(m.read<uint64_t>(SystemMachine::inner_stack - 8) == (Sel::user_data | 3));
    CHECK(m.read<uint64_t>(SystemMachine::inner_stack - 24) == (Rflags::reserved1 | Rflags::if_)); // no RF
    CHECK(cpu.segments[SS].selector == 0);
    CHECK_FALSE(cpu.segments[SS].attributes & SegAttr::p);
    CHECK(cpu.system_flags & Rflags::if_);
    CHECK(m.records()[0].flags == ds::BtsFlags::make(ds::BtsKind::interrupt, 0x40));
}

TEST_CASE("IST switches stacks without a change of level; NMIs block NMIs", "[events]") {
    SystemMachine m(TestMode::long64);
    m.set_gate(Vector::nmi, 0xe, 0, 1);
    REQUIRE(deliver(m, Vector::nmi, EventKind::nmi));
    CHECK(m.cpu().gpr[RSP] == SystemMachine::ist1_stack - 40);
    CHECK(m.cpu().segments[SS].selector == Sel::data);
    CHECK(m.cpu().nmi_blocked);
}

TEST_CASE("INT n checks the gate's DPL and faults on itself", "[events]") {
    SystemMachine m(TestMode::long64);
    Cpu& cpu = m.cpu();
    m.set_level(3);
    CHECK(m.faults({0xcd, 0x80}, Vector::gp, 0x80 * 8 + 2));
    CHECK(cpu.rip == SystemMachine::code_at);
    CHECK(m.records().empty());
    m.set_gate(0x80, 0xe, 3);
    REQUIRE(m.step({0xcd, 0x80}));
    CHECK(m.read<uint64_t>(SystemMachine::inner_stack - 40) == SystemMachine::code_at + 2);
    CHECK(cpu.rip == m.handler(0x80));
    const auto records = m.records();
    REQUIRE(records.size() == 1);
    CHECK(records[0].from == SystemMachine::code_at);
    CHECK(records[0].flags == 0); // a branch

    m.set_level(3);
    CHECK(m.faults({0xcc}, Vector::gp, 3 * 8 + 2)); // INT3 is checked,
    REQUIRE(m.step({0xf1}));                        // INT1 isn't
    CHECK(cpu.rip == m.handler(Vector::db));
}

TEST_CASE("faults in a delivery follow table 6-5", "[events]") {
    SystemMachine m(TestMode::long64);
    Cpu& cpu = m.cpu();
    auto absent_gate = [&](unsigned vector) { m.write<uint8_t>(SystemMachine::idt + vector * 16 + 5, 0x0e); };

    SECTION("benign, then contributory: one after the other, with EXT") {
        absent_gate(Vector::ud);
        REQUIRE(deliver(m, Vector::ud));
        CHECK(cpu.rip == m.handler(Vector::np));
        CHECK(m.read<uint64_t>(cpu.gpr[RSP]) == Vector::ud * 8 + 3);
        CHECK(m.records().size() == 1);
    }
    SECTION("contributory twice: double fault, error code 0") {
        absent_gate(Vector::gp);
        REQUIRE(deliver(m, Vector::gp));
        CHECK(cpu.rip == m.handler(Vector::df));
        CHECK(m.read<uint64_t>(cpu.gpr[RSP]) == 0);
        CHECK(m.records()[0].flags == ds::BtsFlags::make(ds::BtsKind::exception, Vector::df));
    }
    SECTION("a page fault in the delivery of a page fault: double fault; CR2 is the second's") {
        m.set_gate(Vector::df, 0xe, 0, 1);
        cpu.gpr[RSP] = SystemMachine::absent_page + 0x800;
        cpu.rip = SystemMachine::code_at;
        REQUIRE(deliver_event(cpu, EventKind::exception, Fault{Vector::pf, true, 4, 0x5000}, from));
        CHECK(cpu.rip == m.handler(Vector::df));
        CHECK(cpu.cr2 == SystemMachine::absent_page + 0x800 - 8); // of the first push
    }
    SECTION("and a fault in that: shutdown, which names them all") {
        absent_gate(Vector::df);
        absent_gate(Vector::gp);
        const uint64_t rsp = cpu.gpr[RSP];
        REQUIRE_FALSE(deliver(m, Vector::gp));
        CHECK(cpu.leave == Leave::shutdown);
        CHECK(cpu.detail.find("#GP, then #NP(0x6b), then #DF(0x0), then #NP(0x43)") != std::string::npos);
        CHECK(cpu.gpr[RSP] == rsp);
        CHECK(m.records().empty());
    }
}

TEST_CASE("a frame that cannot be written leaves everything as it was", "[events]") {
    SystemMachine m(TestMode::long64);
    Cpu& cpu = m.cpu();
    m.set_gate(Vector::df, 0xe, 0, 1);
    m.set_gate(Vector::pf, 0xe, 0, 1);
    // The frame's upper part is on a page that is there, the lower one isn't.
    cpu.gpr[RSP] = SystemMachine::absent_page + page_size + 16;
    m.write<uint64_t>(SystemMachine::absent_page + page_size + 8, 0xdead);
    REQUIRE(deliver(m, Vector::ud));
    CHECK(cpu.rip == m.handler(Vector::pf));
    CHECK(m.read<uint64_t>(SystemMachine::absent_page + page_size + 8) == 0xdead);
    CHECK(m.read<uint64_t>(SystemMachine::ist1_stack - 16) == SystemMachine::absent_page + page_size + 16);
}

TEST_CASE("32-bit gates: levels, 16-bit gates, task gates", "[events]") {
    SystemMachine m(TestMode::protected32);
    Cpu& cpu = m.cpu();
    SECTION("from level 3") {
        m.set_level(3);
        REQUIRE(deliver(m, Vector::ud));
        const uint64_t top = SystemMachine::inner_stack;
        CHECK(cpu.gpr[RSP] == top - 20);
        CHECK(m.read<uint32_t>(top - 4) == (Sel::user_data | 3));
        CHECK(m.read<uint32_t>(top - 8) == SystemMachine::stack_top);
        CHECK(m.read<uint32_t>(top - 16) == (Sel::user_code | 3));
        CHECK(m.read<uint32_t>(top - 20) == SystemMachine::code_at);
        CHECK(cpu.segments[SS].selector == Sel::data);
        CHECK(cpu.cpl == 0);
    }
    SECTION("a 16-bit gate pushes words") {
        m.set_gate(0x30, 6, 0);
        REQUIRE(deliver(m, 0x30, EventKind::external_interrupt));
        CHECK(cpu.gpr[RSP] == SystemMachine::stack_top - 6);
        CHECK(cpu.rip == (m.handler(0x30) & 0xffff));
    }
    SECTION("a bad stack in the TSS is #TS with its selector") {
        m.set_level(3);
        m.write<uint16_t>(SystemMachine::tss + 8, Sel::user_data | 3);
        m.set_gate(0x80, 0xe, 3);
        CHECK(m.faults({0xcd, 0x80}, Vector::ts, Sel::user_data));
    }
    SECTION("task gates are refused in words") {
        m.set_gate(0x31, 5, 0);
        REQUIRE_FALSE(deliver(m, 0x31, EventKind::external_interrupt));
        CHECK(cpu.leave == Leave::unsupported);
        CHECK(cpu.detail.find("task gate") != std::string::npos);
    }
}

TEST_CASE("real mode goes through the IVT", "[events]") {
    SystemMachine m(TestMode::real);
    Cpu& cpu = m.cpu();
    cpu.set_rflags(Rflags::reserved1 | Rflags::if_ | Rflags::tf);
    REQUIRE(m.step({0xcd, 0x21}));
    CHECK(cpu.gpr[RSP] == 0x7000 - 6);
    CHECK(m.read<uint16_t>(0x7000 - 2) == (Rflags::reserved1 | Rflags::if_ | Rflags::tf));
    CHECK(m.read<uint16_t>(0x7000 - 6) == 0x1002);
    CHECK(cpu.segments[CS].selector == 0x3000);
    CHECK(cpu.rip == 0x210);
    CHECK(cpu.rflags() == Rflags::reserved1);
    CHECK(m.records()[0].to == 0x30210);
    // And back.
    REQUIRE(m.step({0xcf}));
    CHECK(cpu.rip == 0x1002);
    CHECK(cpu.segments[CS].selector == 0);
    CHECK(cpu.gpr[RSP] == 0x7000);
    CHECK(cpu.system_flags == (Rflags::if_ | Rflags::tf));
}
