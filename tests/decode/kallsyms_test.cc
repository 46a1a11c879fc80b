// find_kallsyms against real kernels' memory: what it says must be what the kernel itself says in /proc/kallsyms.
// Captures are made by kallsyms_capture.py; where one is missing, that is printed and the case is skipped.
#define CATCH_CONFIG_MAIN
#include <catch2/catch.hpp>

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
