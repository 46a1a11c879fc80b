#include <catch2/catch.hpp>

#include <thread>
#include <vector>

#include "ds/ring.h"

using namespace vtrace;
using namespace vtrace::ds;

namespace {

BtsRecord numbered(uint64_t n) {
    return {n, n * 3, n * 7};
}

/// Producer and consumer on two threads, in uneven batches; the consumer checks every record.
void stream_through(Ring& ring, uint64_t total, size_t batch, size_t take) {
    std::thread producer([&] {
        std::vector<BtsRecord> records;
        for (uint64_t n = 0; n < total;) {
            records.clear();
            for (size_t i = 0; i < 1 + (n * 7 + 3) % batch && n < total; ++i)
                records.push_back(numbered(n++));
            ring.write(records);
        }
        ring.close();
    });
    uint64_t seen = 0, wrong = 0;
    for (;;) {
        const auto records = ring.acquire_wait();
        if (records.empty())
            break;
        const size_t count = std::min<size_t>(records.size(), 1 + seen % take);
        for (size_t i = 0; i < count; ++i, ++seen)
            wrong += records[i].from != seen || records[i].to != seen * 3 || records[i].flags != seen * 7;
        ring.release(count);
    }
    producer.join();
    CHECK(seen == total);
    CHECK(wrong == 0);
    CHECK(ring.finished());
    CHECK(ring.written() == total);
}

} // namespace

TEST_CASE("A ring has a power of two of records, on pages of its own") {
    Doorbell bell;
    auto ring = Ring::create(1000, bell);
    REQUIRE(ring);
    CHECK(ring->capacity() == 1024);
    const BtsRecord record = numbered(1);
    ring->write({&record, 1});
    CHECK(reinterpret_cast<uintptr_t>(ring->acquire().data()) % 4096 == 0);

    CHECK(Ring::create(1, bell)->capacity() * sizeof(BtsRecord) >= 4096);
    const auto huge = Ring::create(Ring::max_records + 1, bell);
    REQUIRE_FALSE(huge);
    CHECK(huge.error().message.find("the most is") != std::string::npos);
}

TEST_CASE("Every record comes through a ring once, in order") {
    Doorbell bell;
    auto ring = Ring::create(256, bell);
    REQUIRE(ring);
    SECTION("small batches") {
        stream_through(*ring, 100'000, 20, 50);
    }
    SECTION("batches larger than the ring: the producer waits inside") {
        stream_through(*ring, 100'000, 1000, 300);
    }
    SECTION("a slow consumer") {
        stream_through(*ring, 20'000, 1000, 1);
    }
}

TEST_CASE("A closed ring is finished once it is empty") {
    Doorbell bell;
    auto ring = Ring::create(256, bell);
    REQUIRE(ring);
    const BtsRecord record = numbered(5);
    ring->write({&record, 1});
    ring->close();
    CHECK_FALSE(ring->finished());
    CHECK(ring->acquire_wait().size() == 1);
    ring->release(1);
    CHECK(ring->finished());
    CHECK(ring->acquire_wait().empty());
}

TEST_CASE("One doorbell serves several rings") {
    Doorbell bell;
    std::vector<Ring> rings;
    for (int i = 0; i < 3; ++i)
        rings.push_back(std::move(*Ring::create(256, bell)));
    std::vector<std::thread> producers;
    for (auto& ring : rings) {
        producers.emplace_back([&ring] {
            for (uint64_t n = 0; n < 5000; ++n) {
                const BtsRecord record = numbered(n);
                ring.write({&record, 1});
            }
            ring.close();
        });
    }
    std::vector<uint64_t> seen(rings.size());
    uint64_t wrong = 0;
    for (;;) {
        const uint32_t state = bell.state();
        bool idle = true, finished = true;
        for (size_t i = 0; i < rings.size(); ++i) {
            const auto records = rings[i].acquire();
            for (const auto& record : records)
                wrong += record.from != seen[i]++;
            idle = idle && records.empty();
            rings[i].release(records.size());
            finished = finished && rings[i].finished();
        }
        if (finished)
            break;
        if (idle)
            bell.wait(state);
    }
    for (auto& producer : producers)
        producer.join();
    CHECK(wrong == 0);
    CHECK(seen == std::vector<uint64_t>{5000, 5000, 5000});
}
