#include "decode/trace_windows.h"

#include <algorithm>
#include <tuple>

namespace vtrace {
namespace {

/// A window record, or the first time after one.
struct Found {
    unsigned vcpu;
    ds::BtsRecord record;
    uint64_t number; // branches of this vCPU before it
};

std::vector<Found> events_of(const ChunkRecords& chunk) {
    std::vector<Found> found;
    uint64_t number = chunk.first_number;
    bool time_wanted = true; // it may be of a window record in the chunk before
    for (const ds::BtsRecord& record : chunk.records) {
        if (!ds::BtsFlags::is_event(record.flags)) {
            ++number;
            continue;
        }
        const auto kind = ds::BtsFlags::kind(record.flags);
        const bool window = kind == ds::BtsKind::window_begin || kind == ds::BtsKind::window_end;
        if (window || (kind == ds::BtsKind::time && time_wanted))
            found.push_back({chunk.vcpu, record, number});
        time_wanted = window;
    }
    return found;
}

} // namespace

Result<std::vector<TraceWindow>> find_windows(const TraceReader& reader) {
    std::vector<TraceWindow> windows;
    std::optional<uint64_t>* time = nullptr; // of the last window record, still unknown
    unsigned vcpu = 0;
    const auto take = [&](const std::vector<Found>& found) {
        for (const Found& event : found) {
            if (event.vcpu != vcpu)
                time = nullptr;
            vcpu = event.vcpu;
            const bool open = !windows.empty() && windows.back().vcpu == vcpu && !windows.back().end_address;
            switch (ds::BtsFlags::kind(event.record.flags)) {
            case ds::BtsKind::time:
                if (time)
                    *time = event.record.from;
                time = nullptr;
                break;
            case ds::BtsKind::window_begin:
                windows.push_back({.number = event.record.to,
                                   .vcpu = vcpu,
                                   .first = event.number,
                                   .last = reader.info().vcpus[vcpu].end_number,
                                   .begin_address = event.record.from,
                                   .end_address = {},
                                   .begin_time = {},
                                   .end_time = {}});
                time = &windows.back().begin_time;
                break;
            case ds::BtsKind::window_end:
                if (!open || windows.back().number != event.record.to)
                    break; // its begin is lost
                windows.back().last = event.number;
                windows.back().end_address = event.record.from;
                time = &windows.back().end_time;
                break;
            default:
                break;
            }
        }
    };
    VTRACE_TRY(reader.map_chunks(std::nullopt, 0, events_of, take));
    std::sort(windows.begin(), windows.end(),
              [](const TraceWindow& a, const TraceWindow& b) { return std::tie(a.number, a.vcpu) < std::tie(b.number, b.vcpu); });
    return windows;
}

} // namespace vtrace
