#include <catch2/catch.hpp>

#include "decode/codec_branch.h"
#include "decode/codec_side.h"
#include "tests/decode/trace_fixture.h"

using namespace vtrace;
using namespace vtrace_test;

namespace {

std::vector<ds::BtsRecord> round_trip(const std::vector<ds::BtsRecord>& stream, size_t batch = 1000) {
    BranchEncoder encoder;
    for (size_t at = 0; at < stream.size(); at += batch)
        encoder.add(std::span(stream).subspan(at, std::min(batch, stream.size() - at)));
    const uint32_t records = encoder.records(), branches = encoder.branches();
    const auto payload = encoder.finish();
    BranchDecoder decoder;
    std::vector<ds::BtsRecord> decoded;
    const auto result = decoder.decode(payload, records, branches, decoded);
    INFO((result ? "" : result.error().message));
    REQUIRE(result);
    return decoded;
}

void check_round_trip(const std::vector<ds::BtsRecord>& stream, size_t batch = 1000) {
    const auto decoded = round_trip(stream, batch);
    REQUIRE(decoded.size() == stream.size());
    for (size_t i = 0; i < stream.size(); ++i) {
        if (!same(stream[i], decoded[i]))
            FAIL("record " << i << " differs");
    }
}

} // namespace

TEST_CASE("Varints and zigzag hold all of 64 bits") {
    ByteWriter out;
    const std::vector<uint64_t> values{0, 1, 127, 128, 300, 1ull << 32, 1ull << 63, UINT64_MAX};
    for (const uint64_t value : values) {
        out.varint(value);
        CHECK(unzigzag(zigzag(value)) == value);
    }
    ByteReader in(out.view());
    for (const uint64_t value : values)
        CHECK(in.varint() == value);
    CHECK(in.left() == 0);
    CHECK_FALSE(in.failed());
    in.varint();
    CHECK(in.failed());

    const uint8_t too_long[] = {0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x02};
    ByteReader bad(too_long);
    bad.varint();
    CHECK(bad.failed());
}

TEST_CASE("Records come back exactly, however they were batched") {
    const auto stream = guest_stream(1, 50'000);
    check_round_trip(stream, 1);
    check_round_trip(stream, 777);
    check_round_trip(stream, stream.size());
}

TEST_CASE("Every 64-bit value of every field survives") {
    std::vector<ds::BtsRecord> stream;
    const std::vector<uint64_t> values{
        0, 1, 1ull << 63, (1ull << 63) - 1, (1ull << 63) + 1, UINT64_MAX, 0xffffffff80000000};
    for (const uint64_t from : values)
        for (const uint64_t to : values)
            for (int repeat = 0; repeat < 2; ++repeat)
                stream.push_back({from, to, 0});
    for (const uint64_t value : values) {
        for (unsigned kind = 0; kind < 256; kind += 5)
            stream.push_back({value, ~value, uint64_t{kind} << 8 | 0x1234'5678'0000'0000 | (value & 0xff)});
        stream.push_back({value, value, make(BtsKind::time)});
        stream.push_back({value, 0, make(BtsKind::cr3)});
        stream.push_back({value, 7, make(BtsKind::cr3)});
    }
    check_round_trip(stream);
}

TEST_CASE("A stream may be empty, of events alone, or all with the predicted bit") {
    check_round_trip({});
    check_round_trip({{5, 6, make(BtsKind::time)}, {0x1000, 0, make(BtsKind::cr3)}, {7, 8, make(BtsKind::time)}});
    auto stream = guest_stream(2, 5000);
    for (auto& record : stream) {
        if (!ds::BtsFlags::is_event(record.flags))
            record.flags |= ds::BtsFlags::predicted;
    }
    check_round_trip(stream);
    BranchEncoder encoder;
    encoder.add(stream);
    const size_t with_bit = encoder.finish().size();
    encoder.add(guest_stream(2, 5000));
    CHECK(with_bit < encoder.finish().size() + 200);
}

TEST_CASE("A loop costs next to nothing") {
    std::vector<ds::BtsRecord> stream;
    for (int i = 0; i < 100'000; ++i)
        stream.push_back({0x1000 + i % 10u * 0x20, 0x1000 + (i + 1) % 10u * 0x20, 0});
    BranchEncoder encoder;
    encoder.add(stream);
    CHECK(encoder.finish().size() < 200);
}

TEST_CASE("An encoder starts anew with each chunk") {
    const auto stream = guest_stream(3, 3000);
    BranchEncoder encoder;
    encoder.add(stream);
    const auto first = encoder.finish();
    CHECK(encoder.records() == 0);
    encoder.add(stream);
    CHECK(encoder.finish() == first);
}

TEST_CASE("A damaged branch payload is an error or other records, never more") {
    const auto stream = guest_stream(4, 400);
    BranchEncoder encoder;
    encoder.add(stream);
    const uint32_t records = encoder.records(), branches = encoder.branches();
    const auto payload = encoder.finish();
    BranchDecoder decoder;
    std::vector<ds::BtsRecord> out;
    CHECK_FALSE(decoder.decode(payload, records + 1, branches, out));
    CHECK_FALSE(decoder.decode(payload, records, branches - 1, out));
    CHECK_FALSE(decoder.decode(payload, records, records + 1, out));
    CHECK_FALSE(decoder.decode(payload, UINT32_MAX, branches, out));
    CHECK_FALSE(decoder.decode({}, 0, 0, out));
    for (size_t cut = 0; cut < payload.size(); cut += 7)
        CHECK_FALSE(decoder.decode(std::span(payload).first(cut), records, branches, out));
    Random random(5);
    for (int i = 0; i < 60; ++i) {
        auto damaged = payload;
        damaged[random.below(damaged.size())] ^= 1 << random.below(8);
        if (decoder.decode(damaged, records, branches, out))
            CHECK(out.size() == records);
    }
}

TEST_CASE("Code pages come back, also those that repeat in a chunk") {
    std::vector<CodePage> pages;
    std::vector<uint8_t> bytes;
    for (uint64_t i = 0; i < 40; ++i) {
        pages.push_back(
            {.place = {i * 2, static_cast<uint32_t>(i % 3), i * 1000}, .gpa = (i % 13) << 12 | (i % 5) << 40});
        const auto page = page_of(i / 2);
        bytes.insert(bytes.end(), page.begin(), page.end());
    }
    const auto payload = encode_code_pages(pages, bytes);
    const auto decoded = decode_code_pages(payload, 40);
    REQUIRE(decoded);
    CHECK(decoded->bytes == bytes);
    for (size_t i = 0; i < pages.size(); ++i) {
        CHECK(decoded->pages[i].gpa == pages[i].gpa);
        CHECK(decoded->pages[i].place.order == pages[i].place.order);
        CHECK(decoded->pages[i].place.position == pages[i].place.position);
        CHECK(decoded->pages[i].place.vcpu == pages[i].place.vcpu);
    }
    CHECK_FALSE(decode_code_pages(payload, 41));
    CHECK_FALSE(decode_code_pages(payload, 39));
    CHECK_FALSE(decode_code_pages(payload, UINT32_MAX));
}

TEST_CASE("Symbols and console output come back") {
    const std::vector<TraceSymbol> symbols{{0, 0, 'A', "", ""},
                                           {0x1000, 16, 't', "one", ""},
                                           {0x1000, 16, 'T', "alias", "mod"},
                                           {0xffffffff81000000, 0, 'T', "_stext", "mod"},
                                           {UINT64_MAX, 1, 'd', "last", ""}};
    const auto payload = encode_symbols(symbols);
    const auto decoded = decode_symbols(payload, symbols.size());
    REQUIRE(decoded);
    CHECK(*decoded == symbols);
    CHECK_FALSE(decode_symbols(payload, symbols.size() - 1));
    CHECK_FALSE(decode_symbols(payload, UINT32_MAX));

    const std::vector<ConsolePiece> pieces{{5, "hello\n"}, {5, ""}, {UINT64_MAX, std::string("\0\xff", 2)}};
    const auto text = encode_console(pieces);
    const auto back = decode_console(text, pieces.size());
    REQUIRE(back);
    for (size_t i = 0; i < pieces.size(); ++i) {
        CHECK((*back)[i].time == pieces[i].time);
        CHECK((*back)[i].bytes == pieces[i].bytes);
    }
    CHECK_FALSE(decode_console(text, 2));
}
