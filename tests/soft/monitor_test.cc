// The guest's own Debug Store and counters in the software engine, against the host's recording beside it and against a
// count of our own: one instruction at a time, each looked at with Capstone.
#define CATCH_CONFIG_MAIN
#include <catch2/catch.hpp>

#include <algorithm>
#include <cstring>
#include <functional>

#include <capstone/capstone.h>

#include "ds/facility.h"
#include "ds/msr.h"
#include "tests/soft/loop_machine.h"

namespace vtrace {
namespace {

namespace msr = ds::msr;

constexpr Gpa area = 0x400000, bts_buffer = 0x410000, pebs_buffer = 0x800000;
constexpr uint64_t tr_bts_btint = 1 << 6 | 1 << 7 | 1 << 8, bts_off_os = 1 << 9, bts_off_usr = 1 << 10;

template <class T>
T read(LoopMachine& loop, Gpa gpa) {
    T value;
    std::memcpy(&value, loop.machine->memory().at(gpa, sizeof value), sizeof value);
    return value;
}
void write(LoopMachine& loop, Gpa gpa, uint64_t value) {
    std::memcpy(loop.machine->memory().at(gpa, sizeof value), &value, sizeof value);
}
void set(LoopMachine& loop, uint32_t register_, uint64_t value) {
    INFO("MSR " << std::hex << register_);
    REQUIRE(loop.machine->facility(0)->write_msr(register_, value));
}
uint64_t get(LoopMachine& loop, uint32_t register_) { return loop.machine->facility(0)->read_msr(register_).value(); }

/// A DS area of the 64-bit layout with room for so many BTS and PEBS records, no threshold within.
void place_area(LoopMachine& loop, uint64_t bts_records, uint64_t pebs_bytes) {
    const uint64_t fields[] = {bts_buffer,  bts_buffer,  bts_buffer + bts_records * 24, ~0ull,
                               pebs_buffer, pebs_buffer, pebs_buffer + pebs_bytes,      ~0ull};
    for (size_t i = 0; i < std::size(fields); ++i)
        write(loop, area + 8 * i, fields[i]);
    set(loop, msr::ds_area, area);
}

using Records = std::vector<std::array<uint64_t, 3>>;

Records guest_records(LoopMachine& loop) {
    Records records;
    for (Gpa at = bts_buffer; at < read<uint64_t>(loop, area + 8); at += 24)
        records.push_back({read<uint64_t>(loop, at), read<uint64_t>(loop, at + 8), read<uint64_t>(loop, at + 16)});
    return records;
}
Records without_flags(Records records) {
    for (auto& record : records)
        record[2] = 0;
    return records;
}

/// One instruction as Capstone and the host's recording saw it.
struct Step {
    uint64_t rip, next_rip;
    bool branch = false, conditional = false, call = false, ret = false, taken = false;
    bool load = false, store = false;
};

class Disassembler {
  public:
    Disassembler() {
        REQUIRE(cs_open(CS_ARCH_X86, CS_MODE_64, &handle_) == CS_ERR_OK);
        cs_option(handle_, CS_OPT_DETAIL, CS_OPT_ON);
    }
    ~Disassembler() { cs_close(&handle_); }

    Step look(LoopMachine& loop) {
        Step step{};
        step.rip = loop.vcpu().state().rip;
        cs_insn* instruction;
        REQUIRE(cs_disasm(handle_, loop.machine->memory().at(step.rip, 16), 16, step.rip, 1, &instruction) == 1);
        const unsigned id = instruction->id;
        step.call = cs_insn_group(handle_, instruction, CS_GRP_CALL);
        step.ret = cs_insn_group(handle_, instruction, CS_GRP_RET);
        const bool jump = cs_insn_group(handle_, instruction, CS_GRP_JUMP) || id == X86_INS_LOOP;
        step.branch = step.call || step.ret || jump;
        step.conditional = jump && id != X86_INS_JMP;
        const cs_x86& x86 = instruction->detail->x86;
        // Capstone 4's `access` is wrong for some of these (MOVDQU, FSTP); by the manual, a destination is written, and
        // read unless it is only moved to.
        const bool only_written = id == X86_INS_MOV || id == X86_INS_MOVDQU || id == X86_INS_FSTP || id == X86_INS_STOSB;
        for (unsigned i = 0; i < x86.op_count; ++i) {
            if (x86.operands[i].type != X86_OP_MEM || id == X86_INS_LEA)
                continue;
            step.load |= i > 0 || !only_written;
            step.store |= (i == 0 && id != X86_INS_FADD) || id == X86_INS_XCHG;
        }
        step.store |= step.call || id == X86_INS_PUSH || id == X86_INS_PUSHFQ;
        step.load |= step.ret || id == X86_INS_POP || id == X86_INS_POPFQ;
        cs_free(instruction, 1);
        return step;
    }

  private:
    csh handle_;
};

/// What `count` instructions of the loop are, one by one.
const std::vector<Step>& steps(size_t count) {
    static const std::vector<Step> all = [] {
        std::vector<Step> list;
        RecordedLoop loop("haswell");
        Disassembler disassembler;
        for (size_t i = 0; i < 6'000; ++i) {
            Step step = disassembler.look(loop);
            loop.run(1, 1);
            step.taken = !loop.branches().empty();
            step.next_rip = loop.vcpu().state().rip;
            list.push_back(step);
        }
        return list;
    }();
    REQUIRE(count <= all.size());
    return all;
}

struct Counted {
    const char* name;
    uint64_t select;
    std::function<bool(const Step&)> matches;
};
/// Haswell's.
const Counted events[] = {
    {"instructions", 0xc0, [](const Step&) { return true; }},
    {"cycles", 0x3c, [](const Step&) { return true; }},
    {"cycles, inverted", 0xc0 | 1 << 23 | 16 << 24, [](const Step&) { return true; }},
    {"branches", 0xc4, [](const Step& s) { return s.branch; }},
    {"branches, cmask 1", 0xc4 | 1 << 24, [](const Step& s) { return s.branch; }},
    {"no branches", 0xc4 | 1 << 23 | 1 << 24, [](const Step& s) { return !s.branch; }},
    {"conditional", 0x01c4, [](const Step& s) { return s.conditional; }},
    {"calls", 0x02c4, [](const Step& s) { return s.call; }},
    {"returns", 0x08c4, [](const Step& s) { return s.ret; }},
    {"not taken", 0x10c4, [](const Step& s) { return s.branch && !s.taken; }},
    {"taken", 0x20c4, [](const Step& s) { return s.taken; }},
    {"far", 0x40c4, [](const Step&) { return false; }},
    {"loads", 0x81d0, [](const Step& s) { return s.load; }},
    {"stores", 0x82d0, [](const Step& s) { return s.store; }},
    {"not modelled", 0x412e, [](const Step&) { return false; }},
    {"mispredicted conditional", 0x01c5,
     [](const Step& s) { return s.conditional && s.taken && s.next_rip > s.rip; }}, // none goes backward here
};

constexpr uint64_t counting = 1 << 16 | 1 << 17 | 1 << 22; // USR, OS, EN

/// As the next Step, from the state before it.
uint64_t expected_count(const Counted& event, size_t begin, size_t end) {
    const auto& all = steps(end);
    return static_cast<uint64_t>(std::count_if(all.begin() + static_cast<long>(begin), all.begin() + static_cast<long>(end), event.matches));
}

} // namespace

TEST_CASE("A guest's BTS has what the host records, however the run is cut") {
    constexpr uint64_t count = 20'000;
    for (const char* model : {"netburst64", "core2", "atom", "nehalem", "icelake"})
        for (uint64_t slice : {count, uint64_t{1}, uint64_t{13}}) {
            INFO(model << ", slices of " << slice);
            RecordedLoop loop(model);
            place_area(loop, 1 << 14, 0);
            const bool netburst = std::string_view(model) == "netburst64";
            set(loop, msr::debugctl, netburst ? 1 << 2 | 1 << 3 | 1 << 4 : tr_bts_btint);
            loop.run(count, slice);
            const Records host = loop.branches(), guest = guest_records(loop);
            REQUIRE(host.size() > 1000);
            CHECK(without_flags(guest) == without_flags(host));
            const auto predicted = std::count_if(guest.begin(), guest.end(), [](const auto& r) { return r[2] == 1 << 4; });
            CHECK((netburst ? predicted > 0 : predicted == 0));
            CHECK(loop.machine->facility(0)->branches().written == host.size());
        }
}

TEST_CASE("The host's recording is the same beside a guest's") {
    RecordedLoop alone("haswell"), both("haswell");
    place_area(both, 100, 0); // soon full
    set(both, msr::debugctl, tr_bts_btint | 1);
    set(both, msr::perfevtsel0, 0xc4 | counting);
    alone.run(20'000, 20'000);
    both.run(20'000, 20'000);
    const Records host = both.branches();
    CHECK(host == alone.branches());
    CHECK(guest_records(both).size() == 100);
    CHECK(both.machine->facility(0)->branches().written == 100);
    CHECK(both.machine->facility(0)->branches().dropped == host.size() - 100);
    CHECK(read<uint64_t>(both, area + 8) == bts_buffer + 2400);
}

TEST_CASE("A circular buffer holds the last branches") {
    RecordedLoop loop("core2");
    place_area(loop, 100, 0);
    set(loop, msr::debugctl, 1 << 6 | 1 << 7);
    loop.run(5'000, 5'000);
    const Records host = loop.branches();
    const size_t newest = (read<uint64_t>(loop, area + 8) - bts_buffer) / 24;
    CHECK(newest == host.size() % 100);
    for (size_t age = 0; age < 100; ++age) {
        const Gpa at = bts_buffer + (newest + 99 - age) % 100 * 24;
        REQUIRE(read<uint64_t>(loop, at) == host[host.size() - 1 - age][0]);
        REQUIRE(read<uint64_t>(loop, at + 8) == host[host.size() - 1 - age][1]);
    }
}

TEST_CASE("BTS_OFF_OS leaves out the kernel, BTS_OFF_USR the user") {
    for (const auto& [bits, recorded] : {std::pair{bts_off_os, false}, {bts_off_usr, true}}) {
        RecordedLoop loop("core2"); // all of the loop is at CPL 0
        place_area(loop, 1000, 0);
        set(loop, msr::debugctl, tr_bts_btint | bits);
        loop.run(1'000, 1'000);
        CHECK(guest_records(loop).empty() != recorded);
    }
}

TEST_CASE("LBRs hold the last branches") {
    for (const char* model : {"core2", "atom", "nehalem", "skylake"}) {
        RecordedLoop loop(model);
        const ds::LbrModel& lbr = loop.machine->facility(0)->model().lbr;
        set(loop, msr::debugctl, 1);
        loop.run(5'003, 5'003);
        const Records host = loop.branches();
        const uint64_t tos = get(loop, msr::lbr_tos);
        for (unsigned age = 0; age < lbr.depth; ++age) {
            const unsigned entry = static_cast<unsigned>(tos - age) % lbr.depth;
            INFO(model << ", " << age << " back");
            CHECK((get(loop, lbr.from + entry) & ~(1ull << 63)) == host[host.size() - 1 - age][0]);
            CHECK(get(loop, lbr.to + entry) == host[host.size() - 1 - age][1]);
        }
        CHECK_FALSE(loop.machine->facility(0)->read_msr(lbr.from + lbr.depth));
        CHECK_FALSE(loop.machine->facility(0)->write_msr(lbr.to + lbr.depth, 0));
    }
}

TEST_CASE("Counters count what Capstone counts, however the run is cut") {
    constexpr uint64_t before = 40, count = 5'000;
    for (uint64_t slice : {count, uint64_t{1}, uint64_t{13}})
        for (size_t first = 0; first < std::size(events); first += 4) {
            LoopMachine loop("haswell");
            loop.run(before, before);
            for (size_t i = 0; i < 4; ++i)
                set(loop, msr::perfevtsel0 + static_cast<uint32_t>(i), events[first + i].select | counting);
            set(loop, msr::fixed_ctr_ctrl, 0x333);
            set(loop, msr::perf_global_ctrl, 0xf | 7ull << 32);
            loop.run(count, slice);
            for (size_t i = 0; i < 4; ++i) {
                INFO(events[first + i].name << ", slices of " << slice);
                CHECK(get(loop, msr::pmc0 + static_cast<uint32_t>(i)) ==
                      expected_count(events[first + i], before, before + count));
                CHECK(loop.machine->facility(0)->read_pmc(static_cast<uint32_t>(i)) ==
                      get(loop, msr::pmc0 + static_cast<uint32_t>(i)));
            }
            CHECK(loop.machine->facility(0)->read_pmc(1u << 30) == count);
        }
}

TEST_CASE("An overflow freezes the counters at its instruction") {
    for (const Counted& event : events) {
        for (uint64_t period : {1u, 2u, 31u, 200u})
            for (uint64_t slice : {uint64_t{5'000}, uint64_t{7}}) {
                if (expected_count(event, 0, 5'000) < period)
                    continue;
                LoopMachine loop("haswell");
                set(loop, msr::debugctl, 1 << 12); // FREEZE_PERFMON_ON_PMI
                set(loop, msr::pmc0 + 2, -period & 0xffff'ffff);
                set(loop, msr::perfevtsel0 + 2, event.select | counting | 1 << 20);
                set(loop, msr::fixed_ctr_ctrl, 3);
                set(loop, msr::perf_global_ctrl, 4 | 1ull << 32);
                loop.run(5'000, slice);
                size_t at = 0;
                for (uint64_t seen = 0; seen < period; ++at)
                    seen += event.matches(steps(6'000)[at]);
                INFO(event.name << ", after " << period << ", slices of " << slice);
                CHECK(get(loop, msr::perf_global_status) == 4);
                CHECK(get(loop, msr::pmc0 + 2) == 0);
                CHECK(get(loop, msr::fixed_ctr0) == at);
                CHECK(get(loop, msr::perf_global_ctrl) == 0);
            }
    }
}

TEST_CASE("PEBS takes a record of the event after each overflow") {
    struct Layout {
        const char* model;
        size_t size, eventing_ip, data_address; // 0: not in it
    };
    const Layout layouts[] = {{"nehalem", 0xb0, 0, 0x98}, {"haswell", 0xc0, 0xb0, 0x98}, {"skylake", 0xc8, 0xb0, 0x98}};
    for (const auto& [model, size, eventing_ip, data_address] : layouts)
        for (size_t which : {0, 3, 6, 12, 13}) {
            const bool nehalem = std::string_view(model) == "nehalem";
            const Counted& event = events[which];
            const uint64_t select = nehalem && which == 12 ? 0x010b : nehalem && which == 13 ? 0x020b : event.select;
            constexpr uint64_t period = 17, count = 5'000;
            LoopMachine loop(model);
            place_area(loop, 0, 1 << 20);
            write(loop, area + 0x40 + 8 * 3, -period);
            set(loop, msr::pmc0 + 3, -period & 0xffff'ffff);
            set(loop, msr::perfevtsel0 + 3, select | counting);
            set(loop, msr::pebs_enable, 1 << 3);
            set(loop, msr::perf_global_ctrl, 0xf);
            loop.run(count, count);
            INFO(model << ", " << event.name);
            Gpa record = pebs_buffer;
            uint64_t seen = 0;
            for (size_t at = 0; at < count; ++at) {
                const Step& step = steps(count)[at];
                if (!event.matches(step) || ++seen <= period)
                    continue;
                seen = 0;
                REQUIRE(record + size <= read<uint64_t>(loop, area + 0x28));
                CHECK(read<uint64_t>(loop, record + 8) == step.next_rip);
                if (eventing_ip)
                    CHECK(read<uint64_t>(loop, record + eventing_ip) == step.rip);
                if (which >= 12) {
                    const auto address = read<uint64_t>(loop, record + data_address);
                    const auto rsp = read<uint64_t>(loop, record + 0x48);
                    const bool in_data = address >= LoopMachine::data && address < LoopMachine::data + LoopMachine::data_size;
                    INFO(std::hex << "address " << address << ", RSP " << rsp << ", at " << step.rip);
                    CHECK((in_data || (address >= rsp - 8 && address <= rsp + 8)));
                }
                record += size;
            }
            CHECK(read<uint64_t>(loop, area + 0x28) == record);
            CHECK(record >= pebs_buffer + 10 * size);
            CHECK(get(loop, msr::perf_global_status) == 0);
        }
}

TEST_CASE("An adaptive record has the groups that are asked for") {
    for (uint64_t groups = 0; groups < 16; ++groups) {
        RecordedLoop loop("icelake");
        place_area(loop, 0, 1 << 20);
        write(loop, area + 0x40, ~0ull);
        set(loop, msr::pebs_data_cfg, groups | 7 << 24); // eight LBRs
        set(loop, msr::debugctl, 1);
        loop.run(1'000, 1'000);
        set(loop, msr::a_pmc0, (1ull << 48) - 1);
        set(loop, msr::perfevtsel0, 0x81d0 | counting | 1ull << 34);
        set(loop, msr::pebs_enable, 1);
        loop.run(1'000, 1'000);
        const size_t size = 32 + (groups & 1 ? 32 : 0) + (groups & 2 ? 144 : 0) + (groups & 4 ? 256 : 0) + (groups & 8 ? 8 * 24 : 0);
        INFO("groups " << groups);
        CHECK(read<uint64_t>(loop, pebs_buffer) == (groups | 7 << 24 | uint64_t{size} << 48));
        CHECK(read<uint64_t>(loop, pebs_buffer + 16) == 1);
        const uint64_t bytes = read<uint64_t>(loop, area + 0x28) - pebs_buffer;
        CHECK(bytes % size == 0);
        CHECK(bytes / size > 10);
        if (groups & 2)
            CHECK(read<uint64_t>(loop, pebs_buffer + 32 + (groups & 1 ? 32 : 0) + 8) > read<uint64_t>(loop, pebs_buffer + 8));
    }
}

TEST_CASE("Areas that make no sense do no harm") {
    constexpr uint64_t places[] = {0,          0x0fff'f000, 0xfee0'0000,           0x3fff'f0,
                                   0x2'0000'0000, ~0ull << 12, 0xffff'ffff'ffff'fff8, 0x7fff'ffff'ffe0};
    for (uint64_t place : places) {
        RecordedLoop loop("haswell");
        if (!loop.machine->facility(0)->write_msr(msr::ds_area, place))
            continue;
        set(loop, msr::debugctl, tr_bts_btint);
        loop.run(2'000, 2'000);
        const size_t host = loop.branches().size();
        const auto counts = loop.machine->facility(0)->branches();
        INFO("at " << std::hex << place);
        CHECK(counts.written + counts.dropped == host);
    }
}

} // namespace vtrace
