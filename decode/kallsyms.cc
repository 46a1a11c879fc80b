#include "decode/kallsyms.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <string>
#include <string_view>

namespace vtrace {
namespace {

// The generator's own limits, and ours against hostile memory: real kernels have 0.1 to 0.3 million symbols.
constexpr size_t token_count = 256;
constexpr size_t symbols_per_marker = 256;
constexpr size_t max_name = 512;             // KSYM_NAME_LEN, type character and terminator included
constexpr size_t max_encoded_name = 2 + 512; // length bytes, and at least one byte of output for each byte of input
constexpr uint32_t max_symbols = 1u << 20;
constexpr size_t max_name_bytes = 64u << 20;
constexpr uint64_t max_work = 1ull << 29; // bytes looked at beside the one pass: about a second
constexpr uint64_t lowest_kernel_address = 0xffff'8000'0000'0000;

constexpr size_t align8(size_t value) {
    return (value + 7) & ~size_t{7};
}

template <class T>
T load(const uint8_t* at) {
    T value;
    std::memcpy(&value, at, sizeof value);
    return value;
}

/// The searcher's view of one RAM range. All positions are offsets into it.
struct Region {
    std::span<const uint8_t> bytes;

    bool holds(size_t offset, size_t length) const { return offset <= bytes.size() && length <= bytes.size() - offset; }
    uint16_t u16(size_t offset) const { return load<uint16_t>(bytes.data() + offset); }
    uint32_t u32(size_t offset) const { return load<uint32_t>(bytes.data() + offset); }
    uint64_t u64(size_t offset) const { return load<uint64_t>(bytes.data() + offset); }
};

/// Work that look-alikes may cause.
struct Budget {
    uint64_t left = max_work;
    bool spend(uint64_t amount) {
        if (amount > left) {
            left = 0;
            return false;
        }
        left -= amount;
        return true;
    }
};

struct Tokens {
    size_t table; // offset of token_table
    size_t index; // offset of token_index
    std::array<std::string_view, token_count> text;
};

struct Names {
    size_t start; // offset of names
    uint32_t count;
};

struct Markers {
    size_t start;
    size_t count;
};

/// Does a token_index begin here? 256 numbers, rising from 0.
bool is_token_index(const Region& region, size_t index) {
    if (!region.holds(index, token_count * 2))
        return false;
    for (size_t i = 1; i < token_count; ++i)
        if (region.u16(index + 2 * i) <= region.u16(index + 2 * i - 2))
            return false;
    return true;
}

/// The token_table that ends before `index` (its length is not written anywhere: that of the last token is unknown).
std::optional<Tokens> find_token_table(const Region& region, size_t index, Budget& budget) {
    size_t last = region.u16(index + 2 * (token_count - 1));
    for (size_t distance = align8(last + 1); distance <= align8(last + max_name) && distance <= index; distance += 8) {
        Tokens tokens{index - distance, index, {}};
        bool fits = true;
        for (size_t i = 0; i < token_count && fits; ++i) {
            size_t begin = region.u16(index + 2 * i);
            size_t limit = i + 1 < token_count ? region.u16(index + 2 * i + 2) : distance;
            const auto* text = reinterpret_cast<const char*>(region.bytes.data()) + tokens.table + begin;
            size_t length = strnlen(text, limit - begin);
            // Each token ends exactly where the next one begins; the last one's padding is up to 7 zero bytes.
            bool ends = i + 1 < token_count ? length + 1 == limit - begin
                                            : length < limit - begin && align8(begin + length + 1) == distance;
            bool printable = std::all_of(text, text + length, [](unsigned char c) { return c > ' ' && c != 0x7f; });
            fits = ends && printable;
            tokens.text[i] = {text, length};
            if (!budget.spend(length + 1))
                return std::nullopt;
        }
        if (fits)
            return tokens;
    }
    return std::nullopt;
}

/// The markers that end at `end`, read backwards to the 0 that they begin with.
std::optional<Markers> markers_before(const Region& region, size_t end, Budget& budget) {
    uint64_t above = uint64_t{1} << 32;
    size_t count = 0;
    for (size_t at = end; at >= 4;) {
        at -= 4;
        uint32_t value = region.u32(at);
        if (value >= above || count > max_symbols / symbols_per_marker || !budget.spend(4))
            return std::nullopt;
        ++count;
        above = value;
        if (value == 0)
            return count >= 2 && at % 8 == 0 ? std::optional(Markers{at, count}) : std::nullopt;
    }
    return std::nullopt;
}

/// The markers that begin at `start`: a 0, and steps of 256 names.
std::optional<Markers> markers_at(const Region& region, size_t start, size_t limit, Budget& budget) {
    if (region.u32(start) != 0)
        return std::nullopt;
    size_t count = 1;
    uint32_t before = 0;
    for (size_t at = start + 4; at + 4 <= limit && budget.spend(4); at += 4, ++count) {
        uint32_t value = region.u32(at);
        if (value < before + 2 * symbols_per_marker || value > before + symbols_per_marker * max_encoded_name)
            break;
        before = value;
    }
    return count >= 2 ? std::optional(Markers{start, count}) : std::nullopt;
}

/// Length of the encoded name at `at`, and the bytes that its length takes; 0 when it can't be one.
struct EncodedName {
    size_t head = 0, length = 0;
};
EncodedName encoded_name(const Region& region, size_t at, size_t limit) {
    if (at >= limit)
        return {};
    size_t length = region.bytes[at], head = 1;
    if (length & 0x80) {
        if (at + 1 >= limit)
            return {};
        length = (length & 0x7f) | size_t{region.bytes[at + 1]} << 7;
        head = 2;
    }
    if (length == 0 || length > max_name || length > limit - at - head)
        return {};
    return {head, length};
}

/// Do `count` names begin at `start`, agree with the markers and end where the markers begin?
bool names_fit(const Region& region, size_t start, uint32_t count, const Markers& markers, Budget& budget) {
    size_t at = start;
    for (uint32_t i = 0; i < count; ++i) {
        if (i % symbols_per_marker == 0 && at - start != region.u32(markers.start + 4 * (i / symbols_per_marker)))
            return false;
        EncodedName name = encoded_name(region, at, markers.start);
        if (name.length == 0 || !budget.spend(name.head + name.length))
            return false;
        at += name.head + name.length;
    }
    return align8(at) == markers.start;
}

/// The names before the markers: num_syms lies 8 bytes before them, and nothing else says where they begin.
std::optional<Names> find_names(const Region& region, const Markers& markers, Budget& budget) {
    size_t last = region.u32(markers.start + 4 * (markers.count - 1));
    size_t highest_count = markers.count * symbols_per_marker;
    for (size_t tail = 8; tail <= align8(symbols_per_marker * max_encoded_name); tail += 8) {
        size_t distance = align8(last) + tail;
        if (distance + 8 > markers.start || !budget.spend(1))
            return std::nullopt;
        size_t start = markers.start - distance;
        uint32_t count = region.u32(start - 8);
        if (count > highest_count - symbols_per_marker && count <= highest_count && count <= max_symbols &&
            names_fit(region, start, count, markers, budget))
            return Names{start, count};
    }
    return std::nullopt;
}

/// Markers and names before token_table, with seqs_of_names between (6.2 and 6.3) or without.
std::optional<Names> find_names_before(const Region& region, const Tokens& tokens, Budget& budget) {
    for (size_t padding : {0, 4}) {
        if (tokens.table < padding + 8)
            continue;
        if (auto markers = markers_before(region, tokens.table - padding, budget))
            if (auto names = find_names(region, *markers, budget))
                return names;
    }
    size_t furthest = max_symbols * 3 + max_symbols / symbols_per_marker * 4;
    size_t lowest = tokens.table > furthest ? tokens.table - furthest : 0;
    for (size_t start = tokens.table; start >= lowest + 8;) {
        start -= 8;
        if (!budget.spend(1))
            return std::nullopt;
        auto markers = markers_at(region, start, tokens.table, budget);
        // The first of seqs_of_names may by chance look like one or two more of the markers.
        for (size_t drop = 0; markers && drop < 3 && markers->count >= 2; ++drop, --markers->count)
            if (auto names = find_names(region, *markers, budget))
                return names;
    }
    return std::nullopt;
}

struct Address {
    uint64_t value;
    bool absolute;
};

/// Addresses from the offsets at `offsets` and the base at `base`; nullopt when they can't be those of a kernel.
std::optional<std::vector<Address>> read_addresses(const Region& region, size_t offsets, size_t base, uint32_t count) {
    if (!region.holds(offsets, size_t{count} * 4) || !region.holds(base, 8))
        return std::nullopt;
    uint64_t relative_base = region.u64(base);
    if (relative_base < lowest_kernel_address)
        return std::nullopt;
    // CONFIG_KALLSYMS_ABSOLUTE_PERCPU: negative offsets are relative (base - 1 - offset), others absolute. Without it
    // all are relative and unsigned; then none is negative, as a kernel is smaller than 2 GiB.
    bool absolute_percpu = false;
    for (uint32_t i = 0; i < count && !absolute_percpu; ++i)
        absolute_percpu = static_cast<int32_t>(region.u32(offsets + 4 * i)) < 0;
    std::vector<Address> addresses;
    addresses.reserve(count);
    uint64_t before = 0;
    for (uint32_t i = 0; i < count; ++i) {
        uint32_t raw = region.u32(offsets + 4 * i);
        auto offset = static_cast<int32_t>(raw);
        bool absolute = absolute_percpu && offset >= 0;
        uint64_t value = absolute          ? raw
                         : absolute_percpu ? relative_base - 1 - static_cast<int64_t>(offset)
                                           : relative_base + raw;
        if (!absolute) {
            if (value < before || value < relative_base)
                return std::nullopt;
            before = value;
        }
        addresses.push_back({value, absolute});
    }
    return addresses;
}

/// Type character and name, expanded; false when it is too long to be one.
bool expand(const Region& region, size_t at, size_t length, const Tokens& tokens, std::string& text) {
    text.clear();
    for (size_t i = 0; i < length; ++i) {
        text += tokens.text[region.bytes[at + i]];
        if (text.size() >= max_name)
            return false;
    }
    return text.size() >= 2;
}

std::optional<std::vector<TraceSymbol>> read_symbols(const Region& region, const Tokens& tokens, const Names& names) {
    size_t offsets_length = align8(size_t{names.count} * 4);
    std::optional<std::vector<Address>> addresses;
    if (names.start >= 16 + offsets_length) // up to 6.3
        addresses = read_addresses(region, names.start - 16 - offsets_length, names.start - 16, names.count);
    if (!addresses) { // 6.4 on
        size_t offsets = tokens.index + 2 * token_count;
        addresses = read_addresses(region, offsets, offsets + offsets_length, names.count);
    }
    if (!addresses)
        return std::nullopt;

    std::vector<TraceSymbol> symbols;
    symbols.reserve(names.count);
    std::string text;
    size_t at = names.start, name_bytes = 0;
    for (const Address& address : *addresses) {
        EncodedName name = encoded_name(region, at, region.bytes.size());
        if (!expand(region, at + name.head, name.length, tokens, text) || (name_bytes += text.size()) > max_name_bytes)
            return std::nullopt;
        at += name.head + name.length;
        char type = address.absolute ? 'A' : text[0];
        symbols.push_back({address.value, 0, type, text.substr(1), {}});
    }
    std::stable_sort(symbols.begin(), symbols.end(),
                     [](const TraceSymbol& a, const TraceSymbol& b) { return a.address < b.address; });
    return symbols;
}

/// Does the guest, as it is now, find its banner where these symbols say that it is?
bool banner_found(const MemoryView& memory, const std::vector<TraceSymbol>& symbols) {
    constexpr std::string_view banner = "Linux version ";
    auto symbol = std::find_if(symbols.begin(), symbols.end(),
                               [](const TraceSymbol& candidate) { return candidate.name == "linux_banner"; });
    if (symbol == symbols.end())
        return false;
    std::optional<uint64_t> gpa = memory.translate(symbol->address);
    if (!gpa)
        return false;
    for (const RamRange& range : memory.ram)
        if (*gpa >= range.gpa && *gpa - range.gpa < range.bytes.size() &&
            range.bytes.size() - (*gpa - range.gpa) >= banner.size())
            return std::memcmp(range.bytes.data() + (*gpa - range.gpa), banner.data(), banner.size()) == 0;
    return false;
}

/// Calls found(index) for each place that may be a token_index, until it returns true.
template <class Found>
bool scan(const Region& region, Found found) {
    constexpr size_t line = 64;
    const uint8_t* bytes = region.bytes.data();
    size_t end = region.bytes.size() & ~(line - 1);
    for (size_t offset = 0; offset < end; offset += line) {
        uint64_t any = 0;
        for (size_t i = 0; i < line; i += 8)
            any |= load<uint64_t>(bytes + offset + i);
        if (any == 0)
            continue;
        for (size_t i = 0; i < line; i += 8) {
            uint64_t value = load<uint64_t>(bytes + offset + i);
            auto first = static_cast<uint16_t>(value >> 16), second = static_cast<uint16_t>(value >> 32),
                 third = static_cast<uint16_t>(value >> 48);
            if ((value & 0xffff) == 0 && first > 0 && second > first && third > second &&
                is_token_index(region, offset + i) && found(offset + i))
                return true;
        }
    }
    return false;
}

} // namespace

Result<std::vector<TraceSymbol>> find_kallsyms(const MemoryView& memory) {
    Budget budget;
    bool seen_tokens = false, seen_names = false;
    std::optional<std::vector<TraceSymbol>> best;
    for (const RamRange& range : memory.ram) {
        Region region{range.bytes};
        bool done = scan(region, [&](size_t index) {
            auto tokens = find_token_table(region, index, budget);
            if (!tokens)
                return budget.left == 0;
            seen_tokens = true;
            auto names = find_names_before(region, *tokens, budget);
            if (!names)
                return budget.left == 0;
            seen_names = true;
            auto symbols = read_symbols(region, *tokens, *names);
            if (!symbols)
                return !budget.spend(uint64_t{names->count} * 64);
            bool certain = !memory.translate || banner_found(memory, *symbols);
            if (certain || !best)
                best = std::move(symbols);
            return certain;
        });
        if (done)
            break;
    }
    if (best)
        return std::move(*best);
    if (budget.left == 0)
        return fail("cannot find the kernel's symbols in guest memory: gave up at too many things that look like them");
    if (seen_names)
        return fail("cannot read the kernel's symbols in guest memory: its names are there, but no table of addresses "
                    "in a layout known here (Linux 4.6 to 6.14)");
    if (seen_tokens)
        return fail("cannot read the kernel's symbols in guest memory: a kallsyms token table is there, but no names");
    return fail("cannot find the kernel's symbols in guest memory: no kallsyms tables there (not Linux, not yet "
                "decompressed, or built without CONFIG_KALLSYMS)");
}

} // namespace vtrace
