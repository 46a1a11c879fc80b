// Windows: which trigger is waited for, when a turn is due, and how many there are.
#include <catch2/catch.hpp>

#include "vmm/windows.h"

using namespace vtrace;
using Kind = Trigger::Kind;

namespace {

Windows following(std::string_view from, std::string_view to, uint64_t times = 1) {
    WindowPlan plan;
    if (!from.empty())
        plan.from = *parse_trigger(from, false);
    plan.to = *parse_trigger(to, true);
    plan.times = times;
    Windows windows;
    windows.follow(plan);
    return windows;
}

} // namespace

TEST_CASE("windows: without a plan one is open for good") {
    Windows windows;
    windows.on_console("anything");
    windows.on_marker(1);
    windows.on_progress(1'000'000, 1'000'000);
    CHECK((windows.open() && !windows.due() && !windows.planned() && windows.count() == 1));
    CHECK(windows.next_time() == never);
    windows.trace_nothing();
    CHECK((!windows.open() && windows.count() == 0));
}

TEST_CASE("windows: from marker to marker, twice, and no third time") {
    Windows windows = following("marker:1", "marker:2", 2);
    for (uint64_t n = 1; n <= 2; ++n) {
        CHECK((!windows.open() && windows.count() == n - 1));
        windows.on_marker(2); // not the one that is waited for
        CHECK_FALSE(windows.due());
        windows.on_marker(1);
        REQUIRE(windows.due());
        windows.turn(10 * n, 100 * n);
        CHECK((windows.open() && !windows.due() && windows.count() == n));
        windows.on_marker(1);
        CHECK_FALSE(windows.due());
        windows.on_marker(2);
        REQUIRE(windows.due());
        windows.turn(10 * n + 5, 100 * n + 50);
    }
    windows.on_marker(1);
    CHECK((!windows.open() && !windows.due() && windows.awaited() == nullptr));
}

TEST_CASE("windows: times and instructions count from the last turn") {
    Windows windows = following("time:100ns", "instructions:7", 3);
    CHECK(windows.next_time() == 100);
    CHECK(windows.next_retired() == UINT64_MAX);
    windows.on_progress(99, 0);
    CHECK_FALSE(windows.due());
    windows.on_progress(100, 0);
    REQUIRE(windows.due());
    windows.turn(103, 1000);
    CHECK(windows.next_time() == never);
    CHECK(windows.next_retired() == 1007);
    windows.on_progress(1'000'000, 1006);
    CHECK_FALSE(windows.due());
    windows.on_progress(1'000'000, 1007);
    REQUIRE(windows.due());
    windows.turn(200, 1007);
    CHECK(windows.next_time() == 300);
}

TEST_CASE("windows: text counts from where it is waited for") {
    Windows windows = following("console:go", "console:go");
    windows.on_console("let's g");
    CHECK_FALSE(windows.due());
    windows.on_console("o on\n");
    REQUIRE(windows.due());
    windows.turn(1, 1);
    windows.on_console("g\no"); // not within one line
    CHECK_FALSE(windows.due());
    windows.on_console("\ngo");
    CHECK(windows.due());
}

TEST_CASE("windows: a breakpoint is asked for while it is waited for") {
    Windows windows = following("address:0xffffffff81000000", "end");
    CHECK(windows.breakpoint() == Gva{0xffff'ffff'8100'0000});
    windows.on_breakpoint();
    REQUIRE(windows.due());
    windows.turn(1, 1);
    CHECK((windows.open() && !windows.breakpoint() && windows.awaited() == nullptr));
}

TEST_CASE("windows: without a begin, from the start") {
    Windows windows = following("", "time:1us");
    CHECK((windows.open() && windows.planned() && windows.count() == 1));
    CHECK(windows.next_time() == 1000);
    windows.on_progress(1000, 1);
    REQUIRE(windows.due());
    windows.turn(1000, 1);
    CHECK((!windows.open() && windows.awaited() == nullptr));
}
