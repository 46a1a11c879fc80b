#include "decode/trace_recorder.h"

#include <cstring>
#include <system_error>
#include <utility>

#include <nlohmann/json.hpp>

namespace vtrace {

namespace {

/// What may wait to be written, in multiples of TraceWriterOptions::side_bytes, before the machine waits too.
constexpr uint64_t most_told = 8;
/// Taken from a ring at once, so that room comes back in small steps.
constexpr size_t most_taken = 32u << 10;
/// What an item weighs beside its bytes.
constexpr uint64_t item_bytes = 64;

} // namespace

TraceRecorder::TraceRecorder(TraceWriter writer, const TraceWriterOptions& options)
    : writer_(std::move(writer)), side_bytes_(options.side_bytes) {}

Result<std::unique_ptr<TraceRecorder>> TraceRecorder::start(const std::string& path, const nlohmann::json& config,
                                                            const TraceWriterOptions& options, size_t ring_records) {
    auto writer = TraceWriter::open(path, config, options);
    if (!writer)
        return Unexpected(std::move(writer.error()));
    std::unique_ptr<TraceRecorder> recorder(new TraceRecorder(std::move(*writer), options));
    for (unsigned vcpu = 0; vcpu < options.vcpus; ++vcpu) {
        auto ring = ds::Ring::create(ring_records, recorder->bell_);
        if (!ring)
            return Unexpected(std::move(ring.error()));
        recorder->rings_.push_back(std::move(*ring));
    }
    recorder->bytes_written_ = recorder->writer_.bytes_written();
    try {
        recorder->thread_ = std::thread(&TraceRecorder::run, recorder.get());
    } catch (const std::system_error& error) {
        return fail("cannot start the thread that writes '{}': {}", path, error.code().message());
    }
    return recorder;
}

TraceRecorder::~TraceRecorder() {
    stop();
}

void TraceRecorder::stop() {
    if (!thread_.joinable())
        return;
    for (auto& ring : rings_)
        ring.close();
    thread_.join();
}

bool TraceRecorder::tell(Told item, uint64_t bytes) {
    if (failed())
        return false;
    std::unique_lock lock(mutex_);
    room_.wait(lock, [&] { return told_bytes_ <= most_told * side_bytes_ || idle_ || failed(); });
    told_.push_back(std::move(item));
    told_bytes_ += bytes;
    told_since_hint_ += bytes;
    if (told_since_hint_ < side_bytes_)
        return false;
    told_since_hint_ = 0;
    return true;
}

bool TraceRecorder::code_page(unsigned vcpu, uint64_t position, uint64_t gpa, std::span<const uint8_t, 4096> bytes) {
    CodeLines lines(bytes);
    const uint64_t size = item_bytes + lines.bytes.size();
    return tell(ToldPage{vcpu, position, gpa, std::move(lines)}, size);
}

bool TraceRecorder::code_mapping(unsigned vcpu, uint64_t position, uint64_t cr3, uint64_t gva, uint64_t gpa,
                                 bool global) {
    return tell(ToldMapping{vcpu, position, cr3, gva, gpa, global}, item_bytes);
}

void TraceRecorder::console(uint64_t time, std::string_view bytes) {
    tell(ToldConsole{time, std::string(bytes)}, item_bytes + bytes.size());
}

void TraceRecorder::begin_window() {
    tell(ToldWindow{}, item_bytes);
}

void TraceRecorder::take_told() {
    std::vector<Told> taken;
    {
        const std::lock_guard lock(mutex_);
        taken.swap(told_);
    }
    for (auto& item : taken) {
        if (auto* page = std::get_if<ToldPage>(&item))
            writer_.code_lines(page->vcpu, page->position, page->gpa, std::move(page->lines));
        else if (const auto* mapping = std::get_if<ToldMapping>(&item))
            writer_.code_mapping(mapping->vcpu, mapping->position, mapping->cr3, mapping->gva, mapping->gpa,
                                 mapping->global);
        else if (const auto* console = std::get_if<ToldConsole>(&item))
            writer_.console(console->time, console->bytes);
        else
            writer_.begin_window();
    }
}

/// One round over the rings. False: there was nothing.
bool TraceRecorder::encode_some(bool& finished) {
    bool any = false;
    finished = true;
    for (unsigned vcpu = 0; vcpu < rings_.size(); ++vcpu) {
        auto records = rings_[vcpu].acquire();
        if (!records.empty()) {
            any = true;
            records = records.first(std::min(records.size(), most_taken));
            // After the look into the ring: what was told before these records went in is here now.
            take_told();
            if (!error_) {
                if (auto result = writer_.add_records(vcpu, records); !result) {
                    error_ = std::move(result.error());
                    failed_ = true;
                }
            }
            rings_[vcpu].release(records.size());
        }
        finished = finished && rings_[vcpu].finished();
    }
    if (any) {
        branches_.store(writer_.branches(), std::memory_order_relaxed);
        bytes_written_.store(writer_.bytes_written(), std::memory_order_relaxed);
        const std::lock_guard lock(mutex_);
        told_bytes_ = writer_.bytes_held();
        for (const auto& item : told_) {
            if (const auto* console = std::get_if<ToldConsole>(&item))
                told_bytes_ += item_bytes + console->bytes.size();
            else
                told_bytes_ += item_bytes + (std::holds_alternative<ToldPage>(item) ? 4096 : 0);
        }
        room_.notify_all();
    }
    return any;
}

void TraceRecorder::run() {
    for (;;) {
        const uint32_t seen = bell_.state();
        bool finished = false;
        const bool any = encode_some(finished);
        if (finished)
            break;
        if (any)
            continue;
        {
            const std::lock_guard lock(mutex_);
            idle_ = true;
            room_.notify_all();
        }
        bell_.wait(seen);
        const std::lock_guard lock(mutex_);
        idle_ = false;
    }
    // What is told from here on waits for nobody; finish() takes it.
    const std::lock_guard lock(mutex_);
    idle_ = true;
    room_.notify_all();
}

Result<> TraceRecorder::finish(const nlohmann::json& outcome, std::vector<TraceSymbol> symbols) {
    stop();
    if (error_)
        return Unexpected(*error_);
    take_told();
    auto result = writer_.close(outcome, std::move(symbols));
    branches_ = writer_.branches();
    bytes_written_ = writer_.bytes_written();
    return result;
}

} // namespace vtrace
