// Text for people: guests' output made harmless, numbers made readable.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace vtrace {

/// The last `count` lines of a guest's console output, in order, without empty ones at the end. Control characters and
/// terminal escape sequences are taken out: what a guest writes must not reach the user's terminal as commands.
std::vector<std::string> last_lines(std::string_view console, size_t count);

/// One line, printable: control characters become "?". Bytes of 0x80 and above stay (UTF-8).
std::string printable(std::string_view text);

/// 1234567 -> "1,234,567".
std::string grouped(uint64_t number);

/// 3412345678 -> "3.412 s"; below a second "512.3 ms", "12.3 us", "7 ns".
std::string duration(uint64_t nanoseconds);

/// 123456789 -> "117.7 MiB".
std::string byte_size(uint64_t bytes);

/// 12.3 for 123 of 1000; 0 where the whole is 0.
double percent(uint64_t part, uint64_t whole);

} // namespace vtrace
