// CodeLines: the lines of a code page that are known, without the many that are not.
//
// A page of code is told line by line as it first runs: a kernel executes less than half of its text. A line of zeros
// stands for "not known"; code of 64 zero bytes is the one thing that a trace can't tell from that.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

namespace vtrace {

struct CodeLines {
    static constexpr size_t line_bytes = 64;
    static constexpr size_t page_bytes = 4096;
    static_assert(page_bytes / line_bytes == 64);

    uint64_t mask = 0;          // bit i: line i is known
    std::vector<uint8_t> bytes; // of the known lines, ascending

    CodeLines() = default;
    /// The lines of a page that aren't zero.
    explicit CodeLines(std::span<const uint8_t, page_bytes> page) {
        for (unsigned line = 0; line < 64; ++line) {
            const uint8_t* from = &page[line * line_bytes];
            if (is_empty(from))
                continue;
            mask |= uint64_t{1} << line;
            bytes.insert(bytes.end(), from, from + line_bytes);
        }
    }

    static bool is_empty(const uint8_t* line) {
        static constexpr uint8_t zeros[line_bytes] = {};
        return std::memcmp(line, zeros, line_bytes) == 0;
    }

    /// Adds these lines to a page unless one of them is there with other bytes: then false, and nothing is added.
    bool join(std::span<uint8_t, page_bytes> page) const {
        const auto each = [&](auto function) {
            const uint8_t* from = bytes.data();
            for (uint64_t left = mask; left; left &= left - 1, from += line_bytes)
                if (!function(&page[std::countr_zero(left) * line_bytes], from))
                    return false;
            return true;
        };
        if (!each([](const uint8_t* to, const uint8_t* from) {
                return is_empty(to) || std::memcmp(to, from, line_bytes) == 0;
            }))
            return false;
        return each([](uint8_t* to, const uint8_t* from) {
            std::memcpy(to, from, line_bytes);
            return true;
        });
    }
};

} // namespace vtrace
