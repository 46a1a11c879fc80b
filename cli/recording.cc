#include "cli/recording.h"

namespace vtrace::cli {

Result<std::unique_ptr<Recording>> Recording::start(const std::string& path, const nlohmann::json& config, unsigned vcpus,
                                                    Privilege privilege) {
    TraceWriterOptions options;
    options.vcpus = vcpus;
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

void Recording::code_page(unsigned vcpu, uint64_t position, Gpa gpa, std::span<const uint8_t, page_size> bytes) {
    if (recorder_->code_page(vcpu, position, gpa, bytes))
        stores_[vcpu]->request_drain();
}

void Recording::code_mapping(unsigned vcpu, uint64_t position, uint64_t cr3, Gva gva, Gpa gpa, bool global) {
    if (recorder_->code_mapping(vcpu, position, cr3, gva, gpa, global))
        stores_[vcpu]->request_drain();
}

Result<> Recording::finish(const nlohmann::json& outcome, std::vector<TraceSymbol> symbols) {
    return recorder_->finish(outcome, std::move(symbols));
}

} // namespace vtrace::cli
