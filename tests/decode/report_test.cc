// Edges, reports and lines of the sample trace, each number counted by hand.
#define CATCH_CONFIG_MAIN
#include <catch2/catch.hpp>

#include <algorithm>
#include <map>

#include "decode/analysis_report.h"
#include "decode/branch_line.h"
#include "decode/text.h"
#include "tests/decode/sample_trace.h"
#include "tests/decode/trace_fixture.h"

using namespace vtrace;
using namespace vtrace_test;

namespace {

TraceReader open_sample(const TempFile& file) {
    write_sample(file.path, [](const std::string& message) { FAIL(message); });
    auto reader = TraceReader::open(file.path);
    REQUIRE(reader);
    return std::move(*reader);
}

const Edge* find(const std::vector<Edge>& edges, uint64_t from, uint64_t to) {
    auto edge = std::find_if(edges.begin(), edges.end(),
                             [&](const Edge& candidate) { return candidate.from == from && candidate.to == to; });
    return edge == edges.end() ? nullptr : &*edge;
}

uint64_t total(const std::vector<Edge>& edges) {
    uint64_t sum = 0;
    for (const Edge& edge : edges)
        sum += edge.count;
    return sum;
}

} // namespace

TEST_CASE("each edge has its count, its class and its sides") {
    TempFile file;
    TraceReader reader = open_sample(file);
    EdgeOptions options;
    options.vcpu = 0;
    auto edges = count_edges(reader, options);
    REQUIRE(edges);
    CHECK(total(*edges) == sample_branches);
    struct {
        uint64_t from, to, count;
        BranchClass branch_class;
        Privilege from_side, to_side;
    } expected[] = {
        {boot, start_kernel, 1, BranchClass::indirect_jump, Privilege::kernel, Privilege::kernel},
        {start_kernel, helper, 1, BranchClass::call, Privilege::kernel, Privilege::kernel},
        {helper + 4, helper, 3, BranchClass::conditional, Privilege::kernel, Privilege::kernel},
        {helper + 6, start_kernel + 5, 1, BranchClass::ret, Privilege::kernel, Privilege::kernel},
        {start_kernel + 5, user, 1, BranchClass::iret, Privilege::kernel, Privilege::user},
        {user, entry_syscall, 2, BranchClass::syscall, Privilege::user, Privilege::kernel},
        {entry_syscall + 5, user + 2, 2, BranchClass::sysret, Privilege::kernel, Privilege::user},
        {user + 2, user, 2, BranchClass::conditional, Privilege::user, Privilege::user},
        {user, page_fault, 1, BranchClass::exception, Privilege::user, Privilege::kernel},
        {user + 2, timer, 1, BranchClass::interrupt, Privilege::user, Privilege::kernel},
        {timer, helper, 1, BranchClass::indirect_call, Privilege::kernel, Privilege::kernel},
        {unrecorded, user, 1, BranchClass::unknown, Privilege::user, Privilege::user},
    };
    for (const auto& e : expected) {
        INFO(fmt::format("{:#x} -> {:#x}", e.from, e.to));
        const Edge* edge = find(*edges, e.from, e.to);
        REQUIRE(edge);
        CHECK(edge->count == e.count);
        CHECK(edge->branch_class == e.branch_class);
        CHECK(edge->privilege == e.from_side);
        CHECK(edge->to_privilege == e.to_side);
    }
    CHECK(edges->front().count == 3); // the hottest comes first
}

TEST_CASE("ranges and filters take what they say, and no more") {
    TempFile file;
    TraceReader reader = open_sample(file);
    EdgeOptions options;
    options.vcpu = 0;
    options.first = 2;
    options.last = 5;
    auto edges = count_edges(reader, options);
    REQUIRE(edges);
    REQUIRE(edges->size() == 1);
    CHECK(edges->front().from == helper + 4);
    // Privilege does not depend on where the range begins: branch 7 is the first syscall.
    options.first = 7;
    options.last = 8;
    edges = count_edges(reader, options);
    REQUIRE(edges);
    REQUIRE(edges->size() == 1);
    CHECK(edges->front().privilege == Privilege::user);

    uint64_t kernel_branches = 0, user_branches = 0;
    for (PrivilegeFilter filter : {PrivilegeFilter::kernel_only, PrivilegeFilter::user_only}) {
        auto some = count_edges(reader, {0, 0, UINT64_MAX, filter, 1});
        REQUIRE(some);
        (filter == PrivilegeFilter::kernel_only ? kernel_branches : user_branches) = total(*some);
    }
    CHECK(user_branches == 2 + 2 + 1 + 1 + 1);
    CHECK(kernel_branches + user_branches == sample_branches);
    auto both = count_edges(reader);
    REQUIRE(both);
    CHECK(total(*both) == sample_branches + 2);
}

TEST_CASE("the report counts functions, entries, vectors and syscalls") {
    TempFile file;
    TraceReader reader = open_sample(file);
    auto report = make_report(reader, {});
    REQUIRE(report);
    CHECK(report->branches == sample_branches + 2);
    CHECK(report->user == 7);
    CHECK(report->kernel == sample_branches + 2 - 7);
    std::map<std::string, FunctionCount> functions;
    for (const FunctionCount& function : report->by_branches)
        functions[function.place.name] = function;
    CHECK(functions.at("helper").branches == 3 + 1 + 1 + 2); // loop, two returns, and vCPU 1
    CHECK(functions.at("helper").entries == 2);              // the loop does not enter it
    CHECK(functions.at("start_kernel").branches == 2);
    CHECK(functions.at("start_kernel").entries == 1);
    CHECK(functions.at("[user]").branches == 7);
    CHECK(functions.at("[boot]").branches == 1);
    CHECK(functions.at("__x64_sys_getpid").entries == 2);
    CHECK_FALSE(functions.contains("[kernel]"));
    CHECK(report->by_branches.front().place.name == "[user]"); // 7 as helper has: by name
    REQUIRE(report->interrupts.size() == 1);
    CHECK(report->interrupts[0].vector == 0xec);
    CHECK(report->interrupts[0].user == 1);
    CHECK(report->interrupts[0].handler == "asm_sysvec_apic_timer_interrupt");
    REQUIRE(report->exceptions.size() == 1);
    CHECK(report->exceptions[0].name == "#PF");
    CHECK(report->exceptions[0].handler == "asm_exc_page_fault");
    CHECK(report->syscalls == 2);
    REQUIRE(report->syscall_handlers.size() == 1);
    CHECK(report->syscall_handlers[0].name == "__x64_sys_getpid");
    CHECK(report->syscall_handlers[0].entries == 2);
    CHECK(report->console == std::vector<std::string>{"Linux version 6.1", "hello", "last line"});
    CHECK(report->time[0].last_time == 2'000'000);
    CHECK(report->time[0].retired == 5'000);
    CHECK(report->warnings.empty());
}

TEST_CASE("counts do not depend on chunks and threads") {
    // The same stream in chunks of different sizes: user space is entered somewhere in the middle of it.
    std::vector<ds::BtsRecord> records;
    for (int i = 0; i < 500; ++i)
        for (const ds::BtsRecord& record : sample_records())
            records.push_back(record);
    std::optional<std::vector<Edge>> reference;
    for (uint32_t chunk : {7u, 100u, 4096u, 1u << 20}) {
        TempFile file;
        TraceWriterOptions options;
        options.chunk_records = chunk;
        auto writer = TraceWriter::open(file.path, nlohmann::json::object(), options);
        REQUIRE(writer);
        REQUIRE(writer->add_records(0, records));
        REQUIRE(writer->close(nlohmann::json::object()));
        auto reader = TraceReader::open(file.path);
        REQUIRE(reader);
        for (unsigned threads : {1u, 2u, 5u}) {
            auto edges = count_edges(*reader, {{}, 3, 9000, PrivilegeFilter::all, threads});
            REQUIRE(edges);
            CHECK(total(*edges) == 9000 - 3);
            if (!reference)
                reference = *edges;
            CHECK(std::equal(edges->begin(), edges->end(), reference->begin(), reference->end(),
                             [](const Edge& a, const Edge& b) {
                                 return a.from == b.from && a.to == b.to && a.count == b.count &&
                                        a.privilege == b.privilege && a.to_privilege == b.to_privilege;
                             }));
        }
    }
}

TEST_CASE("the last branches, as after a crash") {
    TempFile file;
    TraceReader reader = open_sample(file);
    auto symbols = reader.symbols();
    REQUIRE(symbols);
    SymbolTable table(*symbols);
    auto lines = last_branches(reader, table, 0, 3);
    REQUIRE(lines);
    CHECK(*lines == std::vector<std::string>{
                        "  0          21  ffffffff81000106 -> ffffffff81000342  return         helper+0x6 -> "
                        "asm_sysvec_apic_timer_interrupt+0x2",
                        "  0          22  ffffffff81000342 -> 0000000000401002  iret           "
                        "asm_sysvec_apic_timer_interrupt+0x2 -> -",
                        "  0          23  0000000000500000 -> 0000000000401000  unknown        - -> -"});
    CHECK(last_branches(reader, table, 0, 1000)->size() == sample_branches);
    CHECK_FALSE(last_branches(reader, table, 2, 1));
}

TEST_CASE("text for people") {
    CHECK(grouped(0) == "0");
    CHECK(grouped(999) == "999");
    CHECK(grouped(1234567) == "1,234,567");
    CHECK(duration(999) == "999 ns");
    CHECK(duration(3'412'000'000) == "3.412 s");
    CHECK(byte_size(1536) == "1.5 KiB");
    CHECK(printable("a\x1b[31mb\nc") == "a?[31mb?c");
    // Titles, colours and carriage returns of a guest do not reach the terminal.
    CHECK(last_lines("one\r\n\x1b]0;title\atwo\x1b[31m\n\n", 5) == std::vector<std::string>{"one", "two"});
    CHECK(last_lines("a\nb\nc", 2) == std::vector<std::string>{"b", "c"});
    CHECK(last_lines(std::string(10'000'000, 'x'), 2).size() == 1);
    CHECK(last_lines("\x1b[", 2).empty());
}
