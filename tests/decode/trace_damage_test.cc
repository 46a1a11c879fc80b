#include <catch2/catch.hpp>

#include <csignal>
#include <thread>

#include <fcntl.h>
#include <nlohmann/json.hpp>
#include <sys/resource.h>
#include <sys/stat.h>

#include "decode/trace_file.h"
#include "decode/trace_reader.h"
#include "decode/trace_recorder.h"
#include "tests/decode/trace_fixture.h"

using namespace vtrace;
using namespace vtrace_test;

namespace {

const nlohmann::json config{{"memory", 512}};

/// A small file with every chunk type and several branch chunks; its stream in `stream`.
std::string small_trace(const TempFile& file, const std::vector<ds::BtsRecord>& stream, bool closed = true) {
    TraceWriterOptions options;
    options.chunk_records = 100; // several chunks
    auto writer = TraceWriter::open(file.path, config, options);
    REQUIRE(writer);
    auto page = page_of(1);
    std::fill(page.begin() + 64, page.end(), 0);
    writer->code_page(0, 0, 0x5000, page);
    writer->code_mapping(0, 0, 0x1000, 0xffffffff81000000, 0x5000, true);
    writer->console(1, "boot\n");
    REQUIRE(writer->add_records(0, stream));
    if (closed)
        REQUIRE(writer->close({{"outcome", "exit"}}, {{0xffffffff81000000, 16, 'T', "_text", ""}}));
    return file.read();
}

/// Uses everything. Whatever branch comes out must be the recorded one with that number.
struct Survey {
    bool opened = false;
    bool complete = false;
    uint64_t branches = 0;
    bool told = false; // any warning or damage
};
Survey survey(const std::string& path, const std::vector<ds::BtsRecord>& branches) {
    Survey result;
    const auto reader = TraceReader::open(path);
    if (!reader) {
        CHECK_FALSE(reader.error().message.empty());
        return result;
    }
    result.opened = true;
    result.complete = reader->info().complete;
    auto cursor = reader->records(0, 0, UINT64_MAX, true);
    while (const auto* record = cursor.next()) {
        if (!record->is_branch())
            continue;
        ++result.branches;
        if (record->number >= branches.size() || record->from != branches[record->number].from ||
            record->to != branches[record->number].to)
            FAIL("branch " << record->number << " is not the recorded one");
    }
    (void)reader->config();
    (void)reader->outcome();
    (void)reader->symbols();
    (void)reader->console();
    std::array<uint8_t, 16> bytes;
    (void)reader->code_at(0, 50, 0x1000, 0xffffffff81000000, bytes);
    result.told = !reader->check().empty();
    return result;
}

std::vector<ds::BtsRecord> branches_of(const std::vector<ds::BtsRecord>& stream) {
    auto branches = stream;
    std::erase_if(branches, [](const auto& record) { return ds::BtsFlags::is_event(record.flags); });
    return branches;
}

} // namespace

TEST_CASE("A file cut off at any byte opens, gives what it has, and says what is missing") {
    TempFile file;
    const auto stream = guest_stream(1, 250);
    const auto branches = branches_of(stream);
    const std::string whole = small_trace(file, stream);
    INFO("file of " << whole.size() << " bytes");
    CHECK(survey(file.path, branches).complete);
    CHECK_FALSE(survey(file.path, branches).told);
    uint64_t before = 0;
    for (size_t cut = 0; cut < whole.size(); ++cut) {
        file.write(whole.substr(0, cut));
        const auto result = survey(file.path, branches);
        REQUIRE(result.opened == (cut >= sizeof(FileHeader)));
        REQUIRE_FALSE(result.complete);
        REQUIRE(result.told == result.opened);
        REQUIRE(result.branches >= before); // a longer piece never gives less
        before = result.branches;
    }
    CHECK(before == branches.size());
}

TEST_CASE("A flipped bit anywhere never gives a wrong number without a warning") {
    TempFile file;
    const auto stream = guest_stream(2, 250);
    const auto branches = branches_of(stream);
    const std::string whole = small_trace(file, stream);
    for (size_t at = 0; at < whole.size(); ++at) {
        std::string damaged = whole;
        damaged[at] = static_cast<char>(damaged[at] ^ (1 << at % 8));
        file.write(damaged);
        const auto result = survey(file.path, branches);
        if (result.opened && result.branches < branches.size())
            REQUIRE(result.told);
        // Padding carries nothing; all else is noticed.
        if (result.opened && !result.told && whole[at] != 0)
            FAIL("the flip at " << at << " went unnoticed");
    }
}

TEST_CASE("A damaged chunk costs its own branches only, and is told with its range") {
    TempFile file;
    const auto stream = guest_stream(3, 450);
    const auto branches = branches_of(stream);
    std::string bytes = small_trace(file, stream);
    uint64_t damaged_branches = 0, offset = sizeof(FileHeader), first_number = 0;
    for (ChunkHeader header;; offset += chunk_file_bytes(header)) {
        std::memcpy(&header, bytes.data() + offset, sizeof header);
        if (header.type == static_cast<uint16_t>(ChunkType::branches) && header.first_number != 0) {
            damaged_branches = header.branches;
            first_number = header.first_number;
            break;
        }
    }
    SECTION("its payload") {
        bytes[offset + sizeof(ChunkHeader) + 5] ^= 0x10;
        file.write(bytes);
        CHECK(survey(file.path, branches).branches == branches.size() - damaged_branches);
        const auto reader = TraceReader::open(file.path);
        REQUIRE(reader);
        auto cursor = reader->records(0);
        while (cursor.next()) {
        }
        REQUIRE(reader->damage().size() == 1);
        CHECK(reader->damage()[0].find(fmt::format("branches {} to {} of vCPU 0 are missing", first_number,
                                                   first_number + damaged_branches)) != std::string::npos);
    }
    SECTION("its header, with the index: nothing is lost") {
        bytes[offset + 20] ^= 0x10;
        file.write(bytes);
        const auto result = survey(file.path, branches);
        CHECK(result.branches == branches.size());
        CHECK(result.told);
    }
    SECTION("its header, without the index: the gap is counted") {
        bytes[offset + 20] ^= 0x10;
        bytes.resize(bytes.size() - 1);
        file.write(bytes);
        const auto result = survey(file.path, branches);
        CHECK(result.branches == branches.size() - damaged_branches);
        const auto reader = TraceReader::open(file.path);
        REQUIRE(reader);
        REQUIRE(reader->info().missing.size() == 1);
        CHECK(reader->info().missing[0].first_number == first_number);
        CHECK(reader->info().missing[0].count == damaged_branches);
    }
}

TEST_CASE("A recorder that stops without closing loses the open chunk alone") {
    TempFile file;
    const auto stream = guest_stream(4, 450);
    small_trace(file, stream, false);
    const auto reader = TraceReader::open(file.path);
    REQUIRE(reader);
    const auto& info = reader->info();
    CHECK_FALSE(info.complete);
    CHECK(info.vcpus[0].branches + info.vcpus[0].events == 400);
    REQUIRE(info.missing.size() == 1);
    CHECK_FALSE(info.missing[0].count);
    CHECK(reader->config().value() == config);
    CHECK(reader->outcome().error().message.find("did not come that far") != std::string::npos);
}

TEST_CASE("Chunks of types from the future are passed over") {
    TempFile file;
    auto chunks = ChunkFile::create(file.path, 1);
    REQUIRE(chunks);
    const uint8_t payload[] = {1, 2, 3};
    ChunkHeader header{};
    header.type = 77;
    REQUIRE(chunks->write(store_chunk(header, payload, 1)));
    const std::string text = "{}";
    header.type = static_cast<uint16_t>(ChunkType::outcome);
    REQUIRE(chunks->write(store_chunk(header, {reinterpret_cast<const uint8_t*>(text.data()), text.size()}, 1)));
    REQUIRE(chunks->finish(1));
    const auto reader = TraceReader::open(file.path);
    REQUIRE(reader);
    CHECK(reader->info().complete);
    CHECK(reader->check().empty());
    CHECK(reader->outcome());
    CHECK(std::string(chunk_type_name(77)) == "unknown");
}

TEST_CASE("A version from the future, and nested JSON without end, are refused") {
    TempFile file;
    std::string bytes = small_trace(file, guest_stream(5, 10));
    FileHeader header;
    std::memcpy(&header, bytes.data(), sizeof header);
    header.version = 99;
    header.checksum = header_checksum(header);
    std::memcpy(bytes.data(), &header, sizeof header);
    file.write(bytes);
    CHECK(TraceReader::open(file.path).error().message.find("version 99") != std::string::npos);

    auto chunks = ChunkFile::create(file.path, 1);
    REQUIRE(chunks);
    const std::vector<uint8_t> deep(1'000'000, '[');
    ChunkHeader config_header{};
    config_header.type = static_cast<uint16_t>(ChunkType::config);
    REQUIRE(chunks->write(store_chunk(config_header, deep, 1)));
    REQUIRE(chunks->finish(1));
    const auto reader = TraceReader::open(file.path);
    REQUIRE(reader);
    CHECK_FALSE(reader->config());
}

TEST_CASE("When the disk is full, the error comes back and what was written is readable") {
    TempFile file;
    const auto stream = guest_stream(6, 20'000);
    struct rlimit before;
    getrlimit(RLIMIT_FSIZE, &before);
    const auto old_handler = std::signal(SIGXFSZ, SIG_IGN);
    struct rlimit small = before;
    small.rlim_cur = 20'001;
    setrlimit(RLIMIT_FSIZE, &small);

    TraceWriterOptions options;
    options.chunk_records = 1000;
    auto recorder = TraceRecorder::start(file.path, config, options, 1024);
    REQUIRE(recorder);
    for (size_t at = 0; at < stream.size(); at += 1000)
        (*recorder)->ring(0).write(std::span(stream).subspan(at, 1000)); // never stuck, although nothing is written
    const auto result = (*recorder)->finish({});
    setrlimit(RLIMIT_FSIZE, &before);
    std::signal(SIGXFSZ, old_handler);

    REQUIRE_FALSE(result);
    CHECK((*recorder)->failed());
    CHECK(result.error().message.find(file.path) != std::string::npos);
    CHECK(result.error().message.find("readable") != std::string::npos);
    const auto branches = branches_of(stream);
    const auto seen = survey(file.path, branches);
    CHECK(seen.opened);
    CHECK(seen.branches > 0);
    CHECK(seen.branches < branches.size());
    const auto reader = TraceReader::open(file.path);
    for (const auto& warning : reader->info().warnings)
        CHECK(warning.find("ends inside") == std::string::npos); // the incomplete chunk was cut off
}

TEST_CASE("A pipe that nobody reads is an error, not a signal") {
    TempFile file;
    REQUIRE(::mkfifo(file.path.c_str(), 0600) == 0);
    const int end = ::open(file.path.c_str(), O_RDONLY | O_NONBLOCK);
    auto writer = TraceWriter::open(file.path, config);
    REQUIRE(writer);
    ::close(end);
    REQUIRE(writer->add_records(0, guest_stream(7, 100)));
    const auto result = writer->close({});
    REQUIRE_FALSE(result);
    CHECK(result.error().message.find("Broken pipe") != std::string::npos);
}
