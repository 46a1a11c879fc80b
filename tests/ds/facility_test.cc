// The guest's side of the Debug Store by itself: registers, areas in every layout, and what a hostile guest may do.
#include <catch2/catch.hpp>

#include <cstring>
#include <map>
#include <random>

#include "ds/facility.h"
#include "ds/msr.h"

using namespace vtrace::ds;

namespace {

/// Memory of which every write is noted: [begin, begin + size) is there, all else isn't.
class Memory final : public GuestSpace {
  public:
    Memory(uint64_t begin, size_t size) : begin_(begin), bytes_(size) {}

    bool read(uint64_t linear, void* bytes, size_t size) override {
        if (!has(linear, size))
            return false;
        std::memcpy(bytes, &bytes_[linear - begin_], size);
        return true;
    }
    bool write(uint64_t linear, const void* bytes, size_t size) override {
        if (!has(linear, size))
            return false;
        std::memcpy(&bytes_[linear - begin_], bytes, size);
        writes.push_back({linear, size});
        return true;
    }
    uint8_t* fast(uint64_t, size_t) override { return nullptr; }
    template <class T>
    T get(uint64_t linear) {
        T value{};
        REQUIRE(read(linear, &value, sizeof value));
        return value;
    }
    template <class T>
    void put(uint64_t linear, T value) {
        REQUIRE(write(linear, &value, sizeof value));
        writes.clear();
    }

    std::vector<std::pair<uint64_t, size_t>> writes;

  private:
    bool has(uint64_t linear, size_t size) const {
        return linear >= begin_ && linear - begin_ <= bytes_.size() && bytes_.size() - (linear - begin_) >= size;
    }
    uint64_t begin_;
    std::vector<uint8_t> bytes_;
};

struct Line final : PmiLine {
    void raise_pmi() override { ++raised; }
    unsigned raised = 0;
};

constexpr uint64_t begin = 0x1000, area = 0x1000, buffer = 0x2000;

struct Rig {
    explicit Rig(std::string_view name) : model(**find_cpu_model(name)) {}
    const CpuModel& model;
    Memory memory{begin, 0x10000};
    Line line;
    Facility facility{model, memory, line};

    uint64_t on(bool btint = true) const {
        return model.debugctl.tr | model.debugctl.bts | (btint ? model.debugctl.btint : 0);
    }
    template <class Field>
    void place(Field records, Field threshold_at) {
        const auto size = static_cast<Field>(3 * sizeof(Field));
        const Field fields[] = {Field{buffer}, Field{buffer}, static_cast<Field>(buffer + records * size),
                                static_cast<Field>(buffer + threshold_at * size)};
        for (size_t i = 0; i < 4; ++i)
            memory.put<Field>(area + i * sizeof(Field), fields[i]);
        facility.set_ia32e(sizeof(Field) == 8);
        REQUIRE(facility.write_msr(msr::ds_area, area));
    }
    void branch(uint64_t from, uint64_t to, uint8_t cpl = 0) {
        facility.branch({from, to, from + 2, Retired::branch | Retired::taken, cpl});
    }
};

template <class Field>
void check_layout(std::string_view name) {
    INFO(name);
    Rig rig(name);
    rig.place<Field>(10, 8);
    REQUIRE(rig.facility.write_msr(msr::debugctl, rig.on()));
    CHECK(rig.facility.wants_branches());
    const Field size = 3 * sizeof(Field);
    for (unsigned i = 0; i < 12; ++i) {
        rig.branch(0x400000 + i, 0x500000 + i);
        const Field stored = std::min(i + 1, 10u);
        CHECK(rig.memory.get<Field>(area + sizeof(Field)) == buffer + stored * size);
        // One a record at or above the threshold; what is dropped raises none.
        CHECK(rig.line.raised == (i < 7 ? 0u : std::min(i - 6, 3u)));
    }
    for (unsigned i = 0; i < 10; ++i) {
        CHECK(rig.memory.get<Field>(buffer + i * size) == 0x400000 + i);
        CHECK(rig.memory.get<Field>(buffer + i * size + sizeof(Field)) == 0x500000 + i);
        CHECK((rig.memory.get<Field>(buffer + i * size + 2 * sizeof(Field)) & ~Field{1 << 4}) == 0);
    }
    CHECK(rig.facility.branches().written == 10);
    CHECK(rig.facility.branches().dropped == 2);
}

} // namespace

TEST_CASE("Records lie as each model lays them out") {
    check_layout<uint32_t>("netburst");
    check_layout<uint32_t>("pentium-m");
    for (const char* name : {"netburst64", "core2", "atom", "nehalem", "sandybridge", "haswell", "skylake", "icelake"})
        check_layout<uint64_t>(name);
}

TEST_CASE("A model's DEBUGCTL has its bits and no others") {
    for (const CpuModel& model : cpu_models()) {
        Rig rig(model.name);
        for (unsigned bit = 0; bit < 64; ++bit) {
            INFO(model.name << " bit " << bit);
            const bool there = model.debugctl.all() >> bit & 1;
            CHECK(rig.facility.write_msr(msr::debugctl, 1ull << bit) == there);
            CHECK(rig.facility.read_msr(msr::debugctl).value() == (there ? 1ull << bit : 0));
            rig.facility.write_msr(msr::debugctl, 0);
        }
    }
    // The manual's positions, for the families that differ (SDM vol. 3, 17.12.1, 17.14.1 and 17.4.1).
    CHECK(find_cpu_model("netburst").value()->debugctl.all() == 0x7f);
    CHECK(find_cpu_model("pentium-m").value()->debugctl.all() == 0x1c3);
    CHECK(find_cpu_model("core2").value()->debugctl.all() == 0x1fc3);
}

TEST_CASE("The buffer with room for nothing takes nothing") {
    Rig rig("core2");
    rig.place<uint64_t>(0, 0);
    for (bool btint : {true, false}) {
        REQUIRE(rig.facility.write_msr(msr::debugctl, rig.on(btint)));
        rig.branch(1, 2);
    }
    CHECK(rig.memory.writes.empty());
    CHECK(rig.facility.branches().dropped == 2);
    CHECK(rig.line.raised == 0);
}

TEST_CASE("An absolute maximum one past the last record, as the manual has it, is one with the exact end") {
    for (uint64_t more : {0, 1, 23}) {
        Rig rig("core2");
        rig.place<uint64_t>(4, 100);
        rig.memory.put<uint64_t>(area + 16, buffer + 4 * 24 + more);
        REQUIRE(rig.facility.write_msr(msr::debugctl, rig.on()));
        for (unsigned i = 0; i < 6; ++i)
            rig.branch(1, 2);
        CHECK(rig.facility.branches().written == 4);
    }
}

TEST_CASE("A DS area that isn't there drops and counts") {
    Rig rig("core2");
    REQUIRE(rig.facility.write_msr(msr::ds_area, 0x7fff'ffff'f000));
    REQUIRE(rig.facility.write_msr(msr::debugctl, rig.on()));
    rig.branch(1, 2);
    CHECK(rig.facility.branches().dropped == 1);
    CHECK_FALSE(rig.facility.write_msr(msr::ds_area, 0x8000'0000'0000));
    Rig narrow("pentium-m");
    CHECK_FALSE(narrow.facility.write_msr(msr::ds_area, 1ull << 32));
}

TEST_CASE("The PMI freezes what DEBUGCTL says") {
    for (const char* name : {"nehalem", "skylake"}) {
        Rig rig(name);
        rig.place<uint64_t>(10, 1);
        const uint64_t bits = rig.on() | 1 | rig.model.debugctl.freeze_lbrs_on_pmi | rig.model.debugctl.freeze_perfmon_on_pmi;
        REQUIRE(rig.facility.write_msr(msr::debugctl, bits));
        rig.branch(1, 2);
        CHECK(rig.line.raised == 1);
        INFO(name);
        const bool streamlined = rig.model.pmu.version >= 4;
        const uint64_t status = rig.facility.read_msr(msr::perf_global_status).value();
        CHECK(status == (streamlined ? 3ull << 58 : 0));
        CHECK((rig.facility.read_msr(msr::debugctl).value() & 1) == streamlined);
        CHECK((rig.facility.read_msr(msr::perf_global_ctrl).value() == 0) == !streamlined);
        rig.branch(3, 4); // the LBRs are frozen either way
        CHECK(rig.facility.read_msr(msr::lbr_tos).value() == 1);
    }
}

TEST_CASE("#DB clears LBR and BTF; INIT clears the Debug Store") {
    Rig rig("core2");
    rig.place<uint64_t>(10, 100);
    REQUIRE(rig.facility.write_msr(msr::debugctl, rig.on() | 3));
    rig.facility.on_debug_exception();
    CHECK(rig.facility.read_msr(msr::debugctl).value() == rig.on());
    rig.facility.init();
    CHECK(rig.facility.read_msr(msr::debugctl).value() == 0);
    CHECK(rig.facility.read_msr(msr::ds_area).value() == 0);
    CHECK_FALSE(rig.facility.wants_branches());
}

TEST_CASE("Registers that a model lacks are #GP") {
    Rig old("netburst64"), core("core2"), icelake("icelake");
    for (uint32_t absent : {msr::perf_capabilities, msr::pmc0, msr::perf_global_ctrl, msr::pebs_enable, msr::lbr_tos})
        CHECK_FALSE(old.facility.read_msr(absent));
    for (uint32_t absent : {msr::a_pmc0, msr::pebs_data_cfg, msr::pmc0 + 2, msr::perf_global_status_set, msr::lbr_select})
        CHECK_FALSE(core.facility.read_msr(absent));
    CHECK_FALSE(core.facility.write_msr(msr::perf_capabilities, 0));
    CHECK_FALSE(core.facility.write_msr(msr::perf_global_ctrl, 1 << 2));
    CHECK_FALSE(core.facility.write_msr(msr::fixed_ctr0, 1ull << 40));
    CHECK_FALSE(core.facility.write_msr(msr::perfevtsel0, 1ull << 32));
    CHECK_FALSE(icelake.facility.write_msr(msr::a_pmc0, 1ull << 48));
    CHECK(icelake.facility.write_msr(msr::perfevtsel0, 1ull << 34));
    CHECK_FALSE(icelake.facility.write_msr(msr::pebs_data_cfg, 1 << 4));
    // A legacy write is 32 bits, sign-extended.
    CHECK(icelake.facility.write_msr(msr::pmc0, 0x8000'0000));
    CHECK(icelake.facility.read_msr(msr::pmc0) == 0xffff'8000'0000);
    CHECK_FALSE(icelake.facility.read_pmc(8));
    CHECK_FALSE(icelake.facility.read_pmc(1u << 30 | 3));
    CHECK_FALSE(icelake.facility.read_pmc(1u << 29));
}

TEST_CASE("PEBS: no record beyond the maximum, and the threshold's status and interrupt") {
    Rig rig("skylake");
    const uint64_t size = 0xc8;
    for (const auto& [field, value] : {std::pair{0x20, buffer}, {0x28, buffer}, {0x30, buffer + 3 * size}, {0x38, buffer + 2 * size}})
        rig.memory.put<uint64_t>(area + static_cast<uint64_t>(field), value);
    rig.memory.put<uint64_t>(area + 0x40, ~0ull);
    REQUIRE(rig.facility.write_msr(msr::ds_area, area));
    REQUIRE(rig.facility.write_msr(msr::perfevtsel0, 0xc0 | 1 << 17 | 1 << 22));
    REQUIRE(rig.facility.write_msr(msr::pebs_enable, 1));
    REQUIRE(rig.facility.write_msr(msr::pmc0, 0xffff'ffff));
    const std::array<uint8_t, 256> xmm{};
    for (unsigned i = 0; i < 12; ++i) {
        CHECK(rig.facility.instructions_left() == 1);
        rig.facility.retire(1);
        rig.facility.take_pebs_records([&](const Event&) {
            return PebsState{.rflags = 2, .rip = 0x1000 + i, .gpr = {}, .eventing_ip = 0xfff + i, .tsc = 77, .xmm = xmm};
        });
        // A record at each second instruction: one overflows, the next one is taken.
        const uint64_t written = std::min((i + 1) / 2, 3u);
        CHECK(rig.memory.get<uint64_t>(area + 0x28) == buffer + written * size);
        CHECK(rig.line.raised == (written >= 3 ? 2 : written == 2 ? 1 : 0));
        CHECK((rig.facility.read_msr(msr::perf_global_status).value() >> 62 & 1) == (written >= 2));
        if (written == 3 && i > 5)
            break; // dropped: not reloaded, so that it won't overflow soon
    }
    CHECK(rig.memory.get<uint64_t>(buffer + 8) == 0x1001);
    CHECK(rig.memory.get<uint64_t>(buffer + 0xb0) == 0x1000);
    CHECK(rig.memory.get<uint64_t>(buffer + 0xc0) == 77);
    CHECK(rig.memory.get<uint64_t>(buffer + 0x90) == 1);
}

TEST_CASE("Whatever a guest writes, nothing is written outside of its area, and counts add up") {
    std::mt19937_64 random(20261201);
    const auto pick = [&](uint64_t below) { return random() % below; };
    for (unsigned round = 0; round < 3'000; ++round) {
        const CpuModel& model = cpu_models()[pick(cpu_models().size())];
        Rig rig(model.name);
        const bool ia32e = model.long_mode && (model.dtes64 || pick(2));
        rig.facility.set_ia32e(ia32e);
        const size_t field = model.field_size(ia32e);
        for (unsigned step = 0; step < 60; ++step) {
            // Any register, any value; often a sensible one.
            const uint64_t values[] = {random(), pick(1 << 13), area, ~0ull, 1ull << pick(64), rig.on(pick(2)), 0x4300c0 | pick(2) << 20};
            static constexpr uint32_t registers[] = {msr::debugctl, msr::ds_area, msr::pebs_enable, msr::pmc0, msr::perfevtsel0,
                                                     msr::fixed_ctr0, msr::fixed_ctr_ctrl, msr::perf_global_ctrl,
                                                     msr::perf_global_ovf_ctrl, msr::pebs_data_cfg, msr::lbr_tos, msr::lbr_select};
            const uint32_t which = pick(8) ? registers[pick(std::size(registers))] : static_cast<uint32_t>(pick(0x2000));
            rig.facility.write_msr(which, values[pick(std::size(values))]);
            if (pick(3) == 0) {
                const uint64_t near[] = {buffer, buffer + pick(400), begin + pick(0x10100), random(), ~0ull - pick(64)};
                for (unsigned i = 0; i < 12; ++i)
                    rig.memory.put<uint64_t>(area + 8 * i, near[pick(std::size(near))]);
                rig.memory.writes.clear();
            }
            // What the area says before the event.
            const uint64_t at = rig.facility.read_msr(msr::ds_area).value();
            struct Bounds {
                uint64_t base = 0, maximum = 0;
                bool known = false;
            } bounds[2];
            for (unsigned part = 0; part < 2; ++part) {
                const uint64_t place = at + part * 4 * field;
                uint64_t base = 0, maximum = 0;
                if (rig.memory.read(place, &base, field) && rig.memory.read(place + 2 * field, &maximum, field))
                    bounds[part] = {base, maximum, true};
            }
            const auto before = rig.facility.branches();
            const bool storing = (rig.facility.read_msr(msr::debugctl).value() & rig.on(false)) == rig.on(false);
            rig.memory.writes.clear();
            const auto cpl = static_cast<uint8_t>(pick(2) * 3);
            rig.facility.set_cpl(cpl);
            if (pick(2)) {
                rig.branch(random(), random(), cpl);
                const uint64_t off = cpl ? model.debugctl.bts_off_usr : model.debugctl.bts_off_os;
                const auto after = rig.facility.branches();
                const uint64_t taken = after.written + after.dropped - before.written - before.dropped;
                if (!storing)
                    REQUIRE(taken == 0);
                else if (!off)
                    REQUIRE(taken == 1);
                else
                    REQUIRE(taken <= 1);
            } else if (rig.facility.counting()) {
                const InstructionEvents one[] = {static_cast<InstructionEvents>(random())};
                rig.facility.retire(one);
                const std::array<uint8_t, 256> xmm{};
                rig.facility.take_pebs_records([&](const Event&) {
                    return PebsState{.rflags = 2, .rip = 1, .gpr = {}, .eventing_ip = 0, .tsc = 0, .xmm = xmm};
                });
            }
            for (const auto& [place, size] : rig.memory.writes) {
                bool allowed = false;
                for (unsigned part = 0; part < 2; ++part) {
                    const uint64_t index = at + (part * 4 + 1) * field;
                    allowed |= place == index && size == field;
                    allowed |= bounds[part].known && place >= bounds[part].base && place + size <= bounds[part].maximum;
                }
                INFO(model.name << " wrote " << size << " bytes at " << std::hex << place);
                REQUIRE(allowed);
            }
        }
    }
}
