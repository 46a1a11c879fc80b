// Seeds for fuzz_trace_reader: a small whole trace, once to be sealed and once as it is, and a bare branch payload.
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <string>

#include <nlohmann/json.hpp>

#include "decode/codec_branch.h"
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
    BranchEncoder encoder;
    encoder.add(stream);
    const uint32_t records = encoder.records(), branches = encoder.branches();
    const auto payload = encoder.finish();
    put("branches", 2, records, branches, {payload.begin(), payload.end()});
}
