#include "decode/codec_side.h"

#include <algorithm>
#include <cassert>
#include <unordered_map>

#include "decode/codec_bytes.h"

namespace vtrace {

namespace {

std::vector<uint8_t> to_vector(const ByteWriter& out) {
    return {out.view().begin(), out.view().end()};
}

/// Places are written as differences to the one before.
class PlaceWriter {
  public:
    void put(ByteWriter& out, const SidePlace& place) {
        out.varint(place.order - last_.order);
        out.varint(place.vcpu);
        out.varint(zigzag(place.position - last_.position));
        last_ = place;
    }

  private:
    SidePlace last_;
};

class PlaceReader {
  public:
    SidePlace get(ByteReader& in) {
        last_.order += in.varint();
        last_.vcpu = static_cast<uint32_t>(in.varint());
        last_.position += unzigzag(in.varint());
        return last_;
    }

  private:
    SidePlace last_;
};

std::string_view text(std::span<const uint8_t> bytes) {
    return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

Unexpected damaged(const char* what) {
    return fail("the {} in it do not add up to its size", what);
}

} // namespace

std::vector<uint8_t> encode_code_pages(std::span<const CodePage> pages, std::span<const uint8_t> bytes) {
    assert(bytes.size() == pages.size() * code_page_bytes);
    ByteWriter places;
    PlaceWriter place;
    uint64_t last_frame = 0;
    std::vector<uint8_t> contents(bytes.begin(), bytes.end());
    std::unordered_map<uint64_t, size_t> versions; // gpa -> index of its last version
    for (size_t i = 0; i < pages.size(); ++i) {
        const uint64_t frame = pages[i].gpa / code_page_bytes;
        const auto [earlier, fresh] = versions.try_emplace(pages[i].gpa, i);
        place.put(places, pages[i].place);
        places.varint(zigzag(frame - last_frame));
        places.byte(!fresh);
        last_frame = frame;
        if (!fresh) {
            for (size_t b = 0; b < code_page_bytes; ++b)
                contents[i * code_page_bytes + b] ^= bytes[earlier->second * code_page_bytes + b];
            earlier->second = i;
        }
    }
    ByteWriter out;
    out.bytes(contents);
    out.bytes(places.view());
    return to_vector(out);
}

Result<DecodedCodePages> decode_code_pages(std::span<const uint8_t> payload, uint32_t count) {
    ByteReader in(payload);
    DecodedCodePages result;
    const auto contents = in.bytes(uint64_t{count} * code_page_bytes);
    if (in.failed() || count > max_chunk_entries || in.left() < count)
        return damaged("code pages");
    result.bytes.assign(contents.begin(), contents.end());
    result.pages.reserve(count);
    PlaceReader place;
    uint64_t frame = 0;
    std::unordered_map<uint64_t, size_t> versions;
    for (size_t i = 0; i < count; ++i) {
        CodePage page{.place = place.get(in), .gpa = 0};
        frame += unzigzag(in.varint());
        page.gpa = frame * code_page_bytes;
        const auto [earlier, fresh] = versions.try_emplace(page.gpa, i);
        if (in.byte() != !fresh || in.failed())
            return damaged("code pages");
        if (!fresh) {
            uint8_t* bytes = result.bytes.data() + i * code_page_bytes;
            const uint8_t* before = result.bytes.data() + earlier->second * code_page_bytes;
            for (size_t b = 0; b < code_page_bytes; ++b)
                bytes[b] ^= before[b];
            earlier->second = i;
        }
        result.pages.push_back(page);
    }
    if (in.left() != 0)
        return damaged("code pages");
    return result;
}

std::vector<uint8_t> encode_code_mappings(std::span<const CodeMapping> mappings) {
    ByteWriter out;
    PlaceWriter place;
    CodeMapping last;
    for (const auto& mapping : mappings) {
        place.put(out, mapping.place);
        out.varint(zigzag(mapping.cr3 - last.cr3));
        out.varint(zigzag((mapping.gva - last.gva) / code_page_bytes));
        out.varint(zigzag((mapping.gpa - last.gpa) / code_page_bytes));
        out.byte(mapping.global);
        last = mapping;
    }
    return to_vector(out);
}

Result<std::vector<CodeMapping>> decode_code_mappings(std::span<const uint8_t> payload, uint32_t count) {
    ByteReader in(payload);
    if (count > max_chunk_entries || in.left() < count)
        return damaged("code mappings");
    std::vector<CodeMapping> mappings;
    PlaceReader place;
    CodeMapping mapping;
    for (uint32_t i = 0; i < count && !in.failed(); ++i) {
        mapping.place = place.get(in);
        mapping.cr3 += unzigzag(in.varint());
        mapping.gva += unzigzag(in.varint()) * code_page_bytes;
        mapping.gpa += unzigzag(in.varint()) * code_page_bytes;
        mapping.global = in.byte() & 1;
        mappings.push_back(mapping);
    }
    if (in.failed() || in.left() != 0)
        return damaged("code mappings");
    return mappings;
}

std::vector<uint8_t> encode_console(std::span<const ConsolePiece> pieces) {
    ByteWriter out;
    uint64_t time = 0;
    for (const auto& piece : pieces) {
        out.varint(zigzag(piece.time - time));
        out.varint(piece.bytes.size());
        out.text(piece.bytes);
        time = piece.time;
    }
    return to_vector(out);
}

Result<std::vector<ConsolePiece>> decode_console(std::span<const uint8_t> payload, uint32_t count) {
    ByteReader in(payload);
    if (count > max_chunk_entries || in.left() < count)
        return damaged("pieces of console output");
    std::vector<ConsolePiece> pieces;
    uint64_t time = 0;
    for (uint32_t i = 0; i < count && !in.failed(); ++i) {
        time += unzigzag(in.varint());
        pieces.push_back({time, std::string(text(in.bytes(in.varint())))});
    }
    if (in.failed() || in.left() != 0)
        return damaged("pieces of console output");
    return pieces;
}

std::vector<uint8_t> encode_windows(std::span<const WindowBegin> windows) {
    ByteWriter out;
    uint64_t position = 0;
    for (const auto& window : windows) {
        out.varint(window.number);
        out.varint(window.vcpu);
        out.varint(zigzag(window.position - position));
        position = window.position;
    }
    return to_vector(out);
}

Result<std::vector<WindowBegin>> decode_windows(std::span<const uint8_t> payload, uint32_t count) {
    ByteReader in(payload);
    if (count > max_chunk_entries || in.left() < count)
        return damaged("windows");
    std::vector<WindowBegin> windows;
    WindowBegin window;
    for (uint32_t i = 0; i < count && !in.failed(); ++i) {
        window.number = in.varint();
        window.vcpu = static_cast<uint32_t>(in.varint());
        window.position += unzigzag(in.varint());
        windows.push_back(window);
    }
    if (in.failed() || in.left() != 0)
        return damaged("windows");
    return windows;
}

std::vector<uint8_t> encode_dropped(std::span<const DroppedStart> streams) {
    ByteWriter out;
    for (const auto& stream : streams) {
        out.varint(stream.branches);
        out.varint(stream.records);
        out.byte(stream.entered_user);
    }
    return to_vector(out);
}

Result<std::vector<DroppedStart>> decode_dropped(std::span<const uint8_t> payload, uint32_t count) {
    ByteReader in(payload);
    if (count > max_trace_vcpus)
        return damaged("streams");
    std::vector<DroppedStart> streams;
    for (uint32_t i = 0; i < count; ++i) {
        DroppedStart stream{.branches = in.varint(), .records = in.varint(), .entered_user = (in.byte() & 1) != 0};
        if (stream.branches > stream.records)
            return damaged("streams");
        streams.push_back(stream);
    }
    if (in.failed() || in.left() != 0)
        return damaged("streams");
    return streams;
}

std::vector<uint8_t> encode_symbols(std::span<const TraceSymbol> symbols) {
    ByteWriter out;
    uint64_t address = 0;
    std::string_view module;
    for (const auto& symbol : symbols) {
        out.varint(symbol.address - address);
        out.varint(symbol.size);
        out.byte(static_cast<uint8_t>(symbol.type));
        out.varint(symbol.name.size());
        out.text(symbol.name);
        // 0: the module of the symbol before; else its length + 1 and its name.
        if (symbol.module == module) {
            out.varint(0);
        } else {
            out.varint(symbol.module.size() + 1);
            out.text(symbol.module);
        }
        address = symbol.address;
        module = symbol.module;
    }
    return to_vector(out);
}

Result<std::vector<TraceSymbol>> decode_symbols(std::span<const uint8_t> payload, uint32_t count) {
    ByteReader in(payload);
    if (count > max_chunk_entries || in.left() < count)
        return damaged("symbols");
    std::vector<TraceSymbol> symbols;
    uint64_t address = 0;
    std::string_view module; // into the payload
    for (uint32_t i = 0; i < count && !in.failed(); ++i) {
        TraceSymbol symbol;
        symbol.address = address += in.varint();
        symbol.size = in.varint();
        symbol.type = static_cast<char>(in.byte());
        symbol.name = text(in.bytes(in.varint()));
        if (const uint64_t length = in.varint(); length != 0)
            module = text(in.bytes(length - 1));
        // A long name that many symbols share would multiply: kernel module names have at most 55 characters.
        if (module.size() > 255)
            return damaged("symbols");
        symbol.module = module;
        symbols.push_back(std::move(symbol));
    }
    if (in.failed() || in.left() != 0)
        return damaged("symbols");
    return symbols;
}

} // namespace vtrace
