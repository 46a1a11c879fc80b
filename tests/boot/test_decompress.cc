#include <catch2/catch.hpp>

#include "tests/boot/builders.h"

using namespace vtrace;
using namespace vtrace::testing;

namespace {

const Compression all[] = {Compression::gzip, Compression::xz, Compression::lzma, Compression::lz4, Compression::zstd};

} // namespace

TEST_CASE("each format is recognized and decompresses to what was compressed") {
    const Bytes plain = mixed_data(300'000);
    for (Compression format : all) {
        INFO(name_of(format));
        const Bytes packed = compress(format, plain);
        REQUIRE(packed.size() < plain.size());
        REQUIRE(compression_of(packed) == format);
        Bytes out(plain.size());
        const auto done = decompress(format, packed, out);
        REQUIRE(done);
        CHECK(done->complete);
        CHECK(done->size == plain.size());
        CHECK(out == plain);
    }
}

TEST_CASE("lz4 legacy frames of several blocks, and concatenated ones") {
    const Bytes plain = mixed_data((16 << 20) + 12345);
    Bytes packed = compress(Compression::lz4, plain);
    Bytes out(plain.size());
    auto done = decompress(Compression::lz4, packed, out);
    REQUIRE(done);
    CHECK(out == plain);

    const Bytes more = text("and another frame");
    append(packed, compress(Compression::lz4, more));
    out.resize(plain.size() + more.size());
    done = decompress(Compression::lz4, packed, out);
    REQUIRE(done);
    CHECK(done->complete);
    CHECK(std::equal(more.begin(), more.end(), out.end() - more.size()));
}

TEST_CASE("the output buffer bounds a bomb") {
    const Bytes zeros(4 << 20);
    for (Compression format : all) {
        INFO(name_of(format));
        const Bytes packed = compress(format, zeros);
        for (size_t room : {size_t(0), size_t(1), size_t(1000), zeros.size() - 1}) {
            Bytes out(room + 16, 0xee);
            const auto done = decompress(format, packed, std::span(out).first(room));
            REQUIRE(done);
            CHECK_FALSE(done->complete);
            CHECK(done->size == room);
            CHECK(std::all_of(out.begin() + room, out.end(), [](uint8_t byte) { return byte == 0xee; }));
        }
    }
}

TEST_CASE("a stream that is cut at any byte is an error, never a short success") {
    const Bytes plain = mixed_data(600);
    for (Compression format : all) {
        const Bytes packed = compress(format, plain);
        // An lzma stream of known size ends at its last symbol; here it has an end mark of a few bytes instead.
        for (size_t size = 0; size < packed.size(); size++) {
            INFO(name_of(format) << " cut to " << size << " of " << packed.size());
            Bytes out(plain.size());
            const auto done = decompress(format, std::span(packed).first(size), out);
            // With lz4 the empty file and the bare magic are streams of nothing; all other cuts are errors.
            const bool lz4_of_nothing = format == Compression::lz4 && (size == 0 || size == 4);
            if (lz4_of_nothing)
                CHECK((done && done->size == 0));
            else if (done)
                CHECK_FALSE(done->complete); // all bytes are out, the end mark is missing: never called complete
            else
                CHECK(done.error().message.substr(0, 2) == name_of(format).substr(0, 2));
        }
    }
}

TEST_CASE("damage is found by the formats that have a checksum, and never harms with the others") {
    const Bytes plain = mixed_data(2000);
    for (Compression format : all) {
        const Bytes packed = compress(format, plain);
        for (size_t at = 0; at < packed.size(); at++) {
            INFO(name_of(format) << " damaged at " << at);
            Bytes bad = packed, out(plain.size());
            bad[at] ^= 0x55;
            const auto done = decompress(format, bad, out);
            if (format == Compression::xz)
                CHECK_FALSE((done && done->complete && done->size == plain.size()));
        }
    }
}

TEST_CASE("formats that are only recognized say what to do") {
    const Bytes bzip2 = text("BZh91AY&SY");
    REQUIRE(compression_of(bzip2) == Compression::bzip2);
    Bytes out(100);
    const auto done = decompress(Compression::bzip2, bzip2, out);
    REQUIRE_FALSE(done);
    CHECK(done.error().message == "bzip2: not supported; build the kernel with gzip, xz, lzma, lz4 or zstd");
    CHECK(compression_of(text("hello")) == Compression::none);
    CHECK(compression_of({}) == Compression::none);
}

TEST_CASE("an xz stream with a huge dictionary is refused, not allocated") {
    // Block header flags, one LZMA2 filter with a dictionary of 4 GiB (property 40), CRC32s made fitting by zlib's
    // crc32.
    Bytes stream{0xfd, '7', 'z', 'X', 'Z', 0, 0, 1, 0x69, 0x22, 0xde, 0x36};
    Bytes header{0x02, 0x00, 0x21, 0x01, 40, 0, 0, 0};
    uint32_t crc = 0xffff'ffff;
    for (uint8_t byte : header) {
        crc ^= byte;
        for (int i = 0; i < 8; i++)
            crc = crc >> 1 ^ (crc & 1 ? 0xedb8'8320 : 0);
    }
    append(stream, header);
    append(stream, bytes_of(~crc));
    stream.resize(stream.size() + 100);
    Bytes out(100);
    const auto done = decompress(Compression::xz, stream, out);
    REQUIRE_FALSE(done);
    CHECK(done.error().message == "xz: the data needs a window of more than 256 MiB");
}
