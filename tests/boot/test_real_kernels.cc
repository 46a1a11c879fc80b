// Debian's own kernels, where the cache folder has them, judged by foreign programs: the compressors' command-line
// tools unpack the payload, readelf reads its program headers, file tells the version.
#include <catch2/catch.hpp>

#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <sstream>

#include <asm/bootparam.h>

#include "tests/boot/builders.h"

using namespace vtrace;
using namespace vtrace::testing;
namespace stdfs = std::filesystem;

namespace {

stdfs::path cache_directory() {
    if (const char* cache = std::getenv("XDG_CACHE_HOME"); cache && *cache)
        return stdfs::path(cache) / "vtrace";
    const char* home = std::getenv("HOME");
    return stdfs::path(home ? home : "/") / ".cache/vtrace";
}

std::vector<std::string> kernels() {
    std::vector<std::string> found;
    std::error_code error;
    for (stdfs::recursive_directory_iterator at(cache_directory(), error), end; !error && at != end;
         at.increment(error))
        if (at->is_regular_file() && at->path().filename().string().rfind("vmlinuz-", 0) == 0)
            found.push_back(at->path().string());
    std::sort(found.begin(), found.end());
    return found;
}

Bytes read_file(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    return Bytes(std::istreambuf_iterator<char>(file), {});
}

std::string output_of(const std::string& command) {
    std::unique_ptr<FILE, int (*)(FILE*)> pipe(popen(command.c_str(), "r"), pclose);
    std::string out;
    char buffer[65536];
    for (size_t got; pipe && (got = fread(buffer, 1, sizeof buffer, pipe.get())) != 0;)
        out.append(buffer, got);
    return out;
}

bool available(const std::string& tool) {
    return std::system(("command -v " + tool + " >/dev/null").c_str()) == 0;
}

} // namespace

TEST_CASE("Debian's kernels, loaded directly and as shipped") {
    const auto found = kernels();
    if (found.empty()) {
        WARN("skipped: no vmlinuz-* below " << cache_directory().string());
        return;
    }
    for (const std::string& path : found) {
        INFO(path);
        const Bytes file = read_file(path);
        BootOptions options;
        options.kernel_path = path;
        options.command_line = "console=ttyS0";
        GuestMemory memory = memory_of(256);
        const auto guest = load_guest(memory, options, 0);
        if (!guest)
            FAIL(guest.error().message);
        CHECK(guest->kind == KernelKind::linux_payload);
        if (available("file"))
            CHECK(output_of("file -b '" + path + "'").find("version " + guest->version) != std::string::npos);
        else
            WARN("not judged by file: it is not installed");

        const auto header = *load_le<setup_header>(file, 0x1f1);
        const size_t payload_at = (header.setup_sects + 1) * 512 + header.payload_offset;
        const std::string tool = guest->compression == "gzip" ? "gzip" : guest->compression;
        if (!available(tool) || !available("readelf")) {
            WARN("not judged: " << tool << " or readelf is not installed");
            continue;
        }
        const bool has_own_size = tool == "gzip";
        const size_t length = header.payload_length - (has_own_size ? 0 : 4);
        const std::string vmlinux =
            (stdfs::temp_directory_path() / "vtrace-boot-vmlinux").string() + std::to_string(getpid());
        output_of("tail -c +" + std::to_string(payload_at + 1) + " '" + path + "' | head -c " + std::to_string(length) +
                  " | " + tool + " -dc > " + vmlinux);
        const Bytes elf = read_file(vmlinux);
        std::istringstream headers(output_of("LC_ALL=C readelf -lW " + vmlinux));
        unsigned loads = 0;
        for (std::string line; std::getline(headers, line);) {
            uint64_t offset, virtual_, physical, file_size, memory_size;
            if (uint64_t entry; sscanf(line.c_str(), "Entry point 0x%" SCNx64, &entry) == 1)
                CHECK(guest->entry == entry);
            if (sscanf(line.c_str(), " LOAD 0x%" SCNx64 " 0x%" SCNx64 " 0x%" SCNx64 " 0x%" SCNx64 " 0x%" SCNx64,
                       &offset, &virtual_, &physical, &file_size, &memory_size) != 5)
                continue;
            loads++;
            REQUIRE(offset + file_size <= elf.size());
            Bytes expected(elf.begin() + offset, elf.begin() + offset + file_size);
            expected.resize(memory_size);
            CHECK((read_guest(memory, physical, memory_size) == expected));
            CHECK(physical >= guest->kernel.start);
            CHECK(physical + memory_size <= guest->kernel.end);
        }
        CHECK(loads >= 3);
        stdfs::remove(vmlinux);

        options.as_shipped = true;
        GuestMemory shipped = memory_of(256);
        const auto itself = load_guest(shipped, options, 0);
        REQUIRE(itself);
        CHECK(itself->kernel.size() == header.init_size);
        const Gpa load = header.pref_address;
        const size_t setup_size = (header.setup_sects + 1) * 512;
        CHECK((read_guest(shipped, load, file.size() - setup_size) == Bytes(file.begin() + setup_size, file.end())));
        CHECK(itself->entry == load + 0x200);

        GuestMemory small = memory_of(32);
        CHECK_FALSE(load_guest(small, options, 0));
        options.as_shipped = false;
        CHECK_FALSE(load_guest(small, options, 0));
    }
}
