// A made-up guest with windows and changing code, which tells a TraceWriter what an engine would, and knows the truth.
#pragma once

#include <functional>
#include <map>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <catch2/catch.hpp>

#include "decode/trace_writer.h"
#include "tests/decode/trace_fixture.h"

namespace vtrace_test {

struct ModelOptions {
    uint64_t seed = 1;
    unsigned vcpus = 1;
    unsigned windows = 3; // 0: all of the run is recorded, without any
    uint64_t steps = 1000; // in each window
};

class RunModel {
  public:
    static constexpr uint64_t pages = 24, shared = 8, base = 0xffffffff81000000, code_bytes = 16;
    using Code = std::array<uint8_t, code_bytes>;

    struct Branch {
        BtsRecord record;
        uint64_t position, cr3, window; // the window counted from 0
        Code code;  // at `from`
    };
    struct Window {
        uint64_t number, first, last, begin_address, end_address, begin_time, end_time;
    };
    struct Vcpu {
        std::vector<BtsRecord> records;
        std::vector<Branch> branches;
        std::vector<Window> windows;
        uint64_t cr3 = 0x1000;
    };

    explicit RunModel(const ModelOptions& options) : options_(options), random_(options.seed), vcpus(options.vcpus) {
        for (uint64_t i = 0; i < pages; ++i)
            memory_.push_back(page_of(random_.next()));
    }

    /// All of the run; `after` is called now and then.
    void run(vtrace::TraceWriter& writer, const std::function<void()>& after = [] {}) {
        writer_ = &writer;
        for (unsigned window = 0; window < std::max(options_.windows, 1u); ++window) {
            pass_gap();
            told_lines_.clear();
            told_mappings_.clear();
            ran_.emplace_back();
            if (options_.windows)
                writer.begin_window();
            if (options_.windows)
                bound(BtsKind::window_begin, window + 1);
            for (uint64_t step = 0; step < options_.steps; ++step) {
                const unsigned vcpu = static_cast<unsigned>(random_.below(options_.vcpus));
                const uint64_t what = random_.below(100);
                time_ += random_.below(50), retired_ += random_.below(20);
                if (what == 0)
                    add(vcpu, {time_, retired_, make(BtsKind::time)});
                else if (what == 1)
                    switch_space(vcpu);
                else if (what == 2)
                    patch(vcpu);
                else if (what == 3)
                    writer_->console(time_, "text " + std::to_string(step) + "\n");
                else
                    branch(vcpu);
                if (step % 50 == 49)
                    after();
            }
            if (options_.windows)
                bound(BtsKind::window_end, window + 1);
            else
                for (unsigned vcpu = 0; vcpu < options_.vcpus; ++vcpu)
                    add(vcpu, {time_, retired_, make(BtsKind::time)});
        }
    }

    /// Did anything run on this page, at any time of the window?
    bool ran(uint64_t window, uint64_t cr3, uint64_t page) const { return ran_[window].contains({cr3, page}); }

    uint64_t branches() const {
        uint64_t sum = 0;
        for (const Vcpu& vcpu : vcpus)
            sum += vcpu.branches.size();
        return sum;
    }

  private:
    void add(unsigned vcpu, const BtsRecord& record) {
        vcpus[vcpu].records.push_back(record);
        if (!writer_->add_records(vcpu, {&record, 1}))
            FAIL("the writer refuses records");
    }

    /// What a guest does unseen: code changes, address spaces too.
    void pass_gap() {
        time_ += 100'000, retired_ += 100'000;
        for (auto& page : memory_)
            if (random_.below(2))
                page = page_of(random_.next());
        std::swap(frames_[0], frames_[1]);
    }

    void bound(BtsKind kind, uint64_t number) {
        for (unsigned vcpu = 0; vcpu < options_.vcpus; ++vcpu) {
            Vcpu& v = vcpus[vcpu];
            const uint64_t at = base + random_.below(1 << 16);
            if (kind == BtsKind::window_begin)
                v.windows.push_back({number, v.branches.size(), 0, at, 0, time_, 0});
            else
                v.windows.back().last = v.branches.size(), v.windows.back().end_address = at,
                v.windows.back().end_time = time_;
            add(vcpu, {at, number, make(kind)});
            if (kind == BtsKind::window_begin)
                add(vcpu, {v.cr3, 0, make(BtsKind::cr3)});
            add(vcpu, {time_, retired_, make(BtsKind::time)});
        }
    }

    void switch_space(unsigned vcpu) {
        vcpus[vcpu].cr3 = random_.below(2) ? 0x1000 : 0x2000;
        add(vcpu, {vcpus[vcpu].cr3, 0, make(BtsKind::cr3)});
    }

    /// The frame of a page: two address spaces, one the other way round.
    uint64_t frame(uint64_t cr3, uint64_t page) const { return cr3 == frames_[0] ? page : pages - 1 - page; }
    /// Some frames are run by all and never patched, the others by one vCPU: how the changes that one makes lie to the
    /// records of another, a trace does not say.
    bool runs(unsigned vcpu, uint64_t frame) const { return frame < shared || frame % options_.vcpus == vcpu; }
    void patch(unsigned vcpu) {
        const uint64_t frame = shared + random_.below(pages - shared);
        if (runs(vcpu, frame))
            memory_[frame][random_.below(4096)] ^= 1;
    }

    void branch(unsigned vcpu) {
        Vcpu& v = vcpus[vcpu];
        const uint64_t page = random_.below(pages), f = frame(v.cr3, page);
        if (!runs(vcpu, f))
            return;
        const uint64_t from = base + page * 4096 + random_.below(256) * 16;
        tell(vcpu, page, from % 4096);
        ran_.back().insert({v.cr3, page});
        Branch branch{.record = {from, base + random_.below(pages * 256) * 16, 0},
                      .position = v.records.size(),
                      .cr3 = v.cr3,
                      .window = ran_.size() - 1,
                      .code = {}};
        std::copy_n(memory_[f].begin() + static_cast<ptrdiff_t>(from % 4096), code_bytes, branch.code.begin());
        v.branches.push_back(branch);
        add(vcpu, branch.record);
    }

    void tell(unsigned vcpu, uint64_t page, uint64_t offset) {
        Vcpu& v = vcpus[vcpu];
        const uint64_t f = frame(v.cr3, page), line = offset / 64 * 64, position = v.records.size();
        std::array<uint8_t, 64> now;
        std::copy_n(memory_[f].begin() + static_cast<ptrdiff_t>(line), 64, now.begin());
        const auto [told, fresh] = told_lines_.try_emplace({f, line}, now);
        if (fresh || told->second != now) {
            told->second = now;
            std::array<uint8_t, 4096> lines{};
            std::copy(now.begin(), now.end(), lines.begin() + static_cast<ptrdiff_t>(line));
            writer_->code_page(vcpu, position, f << 12, lines);
        }
        if (told_mappings_.insert({vcpu, v.cr3, page}).second)
            writer_->code_mapping(vcpu, position, v.cr3, base + page * 4096, f << 12, false);
    }

    const ModelOptions options_;
    Random random_;
    vtrace::TraceWriter* writer_ = nullptr;
    std::vector<std::array<uint8_t, 4096>> memory_;
    uint64_t frames_[2] = {0x1000, 0x2000};
    uint64_t time_ = 1000, retired_ = 10;
    std::map<std::pair<uint64_t, uint64_t>, std::array<uint8_t, 64>> told_lines_;
    std::set<std::tuple<unsigned, uint64_t, uint64_t>> told_mappings_;
    std::vector<std::set<std::pair<uint64_t, uint64_t>>> ran_; // by window: cr3 and page

  public:
    std::vector<Vcpu> vcpus;
};

} // namespace vtrace_test
