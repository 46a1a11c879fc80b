#include <catch2/catch.hpp>

#include <algorithm>
#include <fstream>
#include <iterator>

#include "decode/elf_symbols.h"

// Named for the test to find: this program is an ELF file too.
extern "C" [[gnu::noinline, gnu::used]] int elf_symbols_test_landmark(int x) {
    return x * 3;
}

namespace vtrace {
namespace {

std::vector<uint8_t> own_file() {
    std::ifstream file("/proc/self/exe", std::ios::binary);
    return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

} // namespace

TEST_CASE("an ELF file's functions are found by name, ascending") {
    auto symbols = elf_symbols(own_file());
    REQUIRE(symbols);
    auto found = std::find_if(symbols->begin(), symbols->end(),
                              [](const TraceSymbol& symbol) { return symbol.name == "elf_symbols_test_landmark"; });
    REQUIRE(found != symbols->end());
    CHECK(found->type == 'T');
    CHECK(found->size > 0);
    // Position-independent: the file's addresses differ from the process's by whole pages.
    CHECK((found->address & 0xfff) == (reinterpret_cast<uint64_t>(&elf_symbols_test_landmark) & 0xfff));
    CHECK(std::is_sorted(symbols->begin(), symbols->end(),
                         [](const auto& a, const auto& b) { return a.address < b.address; }));
    CHECK(std::none_of(symbols->begin(), symbols->end(), [](const auto& symbol) { return symbol.name.empty(); }));
}

TEST_CASE("what is no ELF file, or only a part of one, gives an error or fewer symbols") {
    CHECK_FALSE(elf_symbols({}));
    const std::vector<uint8_t> text{'h', 'e', 'l', 'l', 'o'};
    CHECK_FALSE(elf_symbols(text));
    std::vector<uint8_t> file = own_file();
    const std::span<const uint8_t> whole(file);
    for (size_t size = 0; size < 256; ++size)
        CHECK_FALSE(elf_symbols(whole.first(size)));
    for (size_t part = 1; part < 16; ++part)
        static_cast<void>(elf_symbols(whole.first(file.size() * part / 16)));
    // The section headers' place and the section count, damaged.
    for (size_t at : {0x28u, 0x2au, 0x2du, 0x3au, 0x3cu, 0x3eu})
        for (uint8_t value : {0x00, 0x7f, 0xff}) {
            std::vector<uint8_t> damaged = file;
            damaged[at] = value;
            static_cast<void>(elf_symbols(damaged));
        }
}

} // namespace vtrace
