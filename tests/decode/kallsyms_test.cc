// find_kallsyms against real kernels' memory: what it says must be what the kernel itself says in /proc/kallsyms.
// Captures are made by kallsyms_capture.py; where one is missing, that is printed and the case is skipped.
#define CATCH_CONFIG_MAIN
#include <catch2/catch.hpp>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <filesystem>
#include <iostream>
#include <set>
#include <sstream>
#include <sys/mman.h>
#include <unistd.h>
#include <zlib.h>

#include "decode/kallsyms.h"

using namespace vtrace;

namespace {

struct Entry {
    uint64_t address;
    char type;
    std::string name;
    auto operator<=>(const Entry&) const = default;
};

std::filesystem::path cache_folder() {
    if (const char* cache = std::getenv("XDG_CACHE_HOME"); cache && *cache)
        return std::filesystem::path(cache) / "vtrace";
    const char* home = std::getenv("HOME");
    return std::filesystem::path(home ? home : "/") / ".cache/vtrace";
}

/// A file mapped read-only.
struct Mapping {
    explicit Mapping(const std::filesystem::path& path) {
        int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
        REQUIRE(fd >= 0);
        size = std::filesystem::file_size(path);
        data = static_cast<uint8_t*>(mmap(nullptr, size, PROT_READ, MAP_PRIVATE, fd, 0));
        ::close(fd);
        REQUIRE(data != MAP_FAILED);
    }
    Mapping(const Mapping&) = delete;
    Mapping& operator=(const Mapping&) = delete;
    ~Mapping() { munmap(data, size); }
    std::span<const uint8_t> bytes() const { return {data, size}; }

    uint8_t* data;
    size_t size;
};

/// The kernel's own list, without modules and what BPF adds at run time (both have a "[name]" behind).
std::set<Entry> proc_kallsyms(const std::filesystem::path& path) {
    gzFile file = gzopen(path.c_str(), "rb");
    REQUIRE(file);
    std::set<Entry> entries;
    char line[1024];
    while (gzgets(file, line, sizeof line)) {
        std::istringstream fields(line);
        Entry entry;
        std::string module;
        fields >> std::hex >> entry.address >> entry.type >> entry.name;
        if (!(fields >> module))
            entries.insert(entry);
    }
    gzclose(file);
    return entries;
}

std::set<Entry> as_entries(const std::vector<TraceSymbol>& symbols) {
    std::set<Entry> entries;
    for (const TraceSymbol& symbol : symbols)
        entries.insert({symbol.address, symbol.type, symbol.name});
    return entries;
}

void check_capture(const std::string& name) {
    auto folder = cache_folder() / "kallsyms" / name;
    if (!std::filesystem::exists(folder / "version")) {
        std::cout << "SKIP " << name << ": no capture in " << folder
                  << " (tests/decode/kallsyms_capture.py makes it)\n";
        return;
    }
    Mapping memory(folder / "memory");
    auto start = std::chrono::steady_clock::now();
    auto symbols = find_kallsyms({{{0, memory.bytes()}}, {}});
    std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    INFO((symbols ? std::string() : symbols.error().message));
    REQUIRE(symbols);
    std::set<Entry> expected = proc_kallsyms(folder / "kallsyms.gz"), found = as_entries(*symbols);
    std::cout << name << ": " << symbols->size() << " symbols in " << seconds.count() << " s\n";
    CHECK(expected.size() > 50'000);
    size_t text = 0, wrong = 0;
    std::string first;
    for (const Entry& entry : expected)
        if (!found.contains(entry)) {
            ++wrong;
            if (first.size() < 500)
                first += fmt::format("missing {:x} {} {}\n", entry.address, entry.type, entry.name);
        } else if (entry.type == 't' || entry.type == 'T') {
            ++text;
        }
    for (const Entry& entry : found)
        if (!expected.contains(entry)) {
            ++wrong;
            if (first.size() < 1000)
                first += fmt::format("not the kernel's {:x} {} {}\n", entry.address, entry.type, entry.name);
        }
    INFO(first);
    CHECK(wrong == 0);
    CHECK(text > 20'000);
}

} // namespace

TEST_CASE("captures: the kernel's own list, symbol by symbol") {
    for (const char* name : {"6.1-cloud", "6.1-cloud+kaslr", "6.12-cloud", "6.12-cloud+kaslr", "6.1", "6.1+kaslr"})
        check_capture(name);
}

namespace {

/// What a build of the kernel would lay out, small: names that use every character as its own token.
struct Tables {
    enum class Layout { up_to_6_1, with_seqs_6_2, from_6_4 };

    struct Symbol {
        uint64_t address;
        bool absolute;
        std::string text; // type and name
    };
    std::vector<Symbol> symbols;
    std::vector<uint8_t> bytes;
    size_t offsets = 0, base = 0, count = 0, names = 0, markers = 0, table = 0, index = 0; // where they begin

    uint64_t relative_base;

    Tables(Layout layout, uint32_t symbol_count, bool percpu = true, uint64_t lowest = 0xffff'ffff'9a00'0000)
        : relative_base(lowest) {
        for (uint32_t i = 0; i < symbol_count; ++i) {
            bool absolute = percpu && i < 3;
            uint64_t address = absolute ? i * 0x40 : relative_base + uint64_t{i} * 0x30;
            // Some names are longer than one byte of length can say.
            std::string name = (absolute ? "A" : i % 3 ? "t" : "T") + std::string("sym_") + std::to_string(i);
            if (i % 500 == 7)
                name += std::string(200, 'x');
            symbols.push_back({address, absolute, i == 5 ? "Dlinux_banner" : name});
        }
        bytes.assign(64, 0xcc);
        if (layout != Layout::from_6_4)
            put_offsets();
        put_names();
        if (layout == Layout::with_seqs_6_2)
            put_seqs();
        put_tokens();
        if (layout == Layout::from_6_4) {
            put_offsets();
            put_seqs();
        }
        bytes.insert(bytes.end(), 4096, 0xcc);
        bytes.resize((bytes.size() + 63) & ~size_t{63});
    }

  private:
    size_t align() {
        bytes.resize((bytes.size() + 7) & ~size_t{7});
        return bytes.size();
    }
    template <class T>
    void put(T value) {
        const auto* raw = reinterpret_cast<const uint8_t*>(&value);
        bytes.insert(bytes.end(), raw, raw + sizeof value);
    }
    void put_offsets() {
        bool percpu = std::any_of(symbols.begin(), symbols.end(), [](const Symbol& symbol) { return symbol.absolute; });
        offsets = align();
        for (const Symbol& symbol : symbols)
            put(static_cast<uint32_t>(symbol.absolute ? symbol.address
                                      : percpu        ? relative_base - 1 - symbol.address
                                                      : symbol.address - relative_base));
        base = align();
        put(relative_base);
    }
    void put_names() {
        count = align();
        put(static_cast<uint32_t>(symbols.size()));
        names = align();
        std::vector<uint32_t> starts;
        for (size_t i = 0; i < symbols.size(); ++i) {
            if (i % 256 == 0)
                starts.push_back(static_cast<uint32_t>(bytes.size() - names));
            // "sym_" is token 1: one byte for four.
            std::string text = symbols[i].text;
            if (i != 5)
                text.replace(1, 4, "\x01");
            if (text.size() > 0x7f)
                put(static_cast<uint8_t>((text.size() & 0x7f) | 0x80)), put(static_cast<uint8_t>(text.size() >> 7));
            else
                put(static_cast<uint8_t>(text.size()));
            bytes.insert(bytes.end(), text.begin(), text.end());
        }
        markers = align();
        for (uint32_t start : starts)
            put(start);
    }
    void put_seqs() {
        align();
        for (size_t i = 0; i < symbols.size(); ++i) {
            auto seq = static_cast<uint32_t>((i * 7919) % symbols.size());
            put(static_cast<uint8_t>(seq >> 16)), put(static_cast<uint8_t>(seq >> 8)), put(static_cast<uint8_t>(seq));
        }
    }
    void put_tokens() {
        table = align();
        std::vector<uint16_t> starts;
        for (unsigned i = 0; i < 256; ++i) {
            starts.push_back(static_cast<uint16_t>(bytes.size() - table));
            std::string token = i == 1 ? "sym_" : i > ' ' && i < 0x7f ? std::string(1, static_cast<char>(i)) : "tok";
            bytes.insert(bytes.end(), token.begin(), token.end());
            put(uint8_t{0});
        }
        index = align();
        for (uint16_t start : starts)
            put(start);
    }
};

bool found(const Tables& tables, const Result<std::vector<TraceSymbol>>& result) {
    if (!result || result->size() != tables.symbols.size())
        return false;
    std::vector<TraceSymbol> expected;
    for (const auto& symbol : tables.symbols)
        expected.push_back({symbol.address, 0, symbol.text[0], symbol.text.substr(1), {}});
    return *result == expected;
}

Result<std::vector<TraceSymbol>> find_in(const std::vector<uint8_t>& bytes) {
    return find_kallsyms({{{0x1000, bytes}}, {}});
}

} // namespace

TEST_CASE("every layout, number of markers and padding") {
    for (auto layout : {Tables::Layout::up_to_6_1, Tables::Layout::with_seqs_6_2, Tables::Layout::from_6_4})
        for (uint32_t count : {300u, 511u, 512u, 513u, 1000u, 1023u, 4000u, 70'000u})
            for (bool percpu : {true, false}) {
                INFO("layout " << static_cast<int>(layout) << " symbols " << count << " percpu " << percpu);
                Tables tables(layout, count, percpu);
                auto result = find_in(tables.bytes);
                INFO((result ? std::string() : result.error().message));
                CHECK(found(tables, result));
            }
}

TEST_CASE("of two tables, the one that the guest's page tables confirm") {
    constexpr uint64_t gpa = 0x1000, live_base = 0xffff'ffff'8100'0000;
    Tables stale(Tables::Layout::from_6_4, 1000), live(Tables::Layout::from_6_4, 2000, true, live_base);
    std::vector<uint8_t> memory = stale.bytes;
    memory.insert(memory.end(), live.bytes.begin(), live.bytes.end());
    constexpr std::string_view banner = "Linux version 6.12";
    size_t banner_at = memory.size();
    memory.insert(memory.end(), banner.begin(), banner.end());
    auto translate = [&](uint64_t linear) -> std::optional<uint64_t> {
        // The stale table's addresses are mapped too, but not to a banner.
        return linear == live.symbols[5].address ? gpa + banner_at : gpa + 64;
    };
    CHECK(found(live, find_kallsyms({{{gpa, memory}}, translate})));
    // Without page tables the first is as good as any; with those that confirm neither, too.
    CHECK(found(stale, find_kallsyms({{{gpa, memory}}, {}})));
    CHECK(found(stale, find_kallsyms({{{gpa, memory}}, [](uint64_t) { return std::nullopt; }})));
}

TEST_CASE("memory without tables, and damaged ones") {
    CHECK_FALSE(find_kallsyms({}));
    CHECK_FALSE(find_in({}));
    CHECK_FALSE(find_in(std::vector<uint8_t>(1 << 20)));
    Tables good(Tables::Layout::from_6_4, 3000);
    auto broken = [&](size_t at, uint8_t value) {
        std::vector<uint8_t> bytes = good.bytes;
        bytes[at] = value;
        return find_in(bytes);
    };
    CHECK_FALSE(broken(good.index, 1));                // the first token does not begin at 0
    CHECK_FALSE(broken(good.index + 100, 0xff));       // the index no longer rises
    CHECK_FALSE(broken(good.table + 3, 'x'));          // a token runs into the next
    CHECK_FALSE(broken(good.count + 2, 0xff));         // far more symbols than markers
    CHECK_FALSE(broken(good.names, 0));                // a name of length 0
    CHECK_FALSE(broken(good.markers + 4, 0));          // a marker that is not where 256 names end
    CHECK_FALSE(broken(good.base + 7, 0));             // no kernel address
    CHECK_FALSE(broken(good.offsets + 4 * 10 + 2, 0)); // addresses out of order
    // Cut anywhere: no crash, and nothing but the whole is taken.
    size_t needed = good.base + 8;
    for (size_t size = 0; size < good.bytes.size(); size += 611) {
        auto result = find_in({good.bytes.begin(), good.bytes.begin() + static_cast<ptrdiff_t>(size)});
        CHECK((!result || size >= needed));
    }
}

TEST_CASE("memory full of look-alikes costs bounded time") {
    // Token tables and nothing else: 16 MB of them, 700 bytes each.
    Tables tables(Tables::Layout::from_6_4, 300);
    std::vector<uint8_t> unit(tables.bytes.begin() + static_cast<ptrdiff_t>(tables.table),
                              tables.bytes.begin() + static_cast<ptrdiff_t>(tables.index + 512));
    std::vector<uint8_t> memory;
    memory.reserve(16 << 20);
    while (memory.size() + unit.size() < (16 << 20))
        memory.insert(memory.end(), unit.begin(), unit.end());
    auto start = std::chrono::steady_clock::now();
    auto result = find_in(memory);
    std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    CHECK_FALSE(result);
    CHECK(seconds.count() < 20); // about one on an idle machine
    std::cout << "look-alikes: " << seconds.count() << " s: " << result.error().message << '\n';
}

TEST_CASE("random bytes thrown at good tables never crash the search") {
    uint64_t state = 12345;
    auto random = [&] {
        state = state * 6364136223846793005 + 1442695040888963407;
        return state >> 33;
    };
    for (auto layout : {Tables::Layout::up_to_6_1, Tables::Layout::with_seqs_6_2, Tables::Layout::from_6_4}) {
        Tables tables(layout, 700);
        for (int round = 0; round < 100; ++round) {
            std::vector<uint8_t> bytes = tables.bytes;
            for (int i = 0; i < 3; ++i)
                bytes[random() % bytes.size()] = static_cast<uint8_t>(random());
            if (auto result = find_in(bytes))
                CHECK(result->size() <= 1024);
        }
    }
}
