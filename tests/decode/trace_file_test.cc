#include <catch2/catch.hpp>

#include <nlohmann/json.hpp>

#include "decode/trace_reader.h"
#include "decode/trace_recorder.h"
#include "decode/trace_writer.h"
#include "tests/decode/trace_fixture.h"

using namespace vtrace;
using namespace vtrace_test;

namespace {

const nlohmann::json config{{"cpu", "x86-64-v2"}, {"memory", 512}};
const nlohmann::json outcome{{"outcome", "power-off"}};

TraceReader open_ok(const std::string& path) {
    auto reader = TraceReader::open(path);
    INFO((reader ? "" : reader.error().message));
    REQUIRE(reader);
    return std::move(*reader);
}

std::vector<ds::BtsRecord> all_records(const TraceReader& reader, unsigned vcpu, uint64_t first = 0,
                                       uint64_t last = UINT64_MAX) {
    std::vector<ds::BtsRecord> records;
    auto cursor = reader.records(vcpu, first, last, true);
    while (const auto* record = cursor.next())
        records.push_back(
            {record->from, record->to, ds::BtsFlags::make(record->kind, record->vector, record->error_code)});
    return records;
}

void check_same(const std::vector<ds::BtsRecord>& a, const std::vector<ds::BtsRecord>& b) {
    REQUIRE(a.size() == b.size());
    for (size_t i = 0; i < a.size(); ++i) {
        if (!same(a[i], b[i]))
            FAIL("record " << i << " differs");
    }
}

TraceWriterOptions small_chunks(unsigned vcpus = 1) {
    TraceWriterOptions options;
    options.vcpus = vcpus;
    options.chunk_records = 1000;
    return options;
}

} // namespace

TEST_CASE("What is written is read: configuration, records, console, symbols, outcome") {
    TempFile file;
    const auto stream = guest_stream(1, 10'500);
    auto writer = TraceWriter::open(file.path, config, small_chunks());
    REQUIRE(writer);
    writer->console(500, "early\n");
    REQUIRE(writer->add_records(0, stream));
    writer->console(uint64_t{1} << 60, "late\n");
    std::vector<TraceSymbol> symbols{{0x2000, 0, 't', "b", "m"}, {0x1000, 8, 'T', "a", ""}};
    REQUIRE(writer->close(outcome, symbols));
    CHECK_FALSE(writer->add_records(0, stream));

    const auto reader = open_ok(file.path);
    CHECK(reader.info().complete);
    CHECK(reader.info().warnings.empty());
    CHECK(reader.check(2).empty());
    CHECK(reader.config().value() == config);
    CHECK(reader.outcome().value() == outcome);
    std::swap(symbols[0], symbols[1]);
    CHECK(reader.symbols().value() == symbols);
    const auto console = reader.console().value();
    REQUIRE(console.size() == 2);
    CHECK(console[0].bytes == "early\n");
    CHECK(console[1].time == uint64_t{1} << 60);
    check_same(all_records(reader, 0), stream);

    uint64_t branches = 0;
    for (const auto& record : stream)
        branches += !ds::BtsFlags::is_event(record.flags);
    const auto& info = reader.info();
    CHECK(info.branches() == branches);
    CHECK(info.vcpus[0].end_number == branches);
    CHECK(info.vcpus[0].events == stream.size() - branches);
    CHECK(info.vcpus[0].chunks == 11);
    CHECK(info.file_bytes == writer->bytes_written());
}

TEST_CASE("A range of branches is the same as that part of the whole, with the state there") {
    TempFile file;
    const auto stream = guest_stream(2, 7000);
    auto writer = TraceWriter::open(file.path, config, small_chunks());
    REQUIRE(writer);
    REQUIRE(writer->add_records(0, stream));
    REQUIRE(writer->close(outcome));
    const auto reader = open_ok(file.path);

    // The plain truth, by hand.
    struct Expected {
        ds::BtsRecord record;
        uint64_t position;
        StreamState state;
    };
    std::vector<Expected> branches;
    StreamState state;
    for (size_t i = 0; i < stream.size(); ++i) {
        if (stream[i].flags == make(BtsKind::time))
            state.time = stream[i].from, state.retired = stream[i].to;
        else if (stream[i].flags == make(BtsKind::cr3))
            state.cr3 = stream[i].from;
        else
            branches.push_back({stream[i], i, state});
    }
    const auto check = [&](uint64_t first, uint64_t last) {
        auto cursor = reader.records(0, first, last);
        for (uint64_t number = first; number < std::min<uint64_t>(last, branches.size()); ++number) {
            const auto* record = cursor.next();
            REQUIRE(record);
            const auto& expected = branches[number];
            if (record->number != number || record->from != expected.record.from || record->to != expected.record.to ||
                record->vector != ds::BtsFlags::vector(expected.record.flags) || !record->is_branch() ||
                record->error_code != ds::BtsFlags::error_code(expected.record.flags) ||
                record->position != expected.position || cursor.state().cr3 != expected.state.cr3 ||
                cursor.state().time != expected.state.time || cursor.state().retired != expected.state.retired)
                FAIL("branch " << number << " differs");
        }
        CHECK(cursor.next() == nullptr);
        CHECK(cursor.next() == nullptr);
    };
    check(0, 10);
    check(995, 1005);
    check(3333, 3334);
    check(6000, UINT64_MAX);
    check(50, 50);
    check(branches.size() + 5, UINT64_MAX);
    CHECK(reader.records(7).next() == nullptr);
}

TEST_CASE("Chunks are mapped on threads and reduced in order") {
    TempFile file;
    auto writer = TraceWriter::open(file.path, config, small_chunks(2));
    REQUIRE(writer);
    const std::vector<std::vector<ds::BtsRecord>> streams{guest_stream(3, 12'345), guest_stream(4, 3000)};
    for (unsigned vcpu = 0; vcpu < 2; ++vcpu)
        REQUIRE(writer->add_records(vcpu, streams[vcpu]));
    REQUIRE(writer->close(outcome));
    const auto reader = open_ok(file.path);
    for (const unsigned threads : {1, 2, 5}) {
        std::vector<std::vector<ds::BtsRecord>> seen(2);
        REQUIRE(reader.map_chunks(
            std::nullopt, threads, [](const ChunkRecords& chunk) { return std::pair(chunk.vcpu, chunk.records); },
            [&](std::pair<unsigned, std::vector<ds::BtsRecord>>&& part) {
                auto& all = seen[part.first];
                all.insert(all.end(), part.second.begin(), part.second.end());
            }));
        check_same(seen[0], streams[0]);
        check_same(seen[1], streams[1]);
    }
    uint64_t records = 0;
    REQUIRE(reader.map_chunks(
        0, 2, [](const ChunkRecords& chunk) { return chunk.records.size(); }, [&](size_t&& count) { records += count; },
        1500, 1600));
    CHECK(records <= 2000);
    CHECK(records >= 1000);
}

TEST_CASE("Code is found as it was at each place, by address space and version") {
    TempFile file;
    auto writer = TraceWriter::open(file.path, config, small_chunks());
    REQUIRE(writer);
    const auto stream = guest_stream(5, 5000);
    const auto a = page_of(1), b = page_of(2), c = page_of(3), user = page_of(4);
    writer->code_page(0, 0, 0x5000, a);
    writer->code_mapping(0, 0, 0x1000, 0xffffffff81000000, 0x5000, true);
    writer->code_page(0, 10, 0x6000, b);
    writer->code_mapping(0, 10, 0x1000, 0xffffffff81001000, 0x6000, true);
    writer->code_mapping(0, 20, 0x1000, 0x400000, 0x7000, false);
    writer->code_page(0, 20, 0x7000, user);
    writer->code_mapping(0, 30, 0x2000, 0x400000, 0x5000, false);
    REQUIRE(writer->add_records(0, std::span(stream).first(3000)));
    writer->code_page(0, 3000, 0x5000, c); // patched
    REQUIRE(writer->add_records(0, std::span(stream).subspan(3000)));
    REQUIRE(writer->close(outcome));

    const auto reader = open_ok(file.path);
    CHECK(reader.check().empty());
    std::array<uint8_t, 16> bytes;
    const auto at = [&](uint64_t position, uint64_t cr3, uint64_t gva) {
        bytes.fill(0xee);
        return reader.code_at(0, position, cr3, gva, bytes);
    };
    const auto equal = [&](const std::array<uint8_t, 4096>& page, size_t offset, size_t from, size_t count) {
        return std::equal(bytes.begin() + from, bytes.begin() + from + count, page.begin() + offset);
    };
    CHECK(at(5, 0x9000, 0xffffffff81000100) == 16); // global: under any CR3
    CHECK(equal(a, 0x100, 0, 16));
    CHECK(at(2999, 0x9000, 0xffffffff81000100) == 16);
    CHECK(equal(a, 0x100, 0, 16));
    CHECK(at(3000, 0x9000, 0xffffffff81000100) == 16);
    CHECK(equal(c, 0x100, 0, 16));
    CHECK(at(5, 0, 0xffffffff81000ff8) == 8); // the next page is not there yet
    CHECK(at(10, 0, 0xffffffff81000ff8) == 16);
    CHECK((equal(a, 0xff8, 0, 8) && equal(b, 0, 8, 8)));
    CHECK(at(19, 0x1000, 0x400010) == 0);
    CHECK(at(20, 0x1000 | 7 | 1ull << 63, 0x400010) == 16); // PCID and the no-flush bit do not count
    CHECK(equal(user, 0x10, 0, 16));
    CHECK(at(25, 0x2000, 0x400010) == 0);
    CHECK(at(4000, 0x2000, 0x400010) == 16);
    CHECK(equal(c, 0x10, 0, 16));
    CHECK(at(100, 0x1000, 0x500000) == 0);
    CHECK(at(100, 0x1000, UINT64_MAX - 3) == 0);
}

TEST_CASE("Much code in little time closes chunks early") {
    TempFile file;
    TraceWriterOptions options;
    options.side_bytes = 64 << 10;
    auto writer = TraceWriter::open(file.path, config, options);
    REQUIRE(writer);
    const auto stream = guest_stream(6, 2000);
    bool asked = false;
    for (size_t i = 0; i < stream.size(); ++i) {
        asked |= writer->code_page(0, i, i << 12, page_of(i % 7));
        REQUIRE(writer->add_records(0, {&stream[i], 1}));
        REQUIRE(writer->bytes_held() <= 2 * options.side_bytes);
    }
    CHECK(asked);
    REQUIRE(writer->close(outcome));
    const auto reader = open_ok(file.path);
    CHECK(reader.check().empty());
    check_same(all_records(reader, 0), stream);
}

TEST_CASE("Virtual time closes a chunk that has enough records") {
    TempFile file;
    TraceWriterOptions options;
    options.chunk_ns = 1000;
    options.min_timed_records = 100;
    auto writer = TraceWriter::open(file.path, config, options);
    REQUIRE(writer);
    std::vector<ds::BtsRecord> stream;
    for (uint64_t i = 0; i < 1000; ++i)
        stream.push_back(i % 10 == 9 ? ds::BtsRecord{i * 100, i, make(BtsKind::time)} : ds::BtsRecord{i, i + 1, 0});
    REQUIRE(writer->add_records(0, stream));
    REQUIRE(writer->close(outcome));
    const auto reader = open_ok(file.path);
    CHECK(reader.info().vcpus[0].chunks == 10);
    check_same(all_records(reader, 0), stream);
}

namespace {

/// Two vCPUs, one machine thread, code and console between; `batch` is how records fall to the encoder.
std::string recorded(size_t batch, size_t ring_records) {
    TempFile file;
    auto options = small_chunks(2);
    options.side_bytes = 40 << 10;
    auto recorder = TraceRecorder::start(file.path, config, options, ring_records);
    REQUIRE(recorder);
    uint64_t position[2] = {0, 0};
    std::vector<ds::BtsRecord> streams[2] = {guest_stream(7, 20'000), guest_stream(8, 6000)};
    for (auto& stream : streams) { // events of our own below
        std::erase_if(stream, [](const auto& record) { return ds::BtsFlags::is_event(record.flags); });
    }
    for (uint64_t slice = 0; slice < 100; ++slice) {
        for (unsigned vcpu = 0; vcpu < 2; ++vcpu) {
            const auto& stream = streams[vcpu];
            const size_t per_slice = stream.size() / 100;
            if (slice % 3 == vcpu) {
                (*recorder)->code_page(vcpu, position[vcpu], slice << 12, page_of(slice));
                (*recorder)->code_mapping(vcpu, position[vcpu], 0x1000, slice << 12, slice << 12, true);
            }
            (*recorder)->console(slice * 1000 + vcpu, "x");
            auto part = std::span(stream).subspan(slice * per_slice, per_slice);
            position[vcpu] += part.size();
            while (!part.empty()) {
                const size_t count = std::min(batch, part.size());
                (*recorder)->ring(vcpu).write(part.first(count));
                part = part.subspan(count);
            }
        }
        for (unsigned vcpu = 0; vcpu < 2; ++vcpu) {
            const ds::BtsRecord time{slice * 1000 + 500, position[vcpu], make(BtsKind::time)};
            (*recorder)->ring(vcpu).write({&time, 1});
            ++position[vcpu];
        }
    }
    const auto finished = (*recorder)->finish(outcome, {{1, 2, 't', "s", ""}});
    REQUIRE(finished);
    CHECK_FALSE((*recorder)->failed());
    const auto reader = open_ok(file.path);
    CHECK(reader.info().complete);
    CHECK(reader.check().empty());
    CHECK(all_records(reader, 0).size() == position[0]);
    CHECK(all_records(reader, 1).size() == position[1]);
    return file.read();
}

} // namespace

TEST_CASE("A recording on threads is the same bytes however its threads were scheduled") {
    const std::string first = recorded(1'000'000, 1 << 16);
    CHECK(recorded(1'000'000, 170) == first); // a ring that is always full
    CHECK(recorded(13, 1 << 16) == first);
}

TEST_CASE("A file that cannot be written is an error that names it") {
    const auto missing = TraceWriter::open("/nonexistent/x.vtr", config);
    REQUIRE_FALSE(missing);
    CHECK(missing.error().message.find("/nonexistent/x.vtr") != std::string::npos);
    CHECK(missing.error().message.find("No such file") != std::string::npos);
    const auto full = TraceWriter::open("/dev/full", config);
    REQUIRE_FALSE(full);
    CHECK(full.error().message.find("No space left") != std::string::npos);
    auto options = small_chunks(0);
    CHECK_FALSE(TraceWriter::open("/dev/null", config, options));
}

TEST_CASE("Files that are no traces are refused by name") {
    TempFile file;
    CHECK(TraceReader::open(file.path).error().message.find("No such file") != std::string::npos);
    file.write("");
    CHECK(TraceReader::open(file.path).error().message.find("empty") != std::string::npos);
    file.write("short");
    CHECK(TraceReader::open(file.path).error().message.find("not a vtrace trace") != std::string::npos);
    file.write(std::string(500, 'x'));
    CHECK(TraceReader::open(file.path).error().message.find("not a vtrace trace") != std::string::npos);
    CHECK(TraceReader::open("/tmp").error().message.find("not a regular file") != std::string::npos);
}
