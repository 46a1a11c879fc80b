// What the branch codec costs and gives on a real stream: bytes a branch, ns a branch to encode and to decode.
//
//   bench_codec FILE [MAX_RECORDS]     FILE: raw BtsRecords of 24 bytes, as any BTS drain leaves them
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <vector>

#include <zstd.h>

#include "decode/codec_branch.h"
#include "decode/trace_writer.h"

namespace {

/// Processor time of this thread: other load on the machine does not count, but for what it does to the caches.
struct Clock {
    using time_point = double; // ns
    static double now() {
        timespec time;
        clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
        return 1e9 * static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec);
    }
};

double ns_since(Clock::time_point start) {
    return Clock::now() - start;
}

} // namespace

int main(int argc, char** argv) {
    if (argc < 2) {
        std::fprintf(stderr, "usage: bench_codec FILE [MAX_RECORDS]\n");
        return 2;
    }
    std::FILE* file = std::fopen(argv[1], "rb");
    if (!file) {
        std::perror(argv[1]);
        return 1;
    }
    const uint64_t most = argc > 2 ? std::strtoull(argv[2], nullptr, 0) : UINT64_MAX;
    const vtrace::TraceWriterOptions options;
    const size_t batch = 8192; // as a drained area comes
    vtrace::BranchEncoder encoder;
    vtrace::BranchDecoder decoder;
    std::vector<vtrace::ds::BtsRecord> records(options.chunk_records), decoded;
    std::vector<uint8_t> stored;
    uint64_t total = 0, raw_bytes = 0, stored_bytes = 0;
    double encode_ns = 0, compress_ns = 0, decompress_ns = 0, decode_ns = 0;
    while (total < most) {
        const size_t got = std::fread(records.data(), sizeof records[0], records.size(), file);
        if (got == 0)
            break;
        auto start = Clock::now();
        for (size_t at = 0; at < got; at += batch)
            encoder.add({records.data() + at, std::min(batch, got - at)});
        const uint32_t branches = encoder.branches();
        std::vector<uint8_t> payload = encoder.finish();
        encode_ns += ns_since(start);

        start = Clock::now();
        stored.resize(ZSTD_compressBound(payload.size()));
        const size_t size =
            ZSTD_compress(stored.data(), stored.size(), payload.data(), payload.size(), options.compression);
        compress_ns += ns_since(start);

        start = Clock::now();
        if (ZSTD_decompress(payload.data(), payload.size(), stored.data(), size) != payload.size())
            return 1;
        decompress_ns += ns_since(start);
        start = Clock::now();
        if (auto result = decoder.decode(payload, got, branches, decoded); !result) {
            std::fprintf(stderr, "decode: %s\n", result.error().message.c_str());
            return 1;
        }
        decode_ns += ns_since(start);
        for (size_t i = 0; i < got; ++i) {
            if (records[i].from != decoded[i].from || records[i].to != decoded[i].to ||
                records[i].flags != decoded[i].flags) {
                std::fprintf(stderr, "record %zu differs\n", i);
                return 1;
            }
        }
        total += got;
        raw_bytes += payload.size();
        stored_bytes += size + sizeof(vtrace::ChunkHeader);
    }
    std::fclose(file);
    if (total == 0) {
        std::fprintf(stderr, "%s: no record\n", argv[1]);
        return 1;
    }
    const double n = static_cast<double>(total);
    std::printf("records             %llu\n", static_cast<unsigned long long>(total));
    std::printf("bytes a record      %.4f before zstd, %.4f stored\n", raw_bytes / n, stored_bytes / n);
    std::printf("encode, ns a record %.2f predict + %.2f zstd\n", encode_ns / n, compress_ns / n);
    std::printf("decode, ns a record %.2f predict + %.2f zstd = %.0f M/s\n", decode_ns / n, decompress_ns / n,
                1e3 * n / (decode_ns + decompress_ns));
}
