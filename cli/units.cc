#include "cli/units.h"

#include <algorithm>
#include <charconv>
#include <span>
#include <string_view>

#include <fmt/format.h>

namespace vtrace::cli {
namespace {

struct Unit {
    std::string_view name;
    uint64_t factor;
};
constexpr Unit count_units[] = {{"", 1},          {"k", 1'000},         {"K", 1'000},
                                {"M", 1'000'000}, {"G", 1'000'000'000}, {"T", 1'000'000'000'000}};
constexpr Unit time_units[] = {{"", 1}, {"ns", 1}, {"us", 1'000}, {"ms", 1'000'000}, {"s", 1'000'000'000}};
constexpr Unit size_units[] = {{"", 1},           {"k", 1 << 10},    {"K", 1 << 10},
                               {"M", 1ull << 20}, {"G", 1ull << 30}, {"T", 1ull << 40}};

/// `what` is expected.
CLI::Validator number_with_unit(std::span<const Unit> units, const char* what) {
    return CLI::Validator(
        [units, what](std::string& text) {
            uint64_t number = 0;
            const auto [rest, error] = std::from_chars(text.data(), text.data() + text.size(), number);
            const std::string_view name(rest, text.data() + text.size());
            const auto unit = std::find_if(units.begin(), units.end(), [&](const Unit& u) { return u.name == name; });
            if (error == std::errc::result_out_of_range ||
                (error == std::errc() && unit != units.end() && number > UINT64_MAX / unit->factor))
                return fmt::format("'{}' is too large", text);
            if (error != std::errc() || unit == units.end())
                return fmt::format("'{}' is not {}", text, what);
            text = std::to_string(number * unit->factor);
            return std::string();
        },
        "");
}

} // namespace

CLI::Validator count_with_unit() {
    return number_with_unit(count_units, "a count: a number, with k, M, G or T for powers of 1000");
}
CLI::Validator size_with_unit() {
    return number_with_unit(size_units, "a size: a number, with K, M, G or T for powers of 1024");
}
CLI::Validator time_with_unit() { return number_with_unit(time_units, "a time: a number, with ns, us, ms or s"); }

} // namespace vtrace::cli
