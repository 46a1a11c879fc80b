#include "decode/trace_windows.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include "decode/code_windows.h"

namespace vtrace {
namespace {

/// A window record, the time that follows it, or, at the start of a chunk, a branch: then none will follow.
struct Found {
    unsigned vcpu;
    ds::BtsRecord record;
    uint64_t number; // branches of this vCPU before it
};

std::vector<Found> events_of(const ChunkRecords& chunk) {
    std::vector<Found> found;
    uint64_t number = chunk.first_number;
    bool time_wanted = true; // no branch since a window record, which may be in the chunk before
    for (const ds::BtsRecord& record : chunk.records) {
        if (!ds::BtsFlags::is_event(record.flags)) {
            if (number++ == chunk.first_number && time_wanted)
                found.push_back({chunk.vcpu, record, chunk.first_number});
            time_wanted = false;
            continue;
        }
        const auto kind = ds::BtsFlags::kind(record.flags);
        const bool window = kind == ds::BtsKind::window_begin || kind == ds::BtsKind::window_end;
        if (window || (kind == ds::BtsKind::time && time_wanted))
            found.push_back({chunk.vcpu, record, number});
        time_wanted = window || (time_wanted && kind != ds::BtsKind::time);
    }
    return found;
}

/// Puts the events of all vCPUs, one vCPU after the other, together.
class Collector {
  public:
    explicit Collector(const TraceReader& reader) : reader_(reader), begins_(reader.window_begins()) {}

    void take(const Found& event) {
        begin_vcpu(event.vcpu);
        switch (ds::BtsFlags::kind(event.record.flags)) {
        case ds::BtsKind::time:
            if (time_)
                *time_ = event.record.from;
            time_ = nullptr;
            break;
        case ds::BtsKind::window_begin:
            if (open())
                windows_.back().last = event.number; // where it ended is lost
            push(event.record.to, event.number, event.record.from);
            time_ = &windows_.back().begin_time;
            break;
        case ds::BtsKind::window_end:
            if (!open() || windows_.back().number != event.record.to)
                break; // its begin is lost
            windows_.back().last = event.number;
            windows_.back().end_address = event.record.from;
            time_ = &windows_.back().end_time;
            break;
        default:
            time_ = nullptr;
            break;
        }
    }

    std::vector<TraceWindow> finish() {
        std::erase_if(windows_, [](const TraceWindow& window) { return !window.begin_address && window.first == window.last; });
        std::sort(windows_.begin(), windows_.end(), [](const TraceWindow& a, const TraceWindow& b) {
            return std::tie(a.number, a.vcpu) < std::tie(b.number, b.vcpu);
        });
        return std::move(windows_);
    }

    void begin_vcpu(unsigned vcpu) {
        if (vcpu_ == vcpu)
            return;
        vcpu_ = vcpu;
        time_ = nullptr;
        // Where a stream's beginning was not kept, it may begin within a window.
        const DroppedStart& dropped = reader_.dropped()[vcpu];
        if (const uint64_t number = begins_.at(vcpu, dropped.records))
            push(number, dropped.branches, std::nullopt);
    }

  private:
    bool open() const { return !windows_.empty() && windows_.back().vcpu == *vcpu_ && !windows_.back().end_address; }

    void push(uint64_t number, uint64_t first, std::optional<uint64_t> address) {
        windows_.push_back({.number = number,
                            .vcpu = *vcpu_,
                            .first = first,
                            .last = reader_.info().vcpus[*vcpu_].end_number,
                            .begin_address = address,
                            .end_address = {},
                            .begin_time = {},
                            .end_time = {}});
    }

    const TraceReader& reader_;
    const CodeWindows begins_;
    std::vector<TraceWindow> windows_;
    std::optional<unsigned> vcpu_;
    std::optional<uint64_t>* time_ = nullptr; // of the last window record, still unknown
};

} // namespace

Result<std::vector<TraceWindow>> find_windows(const TraceReader& reader) {
    Collector collector(reader);
    const auto take = [&](const std::vector<Found>& found) {
        for (const Found& event : found)
            collector.take(event);
    };
    for (unsigned vcpu = 0; vcpu < reader.vcpus(); ++vcpu) {
        collector.begin_vcpu(vcpu);
        VTRACE_TRY(reader.map_chunks(vcpu, 0, events_of, take));
    }
    return collector.finish();
}

} // namespace vtrace
