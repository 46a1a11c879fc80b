#include "decode/trace_trim.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <deque>
#include <map>
#include <optional>
#include <tuple>

#include "decode/code_lines.h"
#include "decode/code_windows.h"

namespace vtrace {
namespace {

using PageBytes = std::array<uint8_t, code_page_bytes>;

constexpr size_t pages_a_chunk = max_chunk_bytes / 2 / code_page_bytes;
constexpr size_t entries_a_chunk = max_chunk_entries / 2;

bool is_type(const ChunkHeader& header, ChunkType type) { return header.type == static_cast<uint16_t>(type); }

/// One call of trim().
class Trimmer {
  public:
    Trimmer(const ChunkFile& old, const TrimPlan& plan, std::vector<DroppedStart> dropped, int compression)
        : old_(old), plan_(plan), dropped_(std::move(dropped)), compression_(compression) {}

    /// What is dropped now, all in all.
    const std::vector<DroppedStart>& count_dropped(std::span<const uint64_t> user_entered);
    Result<> write_to(ChunkFile& file);

  private:
    Result<std::vector<uint8_t>> payload(const IndexEntry& entry) const;
    template <class Decode, class Use>
    Result<> each(ChunkType type, Decode decode, Use use) const;

    Result<> find_windows();
    Result<> find_old_code();
    Result<> put_pages(ChunkFile& file) const;
    Result<> put_mappings(ChunkFile& file) const;
    Result<> put_console(ChunkFile& file) const;
    Result<> put(ChunkFile& file, ChunkType type, size_t count, std::span<const uint8_t> payload, uint64_t first_time = 0,
                 uint64_t last_time = 0) const;

    /// Told, by this order, before any branch that is kept needed something newer: in force at all that are kept, or
    /// superseded for all of them.
    bool is_old(const SidePlace& place) const { return place.order < old_orders_; }
    uint64_t window_of(const SidePlace& place) const { return windows_.at(place.vcpu, place.position); }

    const ChunkFile& old_;
    const TrimPlan& plan_;
    std::vector<DroppedStart> dropped_;
    int compression_;
    CodeWindows windows_;
    std::vector<WindowBegin> window_begins_; // that are still of use
    uint64_t first_window_ = 0;              // that a kept branch can lie in
    uint64_t old_orders_ = UINT64_MAX;
    std::vector<bool> replaced_; // by index: chunks all of whose entries are old
};

const std::vector<DroppedStart>& Trimmer::count_dropped(std::span<const uint64_t> user_entered) {
    for (size_t i = 0; i < plan_.first_kept; ++i) {
        const ChunkHeader& header = old_.chunks()[i].header;
        if (is_type(header, ChunkType::branches))
            dropped_[header.vcpu] = {header.first_number + header.branches, header.first_position + header.count, false};
    }
    for (size_t vcpu = 0; vcpu < dropped_.size(); ++vcpu)
        dropped_[vcpu].entered_user = user_entered[vcpu] < dropped_[vcpu].branches;
    return dropped_;
}

Result<std::vector<uint8_t>> Trimmer::payload(const IndexEntry& entry) const {
    auto chunk = old_.read(entry);
    if (!chunk)
        return Unexpected(std::move(chunk.error()));
    auto bytes = load_payload(chunk->header, chunk->bytes);
    if (!bytes)
        return fail("cannot read back a chunk ({}) of the trace file at {}: {}", chunk_type_name(entry.header.type),
                    entry.offset, bytes.error().message);
    return bytes;
}

/// Calls use(index, decoded) for the chunks of this type.
template <class Decode, class Use>
Result<> Trimmer::each(ChunkType type, Decode decode, Use use) const {
    for (size_t i = 0; i < old_.chunks().size(); ++i) {
        const IndexEntry& entry = old_.chunks()[i];
        if (!is_type(entry.header, type))
            continue;
        const auto bytes = payload(entry);
        if (!bytes)
            return Unexpected(bytes.error());
        auto decoded = decode(*bytes, entry.header.count);
        if (!decoded)
            return fail("cannot read back a chunk ({}) of the trace file at {}: {}", chunk_type_name(entry.header.type),
                        entry.offset, decoded.error().message);
        use(i, std::move(*decoded));
    }
    return {};
}

Result<> Trimmer::find_windows() {
    std::vector<WindowBegin> all;
    VTRACE_TRY(each(ChunkType::windows, decode_windows, [&](size_t, const std::vector<WindowBegin>& begins) {
        all.insert(all.end(), begins.begin(), begins.end());
    }));
    windows_ = CodeWindows(all);
    first_window_ = UINT64_MAX;
    for (unsigned vcpu = 0; vcpu < dropped_.size(); ++vcpu)
        first_window_ = std::min(first_window_, windows_.at(vcpu, dropped_[vcpu].records));
    std::copy_if(all.begin(), all.end(), std::back_inserter(window_begins_),
                 [&](const WindowBegin& begin) { return begin.number >= first_window_; });
    return {};
}

Result<> Trimmer::find_old_code() {
    replaced_.assign(old_.chunks().size(), false);
    std::vector<uint64_t> last_order(old_.chunks().size(), 0);
    const auto note = [&](size_t chunk, const SidePlace& place) {
        last_order[chunk] = std::max(last_order[chunk], place.order);
        if (place.position > dropped_[place.vcpu].records)
            old_orders_ = std::min(old_orders_, place.order);
    };
    VTRACE_TRY(each(ChunkType::code_pages, decode_code_pages, [&](size_t chunk, const DecodedCodePages& decoded) {
        for (const CodePage& page : decoded.pages)
            note(chunk, page.place);
    }));
    VTRACE_TRY(
        each(ChunkType::code_mappings, decode_code_mappings, [&](size_t chunk, const std::vector<CodeMapping>& mappings) {
            for (const CodeMapping& mapping : mappings)
                note(chunk, mapping.place);
        }));
    for (size_t i = 0; i < replaced_.size(); ++i) {
        const ChunkHeader& header = old_.chunks()[i].header;
        if (is_type(header, ChunkType::code_pages) || is_type(header, ChunkType::code_mappings))
            replaced_[i] = last_order[i] < old_orders_;
        else
            replaced_[i] = is_type(header, ChunkType::windows) || is_type(header, ChunkType::dropped) ||
                           (i < plan_.first_kept && (is_type(header, ChunkType::branches) ||
                                                     is_type(header, ChunkType::console)));
    }
    return {};
}

Result<> Trimmer::put(ChunkFile& file, ChunkType type, size_t count, std::span<const uint8_t> payload,
                      uint64_t first_time, uint64_t last_time) const {
    if (count == 0)
        return {};
    ChunkHeader header{};
    header.type = static_cast<uint16_t>(type);
    header.count = static_cast<uint32_t>(count);
    header.first_time = first_time;
    header.last_time = last_time;
    return file.write(store_chunk(header, payload, compression_));
}

/// Of each page, in each window that is still of use, one version: its lines as they were told last.
Result<> Trimmer::put_pages(ChunkFile& file) const {
    struct Version {
        SidePlace place;
        PageBytes bytes;
    };
    std::map<std::pair<uint64_t, uint64_t>, Version> versions; // by window and gpa
    VTRACE_TRY(each(ChunkType::code_pages, decode_code_pages, [&](size_t chunk, const DecodedCodePages& decoded) {
        if (!replaced_[chunk])
            return;
        for (size_t i = 0; i < decoded.pages.size(); ++i) {
            const CodePage& page = decoded.pages[i];
            const uint64_t window = window_of(page.place);
            if (window < first_window_)
                continue;
            Version& version = versions[{window, page.gpa}];
            version.place = page.place; // they come in the order in which they were told
            for (size_t at = 0; at < code_page_bytes; at += CodeLines::line_bytes) {
                const uint8_t* line = &decoded.bytes[i * code_page_bytes + at];
                if (!CodeLines::is_empty(line))
                    std::memcpy(&version.bytes[at], line, CodeLines::line_bytes);
            }
        }
    }));
    std::vector<std::pair<CodePage, const PageBytes*>> ordered;
    for (const auto& [key, version] : versions)
        ordered.push_back({{version.place, key.second}, &version.bytes});
    std::sort(ordered.begin(), ordered.end(),
              [](const auto& a, const auto& b) { return a.first.place.order < b.first.place.order; });
    for (size_t first = 0; first < ordered.size(); first += pages_a_chunk) {
        std::vector<CodePage> pages;
        std::vector<uint8_t> bytes;
        for (size_t i = first; i < std::min(ordered.size(), first + pages_a_chunk); ++i) {
            pages.push_back(ordered[i].first);
            bytes.insert(bytes.end(), ordered[i].second->begin(), ordered[i].second->end());
        }
        VTRACE_TRY(put(file, ChunkType::code_pages, pages.size(), encode_code_pages(pages, bytes)));
    }
    return {};
}

Result<> Trimmer::put_mappings(ChunkFile& file) const {
    std::map<std::tuple<uint64_t, uint64_t, bool, uint64_t>, CodeMapping> latest; // by window, gva, global, cr3
    VTRACE_TRY(
        each(ChunkType::code_mappings, decode_code_mappings, [&](size_t chunk, const std::vector<CodeMapping>& mappings) {
            if (!replaced_[chunk])
                return;
            for (const CodeMapping& mapping : mappings) {
                const uint64_t window = window_of(mapping.place);
                if (window >= first_window_)
                    latest[{window, mapping.gva, mapping.global, mapping.global ? 0 : mapping.cr3}] = mapping;
            }
        }));
    std::vector<CodeMapping> ordered;
    for (const auto& [key, mapping] : latest)
        ordered.push_back(mapping);
    std::sort(ordered.begin(), ordered.end(),
              [](const CodeMapping& a, const CodeMapping& b) { return a.place.order < b.place.order; });
    for (std::span<const CodeMapping> left(ordered); !left.empty();) {
        const auto part = left.first(std::min(left.size(), entries_a_chunk));
        VTRACE_TRY(put(file, ChunkType::code_mappings, part.size(), encode_code_mappings(part)));
        left = left.subspan(part.size());
    }
    return {};
}

Result<> Trimmer::put_console(ChunkFile& file) const {
    uint64_t bytes = 0;
    std::deque<ConsolePiece> pieces;
    for (size_t i = plan_.first_kept; i-- > 0 && bytes < max_kept_console_bytes;) {
        const IndexEntry& entry = old_.chunks()[i];
        if (!is_type(entry.header, ChunkType::console))
            continue;
        const auto payload = this->payload(entry);
        if (!payload)
            return Unexpected(payload.error());
        auto decoded = decode_console(*payload, entry.header.count);
        if (!decoded)
            return fail("cannot read back console output at {} of the trace file: {}", entry.offset,
                        decoded.error().message);
        for (; !decoded->empty() && bytes < max_kept_console_bytes; decoded->pop_back()) {
            bytes += decoded->back().bytes.size() + sizeof(ConsolePiece::time);
            pieces.push_front(std::move(decoded->back()));
        }
    }
    const std::vector<ConsolePiece> part(std::make_move_iterator(pieces.begin()), std::make_move_iterator(pieces.end()));
    if (part.empty())
        return {};
    return put(file, ChunkType::console, part.size(), encode_console(part), part.front().time, part.back().time);
}

Result<> Trimmer::write_to(ChunkFile& file) {
    VTRACE_TRY(find_windows());
    VTRACE_TRY(find_old_code());
    const auto copy = [&](const IndexEntry& entry) -> Result<> {
        auto chunk = old_.read(entry);
        if (!chunk)
            return Unexpected(std::move(chunk.error()));
        if (checksum(chunk->bytes) != entry.header.payload_checksum)
            return fail("cannot read back the trace file at {}: it was changed", entry.offset);
        return file.write(std::move(*chunk));
    };
    const auto& chunks = old_.chunks();
    VTRACE_TRY(copy(chunks.front())); // the configuration
    VTRACE_TRY(put(file, ChunkType::dropped, dropped_.size(), encode_dropped(dropped_)));
    VTRACE_TRY(put(file, ChunkType::windows, window_begins_.size(), encode_windows(window_begins_)));
    VTRACE_TRY(put_pages(file));
    VTRACE_TRY(put_mappings(file));
    VTRACE_TRY(put_console(file));
    for (size_t i = 1; i < chunks.size(); ++i)
        if (!replaced_[i])
            VTRACE_TRY(copy(chunks[i]));
    return {};
}

} // namespace

TrimPlan plan_trim(std::span<const IndexEntry> chunks, uint64_t branches) {
    TrimPlan plan;
    size_t i = chunks.size();
    for (uint64_t kept = 0; i > 0 && kept < branches;) {
        const ChunkHeader& header = chunks[--i].header;
        kept += header.branches;
        plan.kept_bytes += chunk_file_bytes(header);
    }
    plan.first_kept = i;
    while (i > 0) {
        const ChunkHeader& header = chunks[--i].header;
        plan.old_bytes += chunk_file_bytes(header);
        plan.drops = plan.drops || is_type(header, ChunkType::branches);
    }
    return plan;
}

Result<> trim(ChunkFile& file, const TrimPlan& plan, std::span<const uint64_t> user_entered,
              std::vector<DroppedStart>& dropped, int compression) {
    auto successor = file.create_successor(static_cast<unsigned>(dropped.size()), TraceVersion::parts);
    if (!successor)
        return Unexpected(std::move(successor.error()));
    Trimmer trimmer(file, plan, dropped, compression);
    const auto dropped_now = trimmer.count_dropped(user_entered);
    VTRACE_TRY(trimmer.write_to(*successor));
    VTRACE_TRY(file.replace_by(std::move(*successor)));
    dropped = dropped_now;
    return {};
}

} // namespace vtrace
