#include "cli/recording.h"

#include <algorithm>

namespace vtrace::cli {
namespace {

/// A flight recorder keeps whole chunks. Smaller ones waste fewer branches, and more bytes on each.
constexpr uint64_t smallest_kept_chunk = 128u << 10;

uint32_t chunk_records(uint64_t keep_last) {
    return keep_last == 0 ? max_chunk_records
                          : static_cast<uint32_t>(
                                std::clamp<uint64_t>(keep_last / 4, smallest_kept_chunk, max_chunk_records));
}

} // namespace

Result<std::unique_ptr<Recording>> Recording::start(const std::string& path, const nlohmann::json& config,
                                                    const Options& wanted) {
    const unsigned vcpus = wanted.vcpus;
    const Privilege privilege = wanted.privilege;
    TraceWriterOptions options;
    options.vcpus = vcpus;
    options.windows = wanted.windows;
    options.keep_last = wanted.keep_last;
    options.chunk_records = chunk_records(wanted.keep_last);
    auto recorder = TraceRecorder::start(path, config, options);
    if (!recorder)
        return Unexpected(recorder.error());
    std::unique_ptr<Recording> recording(new Recording(std::move(*recorder)));
    for (unsigned vcpu = 0; vcpu < vcpus; ++vcpu) {
        auto store = ds::DebugStore::create(ds::DebugStore::default_records, recording->recorder_->ring(vcpu));
        if (!store)
            return Unexpected(store.error());
        VTRACE_TRY((*store)->set_debugctl(ds::DebugCtl::tr | ds::DebugCtl::bts | ds::DebugCtl::btint |
                                          (privilege == Privilege::kernel_only ? ds::DebugCtl::bts_off_usr : 0) |
                                          (privilege == Privilege::user_only ? ds::DebugCtl::bts_off_os : 0)));
        recording->stores_.push_back(std::move(*store));
    }
    return recording;
}

std::vector<soft::Recording> Recording::for_vcpus() {
    std::vector<soft::Recording> result;
    for (unsigned vcpu = 0; vcpu < stores_.size(); ++vcpu)
        result.push_back({stores_[vcpu].get(), this, vcpu});
    return result;
}

/// The windows of all processors begin at one moment, and nothing is told between two of them.
void Recording::follow_window(unsigned vcpu) {
    if (stores_[vcpu]->window() == window_)
        return;
    window_ = stores_[vcpu]->window();
    recorder_->begin_window();
}

void Recording::code_page(unsigned vcpu, uint64_t position, Gpa gpa, std::span<const uint8_t, page_size> bytes) {
    follow_window(vcpu);
    if (recorder_->code_page(vcpu, position, gpa, bytes))
        stores_[vcpu]->request_drain();
}

void Recording::code_mapping(unsigned vcpu, uint64_t position, uint64_t cr3, Gva gva, Gpa gpa, bool global) {
    follow_window(vcpu);
    if (recorder_->code_mapping(vcpu, position, cr3, gva, gpa, global))
        stores_[vcpu]->request_drain();
}

Result<> Recording::finish(const nlohmann::json& outcome, std::vector<TraceSymbol> symbols) {
    return recorder_->finish(outcome, std::move(symbols));
}

} // namespace vtrace::cli
