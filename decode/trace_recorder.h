// TraceRecorder: a thread that encodes the rings of all vCPUs into a trace file, beside the machine that fills them.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <variant>
#include <vector>

#include <nlohmann/json_fwd.hpp>

#include "decode/trace_writer.h"
#include "ds/ring.h"

namespace vtrace {

/// The machine's side is thread-safe (one mutex for what is told, the rings' own rules for records). Memory is bounded:
/// a full ring makes its writer wait, and so does too much that is told, as long as the thread still has records to
/// encode.
///
/// What is told at a position must be told before the record at that position goes into the ring, as TraceSink has it.
/// With all calls on one thread, the file depends on their order alone.
class TraceRecorder {
  public:
    static constexpr size_t default_ring_records = size_t{1} << 18; // 6 MiB a vCPU

    /// Creates the file and starts the thread. Errors: TraceWriter::open's, no memory.
    static Result<std::unique_ptr<TraceRecorder>> start(const std::string& path, const nlohmann::json& config,
                                                        const TraceWriterOptions& options = {},
                                                        size_t ring_records = default_ring_records);
    /// Without finish() before: as a recorder that was killed, but for the thread, which ends cleanly.
    ~TraceRecorder();

    /// Where vCPU `vcpu`'s DebugStore drains to.
    ds::Ring& ring(unsigned vcpu) { return rings_[vcpu]; }

    /// As TraceSink's calls. True: much is held back; call DebugStore::request_drain() on this vCPU's store.
    bool code_page(unsigned vcpu, uint64_t position, uint64_t gpa, std::span<const uint8_t, 4096> bytes);
    bool code_mapping(unsigned vcpu, uint64_t position, uint64_t cr3, uint64_t gva, uint64_t gpa, bool global);
    void console(uint64_t time, std::string_view bytes);
    /// As TraceWriter::begin_window().
    void begin_window();

    /// Writing has failed (disk full ...): stop the machine; finish() tells why. Until then everything told is dropped.
    bool failed() const { return failed_.load(std::memory_order_relaxed); }

    /// Progress so far. Any thread.
    uint64_t branches() const { return branches_.load(std::memory_order_relaxed); }
    uint64_t bytes_written() const { return bytes_written_.load(std::memory_order_relaxed); }

    /// Once, after the stores were drained for the last time: closes the rings, waits for the thread, completes the
    /// file.
    Result<> finish(const nlohmann::json& outcome, std::vector<TraceSymbol> symbols = {});

  private:
    struct ToldPage {
        unsigned vcpu;
        uint64_t position, gpa;
        CodeLines lines;
    };
    struct ToldMapping {
        unsigned vcpu;
        uint64_t position, cr3, gva, gpa;
        bool global;
    };
    struct ToldConsole {
        uint64_t time;
        std::string bytes;
    };
    struct ToldWindow {};
    using Told = std::variant<ToldPage, ToldMapping, ToldConsole, ToldWindow>;

    TraceRecorder(TraceWriter writer, const TraceWriterOptions& options);
    bool tell(Told item, uint64_t bytes);
    void take_told();
    bool encode_some(bool& finished);
    void run();
    void stop();

    TraceWriter writer_; // the thread's, until it is joined
    const uint64_t side_bytes_;
    ds::Doorbell bell_;
    std::vector<ds::Ring> rings_;
    std::optional<Error> error_; // the thread's, until it is joined

    std::mutex mutex_; // guards what follows
    std::condition_variable room_;
    std::vector<Told> told_;
    uint64_t told_bytes_ = 0; // in told_, and held back in writer_
    uint64_t told_since_hint_ = 0;
    bool idle_ = false; // the thread waits for records: waiting for it is of no use

    std::atomic<bool> failed_{false};
    std::atomic<uint64_t> branches_{0};
    std::atomic<uint64_t> bytes_written_{0};
    std::thread thread_;
};

} // namespace vtrace
