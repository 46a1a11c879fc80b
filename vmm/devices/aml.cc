#include "vmm/devices/aml.h"

namespace vtrace::aml {
namespace {

// Opcodes and prefixes (20.3).
enum Op : uint8_t {
    ZeroOp = 0x00,
    OneOp = 0x01,
    NameOp = 0x08,
    BytePrefix = 0x0a,
    WordPrefix = 0x0b,
    DWordPrefix = 0x0c,
    StringPrefix = 0x0d,
    QWordPrefix = 0x0e,
    ScopeOp = 0x10,
    BufferOp = 0x11,
    PackageOp = 0x12,
    DualNamePrefix = 0x2e,
    ExtOpPrefix = 0x5b,
    DeviceOp = 0x82, // after ExtOpPrefix
    RootChar = 0x5c,
};
constexpr size_t segment_length = 4;

// Resource descriptors' tags, small ones with their length in the low bits (6.4.2, 6.4.3).
constexpr uint8_t irq_tag = 0x20 | 2, io_tag = 0x40 | 7, end_tag = 0x78 | 1;
constexpr uint8_t memory32_fixed_tag = 0x86, dword_space_tag = 0x87, word_space_tag = 0x88;

// Address space descriptors.
enum SpaceType : uint8_t { memory_space = 0, io_space = 1, bus_number_space = 2 };
constexpr uint8_t min_and_max_fixed = 1 << 2 | 1 << 3; // producer, positive decode
constexpr uint8_t memory_read_write = 1 << 0, memory_cacheable = 1 << 1, io_entire_range = 3;

void put(Term& out, uint64_t value, unsigned bytes) {
    for (unsigned i = 0; i < bytes; ++i)
        out.push_back(static_cast<uint8_t>(value >> 8 * i));
}

// `op`, PkgLength and the content; the length counts its own bytes (20.2.4).
Term with_length(std::initializer_list<uint8_t> op, const Term& content) {
    constexpr size_t one_byte_limit = 0x3f;
    Term out(op);
    const size_t size = content.size();
    if (size + 1 <= one_byte_limit) {
        put(out, size + 1, 1);
    } else {
        unsigned extra = 1; // bytes after the lead byte, which holds four bits of the length
        while (size + 1 + extra >= size_t{1} << (4 + 8 * extra))
            ++extra;
        const size_t length = size + 1 + extra;
        out.push_back(static_cast<uint8_t>(extra << 6 | (length & 0xf)));
        put(out, length >> 4, extra);
    }
    append(out, content);
    return out;
}

Term address_space(uint8_t tag, unsigned width, SpaceType type, uint8_t type_flags, uint64_t first, uint64_t last) {
    constexpr unsigned fields = 5; // granularity, minimum, maximum, translation, length
    Term out{tag};
    put(out, 3 + fields * width, 2);
    out.insert(out.end(), {type, min_and_max_fixed, type_flags});
    put(out, 0, width);
    put(out, first, width);
    put(out, last, width);
    put(out, 0, width);
    put(out, last - first + 1, width);
    return out;
}

} // namespace

void append(Term& to, const Term& what) {
    to.insert(to.end(), what.begin(), what.end());
}

Term sequence(std::initializer_list<Term> terms) {
    Term out;
    for (const Term& term : terms)
        append(out, term);
    return out;
}

Term name_string(std::string_view path) {
    Term out;
    if (!path.empty() && path.front() == '\\') {
        out.push_back(RootChar);
        path.remove_prefix(1);
    }
    const size_t dot = path.find('.');
    if (dot != std::string_view::npos)
        out.push_back(DualNamePrefix);
    const auto segment = [&out](std::string_view text) {
        for (size_t i = 0; i < segment_length; ++i)
            out.push_back(static_cast<uint8_t>(i < text.size() ? text[i] : '_'));
    };
    segment(path.substr(0, dot));
    if (dot != std::string_view::npos)
        segment(path.substr(dot + 1));
    return out;
}

Term integer(uint64_t value) {
    if (value <= 1)
        return {value ? OneOp : ZeroOp};
    Term out;
    if (value <= 0xff) {
        out.push_back(BytePrefix);
        put(out, value, 1);
    } else if (value <= 0xffff) {
        out.push_back(WordPrefix);
        put(out, value, 2);
    } else if (value <= 0xffff'ffff) {
        out.push_back(DWordPrefix);
        put(out, value, 4);
    } else {
        out.push_back(QWordPrefix);
        put(out, value, 8);
    }
    return out;
}

Term string(std::string_view text) {
    Term out{StringPrefix};
    out.insert(out.end(), text.begin(), text.end());
    out.push_back(0);
    return out;
}

Term eisa_id(std::string_view id) {
    const auto letter = [](char c) { return static_cast<uint32_t>(c - '@') & 0x1f; };
    const auto digit = [](char c) { return static_cast<uint32_t>(c <= '9' ? c - '0' : c - 'A' + 10); };
    const uint32_t big = letter(id[0]) << 26 | letter(id[1]) << 21 | letter(id[2]) << 16 | digit(id[3]) << 12 |
                         digit(id[4]) << 8 | digit(id[5]) << 4 | digit(id[6]);
    return integer(__builtin_bswap32(big));
}

Term package(const std::vector<Term>& elements) {
    Term content{static_cast<uint8_t>(elements.size())};
    for (const Term& element : elements)
        append(content, element);
    return with_length({PackageOp}, content);
}

Term package(std::initializer_list<Term> elements) {
    return package(std::vector<Term>(elements));
}

Term buffer(const Term& bytes) {
    Term content = integer(bytes.size());
    append(content, bytes);
    return with_length({BufferOp}, content);
}

Term name(std::string_view path, const Term& value) {
    return sequence({{NameOp}, name_string(path), value});
}

Term scope(std::string_view path, const Term& content) {
    return with_length({ScopeOp}, sequence({name_string(path), content}));
}

Term device(std::string_view path, const Term& content) {
    return with_length({ExtOpPrefix, DeviceOp}, sequence({name_string(path), content}));
}

Term io(uint16_t start, uint8_t length) {
    constexpr uint8_t decode_16 = 1, alignment = 1;
    Term out{io_tag, decode_16};
    put(out, start, 2);
    put(out, start, 2);
    out.insert(out.end(), {alignment, length});
    return out;
}

Term irq(unsigned line) {
    Term out{irq_tag};
    put(out, 1u << line, 2);
    return out;
}

Term memory32_fixed(uint32_t start, uint32_t length) {
    constexpr uint8_t read_write = 1;
    Term out{memory32_fixed_tag};
    put(out, 9, 2);
    out.push_back(read_write);
    put(out, start, 4);
    put(out, length, 4);
    return out;
}

Term bus_number_window(uint16_t first, uint16_t last) {
    return address_space(word_space_tag, 2, bus_number_space, 0, first, last);
}

Term io_window(uint16_t first, uint16_t last) {
    return address_space(word_space_tag, 2, io_space, io_entire_range, first, last);
}

Term memory_window(uint32_t first, uint32_t last, bool cacheable) {
    const auto flags = static_cast<uint8_t>(memory_read_write | (cacheable ? memory_cacheable : 0));
    return address_space(dword_space_tag, 4, memory_space, flags, first, last);
}

Term resource_template(std::initializer_list<Term> descriptors) {
    constexpr uint8_t checksum_unused = 0;
    Term bytes = sequence(descriptors);
    bytes.insert(bytes.end(), {end_tag, checksum_unused});
    return buffer(bytes);
}

} // namespace vtrace::aml
