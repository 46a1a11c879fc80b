// SymbolTable: what covers an address, and which of several names it gets.
#define CATCH_CONFIG_MAIN
#include <catch2/catch.hpp>

#include "decode/symbols.h"

using namespace vtrace;

namespace {

/// The name that wins at one address.
std::string best(std::vector<TraceSymbol> symbols) {
    for (TraceSymbol& symbol : symbols)
        symbol.address = 0xffff'ffff'8100'0000;
    symbols.push_back({0xffff'ffff'8100'1000, 0, 'T', "next", {}});
    return SymbolTable(symbols).describe(0xffff'ffff'8100'0000);
}

TraceSymbol symbol(char type, const char* name) {
    return {0, 0, type, name, {}};
}

} // namespace

TEST_CASE("among aliases, as real kernels have them") {
    CHECK(best({symbol('t', "__do_sys_getpid"), symbol('T', "__ia32_sys_getpid"), symbol('T', "__x64_sys_getpid")}) ==
          "__x64_sys_getpid");
    CHECK(best({symbol('T', "__memcpy"), symbol('W', "memcpy")}) == "memcpy");
    CHECK(best({symbol('T', "_text"), symbol('T', "startup_64"), symbol('T', "_stext")}) == "startup_64");
    CHECK(best({symbol('t', "common_interrupt_return"), symbol('T', "swapgs_restore_regs_and_return_to_usermode"),
                symbol('T', "__irqentry_text_end")}) == "swapgs_restore_regs_and_return_to_usermode");
    CHECK(best({symbol('T', "__softirqentry_text_start"), symbol('T', "__do_softirq")}) == "__do_softirq");
    CHECK(best({symbol('T', "irq_entries_start"), symbol('T', "__irqentry_text_start")}) == "irq_entries_start");
    CHECK(best({symbol('T', "__cfi_f"), symbol('t', "a_long_local_name")}) == "a_long_local_name");
    // The order of the table must not matter.
    CHECK(best({symbol('t', "quirk_radeon_pm.part.0"), symbol('t', "quirk_nvidia_hda_pm.part.0")}) ==
          "quirk_radeon_pm.part.0");
    CHECK(best({symbol('t', "quirk_nvidia_hda_pm.part.0"), symbol('t', "quirk_radeon_pm.part.0")}) ==
          "quirk_radeon_pm.part.0");
}

TEST_CASE("a function reaches to the next symbol, of whatever kind") {
    SymbolTable table({{0x3000, 0, 'd', "data", {}},
                       {0x1000, 0, 'T', "first", {}},
                       {0x1400, 0, 't', "second", {}},
                       {0x5000, 0x10, 'T', "sized", "mod"},
                       {0x6080, 0, 'T', "last", {}}});
    CHECK(table.describe(0xfff) == "0xfff");
    CHECK(table.describe(0x1000) == "first");
    CHECK(table.describe(0x13ff) == "first+0x3ff");
    CHECK(table.describe(0x2fff) == "second+0x1bff");
    CHECK(table.describe(0x3000) == "0x3000"); // data never answers
    CHECK(table.describe(0x5004) == "sized+0x4 [mod]");
    CHECK(table.describe(0x5010) == "0x5010"); // its own size counts
    CHECK(table.describe(0x6fff) == "last+0xf7f");
    CHECK(table.describe(0x7000) == "0x7000");
    CHECK(table.functions().size() == 4);
    CHECK(table[*table.find_name("second")].size == 0x1c00);
    CHECK_FALSE(table.find_name("data"));
}

TEST_CASE("per-CPU and absolute symbols neither match nor bound") {
    SymbolTable table({{0x1000, 0, 'T', "f", {}}, {0x1800, 0, 'A', "cpu_offset", {}}, {0x2000, 0, 'T', "g", {}}});
    CHECK(table.describe(0x1800) == "f+0x800");
    CHECK(SymbolTable().describe(0x1234) == "0x1234");
    CHECK(SymbolTable({{0, 0, 'A', "only", {}}}).empty());
}

TEST_CASE("several functions of one name") {
    SymbolTable table({{0x1000, 0, 't', "init", {}}, {0x2000, 0, 'T', "x", {}}, {0x3000, 0, 't', "init", {}}});
    CHECK(table.find_all("init").size() == 2);
    CHECK(table[*table.find_name("init")].address == 0x1000);
    CHECK(table.find_all("nothing").empty());
}
