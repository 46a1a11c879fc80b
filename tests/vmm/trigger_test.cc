// The SPECs of --from and --to: what each means, that describe() gives it back, and what is said of a wrong one.
#include <catch2/catch.hpp>

#include "vmm/console_watch.h"
#include "vmm/trigger.h"

using namespace vtrace;
using Kind = Trigger::Kind;

namespace {

Trigger parsed(const std::string& spec, bool for_end = false) {
    INFO(spec);
    auto trigger = parse_trigger(spec, for_end);
    REQUIRE(trigger.has_value());
    auto again = parse_trigger(describe(*trigger), for_end);
    REQUIRE(again.has_value());
    CHECK(*again == *trigger);
    return *trigger;
}

std::string error(const std::string& spec, bool for_end = false) {
    INFO(spec);
    auto trigger = parse_trigger(spec, for_end);
    REQUIRE_FALSE(trigger.has_value());
    CHECK(trigger.error().message.find('\n') == std::string::npos);
    return trigger.error().message;
}

using Catch::Matchers::Contains;

} // namespace

TEST_CASE("trigger: each kind, and its description") {
    CHECK(parsed("console:login: ") == Trigger{.kind = Kind::console, .text = "login: "});
    CHECK(parsed("console::+").text == ":+");
    CHECK(parsed("marker") == Trigger{.kind = Kind::marker, .text = {}, .value = 0, .any_value = true});
    CHECK(parsed("marker:0") == Trigger{.kind = Kind::marker, .text = {}, .value = 0});
    CHECK(parsed("marker:0xFFffFFff").value == 0xffff'ffff);
    CHECK(parsed("instructions:1000000").value == 1'000'000);
    CHECK(parsed("instructions:0x10").value == 16);
    CHECK(parsed("symbol:schedule") == Trigger{.kind = Kind::symbol, .text = "schedule"});
    CHECK(parsed("symbol:schedule+0x10").value == 0x10);
    CHECK(parsed("symbol:schedule+10").value == 10);
    CHECK(parsed("symbol:operator++0x4") == Trigger{.kind = Kind::symbol, .text = "operator+", .value = 4});
    CHECK(parsed("address:0xffffffff81000000").value == 0xffff'ffff'8100'0000);
    CHECK(parsed("address:0x0").value == 0);
    CHECK(parsed("end", true) == Trigger{.kind = Kind::end});
    CHECK(describe(parsed("time:1500ms")) == "time:1500ms");
    CHECK(describe(parsed("symbol:f+16")) == "symbol:f+0x10");
}

TEST_CASE("trigger: times are exact") {
    CHECK(parsed("time:10ms").value == 10'000'000);
    CHECK(parsed("time:1.5s").value == 1'500'000'000);
    CHECK(parsed("time:200us").value == 200'000);
    CHECK(parsed("time:7ns").value == 7);
    CHECK(parsed("time:0.000000001s").value == 1);
    CHECK(parsed("time:1.2500000000s").value == 1'250'000'000);
    CHECK(parsed("time:9223372036s").value == 9'223'372'036'000'000'000);
    CHECK_THAT(error("time:9223372037s"), Contains("292 years"));
    CHECK_THAT(error("time:0.5ns"), Contains("nanoseconds"));
    for (const char* none : {"time:0s", "time:0.0ms"})
        CHECK_THAT(error(none), Contains("more than none"));
    for (const char* unit :
         {"time:", "time:5", "time:5m", "time:5min", "time:-5s", "time:5 s", "time:1,5s", "time:1e3s"})
        CHECK_THAT(error(unit), Contains("s, ms, us or ns"));
    for (const char* number :
         {"time:s", "time:.s", "time:1.s", "time:.5s", "time:1.2.3s", "time:99999999999999999999s"})
        CHECK_THAT(error(number), Contains("a number and its unit"));
}

TEST_CASE("trigger: markers match what is written") {
    CHECK(parsed("marker").matches_marker(7));
    CHECK(parsed("marker:7").matches_marker(7));
    CHECK_FALSE(parsed("marker:7").matches_marker(8));
    CHECK_FALSE(parsed("instructions:7").matches_marker(7));
}

TEST_CASE("trigger: typos are told") {
    CHECK_THAT(error("consol:x"), Contains("is 'console' meant?"));
    CHECK_THAT(error("makrer:1"), Contains("is 'marker' meant?"));
    CHECK_THAT(error("Symbol:x"), Contains("is 'symbol' meant?"));
    CHECK_THAT(error("adress:0x1"), Contains("is 'address' meant?"));
    CHECK_THAT(error("nonsense"),
               Contains("console, marker, time, instructions, symbol, address,") && !Contains("end"));
    CHECK_THAT(error("nonsense", true), Contains("address, end,"));
    CHECK_THAT(error(""), Contains("must begin with one of"));
    CHECK_THAT(error(std::string(100'000, 'x') + ":"), Contains("must begin with one of"));
    CHECK_THAT(error("symbol"), Contains("missing") && Contains("symbol:NAME"));
    CHECK_THAT(error("console:"), Contains("which text"));
    CHECK_THAT(error("console:a\nb"), Contains("one line"));
    CHECK_THAT(error("console:" + std::string(ConsoleWatch::max_text + 1, 'x')), Contains("at most 512"));
    CHECK(parsed("console:" + std::string(ConsoleWatch::max_text, 'x')).text.size() == ConsoleWatch::max_text);
    for (const char* marker : {"marker:", "marker:x", "marker:-1", "marker:0x100000000", "marker:0x", "marker:1 "})
        CHECK_THAT(error(marker), Contains("32 bits"));
    for (const char* count :
         {"instructions:", "instructions:0", "instructions:1e6", "instructions:99999999999999999999"})
        CHECK_THAT(error(count), Contains("above 0"));
    CHECK_THAT(error("symbol:"), Contains("which symbol"));
    CHECK_THAT(error("symbol:+0x10"), Contains("which symbol"));
    CHECK_THAT(error("symbol:f+"), Contains("offset"));
    CHECK_THAT(error("symbol:f+ff"), Contains("hexadecimal"));
    for (const char* address : {"address:", "address:ff", "address:0x", "address:0xfg", "address:0x1ffffffffffffffff"})
        CHECK_THAT(error(address), Contains("hexadecimal after 0x"));
    CHECK_THAT(error("address:0x800000000000"), Contains("canonical"));
    CHECK_THAT(error("end"), Contains("can't begin"));
    CHECK_THAT(error("end:now", true), Contains("nothing can follow"));
}
