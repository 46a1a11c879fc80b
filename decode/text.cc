#include "decode/text.h"

#include <algorithm>
#include <array>

#include <fmt/format.h>

namespace vtrace {
namespace {

constexpr char escape = '\x1b';

/// Takes out ECMA-48 escape sequences: ESC [ parameters final, ESC ] string BEL, and ESC with one more character.
std::string without_escapes(std::string_view text) {
    std::string plain;
    for (size_t i = 0; i < text.size(); ++i) {
        if (text[i] != escape) {
            plain += text[i];
            continue;
        }
        if (++i >= text.size())
            break;
        if (text[i] == '[') {
            do
                ++i;
            while (i < text.size() && (text[i] < 0x40 || text[i] > 0x7e));
        } else if (text[i] == ']') {
            while (i < text.size() && text[i] != '\a' && text[i] != escape)
                ++i;
        }
    }
    return plain;
}

} // namespace

std::string printable(std::string_view text) {
    std::string result(text);
    for (char& c : result)
        if (static_cast<unsigned char>(c) < ' ' || c == 0x7f)
            c = c == '\t' ? ' ' : '?';
    return result;
}

std::vector<std::string> last_lines(std::string_view console, size_t count) {
    constexpr size_t longest = 4096; // bytes of a line: guests that never end theirs
    // A tail that surely holds the lines wanted, so that a console of many megabytes is not copied.
    if (size_t most = (count + 1) * longest; console.size() > most)
        console.remove_prefix(console.size() - most);
    std::string text = without_escapes(console);
    std::erase(text, '\r');
    std::vector<std::string> lines;
    for (size_t begin = 0; begin < text.size();) {
        size_t end = std::min(text.find('\n', begin), text.size());
        lines.push_back(printable(std::string_view(text).substr(begin, std::min(end - begin, longest))));
        begin = end + 1;
    }
    while (!lines.empty() && lines.back().find_first_not_of(' ') == std::string::npos)
        lines.pop_back();
    if (lines.size() > count)
        lines.erase(lines.begin(), lines.end() - static_cast<ptrdiff_t>(count));
    return lines;
}

std::string grouped(uint64_t number) {
    std::string digits = std::to_string(number);
    for (size_t at = digits.size(); at > 3;)
        digits.insert(at -= 3, 1, ',');
    return digits;
}

std::string duration(uint64_t nanoseconds) {
    auto value = static_cast<double>(nanoseconds);
    if (nanoseconds < 1'000)
        return fmt::format("{} ns", nanoseconds);
    if (nanoseconds < 1'000'000)
        return fmt::format("{:.1f} us", value / 1e3);
    if (nanoseconds < 1'000'000'000)
        return fmt::format("{:.1f} ms", value / 1e6);
    return fmt::format("{:.3f} s", value / 1e9);
}

std::string byte_size(uint64_t bytes) {
    constexpr std::array<const char*, 5> units = {"KiB", "MiB", "GiB", "TiB", "PiB"};
    if (bytes < 1024)
        return fmt::format("{} bytes", bytes);
    double value = static_cast<double>(bytes) / 1024;
    size_t unit = 0;
    for (; value >= 1024 && unit + 1 < units.size(); ++unit)
        value /= 1024;
    return fmt::format("{:.1f} {}", value, units[unit]);
}

double percent(uint64_t part, uint64_t whole) {
    return whole == 0 ? 0 : 100.0 * static_cast<double>(part) / static_cast<double>(whole);
}

} // namespace vtrace
