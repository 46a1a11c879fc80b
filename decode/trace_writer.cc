#include "decode/trace_writer.h"

#include <algorithm>
#include <cassert>
#include <cstring>
#include <deque>
#include <optional>
#include <utility>
#include <unordered_map>
#include <variant>

#include <nlohmann/json.hpp>

#include "decode/codec_branch.h"
#include "decode/codec_side.h"
#include "decode/privilege.h"
#include "decode/trace_file.h"
#include "decode/trace_trim.h"

namespace vtrace {

namespace {

/// Uncompressed bytes after which a chunk is closed or split, whatever it holds; far enough below max_chunk_bytes for
/// one more piece.
constexpr uint64_t soft_chunk_bytes = max_chunk_bytes / 2;
/// Records added to the encoder at a time: the limits are tested between.
constexpr size_t encoder_batch = 4096;
constexpr size_t max_console_piece = 1u << 20;

struct HeldPage {
    CodePage page;
    CodeLines lines;
};
struct HeldWindow {}; // what follows belongs to another one
using Held = std::variant<HeldPage, CodeMapping, ConsolePiece, HeldWindow>;

uint64_t held_size(const Held& held) {
    if (const auto* page = std::get_if<HeldPage>(&held))
        return sizeof(Held) + page->lines.bytes.size();
    if (const auto* piece = std::get_if<ConsolePiece>(&held))
        return sizeof(Held) + piece->bytes.size();
    return sizeof(Held);
}

/// One vCPU's stream: the open chunk, and closed ones that wait for their turn in the file.
struct Stream {
    BranchEncoder encoder;
    uint64_t branches = 0; // in closed chunks
    uint64_t records = 0;  // in closed chunks
    struct Waiting {
        StoredChunk chunk;
        std::vector<WindowBegin> windows; // that begin in it
    };
    std::deque<Waiting> waiting;
    std::vector<WindowBegin> windows; // that begin in the open chunk
    uint64_t user_entered = UINT64_MAX; // number of the first branch into user space; kept with keep_last alone
    std::deque<uint64_t> cuts; // positions at which a chunk must end, ascending

    // State at the place reached, and at the start of the open chunk.
    struct Known {
        uint64_t time = 0, retired = 0, cr3 = 0;
        uint8_t flags = 0; // ChunkFlags
    };
    Known now, at_start;

    uint64_t position() const { return records + encoder.records(); }
};

} // namespace

struct TraceWriter::State {
    TraceWriterOptions options;
    ChunkFile file;
    std::vector<Stream> streams;
    std::deque<Held> held;
    uint64_t held_bytes = 0;
    uint64_t held_since_cut = 0;
    uint64_t next_order = 0;
    std::vector<DroppedStart> dropped; // of each vCPU
    uint64_t trimmed_bytes = 0;        // of the file, when branches were dropped last
    std::optional<Error> error;

    State(const TraceWriterOptions& the_options, ChunkFile the_file)
        : options(the_options), file(std::move(the_file)), streams(the_options.vcpus), dropped(the_options.vcpus) {}

    Result<> write(StoredChunk chunk) {
        if (!error) {
            if (auto result = file.write(std::move(chunk)); !result)
                error = std::move(result.error());
        }
        return status();
    }
    /// Drops branches that keep_last does not want: where that is worth the trouble, or all.
    Result<> trim(bool all);
    void note_user_entry(Stream& stream, std::span<const ds::BtsRecord> records) const;
    Result<> status() const {
        if (error)
            return Unexpected(*error);
        return {};
    }

    void hold(Held item) {
        const uint64_t size = held_size(item);
        held_bytes += size;
        held_since_cut += size;
        held.push_back(std::move(item));
    }
    bool cut_if_due(unsigned vcpu, uint64_t position) {
        if (held_since_cut < options.side_bytes)
            return false;
        held_since_cut = 0;
        streams[vcpu].cuts.push_back(position);
        return true;
    }

    Result<> write_text(ChunkType type, const nlohmann::json& json) {
        const std::string text = json.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
        ChunkHeader header{};
        header.type = static_cast<uint16_t>(type);
        return write(
            store_chunk(header, {reinterpret_cast<const uint8_t*>(text.data()), text.size()}, options.compression));
    }

    Result<> add(unsigned vcpu, std::span<const ds::BtsRecord> records);
    Result<> end_chunk(unsigned vcpu);
    Result<> write_waiting(bool all);
    Result<> write_held(size_t count);
    Result<> write_symbols(std::span<const TraceSymbol> symbols);
};

Result<> TraceWriter::State::add(unsigned vcpu, std::span<const ds::BtsRecord> records) {
    Stream& stream = streams[vcpu];
    const auto limit = [&] { return options.chunk_records - stream.encoder.records(); };
    while (!records.empty()) {
        while (!stream.cuts.empty() && stream.cuts.front() <= stream.position()) {
            if (stream.cuts.front() == stream.position())
                VTRACE_TRY(end_chunk(vcpu));
            stream.cuts.pop_front();
        }
        size_t count = std::min<size_t>({records.size(), encoder_batch, limit()});
        if (!stream.cuts.empty())
            count = std::min<size_t>(count, stream.cuts.front() - stream.position());
        // A batch ends with the first time event that makes the chunk old enough, and keeps the state up to date.
        bool old = false;
        for (size_t i = 0; i < count; ++i) {
            const auto& record = records[i];
            if (!ds::BtsFlags::is_event(record.flags)) [[likely]]
                continue;
            if (ds::BtsFlags::kind(record.flags) == ds::BtsKind::cr3) {
                stream.now.cr3 = record.from;
                stream.now.flags |= ChunkFlags::cr3_known;
            } else if (ds::BtsFlags::kind(record.flags) == ds::BtsKind::time) {
                stream.now.time = record.from;
                stream.now.retired = record.to;
                stream.now.flags |= ChunkFlags::time_known;
                old = stream.encoder.records() + i + 1 >= options.min_timed_records &&
                      record.from - stream.at_start.time >= options.chunk_ns;
                if (old) {
                    count = i + 1;
                    break;
                }
            } else if (ds::BtsFlags::kind(record.flags) == ds::BtsKind::window_begin) {
                stream.windows.push_back({.number = record.to, .vcpu = vcpu, .position = stream.position() + i});
            }
        }
        if (options.keep_last != 0 && stream.user_entered == UINT64_MAX)
            note_user_entry(stream, records.first(count));
        stream.encoder.add(records.first(count));
        records = records.subspan(count);
        if (old || limit() == 0 || stream.encoder.bytes() >= soft_chunk_bytes)
            VTRACE_TRY(end_chunk(vcpu));
    }
    return write_waiting(false); // the time that passed here may be what another vCPU's chunk waits for
}

Result<> TraceWriter::State::end_chunk(unsigned vcpu) {
    Stream& stream = streams[vcpu];
    if (stream.encoder.records() == 0)
        return {};
    ChunkHeader header{};
    header.type = static_cast<uint16_t>(ChunkType::branches);
    header.vcpu = static_cast<uint16_t>(vcpu);
    header.flags = stream.at_start.flags;
    header.first_number = stream.branches;
    header.first_position = stream.records;
    header.branches = stream.encoder.branches();
    header.count = stream.encoder.records();
    header.first_time = stream.at_start.time;
    header.last_time = stream.now.time;
    header.first_retired = stream.at_start.retired;
    header.last_retired = stream.now.retired;
    header.start_cr3 = stream.at_start.cr3;
    stream.branches += header.branches;
    stream.records += header.count;
    stream.at_start = stream.now;
    stream.waiting.push_back({.chunk = store_chunk(header, stream.encoder.finish(), options.compression),
                              .windows = std::exchange(stream.windows, {})});
    return write_waiting(false);
}

/// Writes closed chunks in the order of (last_time, vcpu), each as soon as no stream can close an earlier one any more.
Result<> TraceWriter::State::write_waiting(bool all) {
    const auto key = [&](unsigned vcpu) {
        const Stream& stream = streams[vcpu];
        const uint64_t time = stream.waiting.empty() ? stream.now.time : stream.waiting.front().chunk.header.last_time;
        return std::pair(time, vcpu);
    };
    for (;;) {
        std::optional<unsigned> first;
        for (unsigned vcpu = 0; vcpu < streams.size(); ++vcpu) {
            if ((!all || !streams[vcpu].waiting.empty()) && (!first || key(vcpu) < key(*first)))
                first = vcpu;
        }
        if (!first || streams[*first].waiting.empty())
            return {};
        auto [chunk, windows] = std::move(streams[*first].waiting.front());
        streams[*first].waiting.pop_front();
        // What was told before the end of this chunk goes before it. All of it is here by now, whatever the threads
        // did, and so is everything that was told still earlier.
        const uint64_t end = chunk.header.first_position + chunk.header.count;
        const uint64_t last_time = chunk.header.last_time;
        size_t count = 0;
        for (size_t i = 0; i < held.size(); ++i) {
            const auto reached = [&](const auto& item) {
                using T = std::decay_t<decltype(item)>;
                if constexpr (std::is_same_v<T, HeldPage>)
                    return item.page.place.vcpu == *first && item.page.place.position < end;
                else if constexpr (std::is_same_v<T, CodeMapping>)
                    return item.place.vcpu == *first && item.place.position < end;
                else if constexpr (std::is_same_v<T, HeldWindow>)
                    return false;
                else
                    return item.time < last_time;
            };
            if (std::visit(reached, held[i]))
                count = i + 1;
        }
        VTRACE_TRY(write_held(count));
        if (!windows.empty()) {
            ChunkHeader header{};
            header.type = static_cast<uint16_t>(ChunkType::windows);
            header.count = static_cast<uint32_t>(windows.size());
            VTRACE_TRY(write(store_chunk(header, encode_windows(windows), options.compression)));
        }
        VTRACE_TRY(write(std::move(chunk)));
        VTRACE_TRY(trim(false));
    }
}

Result<> TraceWriter::State::trim(bool all) {
    if (options.keep_last == 0 || error || (!all && file.bytes() < 2 * trimmed_bytes + options.keep_slack_bytes))
        return status();
    const TrimPlan plan = plan_trim(file.chunks(), options.keep_last);
    if (!plan.drops)
        return {};
    std::vector<uint64_t> user_entered;
    for (const Stream& stream : streams)
        user_entered.push_back(stream.user_entered);
    if (auto result = vtrace::trim(file, plan, user_entered, dropped, options.compression); !result)
        error = std::move(result.error());
    trimmed_bytes = file.bytes();
    return status();
}

void TraceWriter::State::note_user_entry(Stream& stream, std::span<const ds::BtsRecord> records) const {
    uint64_t number = stream.branches + stream.encoder.branches();
    for (const auto& record : records) {
        if (ds::BtsFlags::is_event(record.flags))
            continue;
        if (enters_user(record.from, record.to)) {
            stream.user_entered = number;
            return;
        }
        ++number;
    }
}

/// Writes the first `count` items held back: chunks of pages, of mappings and of console output.
Result<> TraceWriter::State::write_held(size_t count) {
    std::vector<CodePage> pages;
    std::vector<uint8_t> page_bytes;
    std::unordered_map<uint64_t, size_t> last_version; // gpa -> index into pages
    std::vector<CodeMapping> mappings;
    std::vector<ConsolePiece> pieces;
    uint64_t piece_bytes = 0;
    const auto put = [&](ChunkType type, size_t entries, std::span<const uint8_t> payload, uint64_t first_time = 0,
                         uint64_t last_time = 0) {
        ChunkHeader header{};
        header.type = static_cast<uint16_t>(type);
        header.count = static_cast<uint32_t>(entries);
        header.first_time = first_time;
        header.last_time = last_time;
        return write(store_chunk(header, payload, options.compression));
    };
    const auto put_pages = [&]() -> Result<> {
        if (pages.empty())
            return {};
        auto result = put(ChunkType::code_pages, pages.size(), encode_code_pages(pages, page_bytes));
        pages.clear();
        page_bytes.clear();
        last_version.clear();
        return result;
    };
    // Lines that join a version of their page in this chunk without contradiction go into it: it then says some of them
    // earlier than they ran, and nobody asks for them there.
    const auto add_page = [&](const HeldPage& held_page) {
        const auto [known, fresh] = last_version.try_emplace(held_page.page.gpa, pages.size());
        if (!fresh && held_page.lines.join(
                          std::span<uint8_t, code_page_bytes>(&page_bytes[known->second * code_page_bytes], code_page_bytes)))
            return;
        known->second = pages.size();
        pages.push_back(held_page.page);
        page_bytes.resize(page_bytes.size() + code_page_bytes);
        held_page.lines.join(
            std::span<uint8_t, code_page_bytes>(&page_bytes[known->second * code_page_bytes], code_page_bytes));
    };
    const auto put_mappings = [&]() -> Result<> {
        if (mappings.empty())
            return {};
        auto result = put(ChunkType::code_mappings, mappings.size(), encode_code_mappings(mappings));
        mappings.clear();
        return result;
    };
    const auto put_pieces = [&]() -> Result<> {
        if (pieces.empty())
            return {};
        auto result =
            put(ChunkType::console, pieces.size(), encode_console(pieces), pieces.front().time, pieces.back().time);
        pieces.clear();
        piece_bytes = 0;
        return result;
    };
    for (size_t i = 0; i < count; ++i) {
        Held item = std::move(held.front());
        held.pop_front();
        held_bytes -= held_size(item);
        if (auto* page = std::get_if<HeldPage>(&item)) {
            add_page(*page);
            if (page_bytes.size() >= soft_chunk_bytes)
                VTRACE_TRY(put_pages());
        } else if (auto* mapping = std::get_if<CodeMapping>(&item)) {
            mappings.push_back(*mapping);
            if (mappings.size() == max_chunk_entries / 2)
                VTRACE_TRY(put_mappings());
        } else if (auto* piece = std::get_if<ConsolePiece>(&item)) {
            piece_bytes += piece->bytes.size();
            pieces.push_back(std::move(*piece));
            if (piece_bytes >= soft_chunk_bytes || pieces.size() == max_chunk_entries)
                VTRACE_TRY(put_pieces());
        } else {
            last_version.clear(); // lines of one window must not seem to be of another
        }
    }
    VTRACE_TRY(put_pages());
    VTRACE_TRY(put_mappings());
    return put_pieces();
}

Result<> TraceWriter::State::write_symbols(std::span<const TraceSymbol> symbols) {
    constexpr size_t per_chunk = 256u << 10;
    while (!symbols.empty()) {
        uint64_t bytes = 0;
        size_t count = 0;
        while (count < std::min(symbols.size(), per_chunk) && bytes < soft_chunk_bytes) {
            bytes += symbols[count].name.size() + symbols[count].module.size() + 64;
            ++count;
        }
        ChunkHeader header{};
        header.type = static_cast<uint16_t>(ChunkType::symbols);
        header.count = static_cast<uint32_t>(count);
        VTRACE_TRY(write(store_chunk(header, encode_symbols(symbols.first(count)), options.compression)));
        symbols = symbols.subspan(count);
    }
    return {};
}

TraceWriter::TraceWriter(std::unique_ptr<State> state) : state_(std::move(state)) {}
TraceWriter::TraceWriter(TraceWriter&&) noexcept = default;
TraceWriter& TraceWriter::operator=(TraceWriter&&) noexcept = default;
TraceWriter::~TraceWriter() = default;

Result<TraceWriter> TraceWriter::open(const std::string& path, const nlohmann::json& config,
                                      const TraceWriterOptions& options) {
    if (options.vcpus == 0 || options.vcpus > max_trace_vcpus)
        return fail("cannot record {} vCPUs in '{}': 1 to {} are possible", options.vcpus, path, max_trace_vcpus);
    if (options.chunk_records == 0 || options.chunk_records > max_chunk_records)
        return fail("cannot write '{}' in chunks of {} records: 1 to {} are possible", path, options.chunk_records,
                    max_chunk_records);
    auto file = ChunkFile::create(path, options.vcpus, options.windows ? TraceVersion::parts : TraceVersion::first);
    if (!file)
        return Unexpected(std::move(file.error()));
    if (options.keep_last != 0) // in time: that it can be written anew at all
        if (auto successor = file->create_successor(options.vcpus, TraceVersion::parts); !successor)
            return Unexpected(std::move(successor.error()));
    TraceWriter writer(std::make_unique<State>(options, std::move(*file)));
    VTRACE_TRY(writer.state_->write_text(ChunkType::config, config));
    return writer;
}

Result<> TraceWriter::add_records(unsigned vcpu, std::span<const ds::BtsRecord> records) {
    assert(vcpu < state_->streams.size());
    VTRACE_TRY(state_->status());
    return state_->add(vcpu, records);
}

bool TraceWriter::code_lines(unsigned vcpu, uint64_t position, uint64_t gpa, CodeLines lines) {
    assert(vcpu < state_->streams.size());
    if (state_->error)
        return false;
    state_->hold(HeldPage{.page = {.place = {state_->next_order++, vcpu, position}, .gpa = gpa & ~(code_page_bytes - 1)},
                          .lines = std::move(lines)});
    return state_->cut_if_due(vcpu, position);
}

bool TraceWriter::code_mapping(unsigned vcpu, uint64_t position, uint64_t cr3, uint64_t gva, uint64_t gpa,
                               bool global) {
    assert(vcpu < state_->streams.size());
    if (state_->error)
        return false;
    state_->hold(CodeMapping{.place = {state_->next_order++, vcpu, position},
                             .cr3 = cr3,
                             .gva = gva & ~(code_page_bytes - 1),
                             .gpa = gpa & ~(code_page_bytes - 1),
                             .global = global});
    return state_->cut_if_due(vcpu, position);
}

void TraceWriter::console(uint64_t time, std::string_view bytes) {
    if (state_->error)
        return;
    while (!bytes.empty()) {
        const auto piece = bytes.substr(0, max_console_piece);
        state_->hold(ConsolePiece{.time = time, .bytes = std::string(piece)});
        bytes.remove_prefix(piece.size());
    }
}

void TraceWriter::begin_window() {
    if (!state_->error)
        state_->hold(HeldWindow{});
}

Result<> TraceWriter::close(const nlohmann::json& outcome, std::vector<TraceSymbol> symbols) {
    State& state = *state_;
    VTRACE_TRY(state.status());
    for (unsigned vcpu = 0; vcpu < state.streams.size(); ++vcpu)
        VTRACE_TRY(state.end_chunk(vcpu));
    VTRACE_TRY(state.write_waiting(true));
    VTRACE_TRY(state.write_held(state.held.size()));
    VTRACE_TRY(state.trim(true));
    std::stable_sort(symbols.begin(), symbols.end(),
                     [](const auto& a, const auto& b) { return a.address < b.address; });
    VTRACE_TRY(state.write_symbols(symbols));
    VTRACE_TRY(state.write_text(ChunkType::outcome, outcome));
    if (auto result = state.file.finish(state.options.compression); !result) {
        state.error = std::move(result.error());
        return state.status();
    }
    state.error = Error{"cannot add to a trace file that is closed"};
    return {};
}

uint64_t TraceWriter::bytes_written() const {
    return state_->file.bytes();
}
uint64_t TraceWriter::bytes_held() const {
    return state_->held_bytes;
}
uint64_t TraceWriter::branches() const {
    uint64_t sum = 0;
    for (const auto& stream : state_->streams)
        sum += stream.branches + stream.encoder.branches();
    return sum;
}

} // namespace vtrace
