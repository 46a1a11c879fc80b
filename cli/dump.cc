// vtrace dump: the branches themselves.
#include <algorithm>
#include <map>
#include <memory>
#include <unordered_set>

#include "cli/output.h"
#include "cli/subcommand.h"
#include "cli/trace_argument.h"
#include "decode/branch_line.h"
#include "decode/privilege.h"
#include "decode/symbols.h"

namespace vtrace::cli {
namespace {

enum class Format { text, json, raw };

struct Options {
    TraceSelection selection;
    std::optional<uint64_t> count, last;
    bool events = false;
    Format format = Format::text;
    std::string symbol;
    std::string output;
};

/// The functions that --symbol names, as address ranges.
class FunctionFilter {
  public:
    /// Error: the trace has no function of that name.
    static Result<FunctionFilter> create(const SymbolTable& symbols, const std::string& name) {
        FunctionFilter filter;
        filter.symbols_ = &symbols;
        for (SymbolTable::Index index : symbols.find_all(name))
            filter.indices_.insert(index);
        if (filter.indices_.empty())
            return fail("the trace has no function '{}'{}", name,
                        symbols.empty() ? ": it has no symbols at all" : ": names are those of its kernel's kallsyms");
        return filter;
    }
    bool passes(const TraceRecord& record) const { return inside(record.from) || inside(record.to); }

  private:
    bool inside(uint64_t address) const {
        auto index = symbols_->find(address);
        return index && indices_.contains(*index);
    }

    const SymbolTable* symbols_ = nullptr;
    std::unordered_set<SymbolTable::Index> indices_;
};

/// Tells kernel from user branches along one vCPU's stream.
class PrivilegeTracker {
  public:
    PrivilegeTracker(const TraceReader& reader, unsigned vcpu) : reader_(reader), vcpu_(vcpu) {}

    /// To be asked for every branch, in order.
    Privilege of(const TraceRecord& record) {
        if (upper_half(record.from)) {
            in_user_ = in_user_ || enters_user(record.from, record.to);
            return Privilege::kernel;
        }
        if (!in_user_ && !start_known_) {
            // The first of the lower half, and nothing before it in this range has told: what lies before does.
            in_user_ = first_user_branch(reader_, vcpu_, record.number + 1) <= record.number;
            start_known_ = true;
        }
        return in_user_ ? Privilege::user : Privilege::kernel;
    }

  private:
    const TraceReader& reader_;
    unsigned vcpu_;
    bool in_user_ = false, start_known_ = false;
};

class Dump {
  public:
    Dump(const Options& options, const TraceReader& reader, const SymbolTable& symbols,
         std::vector<std::pair<uint64_t, uint64_t>> windows, Output& out)
        : options_(options), reader_(reader), windows_(std::move(windows)), out_(out), describer_(reader, symbols) {}

    void filter_by(FunctionFilter filter) { functions_ = std::move(filter); }

    void run(unsigned vcpu) {
        auto [first, last] = range(vcpu);
        // Behind the last branch of all, or of the window, the window's end comes; of other events there, none is shown.
        const bool with_end =
            last == reader_.info().vcpus[vcpu].end_number || (!windows_.empty() && last == windows_[vcpu].second);
        RecordCursor cursor = reader_.records(vcpu, first, last + with_end, true);
        PrivilegeTracker privileges(reader_, vcpu);
        PrivilegeFilter filter = options_.selection.filter();
        while (const TraceRecord* record = out_.closed() || left_ == 0 ? nullptr : cursor.next()) {
            if (record->is_window() && !windows_.empty() && record->to != *options_.selection.window)
                continue;
            if (!record->is_branch() && !record->is_window() && record->number >= last)
                continue;
            if (record->is_branch()) {
                if (record->number >= last)
                    break; // of the next window
                if (filter != PrivilegeFilter::all) {
                    if (!passes(filter, privileges.of(*record)))
                        continue;
                }
                if (functions_ && !functions_->passes(*record))
                    continue;
                --left_;
            } else if (!options_.events && !(record->is_window() && options_.format != Format::raw)) {
                continue;
            }
            write(*record, cursor.state());
        }
    }

    /// Starts to count --count anew: it holds for each vCPU.
    void begin() { left_ = counts_matches() && options_.count ? *options_.count : UINT64_MAX; }

  private:
    /// With a filter, --count counts what passes it; without, it bounds the range, and nothing beyond is decoded.
    bool counts_matches() const { return functions_ || options_.selection.filter() != PrivilegeFilter::all; }

    std::pair<uint64_t, uint64_t> range(unsigned vcpu) const {
        uint64_t end = std::min(reader_.info().vcpus[vcpu].end_number, options_.selection.to.value_or(UINT64_MAX));
        uint64_t first = options_.selection.from.value_or(0);
        if (!windows_.empty()) {
            first = std::max(first, windows_[vcpu].first);
            end = std::min(end, windows_[vcpu].second);
        }
        if (options_.last)
            first = std::max(first, end - std::min(end, *options_.last));
        if (options_.count && !counts_matches() && *options_.count < end - std::min(end, first))
            end = first + *options_.count;
        return {first, end};
    }

    void write(const TraceRecord& record, const StreamState& state) {
        line_.clear();
        switch (options_.format) {
        case Format::text:
            describer_.append_text(record, state, line_);
            break;
        case Format::json:
            describer_.append_json(record, state, line_);
            break;
        case Format::raw: {
            ds::BtsRecord raw = to_bts_record(record);
            out_.write({reinterpret_cast<const char*>(&raw), sizeof raw});
            return;
        }
        }
        line_ += '\n';
        out_.write(line_);
    }

    const Options& options_;
    const TraceReader& reader_;
    const std::vector<std::pair<uint64_t, uint64_t>> windows_; // branches of --window, by vCPU
    Output& out_;
    BranchDescriber describer_;
    std::optional<FunctionFilter> functions_;
    uint64_t left_ = UINT64_MAX;
    std::string line_;
};

Result<ExitStatus> run(const Options& options) {
    auto reader = options.selection.open();
    if (!reader)
        return Unexpected(std::move(reader.error()));
    SymbolTable symbols;
    if (options.format != Format::raw || !options.symbol.empty()) {
        auto list = reader->symbols();
        if (!list)
            return Unexpected(std::move(list.error()));
        symbols = SymbolTable(std::move(*list));
    }
    std::optional<FunctionFilter> filter;
    if (!options.symbol.empty()) {
        auto created = FunctionFilter::create(symbols, options.symbol);
        if (!created)
            return Unexpected(std::move(created.error()));
        filter = std::move(*created);
    }
    std::optional<Output> file;
    if (!options.output.empty()) {
        auto created = Output::create(options.output);
        if (!created)
            return Unexpected(std::move(created.error()));
        file.emplace(std::move(*created));
    }
    Output standard;
    Output& out = file ? *file : standard;

    auto windows = options.selection.window_ranges(*reader);
    if (!windows)
        return Unexpected(std::move(windows.error()));
    Dump dump(options, *reader, symbols, std::move(*windows), out);
    if (filter)
        dump.filter_by(std::move(*filter));
    unsigned first = options.selection.cpu.value_or(0);
    unsigned end = options.selection.cpu ? first + 1 : reader->vcpus();
    for (unsigned vcpu = first; vcpu < end && !out.closed(); ++vcpu) {
        dump.begin();
        dump.run(vcpu);
    }
    VTRACE_TRY(out.finish());
    for (const std::string& line : reader->damage())
        fmt::print(stderr, "vtrace: warning: {}\n", line);
    return reader->damage().empty() ? ExitStatus::success : ExitStatus::damaged;
}

} // namespace

Action define_dump(CLI::App& app) {
    auto options = std::make_shared<Options>();
    options->selection.add_options(app);
    auto* count = app.add_option("-n,--count", options->count, "At most so many branches of each vCPU");
    count->type_name("N");
    auto* last = app.add_option("--last", options->last, "Only the last N branches of each vCPU, before --to if given");
    last->type_name("N")->excludes(count);
    app.add_flag("--events", options->events, "Also print time and CR3 events");
    app.add_option("--symbol", options->symbol, "Only branches from or to this function")->type_name("NAME");
    const std::map<std::string, Format> formats = {
        {"text", Format::text}, {"json", Format::json}, {"raw", Format::raw}};
    app.add_option("--format", options->format, "text, json (an object a line) or raw (24-byte BTS records)")
        ->transform(CLI::CheckedTransformer(formats, CLI::ignore_case))
        ->type_name("FORMAT");
    app.add_option("-o,--output", options->output, "Write to this file, not to standard output")->type_name("FILE");
    app.footer("A line is: cpu number from -> to kind from-symbol -> to-symbol; \"-\" where there is no symbol.\n"
               "vCPUs come one after the other. raw: little-endian from, to and flags, of eight bytes each.");
    return [options] { return run(*options); };
}

} // namespace vtrace::cli
