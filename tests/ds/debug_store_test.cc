#include <catch2/catch.hpp>

#include <cstddef>
#include <vector>

#include "ds/debug_store.h"

using namespace vtrace;
using namespace vtrace::ds;

namespace {

constexpr uint64_t on = DebugCtl::tr | DebugCtl::bts | DebugCtl::btint;

struct Fixture {
    Doorbell bell;
    Ring ring = std::move(*Ring::create(4096, bell));
    std::unique_ptr<DebugStore> store = std::move(*DebugStore::create(64, ring));

    std::vector<BtsRecord> take() {
        std::vector<BtsRecord> all;
        for (;;) {
            const auto records = ring.acquire();
            if (records.empty())
                return all;
            all.insert(all.end(), records.begin(), records.end());
            ring.release(records.size());
        }
    }
};

bool is(const BtsRecord& record, BtsKind kind, uint64_t from, uint64_t to) {
    return record.flags == BtsFlags::make(kind) && record.from == from && record.to == to;
}

} // namespace

TEST_CASE("The management area has the manual's offsets") {
    CHECK(offsetof(DsManagementArea64, bts_index) == 0x08);
    CHECK(offsetof(DsManagementArea64, bts_absolute_maximum) == 0x10);
    CHECK(offsetof(DsManagementArea64, bts_interrupt_threshold) == 0x18);
    CHECK(offsetof(DsManagementArea64, pebs_buffer_base) == 0x20);
    CHECK(offsetof(DsManagementArea64, pebs_interrupt_threshold) == 0x38);
    CHECK(offsetof(DsManagementArea64, pebs_counter_reset) == 0x40);
}

TEST_CASE_METHOD(Fixture, "Nothing is recorded until TR and BTS are set") {
    auto& cursor = store->cursor();
    for (int i = 0; i < 1000; ++i)
        REQUIRE_FALSE(cursor.append(1, 2, 0));
    CHECK(store->position() == 0);
    REQUIRE(store->set_debugctl(DebugCtl::tr | DebugCtl::btint));
    cursor.append(1, 2, 0);
    CHECK(store->position() == 0);
    store->drain(10, 10);
    CHECK(take().empty());

    REQUIRE(store->set_debugctl(on));
    cursor.append(1, 2, 0);
    CHECK(store->position() == 1);
    const auto area = store->management_area();
    CHECK(area.bts_index == area.bts_buffer_base + sizeof(BtsRecord));
    CHECK(area.bts_absolute_maximum == area.bts_buffer_base + 64 * sizeof(BtsRecord));
    CHECK(area.bts_interrupt_threshold < area.bts_absolute_maximum);
    CHECK(area.bts_buffer_base % 4096 == 0);
}

TEST_CASE_METHOD(Fixture, "DEBUGCTL bits that cannot be honoured are refused by name") {
    CHECK(store->set_debugctl(1).error().message.find("0x1") != std::string::npos);
    CHECK(store->set_debugctl(DebugCtl::tr | DebugCtl::bts).error().message.find("BTINT") != std::string::npos);
    CHECK(store->debugctl() == 0);
}

TEST_CASE_METHOD(Fixture, "The CPL filter tests the CPL after the branch") {
    auto& cursor = store->cursor();
    const auto branch_to = [&](unsigned cpl, uint64_t from) {
        store->set_cpl(cpl);
        cursor.append(from, from + 1, 0);
    };
    SECTION("BTS_OFF_OS") {
        REQUIRE(store->set_debugctl(on | DebugCtl::bts_off_os));
        branch_to(0, 1);
        branch_to(3, 2); // return to user mode: recorded
        branch_to(3, 3);
        branch_to(0, 4); // entry: not
        store->drain(1, 1);
        const auto records = take();
        REQUIRE(records.size() == 3);
        CHECK(records[0].from == 2);
        CHECK(records[1].from == 3);
    }
    SECTION("BTS_OFF_USR") {
        REQUIRE(store->set_debugctl(on | DebugCtl::bts_off_usr));
        branch_to(0, 1);
        branch_to(3, 2);
        branch_to(1, 3);
        branch_to(0, 4);
        store->drain(1, 1);
        const auto records = take();
        REQUIRE(records.size() == 3);
        CHECK(records[0].from == 1);
        CHECK(records[1].from == 4);
    }
    SECTION("both") {
        REQUIRE(store->set_debugctl(on | DebugCtl::bts_off_usr | DebugCtl::bts_off_os));
        branch_to(0, 1);
        branch_to(3, 2);
        CHECK(store->position() == 0);
    }
}

TEST_CASE_METHOD(Fixture, "At its threshold the area is drained into the ring, and time follows the records") {
    REQUIRE(store->set_debugctl(on));
    auto& cursor = store->cursor();
    store->drain(5, 6); // the start: time is known from here
    uint64_t appended = 0, drains = 0;
    while (drains < 3) {
        const bool due = cursor.append(appended, appended + 1, 0);
        ++appended;
        CHECK(due == store->drain_due());
        if (due) {
            ++drains;
            store->drain(100 * drains, 50 * drains);
        }
        REQUIRE(store->position() == appended + drains + 1);
    }
    const auto records = take();
    REQUIRE(records.size() == store->position());
    CHECK(is(records.front(), BtsKind::time, 5, 6));
    CHECK(is(records.back(), BtsKind::time, 300, 150));
    uint64_t next = 0;
    for (const auto& record : records) {
        if (!BtsFlags::is_event(record.flags))
            CHECK(record.from == next++);
    }
    CHECK(next == appended);

    store->drain(300, 150); // nothing new: nothing added
    CHECK(take().empty());
    store->drain(400, 150); // time alone
    CHECK(take().size() == 1);
}

TEST_CASE_METHOD(Fixture, "A requested drain is asked for by the next append") {
    REQUIRE(store->set_debugctl(on));
    CHECK_FALSE(store->cursor().append(1, 2, 0));
    store->request_drain();
    CHECK(store->cursor().append(3, 4, 0));
    store->drain(1, 1);
    CHECK_FALSE(store->cursor().append(5, 6, 0));
}

TEST_CASE_METHOD(Fixture, "A change of CR3 is an event, also while the CPL is filtered, and never lost while off") {
    CHECK_FALSE(store->set_cr3(0x1000)); // off: waits
    CHECK(store->position() == 0);
    REQUIRE(store->set_debugctl(on | DebugCtl::bts_off_os));
    CHECK(store->position() == 1);
    CHECK_FALSE(store->set_cr3(0x1000)); // no change
    CHECK_FALSE(store->set_cr3(0x2000)); // CPL 0 is filtered
    store->cursor().append(1, 2, 0);
    store->drain(1, 1);
    const auto records = take();
    REQUIRE(records.size() == 3);
    CHECK(is(records[0], BtsKind::cr3, 0x1000, 0));
    CHECK(is(records[1], BtsKind::cr3, 0x2000, 0));

    bool due = false;
    for (uint64_t i = 0; i < 64 && !due; ++i)
        due = store->set_cr3(0x10000 + i);
    CHECK(due);
    store->drain(2, 2);
    CHECK_FALSE(store->drain_due());
}

TEST_CASE_METHOD(Fixture, "A window begins and ends with records that tell where, the CR3 and the time") {
    REQUIRE(store->set_debugctl(on));
    CHECK_FALSE(store->set_cr3(0x1000));
    store->drain(5, 6);
    (void)take();
    CHECK(store->window() == 0);
    store->begin_window(1, 0x400000);
    CHECK(store->window() == 1);
    CHECK_FALSE(store->set_cr3(0x1000)); // the same as before the gap: told all the same
    store->drain(5, 6);                  // and the same time
    store->cursor().append(1, 2, 0);
    store->end_window(1, 0x400100);
    store->drain(7, 8);
    CHECK(store->window() == 1);
    const auto records = take();
    REQUIRE(records.size() == 6);
    CHECK(is(records[0], BtsKind::window_begin, 0x400000, 1));
    CHECK(is(records[1], BtsKind::cr3, 0x1000, 0));
    CHECK(is(records[2], BtsKind::time, 5, 6));
    CHECK(is(records[4], BtsKind::window_end, 0x400100, 1));
    CHECK(is(records[5], BtsKind::time, 7, 8));
    CHECK(BtsFlags::is_event(records[0].flags));
    CHECK(BtsFlags::is_event(records[4].flags));
}

TEST_CASE("An area has limits") {
    Doorbell bell;
    auto ring = Ring::create(256, bell);
    CHECK_FALSE(DebugStore::create(1, *ring));
    CHECK_FALSE(DebugStore::create(DebugStore::max_records + 1, *ring));
}
