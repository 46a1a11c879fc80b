// Seeds for fuzz_trace_reader: a small whole trace and one of windows without its beginning, each once to be sealed and
// once as it is, and bare payloads.
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <span>
#include <string>

#include <nlohmann/json.hpp>

#include "decode/codec_branch.h"
#include "decode/codec_side.h"
#include "decode/trace_writer.h"
#include "tests/decode/trace_fixture.h"

using namespace vtrace;
using namespace vtrace_test;

int main(int argc, char** argv) {
    if (argc != 2) {
        std::fprintf(stderr, "usage: write_trace_seeds FOLDER\n");
        return 2;
    }
    const std::filesystem::path folder = argv[1];
    std::filesystem::create_directories(folder);
    const auto put = [&](const char* name, char kind, uint32_t count, uint32_t branches, const std::string& bytes) {
        std::ofstream out(folder / name, std::ios::binary);
        out.put(kind);
        out.write(reinterpret_cast<const char*>(&count), sizeof count);
        out.write(reinterpret_cast<const char*>(&branches), sizeof branches);
        out << bytes;
    };
    const auto stream = guest_stream(1, 300);
    TempFile file;
    TraceWriterOptions options;
    options.chunk_records = 100;
    auto writer = TraceWriter::open(file.path, {{"memory", 512}}, options);
    if (!writer)
        return 1;
    std::array<uint8_t, 4096> page{0x90, 0xc3};
    writer->code_page(0, 0, 0x5000, page);
    writer->code_mapping(0, 0, 0x1000, 0xffffffff81000000, 0x5000, true);
    writer->console(1, "boot\n");
    if (!writer->add_records(0, stream) || !writer->close({{"outcome", "exit"}}, {{0x1000, 16, 'T', "_text", ""}}))
        return 1;
    put("whole", 0, 0, 0, file.read());
    put("as-is", 1, 0, 0, file.read());

    options.windows = true;
    options.keep_last = 150;
    options.keep_slack_bytes = 0;
    auto parts = TraceWriter::open(file.path, {{"memory", 512}}, options);
    if (!parts)
        return 1;
    uint64_t position = 0;
    for (uint64_t window = 1; window <= 3; ++window) {
        const ds::BtsRecord begin{0xffffffff81000000, window, make(BtsKind::window_begin)};
        const ds::BtsRecord end{0xffffffff81000000, window, make(BtsKind::window_end)};
        parts->begin_window();
        if (!parts->add_records(0, {&begin, 1}))
            return 1;
        page[0] = static_cast<uint8_t>(window);
        parts->code_page(0, position + 1, 0x5000, page);
        parts->code_mapping(0, position + 1, 0x1000, 0xffffffff81000000, 0x5000, true);
        if (!parts->add_records(0, std::span(stream).first(150)) || !parts->add_records(0, {&end, 1}))
            return 1;
        position += 152;
    }
    if (!parts->close({{"outcome", "panic"}}))
        return 1;
    put("parts", 0, 0, 0, file.read());
    put("parts-as-is", 1, 0, 0, file.read());
    const WindowBegin begins[] = {{1, 0, 0}, {2, 0, 152}, {2, 1, 7}};
    const auto windows = encode_windows(begins);
    put("windows", 7, 3, 0, {windows.begin(), windows.end()});
    const DroppedStart starts[] = {{10, 20, true}, {}};
    const auto dropped = encode_dropped(starts);
    put("dropped", 8, 2, 0, {dropped.begin(), dropped.end()});

    BranchEncoder encoder;
    encoder.add(stream);
    const uint32_t records = encoder.records(), branches = encoder.branches();
    const auto payload = encoder.finish();
    put("branches", 2, records, branches, {payload.begin(), payload.end()});
}
