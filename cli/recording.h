// Recording: everything between the machine's processors and the trace file, for one run.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "decode/trace_recorder.h"
#include "ds/debug_store.h"
#include "ds/result.h"
#include "vmm/clock.h"
#include "vmm/soft/recording.h"
#include "vmm/trace_sink.h"

namespace vtrace::cli {

/// Which privilege levels' branches go into the trace; decided by the CPL after the branch.
enum class Privilege : uint8_t { all, kernel_only, user_only };

class Recording final : private TraceSink {
  public:
    struct Options {
        unsigned vcpus = 1;
        Privilege privilege = Privilege::all;
        bool windows = false;   // it is of parts of the run
        uint64_t keep_last = 0; // branches, of all vCPUs together; 0: all
    };
    /// Creates the file and starts the encoder's thread. Errors: as TraceRecorder::start's.
    static Result<std::unique_ptr<Recording>> start(const std::string& path, const nlohmann::json& config,
                                                    const Options& options);

    /// One a vCPU, for the machine. They refer to this object.
    std::vector<soft::Recording> for_vcpus();

    /// The machine's thread.
    void console(VirtualTime time, std::string_view bytes) override { recorder_->console(time, bytes); }

    /// Writing has failed: stop the machine, finish() says why.
    bool failed() const { return recorder_->failed(); }
    uint64_t branches() const { return recorder_->branches(); }
    uint64_t bytes_written() const { return recorder_->bytes_written(); }

    /// After the machine has drained its records: completes the file.
    Result<> finish(const nlohmann::json& outcome, std::vector<TraceSymbol> symbols);

  private:
    explicit Recording(std::unique_ptr<TraceRecorder> recorder) : recorder_(std::move(recorder)) {}

    void code_page(unsigned vcpu, uint64_t position, Gpa gpa, std::span<const uint8_t, page_size> bytes) override;
    void code_mapping(unsigned vcpu, uint64_t position, uint64_t cr3, Gva gva, Gpa gpa, bool global) override;

    void follow_window(unsigned vcpu);

    std::unique_ptr<TraceRecorder> recorder_;
    uint64_t window_ = 0; // that what was told last belongs to
    std::vector<std::unique_ptr<ds::DebugStore>> stores_;
};

} // namespace vtrace::cli
