// Recordings of parts of a run: windows, and the last branches of a flight recorder, against a guest that knows the truth.
#include <catch2/catch.hpp>

#include <filesystem>

#include <nlohmann/json.hpp>
#include <sys/stat.h>

#include "decode/trace_reader.h"
#include "decode/trace_windows.h"
#include "tests/decode/run_model.h"

using namespace vtrace;
using namespace vtrace_test;

namespace {

const nlohmann::json config{{"memory", 512}};

TraceWriterOptions writer_options(const ModelOptions& model, uint64_t keep_last = 0) {
    TraceWriterOptions options;
    options.vcpus = model.vcpus;
    options.chunk_records = 150;
    options.windows = model.windows != 0;
    options.keep_last = keep_last;
    options.keep_slack_bytes = 2000;
    return options;
}

/// Every branch that the trace has is the one of that number in the run, and its code is what lay there; code that did
/// not run in its window is not known. Where the file is not complete, code that another vCPU told may be missing. Returns how many branches there are of each vCPU; they must be all from the
/// first one that is there.
std::vector<uint64_t> check_branches(const TraceReader& reader, const RunModel& model, unsigned stride = 1) {
    Random random(5);
    std::vector<uint64_t> counts;
    for (unsigned vcpu = 0; vcpu < model.vcpus.size(); ++vcpu) {
        const auto& truth = model.vcpus[vcpu].branches;
        uint64_t count = 0, next = reader.info().vcpus[vcpu].dropped;
        auto cursor = reader.records(vcpu);
        while (const TraceRecord* record = cursor.next()) {
            if (record->number != next || next >= truth.size())
                FAIL("branch " << record->number << " of vCPU " << vcpu << " in place of " << next);
            const auto& branch = truth[next++];
            if (record->from != branch.record.from || record->to != branch.record.to ||
                record->position != branch.position || cursor.state().cr3.value_or(0x1000) != branch.cr3)
                FAIL("branch " << record->number << " of vCPU " << vcpu << " is not the recorded one");
            if (count++ % stride)
                continue;
            RunModel::Code code{};
            const size_t known = reader.code_at(vcpu, record->position, branch.cr3, record->from, code);
            if ((known != code.size() || code != branch.code) && (known != 0 || reader.info().complete))
                FAIL("the code of branch " << record->number << " of vCPU " << vcpu << " is wrong (" << known << " bytes)");
            const uint64_t page = random.below(RunModel::pages);
            if (!model.ran(branch.window, branch.cr3, page))
                for (uint64_t at = 0; at < code_page_bytes; at += 64)
                    if (reader.code_at(vcpu, record->position, branch.cr3, RunModel::base + page * 4096 + at, code) != 0)
                        FAIL("code that did not run in this window is known, at branch " << record->number);
        }
        counts.push_back(count);
    }
    return counts;
}

uint64_t sum(const std::vector<uint64_t>& counts) {
    uint64_t sum = 0;
    for (const uint64_t count : counts)
        sum += count;
    return sum;
}

TraceReader open_ok(const std::string& path) {
    auto reader = TraceReader::open(path);
    INFO((reader ? "" : reader.error().message));
    REQUIRE(reader);
    return std::move(*reader);
}

void check_windows(const TraceReader& reader, const RunModel& model) {
    const auto windows = find_windows(reader);
    REQUIRE(windows);
    size_t count = 0;
    for (const TraceWindow& window : *windows) {
        ++count;
        const auto& truth = model.vcpus[window.vcpu].windows.at(window.number - 1);
        const uint64_t dropped = reader.info().vcpus[window.vcpu].dropped;
        CHECK(window.first == std::max(truth.first, dropped));
        CHECK(window.last == truth.last);
        CHECK(window.end_address == truth.end_address);
        CHECK(window.end_time == truth.end_time);
        if (truth.first >= dropped && window.begin_address) {
            CHECK(*window.begin_address == truth.begin_address);
            CHECK(window.begin_time == truth.begin_time);
        } else {
            CHECK_FALSE(window.begin_time);
        }
    }
    size_t expected = 0; // those with branches that are there, or that lie behind all that was dropped
    for (unsigned vcpu = 0; vcpu < model.vcpus.size(); ++vcpu)
        for (const auto& window : model.vcpus[vcpu].windows)
            expected += window.last > reader.info().vcpus[vcpu].dropped;
    CHECK(count == expected);
}

} // namespace

TEST_CASE("Windows are read as they were recorded, and code told before a gap is not believed behind it") {
    for (uint64_t seed = 1; seed <= 6; ++seed) {
        const ModelOptions options{.seed = seed, .vcpus = static_cast<unsigned>(1 + seed % 3), .windows = 4, .steps = 700};
        INFO("seed " << seed);
        TempFile file;
        RunModel model(options);
        auto writer = TraceWriter::open(file.path, config, writer_options(options));
        REQUIRE(writer);
        model.run(*writer);
        REQUIRE(writer->close({}));
        const auto reader = open_ok(file.path);
        CHECK(reader.info().complete);
        CHECK(reader.info().version == static_cast<uint32_t>(TraceVersion::parts));
        CHECK(reader.check().empty());
        CHECK(sum(check_branches(reader, model)) == model.branches());
        check_windows(reader, model);
        for (unsigned vcpu = 0; vcpu < options.vcpus; ++vcpu) {
            auto cursor = reader.records(vcpu, 0, UINT64_MAX, true);
            for (const BtsRecord& record : model.vcpus[vcpu].records) {
                const auto* read = cursor.next();
                REQUIRE(read);
                if (read->from != record.from || read->to != record.to || make(read->kind) != record.flags)
                    FAIL("a record differs");
            }
            CHECK(cursor.next() == nullptr);
        }
    }
}

TEST_CASE("A recording of windows that is cut off at any byte gives its beginning, with the right code") {
    const ModelOptions options{.seed = 7, .vcpus = 2, .windows = 3, .steps = 100};
    TempFile file;
    RunModel model(options);
    auto writer_settings = writer_options(options);
    writer_settings.chunk_records = 40;
    auto writer = TraceWriter::open(file.path, config, writer_settings);
    REQUIRE(writer);
    model.run(*writer);
    REQUIRE(writer->close({}));
    const std::string whole = file.read();
    uint64_t before = 0;
    for (size_t cut = sizeof(FileHeader); cut <= whole.size(); cut += cut % 64 == 0 ? 1 : 3) {
        file.write(whole.substr(0, cut));
        const auto reader = open_ok(file.path);
        const uint64_t now = sum(check_branches(reader, model, 7));
        REQUIRE(now >= before);
        before = now;
        REQUIRE(find_windows(reader));
    }
}

TEST_CASE("A recording of a whole run has nothing of all this") {
    const ModelOptions options{.seed = 8, .vcpus = 2, .windows = 0, .steps = 2000};
    std::string bytes[2];
    for (const uint64_t keep : {uint64_t{0}, uint64_t{1'000'000}}) {
        TempFile file;
        RunModel model(options);
        auto writer = TraceWriter::open(file.path, config, writer_options(options, keep));
        REQUIRE(writer);
        model.run(*writer);
        REQUIRE(writer->close({}));
        bytes[keep != 0] = file.read();
        const auto reader = open_ok(file.path);
        CHECK(reader.info().version == static_cast<uint32_t>(TraceVersion::first));
        CHECK(sum(check_branches(reader, model)) == model.branches());
        CHECK(reader.window_begins().empty());
    }
    CHECK(bytes[0] == bytes[1]); // nothing had to be dropped
}

TEST_CASE("The last branches are kept, with all that it takes to read them") {
    for (uint64_t seed = 1; seed <= 9; ++seed) {
        const ModelOptions options{.seed = seed,
                                   .vcpus = static_cast<unsigned>(1 + seed % 3),
                                   .windows = seed % 2 ? 0u : 5u,
                                   .steps = seed % 2 ? 12'000u : 2400u};
        const uint64_t keep = seed % 3 ? 500 * seed : 1;
        INFO("seed " << seed << ", keep " << keep);
        TempFile file;
        RunModel model(options);
        const auto settings = writer_options(options, keep);
        auto writer = TraceWriter::open(file.path, config, settings);
        REQUIRE(writer);
        uint64_t most = 0;
        model.run(*writer, [&] { most = std::max(most, writer->bytes_written()); });
        REQUIRE(writer->close({{"outcome", "panic"}}, {{0x1000, 1, 't', "symbol", ""}}));

        const auto reader = open_ok(file.path);
        const auto& info = reader.info();
        CHECK(info.complete);
        CHECK(info.missing.empty());
        CHECK(info.version == static_cast<uint32_t>(TraceVersion::parts));
        CHECK(reader.check().empty());
        CHECK(reader.symbols()->size() == 1);
        CHECK(reader.outcome().value()["outcome"] == "panic");
        const auto counts = check_branches(reader, model);
        CHECK(sum(counts) >= keep);
        CHECK(sum(counts) < keep + settings.chunk_records);
        for (unsigned vcpu = 0; vcpu < options.vcpus; ++vcpu) {
            CHECK(info.vcpus[vcpu].end_number == model.vcpus[vcpu].branches.size());
            CHECK(info.vcpus[vcpu].dropped + counts[vcpu] == info.vcpus[vcpu].end_number);
        }
        check_windows(reader, model);
        CHECK(std::filesystem::file_size(file.path) == info.file_bytes);
        // Console output goes on where it was, up to its own bound.
        std::string text;
        const auto console = reader.console().value();
        for (const auto& piece : console)
            text += piece.bytes;
        CHECK(text.ends_with("\n"));
        CHECK(text.starts_with("text "));
        CHECK(most < 40 * info.file_bytes);
        CHECK(std::distance(std::filesystem::directory_iterator(std::filesystem::path(file.path).parent_path()), {}) == 1);
    }
}

TEST_CASE("A flight recorder's file does not grow with the run") {
    uint64_t sizes[2];
    for (const uint64_t factor : {1, 5}) {
        const ModelOptions options{.seed = 3, .vcpus = 2, .windows = 0, .steps = 20'000 * factor};
        TempFile file;
        RunModel model(options);
        auto settings = writer_options(options, 500);
        settings.keep_slack_bytes = 50'000;
        auto writer = TraceWriter::open(file.path, config, settings);
        REQUIRE(writer);
        uint64_t most = 0;
        model.run(*writer, [&] { most = std::max(most, writer->bytes_written()); });
        sizes[factor == 5] = most;
    }
    CHECK(sizes[1] < sizes[0] + sizes[0] / 4);
}

TEST_CASE("A flight recorder that is killed at any moment leaves a file with what it had to keep") {
    const ModelOptions options{.seed = 4, .vcpus = 2, .windows = 3, .steps = 2500};
    const uint64_t keep = 600;
    TempFile file, copy;
    RunModel model(options);
    const auto settings = writer_options(options, keep);
    auto writer = TraceWriter::open(file.path, config, settings);
    REQUIRE(writer);
    unsigned killed = 0;
    model.run(*writer, [&] {
        std::filesystem::copy_file(file.path, copy.path, std::filesystem::copy_options::overwrite_existing);
        const auto reader = open_ok(copy.path);
        CHECK_FALSE(reader.info().complete);
        for (const auto& range : reader.info().missing)
            CHECK_FALSE(range.count); // nothing but the end, whose length nobody knows
        const uint64_t there = sum(check_branches(reader, model, 17));
        const uint64_t open_chunks = uint64_t{settings.chunk_records} * 2 * options.vcpus;
        CHECK(there + open_chunks >= std::min(keep, model.branches()));
        ++killed;
    });
    CHECK(killed > 100);
}

TEST_CASE("Branches kept of a user program are known to be in user space") {
    TempFile file;
    TraceWriterOptions options;
    options.chunk_records = 100;
    options.keep_last = 150;
    options.keep_slack_bytes = 0;
    auto writer = TraceWriter::open(file.path, config, options);
    REQUIRE(writer);
    const BtsRecord enter{0xffffffff81000000, 0x401000, 0}, loop{0x401010, 0x401000, 0};
    REQUIRE(writer->add_records(0, {&enter, 1}));
    for (int i = 0; i < 1000; ++i)
        REQUIRE(writer->add_records(0, {&loop, 1}));
    REQUIRE(writer->close({}));
    const auto reader = open_ok(file.path);
    REQUIRE(reader.dropped().size() == 1);
    CHECK(reader.dropped()[0] == DroppedStart{.branches = 800, .records = 800, .entered_user = true});
    CHECK(reader.info().branches() == 201);
}

TEST_CASE("A flight recorder wants a regular file, and keeps its mode and a link to it") {
    CHECK(TraceWriter::open("/dev/null", config, {.keep_last = 5}).error().message.find("not a regular file") !=
          std::string::npos);
    TempFile file;
    const std::string target = file.path + ".target";
    std::ofstream(target) << "old";
    REQUIRE(::chmod(target.c_str(), 0640) == 0);
    std::filesystem::create_symlink(target, file.path);
    const ModelOptions options{.steps = 3000};
    RunModel model(options);
    auto writer = TraceWriter::open(file.path, config, writer_options(options, 300));
    REQUIRE(writer);
    model.run(*writer);
    REQUIRE(writer->close({}));
    CHECK(std::filesystem::is_symlink(file.path));
    struct stat status;
    REQUIRE(::stat(target.c_str(), &status) == 0);
    CHECK((status.st_mode & 0777) == 0640);
    CHECK(open_ok(file.path).info().vcpus[0].dropped > 0);
    std::filesystem::remove(target);
}
