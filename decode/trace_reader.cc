#include "decode/trace_reader.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <list>
#include <map>
#include <set>
#include <thread>
#include <utility>

#include <nlohmann/json.hpp>

#include "decode/codec_branch.h"
#include "decode/trace_code.h"
#include "decode/trace_file.h"
#include "decode/trace_scan.h"

namespace vtrace {

namespace {

constexpr uint64_t max_json_bytes = 16u << 20;
constexpr int max_json_depth = 64;
constexpr size_t max_symbols = size_t{4} << 20;
constexpr uint64_t max_console_bytes = 256u << 20;
/// Decoded branch chunks kept for cursors that go back and forth.
constexpr size_t cached_chunks = 2;
constexpr unsigned max_threads = 64;

bool is_type(const ChunkHeader& header, ChunkType type) {
    return header.type == static_cast<uint16_t>(type);
}

std::string describe_range(const ChunkHeader& header) {
    return fmt::format("branches {} to {} of vCPU {}", header.first_number, header.first_number + header.branches,
                       header.vcpu);
}

/// Deeper than any text of ours: refused before the parser's result could be nested so deep.
bool too_deep(std::string_view json) {
    int depth = 0;
    bool quoted = false;
    for (size_t i = 0; i < json.size(); ++i) {
        const char c = json[i];
        if (quoted) {
            if (c == '\\')
                ++i;
            else if (c == '"')
                quoted = false;
        } else if (c == '"') {
            quoted = true;
        } else if (c == '[' || c == '{') {
            if (++depth > max_json_depth)
                return true;
        } else if (c == ']' || c == '}') {
            --depth;
        }
    }
    return false;
}

StreamState state_from(const ChunkHeader& header) {
    StreamState state;
    if (header.flags & ChunkFlags::cr3_known)
        state.cr3 = header.start_cr3;
    if (header.flags & ChunkFlags::time_known) {
        state.time = header.first_time;
        state.retired = header.first_retired;
    }
    return state;
}

} // namespace

uint64_t TraceInfo::branches() const {
    uint64_t sum = 0;
    for (const auto& vcpu : vcpus)
        sum += vcpu.branches;
    return sum;
}

struct TraceReader::State {
    InputFile file;
    ScannedFile scanned;
    TraceInfo info;
    std::vector<DroppedStart> dropped;        // by vCPU
    std::vector<std::vector<size_t>> streams; // by vCPU: its branch chunks, as indices into scanned.chunks, in order

    mutable std::mutex mutex; // guards what follows
    mutable std::set<size_t> damaged;
    mutable std::vector<std::string> damage;
    mutable std::list<std::pair<size_t, std::shared_ptr<const ChunkRecords>>> cache; // latest first
    mutable std::vector<std::unique_ptr<BranchDecoder>> decoders;                    // not in use

    mutable std::once_flag code_once;
    mutable std::unique_ptr<CodeIndex> code;

    State(InputFile the_file, ScannedFile the_scan) : file(std::move(the_file)), scanned(std::move(the_scan)) {}

    const IndexEntry& entry(size_t chunk) const { return scanned.chunks[chunk]; }

    void build_info();
    void report(size_t chunk, const std::string& why) const;
    Result<std::vector<uint8_t>> payload(size_t chunk) const;
    Result<ChunkRecords> decode(size_t chunk) const;
    std::shared_ptr<const ChunkRecords> cached(size_t chunk) const;
    Result<nlohmann::json> json(ChunkType type) const;
    CodeIndex& code_index() const;
    void load_dropped();
    std::vector<WindowBegin> window_begins() const;
    /// Decodes any chunk of a known type as far as it takes to know that it is sound.
    Result<> verify(size_t chunk) const;
};

void TraceReader::State::build_info() {
    info.version = scanned.header.version;
    info.file_bytes = file.size();
    info.warnings = scanned.warnings;
    info.vcpus.resize(scanned.header.vcpus);
    streams.resize(scanned.header.vcpus);
    std::map<uint16_t, ChunkTypeInfo> types;
    load_dropped();
    std::vector<uint64_t> next_position(info.vcpus.size());
    for (size_t vcpu = 0; vcpu < dropped.size(); ++vcpu) {
        info.vcpus[vcpu].dropped = info.vcpus[vcpu].end_number = dropped[vcpu].branches;
        next_position[vcpu] = dropped[vcpu].records;
    }
    bool outcome_seen = false;
    for (size_t i = 0; i < scanned.chunks.size(); ++i) {
        const ChunkHeader& header = entry(i).header;
        auto& type = types[header.type];
        type.type = header.type;
        ++type.chunks;
        type.count += header.count;
        type.stored_bytes += chunk_file_bytes(header);
        type.raw_bytes += header.raw_bytes;
        outcome_seen = outcome_seen || is_type(header, ChunkType::outcome);
        if (!is_type(header, ChunkType::branches))
            continue;
        const char* wrong = nullptr;
        if (header.vcpu >= info.vcpus.size())
            wrong = "of a vCPU that the file does not have";
        else if (header.count > max_chunk_records || header.branches > header.count ||
                 header.first_position > UINT64_MAX - header.count || header.first_number > header.first_position)
            wrong = "with impossible counts";
        else if (header.first_position < next_position[header.vcpu] ||
                 header.first_number < info.vcpus[header.vcpu].end_number)
            wrong = "out of order";
        if (wrong) {
            info.warnings.push_back(fmt::format("a chunk {} at {} is left out", wrong, entry(i).offset));
            continue;
        }
        StreamInfo& stream = info.vcpus[header.vcpu];
        if (header.first_number > stream.end_number)
            info.missing.push_back(
                {header.vcpu, stream.end_number, header.first_number - stream.end_number, "chunks are lost"});
        else if (header.first_position > next_position[header.vcpu])
            info.warnings.push_back(
                fmt::format("events before branch {} of vCPU {} are lost", header.first_number, header.vcpu));
        stream.branches += header.branches;
        stream.events += header.count - header.branches;
        stream.end_number = header.first_number + header.branches;
        if (stream.chunks == 0)
            stream.first_time = header.first_time;
        stream.last_time = header.last_time;
        stream.last_retired = header.last_retired;
        ++stream.chunks;
        stream.stored_bytes += chunk_file_bytes(header);
        next_position[header.vcpu] = header.first_position + header.count;
        streams[header.vcpu].push_back(i);
    }
    for (const auto& [type, totals] : types)
        info.types.push_back(totals);
    for (const auto& header : scanned.cut) {
        if (is_type(header, ChunkType::branches) && header.vcpu < info.vcpus.size() &&
            header.first_number >= info.vcpus[header.vcpu].end_number)
            info.missing.push_back(
                {header.vcpu, header.first_number, header.branches, "the file ends inside its chunk"});
    }
    if (!outcome_seen) {
        info.warnings.push_back("the recording was not closed: its last branches, symbols and outcome are missing");
        for (unsigned vcpu = 0; vcpu < info.vcpus.size(); ++vcpu)
            info.missing.push_back({vcpu, info.vcpus[vcpu].end_number, std::nullopt, "the recording was not closed"});
    }
    for (const auto& range : info.missing) {
        const std::string count = range.count ? fmt::format("{} branches", *range.count) : "branches";
        info.warnings.push_back(fmt::format("{} from number {} of vCPU {} are missing: {}", count, range.first_number,
                                            range.vcpu, range.reason));
    }
    info.complete = scanned.indexed && outcome_seen && info.warnings.empty();
}

/// Where the streams begin. If that is damaged, they look as if chunks were lost.
void TraceReader::State::load_dropped() {
    dropped.resize(scanned.header.vcpus);
    for (size_t i = 0; i < scanned.chunks.size(); ++i) {
        const ChunkHeader& header = entry(i).header;
        if (!is_type(header, ChunkType::dropped))
            continue;
        const auto bytes = payload(i);
        auto decoded = bytes ? decode_dropped(*bytes, header.count) : Unexpected(bytes.error());
        if (decoded && decoded->size() != dropped.size())
            decoded = fail("it is of {} vCPUs", decoded->size());
        if (decoded)
            dropped = std::move(*decoded);
        else
            report(i, decoded.error().message);
        return;
    }
}

std::vector<WindowBegin> TraceReader::State::window_begins() const {
    std::vector<WindowBegin> all;
    for (size_t i = 0; i < scanned.chunks.size(); ++i) {
        const ChunkHeader& header = entry(i).header;
        if (!is_type(header, ChunkType::windows))
            continue;
        const auto bytes = payload(i);
        const auto decoded = bytes ? decode_windows(*bytes, header.count) : Unexpected(bytes.error());
        if (!decoded)
            report(i, decoded.error().message);
        else if (all.size() + decoded->size() > CodeIndex::max_entries)
            report(i, "more windows than this reader keeps");
        else
            all.insert(all.end(), decoded->begin(), decoded->end());
    }
    return all;
}

void TraceReader::State::report(size_t chunk, const std::string& why) const {
    const auto& [offset, header] = entry(chunk);
    const std::lock_guard lock(mutex);
    if (!damaged.insert(chunk).second)
        return;
    damage.push_back(
        is_type(header, ChunkType::branches)
            ? fmt::format("{} are missing: their chunk at {} is damaged: {}", describe_range(header), offset, why)
            : fmt::format("a chunk ({}, {} entries) at {} is damaged and left out: {}", chunk_type_name(header.type),
                          header.count, offset, why));
}

Result<std::vector<uint8_t>> TraceReader::State::payload(size_t chunk) const {
    const auto& [offset, header] = entry(chunk);
    std::vector<uint8_t> stored(header.stored_bytes);
    VTRACE_TRY(file.read(offset + sizeof(ChunkHeader), stored));
    return load_payload(header, stored);
}

Result<ChunkRecords> TraceReader::State::decode(size_t chunk) const {
    const ChunkHeader& header = entry(chunk).header;
    auto bytes = payload(chunk);
    if (!bytes)
        return Unexpected(std::move(bytes.error()));
    std::unique_ptr<BranchDecoder> decoder;
    {
        const std::lock_guard lock(mutex);
        if (!decoders.empty()) {
            decoder = std::move(decoders.back());
            decoders.pop_back();
        }
    }
    if (!decoder)
        decoder = std::make_unique<BranchDecoder>();
    ChunkRecords result{.vcpu = header.vcpu,
                        .first_number = header.first_number,
                        .first_position = header.first_position,
                        .start = state_from(header),
                        .records = {}};
    auto decoded = decoder->decode(*bytes, header.count, header.branches, result.records);
    {
        const std::lock_guard lock(mutex);
        decoders.push_back(std::move(decoder));
    }
    if (!decoded)
        return Unexpected(std::move(decoded.error()));
    return result;
}

std::shared_ptr<const ChunkRecords> TraceReader::State::cached(size_t chunk) const {
    {
        const std::lock_guard lock(mutex);
        for (auto it = cache.begin(); it != cache.end(); ++it) {
            if (it->first == chunk) {
                cache.splice(cache.begin(), cache, it);
                return it->second;
            }
        }
        if (damaged.contains(chunk))
            return nullptr;
        if (cache.size() == cached_chunks) // makes room first: decoded chunks are large
            cache.pop_back();
    }
    auto records = decode(chunk);
    if (!records) {
        report(chunk, records.error().message);
        return nullptr;
    }
    auto shared = std::make_shared<const ChunkRecords>(std::move(*records));
    const std::lock_guard lock(mutex);
    cache.emplace_front(chunk, shared);
    while (cache.size() > cached_chunks)
        cache.pop_back();
    return shared;
}

Result<nlohmann::json> TraceReader::State::json(ChunkType type) const {
    for (size_t i = 0; i < scanned.chunks.size(); ++i) {
        const ChunkHeader& header = entry(i).header;
        if (!is_type(header, type))
            continue;
        auto bytes = header.raw_bytes <= max_json_bytes ? payload(i) : fail("it is too large");
        if (!bytes) {
            report(i, bytes.error().message);
            return fail("cannot read the {} in '{}': {}", chunk_type_name(header.type), file.path(),
                        bytes.error().message);
        }
        const std::string_view text(reinterpret_cast<const char*>(bytes->data()), bytes->size());
        auto parsed = too_deep(text) ? nlohmann::json(nlohmann::json::value_t::discarded)
                                     : nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
        if (parsed.is_discarded())
            return fail("cannot read the {} in '{}': it is not JSON", chunk_type_name(header.type), file.path());
        return parsed;
    }
    return fail("'{}' has no {}: its recorder did not come that far", file.path(),
                chunk_type_name(static_cast<uint16_t>(type)));
}

CodeIndex& TraceReader::State::code_index() const {
    std::call_once(code_once, [this] {
        const auto load = [this](size_t chunk) -> std::shared_ptr<const DecodedCodePages> {
            auto bytes = payload(chunk);
            if (!bytes)
                return nullptr;
            auto pages = decode_code_pages(*bytes, entry(chunk).header.count);
            return pages ? std::make_shared<const DecodedCodePages>(std::move(*pages)) : nullptr;
        };
        code = std::make_unique<CodeIndex>(load);
        for (size_t i = 0; i < scanned.chunks.size(); ++i) {
            const ChunkHeader& header = entry(i).header;
            const bool pages = is_type(header, ChunkType::code_pages);
            if (!pages && !is_type(header, ChunkType::code_mappings))
                continue;
            auto bytes = payload(i);
            if (!bytes) {
                report(i, bytes.error().message);
                continue;
            }
            bool room = true;
            if (pages) {
                const auto decoded = decode_code_pages(*bytes, header.count);
                if (decoded)
                    room = code->add_pages(i, decoded->pages);
                else
                    report(i, decoded.error().message);
            } else {
                const auto decoded = decode_code_mappings(*bytes, header.count);
                if (decoded)
                    room = code->add_mappings(*decoded);
                else
                    report(i, decoded.error().message);
            }
            if (!room)
                report(i, "more code than this reader keeps");
        }
        code->finish(scanned.header.vcpus, CodeWindows(window_begins()));
    });
    return *code;
}

Result<> TraceReader::State::verify(size_t chunk) const {
    const auto& [offset, header] = entry(chunk);
    ChunkHeader on_disk{};
    VTRACE_TRY(file.read(offset, {reinterpret_cast<uint8_t*>(&on_disk), sizeof on_disk}));
    if (!is_sound(on_disk) || on_disk.header_checksum != header.header_checksum)
        return fail("its header is damaged; the index has a copy");
    const auto drop = [](const auto& result) -> Result<> {
        if (!result)
            return Unexpected(result.error());
        return {};
    };
    if (is_type(header, ChunkType::branches))
        return drop(decode(chunk));
    const auto bytes = payload(chunk);
    if (!bytes)
        return Unexpected(bytes.error());
    switch (static_cast<ChunkType>(header.type)) {
    case ChunkType::code_pages:
        return drop(decode_code_pages(*bytes, header.count));
    case ChunkType::code_mappings:
        return drop(decode_code_mappings(*bytes, header.count));
    case ChunkType::console:
        return drop(decode_console(*bytes, header.count));
    case ChunkType::symbols:
        return drop(decode_symbols(*bytes, header.count));
    case ChunkType::windows:
        return drop(decode_windows(*bytes, header.count));
    case ChunkType::dropped:
        return drop(decode_dropped(*bytes, header.count));
    case ChunkType::config:
    case ChunkType::outcome:
        return drop(json(static_cast<ChunkType>(header.type)));
    default:
        return {};
    }
}

TraceReader::TraceReader(std::unique_ptr<State> state) : state_(std::move(state)) {}
TraceReader::TraceReader(TraceReader&&) noexcept = default;
TraceReader& TraceReader::operator=(TraceReader&&) noexcept = default;
TraceReader::~TraceReader() = default;

Result<TraceReader> TraceReader::open(const std::string& path) {
    auto file = InputFile::open(path);
    if (!file)
        return Unexpected(std::move(file.error()));
    auto scanned = scan_trace(*file);
    if (!scanned)
        return Unexpected(std::move(scanned.error()));
    auto state = std::make_unique<State>(std::move(*file), std::move(*scanned));
    state->build_info();
    return TraceReader(std::move(state));
}

const TraceInfo& TraceReader::info() const {
    return state_->info;
}
const std::vector<DroppedStart>& TraceReader::dropped() const {
    return state_->dropped;
}
std::vector<WindowBegin> TraceReader::window_begins() const {
    return state_->window_begins();
}
unsigned TraceReader::vcpus() const {
    return state_->scanned.header.vcpus;
}

std::vector<std::string> TraceReader::damage() const {
    const std::lock_guard lock(state_->mutex);
    return state_->damage;
}

std::vector<std::string> TraceReader::check(unsigned threads) const {
    if (threads == 0)
        threads = std::thread::hardware_concurrency();
    std::atomic<size_t> next{0};
    const auto work = [&] {
        for (size_t i; (i = next.fetch_add(1)) < state_->scanned.chunks.size();) {
            if (auto result = state_->verify(i); !result)
                state_->report(i, result.error().message);
        }
    };
    std::vector<std::thread> helpers;
    for (unsigned i = 1; i < std::min(threads, max_threads); ++i)
        helpers.emplace_back(work);
    work();
    for (auto& helper : helpers)
        helper.join();
    auto lines = state_->info.warnings;
    auto damage = this->damage();
    std::sort(damage.begin(), damage.end()); // threads met it in any order
    lines.insert(lines.end(), damage.begin(), damage.end());
    return lines;
}

Result<nlohmann::json> TraceReader::config() const {
    return state_->json(ChunkType::config);
}
Result<nlohmann::json> TraceReader::outcome() const {
    return state_->json(ChunkType::outcome);
}

Result<std::vector<TraceSymbol>> TraceReader::symbols() const {
    std::vector<TraceSymbol> all;
    for (size_t i = 0; i < state_->scanned.chunks.size(); ++i) {
        const ChunkHeader& header = state_->entry(i).header;
        if (!is_type(header, ChunkType::symbols))
            continue;
        auto bytes = state_->payload(i);
        auto symbols = bytes ? decode_symbols(*bytes, header.count) : Unexpected(bytes.error());
        if (symbols && all.size() + symbols->size() > max_symbols)
            symbols = fail("more symbols than this reader keeps ({})", max_symbols);
        if (!symbols) {
            state_->report(i, symbols.error().message);
            continue;
        }
        all.insert(all.end(), std::make_move_iterator(symbols->begin()), std::make_move_iterator(symbols->end()));
    }
    std::stable_sort(all.begin(), all.end(), [](const auto& a, const auto& b) { return a.address < b.address; });
    return all;
}

Result<std::vector<ConsolePiece>> TraceReader::console() const {
    std::vector<ConsolePiece> all;
    uint64_t bytes_kept = 0;
    for (size_t i = 0; i < state_->scanned.chunks.size(); ++i) {
        const ChunkHeader& header = state_->entry(i).header;
        if (!is_type(header, ChunkType::console))
            continue;
        bytes_kept += header.raw_bytes + header.count * sizeof(ConsolePiece);
        auto bytes = state_->payload(i);
        auto pieces = bytes ? decode_console(*bytes, header.count) : Unexpected(bytes.error());
        if (pieces && bytes_kept > max_console_bytes)
            pieces = fail("more console output than this reader keeps ({} bytes)", max_console_bytes);
        if (!pieces) {
            state_->report(i, pieces.error().message);
            continue;
        }
        all.insert(all.end(), std::make_move_iterator(pieces->begin()), std::make_move_iterator(pieces->end()));
    }
    return all;
}

RecordCursor TraceReader::records(unsigned vcpu, uint64_t first, uint64_t last, bool with_events) const {
    RecordCursor cursor;
    cursor.reader_ = this;
    cursor.vcpu_ = vcpu;
    cursor.last_ = last;
    cursor.skip_to_ = first;
    cursor.with_events_ = with_events;
    if (vcpu < state_->streams.size()) {
        const auto& chunks = state_->streams[vcpu];
        // The first chunk that reaches beyond `first`; at the very start, all of them, also one of events alone.
        cursor.next_chunk_ =
            std::partition_point(chunks.begin(), chunks.end(),
                                 [&](size_t chunk) {
                                     const auto& header = state_->entry(chunk).header;
                                     return first != 0 && header.first_number + header.branches <= first;
                                 }) -
            chunks.begin();
    }
    return cursor;
}

bool RecordCursor::load_next_chunk() {
    const auto& state = *reader_->state_;
    chunk_.reset(); // before the next one is decoded: they are large
    if (vcpu_ >= state.streams.size())
        return false;
    const auto& chunks = state.streams[vcpu_];
    while (next_chunk_ < chunks.size()) {
        const size_t index = chunks[next_chunk_++];
        if (state.entry(index).header.first_number >= last_)
            return false;
        chunk_ = state.cached(index);
        if (chunk_) {
            state_ = chunk_->start;
            next_record_ = 0;
            record_ = {};
            record_.vcpu = static_cast<uint16_t>(vcpu_);
            next_number_ = chunk_->first_number;
            return true;
        }
    }
    return false;
}

const TraceRecord* RecordCursor::next() {
    for (;;) {
        if (!chunk_ || next_record_ == chunk_->records.size()) {
            if (done_ || !load_next_chunk()) {
                done_ = true;
                return nullptr;
            }
            continue;
        }
        if (next_number_ >= last_) {
            done_ = true;
            chunk_.reset();
            return nullptr;
        }
        const ds::BtsRecord& record = chunk_->records[next_record_];
        const uint64_t position = chunk_->first_position + next_record_++;
        const auto kind = ds::BtsFlags::kind(record.flags);
        const uint64_t number = next_number_;
        if (ds::BtsFlags::is_event(record.flags)) {
            if (kind == ds::BtsKind::cr3) {
                state_.cr3 = record.from;
            } else if (kind == ds::BtsKind::time) {
                state_.time = record.from;
                state_.retired = record.to;
            }
            if (!with_events_ || number < skip_to_)
                continue;
        } else {
            ++next_number_;
            if (number < skip_to_)
                continue;
        }
        record_.from = record.from;
        record_.to = record.to;
        record_.number = number;
        record_.position = position;
        record_.kind = kind;
        record_.vector = ds::BtsFlags::vector(record.flags);
        record_.error_code = ds::BtsFlags::error_code(record.flags);
        return &record_;
    }
}

Result<> TraceReader::map_chunks_erased(std::optional<unsigned> vcpu, unsigned threads, uint64_t first, uint64_t last,
                                        const std::function<std::shared_ptr<void>(const ChunkRecords&)>& map,
                                        const std::function<void(std::shared_ptr<void>)>& reduce) const {
    std::vector<size_t> chunks;
    for (unsigned v = 0; v < vcpus(); ++v) {
        if (vcpu && *vcpu != v)
            continue;
        for (const size_t chunk : state_->streams[v]) {
            const auto& header = state_->entry(chunk).header;
            if (header.first_number < last && (first == 0 || header.first_number + header.branches > first))
                chunks.push_back(chunk);
        }
    }
    if (threads == 0)
        threads = std::max(1u, std::thread::hardware_concurrency());
    threads = static_cast<unsigned>(std::min<size_t>({threads, max_threads, std::max<size_t>(chunks.size(), 1)}));

    std::mutex mutex; // guards what follows
    std::condition_variable turn;
    size_t taken = 0, reduced = 0;
    bool reducing = false;
    std::map<size_t, std::shared_ptr<void>> results; // null: damaged
    const auto work = [&] {
        std::unique_lock lock(mutex);
        for (;;) {
            turn.wait(lock, [&] { return taken == chunks.size() || taken - reduced < size_t{2} * threads; });
            if (taken == chunks.size())
                return;
            const size_t mine = taken++;
            lock.unlock();
            std::shared_ptr<void> result;
            {
                const auto records = state_->decode(chunks[mine]);
                if (records)
                    result = map(*records);
                else
                    state_->report(chunks[mine], records.error().message);
            }
            lock.lock();
            results.emplace(mine, std::move(result));
            while (!reducing && !results.empty() && results.begin()->first == reduced) {
                auto ready = std::move(results.begin()->second);
                results.erase(results.begin());
                reducing = true;
                lock.unlock();
                if (ready)
                    reduce(std::move(ready));
                lock.lock();
                reducing = false;
                ++reduced;
                turn.notify_all();
            }
        }
    };
    std::vector<std::thread> helpers;
    for (unsigned i = 1; i < threads; ++i)
        helpers.emplace_back(work);
    work();
    for (auto& helper : helpers)
        helper.join();
    return {};
}

size_t TraceReader::code_at(unsigned vcpu, uint64_t position, uint64_t cr3, uint64_t gva,
                            std::span<uint8_t> buffer) const {
    return state_->code_index().code_at(vcpu, position, cr3, gva, buffer);
}

} // namespace vtrace
