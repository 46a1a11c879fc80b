// Chrome's trace event format, JSON: what ui.perfetto.dev, chrome://tracing and speedscope draw as a timeline.
//
// Each vCPU is a thread; each frame of its call stack a slice, from the branch that enters it to the one that leaves
// it. A task that goes away ends its slices, and begins them again when it comes back. Between two time events of the
// trace an instruction counts as a nanosecond, which is exact for the software engine.
#include <algorithm>

#include <nlohmann/json.hpp>

#include "decode/call_stack.h"
#include "decode/export/export.h"
#include "decode/text.h"

namespace vtrace {
namespace {

constexpr size_t buffer_bytes = 1u << 16;
constexpr unsigned guest_pid = 1;

std::string quoted(const std::string& text) {
    return nlohmann::json(text).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

const char* category(CallStack::Entry entry) {
    switch (entry) {
    case CallStack::Entry::interrupt:
        return "interrupt";
    case CallStack::Entry::exception:
        return "exception";
    case CallStack::Entry::syscall:
        return "syscall";
    case CallStack::Entry::signal:
        return "signal";
    case CallStack::Entry::tail:
        return "tail call";
    default:
        return "call";
    }
}

class ChromeExport {
  public:
    ChromeExport(const ExportSource& source, ExportSink& sink)
        : source_(source), sink_(sink), names_(source.symbols, source.user_symbols) {}

    Result<ExportNotes> run() {
        buffer_ = "{\"displayTimeUnit\":\"ns\",\"traceEvents\":[\n";
        buffer_ += fmt::format(R"({{"ph":"M","pid":{},"name":"process_name","args":{{"name":"guest"}}}})", guest_pid);
        for (unsigned vcpu = source_.first_vcpu(); vcpu < source_.end_vcpu() && !sink_.closed(); ++vcpu)
            add_vcpu(vcpu);
        VTRACE_TRY(add_console());
        buffer_ += "\n]}\n";
        sink_.write(buffer_);
        return notes_;
    }

  private:
    void event(std::string text) {
        buffer_ += ",\n";
        buffer_ += text;
        if (buffer_.size() >= buffer_bytes) {
            sink_.write(buffer_);
            buffer_.clear();
        }
    }
    /// Microseconds, to the nanosecond.
    static std::string stamp(uint64_t ns) { return fmt::format("{}.{:03}", ns / 1000, ns % 1000); }

    const std::string& name(FunctionId id) {
        auto [known, fresh] = quoted_.try_emplace(id);
        if (fresh)
            known->second = quoted(names_.name(id));
        return known->second;
    }

    void add_vcpu(unsigned vcpu) {
        event(fmt::format(R"({{"ph":"M","pid":{},"tid":{},"name":"thread_name","args":{{"name":"vCPU {}"}}}})",
                          guest_pid, vcpu, vcpu));
        BranchStream stream(source_.reader, vcpu, source_.first, source_.last);
        CallStack stack(names_);
        shown_.clear();
        uint64_t now = 0;
        while (const StreamBranch* branch = sink_.closed() ? nullptr : stream.next()) {
            const uint64_t end = branch->event_time.value_or(0) + branch->since_event;
            stack.arrive(*branch);
            // A block's slices begin where the branch before ended.
            now = std::max(now, end - std::min<uint64_t>(end, branch->instructions));
            first_time_ = std::min(first_time_, now);
            follow(stack, vcpu, now, nullptr);
            now = std::max(now, end);
            stack.take(*branch);
            follow(stack, vcpu, now, branch);
            last_time_ = std::max(last_time_, now);
        }
        close_to(0, vcpu, now);
    }

    void follow(CallStack& stack, unsigned vcpu, uint64_t now, const StreamBranch* branch) {
        if (!stack.changed())
            return;
        const auto frames = stack.frames();
        close_to(stack.unchanged(), vcpu, now);
        for (size_t i = stack.unchanged(); i < frames.size(); ++i) {
            shown_.push_back(frames[i].shown());
            if (!frames[i].shown())
                continue;
            std::string arguments;
            if (branch && frames[i].fresh && branch->delivered())
                arguments = fmt::format(R"(,"args":{{"vector":{}}})", branch->record.vector);
            event(fmt::format(R"({{"ph":"B","pid":{},"tid":{},"ts":{},"cat":"{}","name":{}{}}})", guest_pid, vcpu,
                              stamp(now), category(frames[i].entry), name(frames[i].function), arguments));
        }
        stack.accept_changes();
    }

    void close_to(size_t size, unsigned vcpu, uint64_t now) {
        while (shown_.size() > size) {
            if (shown_.back())
                event(fmt::format(R"({{"ph":"E","pid":{},"tid":{},"ts":{}}})", guest_pid, vcpu, stamp(now)));
            shown_.pop_back();
        }
    }

    /// Lines of the time that was exported, as instants.
    Result<> add_console() {
        auto pieces = source_.reader.console();
        if (!pieces)
            return Unexpected(std::move(pieces.error()));
        std::string line;
        uint64_t begin = 0;
        const auto finish = [&] {
            while (!line.empty() && line.back() == '\r')
                line.pop_back();
            if (!line.empty() && begin >= first_time_ && begin <= last_time_)
                event(fmt::format(R"({{"ph":"i","s":"g","pid":{},"tid":0,"ts":{},"cat":"console","name":{}}})",
                                  guest_pid, stamp(begin), quoted(printable(line))));
            line.clear();
        };
        for (const ConsolePiece& piece : *pieces)
            for (char c : piece.bytes) {
                if (c == '\n') {
                    finish();
                    continue;
                }
                if (line.empty())
                    begin = piece.time;
                line += c;
            }
        finish();
        return {};
    }

    const ExportSource& source_;
    ExportSink& sink_;
    CodeNames names_;
    ExportNotes notes_;
    std::unordered_map<FunctionId, std::string> quoted_;
    std::vector<bool> shown_; // of the frames that are open: is it a slice?
    std::string buffer_;
    uint64_t first_time_ = UINT64_MAX, last_time_ = 0;
};

} // namespace

Result<ExportNotes> export_chrome(const ExportSource& source, ExportSink& sink) {
    return ChromeExport(source, sink).run();
}

} // namespace vtrace
