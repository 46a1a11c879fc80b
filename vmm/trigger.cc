#include "vmm/trigger.h"

#include <algorithm>
#include <charconv>
#include <limits>
#include <optional>

#include "vmm/console_watch.h"

namespace vtrace {
namespace {

using Kind = Trigger::Kind;

struct KindName {
    Kind kind;
    std::string_view name;
    std::string_view example;
};
constexpr KindName kinds[] = {
    {Kind::console, "console", "console:TEXT"},
    {Kind::marker, "marker", "marker or marker:VALUE"},
    {Kind::time, "time", "time:500ms"},
    {Kind::instructions, "instructions", "instructions:1000000"},
    {Kind::symbol, "symbol", "symbol:NAME+0x10"},
    {Kind::address, "address", "address:0xffffffff81000000"},
    {Kind::end, "end", "end"},
};

struct Unit {
    std::string_view name;
    uint64_t nanoseconds;
};
constexpr Unit units[] = {{"ns", 1}, {"us", 1'000}, {"ms", 1'000'000}, {"s", 1'000'000'000}};

const KindName& find_kind(Kind kind) {
    return *std::find_if(std::begin(kinds), std::end(kinds), [kind](const KindName& k) { return k.kind == kind; });
}

/// All of `text` as a number of this base, or none.
std::optional<uint64_t> parse_digits(std::string_view text, int base) {
    uint64_t value = 0;
    const auto [rest, error] = std::from_chars(text.data(), text.data() + text.size(), value, base);
    if (error != std::errc() || rest != text.data() + text.size())
        return {};
    return value;
}

constexpr bool has_hex_prefix(std::string_view text) {
    return text.starts_with("0x") || text.starts_with("0X");
}

std::optional<uint64_t> parse_number(std::string_view text) {
    return has_hex_prefix(text) ? parse_digits(text.substr(2), 16) : parse_digits(text, 10);
}

Unexpected wrong(std::string_view spec, std::string_view why) {
    return fail("'{}': {}", spec, why);
}

/// "1.5s" in nanoseconds, exactly: more digits than the unit has are refused.
Result<uint64_t> parse_time(std::string_view spec, std::string_view text) {
    const size_t end = std::min(text.find_first_not_of("0123456789."), text.size());
    const std::string_view number = text.substr(0, end), unit_name = text.substr(end);
    const Unit* unit =
        std::find_if(std::begin(units), std::end(units), [&](const Unit& u) { return u.name == unit_name; });
    if (unit == std::end(units))
        return wrong(spec, "a time ends in s, ms, us or ns, such as 1.5s or 200us");
    const size_t point = std::min(number.find('.'), number.size());
    const std::string_view whole_text = number.substr(0, point);
    const std::string_view fraction_text = point < number.size() ? number.substr(point + 1) : std::string_view();
    const auto whole = parse_digits(whole_text, 10);
    if (!whole || (point < number.size() && !parse_digits(fraction_text, 10)))
        return wrong(spec, "a time is a number and its unit, such as 1.5s or 200us");

    constexpr uint64_t most = std::numeric_limits<uint64_t>::max() / 2; // room to count from any moment
    if (*whole > most / unit->nanoseconds)
        return wrong(spec, "that is more than 292 years");
    uint64_t total = *whole * unit->nanoseconds, place = unit->nanoseconds;
    for (char digit : fraction_text) {
        if (place == 1 && digit != '0')
            return wrong(spec, "time goes in nanoseconds, and this has parts of one");
        place = std::max<uint64_t>(place / 10, 1);
        total += static_cast<uint64_t>(digit - '0') * place;
    }
    if (total == 0)
        return wrong(spec, "the time must be more than none");
    return total;
}

Result<Trigger> parse_console(std::string_view spec, std::string_view text) {
    if (text.empty())
        return wrong(spec, "which text? console:TEXT waits for what the guest prints");
    if (text.size() > ConsoleWatch::max_text)
        return fail("'console:...': the text has {} bytes, but may have at most {}", text.size(),
                    ConsoleWatch::max_text);
    if (text.find_first_of("\r\n") != std::string_view::npos)
        return wrong("console:...", "the text must be within one line");
    return Trigger{.kind = Kind::console, .text = std::string(text)};
}

Result<Trigger> parse_marker(std::string_view spec, std::string_view text) {
    const auto value = parse_number(text);
    if (!value || *value > std::numeric_limits<uint32_t>::max())
        return wrong(spec, "a marker's value is a number of 32 bits, such as 7 or 0x1f");
    return Trigger{.kind = Kind::marker, .text = {}, .value = *value};
}

Result<Trigger> parse_instructions(std::string_view spec, std::string_view text) {
    const auto value = parse_number(text);
    if (!value || *value == 0)
        return wrong(spec, "instructions: wants a number above 0");
    return Trigger{.kind = Kind::instructions, .text = {}, .value = *value};
}

Result<Trigger> parse_symbol(std::string_view spec, std::string_view text) {
    const size_t plus = text.rfind('+');
    Trigger trigger{.kind = Kind::symbol, .text = std::string(text.substr(0, plus))};
    if (trigger.text.empty())
        return wrong(spec, "which symbol? for example symbol:do_sys_openat2 or symbol:schedule+0x10");
    if (plus != std::string_view::npos) {
        const auto offset = parse_number(text.substr(plus + 1));
        if (!offset)
            return wrong(spec, "the offset after '+' is no number; 0x stands before a hexadecimal one");
        trigger.value = *offset;
    }
    return trigger;
}

Result<Trigger> parse_address(std::string_view spec, std::string_view text) {
    const auto value = has_hex_prefix(text) ? parse_digits(text.substr(2), 16) : std::nullopt;
    if (!value)
        return wrong(spec, "an address is hexadecimal after 0x, at most 16 digits");
    const bool canonical = static_cast<uint64_t>(static_cast<int64_t>(*value << 16) >> 16) == *value;
    if (!canonical)
        return wrong(spec, "no processor executes at an address that isn't canonical");
    return Trigger{.kind = Kind::address, .text = {}, .value = *value};
}

/// How many single-character changes lead from one word to the other.
size_t distance(std::string_view a, std::string_view b) {
    std::string row;
    for (size_t j = 0; j <= b.size(); ++j)
        row += static_cast<char>(j);
    for (size_t i = 1; i <= a.size(); ++i) {
        size_t diagonal = i - 1;
        row[0] = static_cast<char>(i);
        for (size_t j = 1; j <= b.size(); ++j) {
            const size_t above = static_cast<size_t>(row[j]), left = static_cast<size_t>(row[j - 1]);
            row[j] = static_cast<char>(std::min({above + 1, left + 1, diagonal + (a[i - 1] != b[j - 1])}));
            diagonal = above;
        }
    }
    return static_cast<size_t>(row[b.size()]);
}

Unexpected unknown_kind(std::string_view spec, std::string_view name, bool for_end) {
    constexpr size_t longest = 20, near = 2;
    std::string all;
    for (const KindName& kind : kinds) {
        if (kind.kind == Kind::end && !for_end)
            continue;
        if (name.size() <= longest && distance(name, kind.name) <= near)
            return fail("'{}': there is no '{}'; is '{}' meant?", spec, name, kind.name);
        all += (all.empty() ? "" : ", ") + std::string(kind.name);
    }
    return fail("'{}': must begin with one of {}, for example console:TEXT", spec, all);
}

} // namespace

Result<Trigger> parse_trigger(std::string_view spec, bool for_end) {
    const size_t colon = spec.find(':');
    const std::string_view name = spec.substr(0, colon);
    const auto* const kind =
        std::find_if(std::begin(kinds), std::end(kinds), [name](const KindName& k) { return k.name == name; });
    if (kind == std::end(kinds))
        return unknown_kind(spec, name, for_end);
    if (colon == std::string_view::npos) {
        if (kind->kind == Kind::marker)
            return Trigger{.kind = Kind::marker, .text = {}, .value = 0, .any_value = true};
        if (kind->kind != Kind::end)
            return fail("'{}': something is missing after it, for example {}", spec, kind->example);
        if (!for_end)
            return wrong(spec, "a window can't begin at the end of the run");
        return Trigger{};
    }
    const std::string_view text = spec.substr(colon + 1);
    switch (kind->kind) {
    case Kind::console:
        return parse_console(spec, text);
    case Kind::marker:
        return parse_marker(spec, text);
    case Kind::time: {
        auto time = parse_time(spec, text);
        if (!time)
            return Unexpected(std::move(time.error()));
        return Trigger{.kind = Kind::time, .text = {}, .value = *time};
    }
    case Kind::instructions:
        return parse_instructions(spec, text);
    case Kind::symbol:
        return parse_symbol(spec, text);
    case Kind::address:
        return parse_address(spec, text);
    case Kind::end:
        break;
    }
    return wrong(spec, "nothing can follow 'end'");
}

std::string describe(const Trigger& trigger) {
    const std::string_view name = find_kind(trigger.kind).name;
    switch (trigger.kind) {
    case Kind::console:
        return fmt::format("{}:{}", name, trigger.text);
    case Kind::marker:
        return trigger.any_value ? std::string(name) : fmt::format("{}:{}", name, trigger.value);
    case Kind::time: {
        const Unit* unit = std::begin(units);
        for (const Unit& larger : units)
            if (trigger.value % larger.nanoseconds == 0)
                unit = &larger;
        return fmt::format("{}:{}{}", name, trigger.value / unit->nanoseconds, unit->name);
    }
    case Kind::instructions:
        return fmt::format("{}:{}", name, trigger.value);
    case Kind::symbol:
        return trigger.value ? fmt::format("{}:{}+{:#x}", name, trigger.text, trigger.value)
                             : fmt::format("{}:{}", name, trigger.text);
    case Kind::address:
        return fmt::format("{}:{:#x}", name, trigger.value);
    case Kind::end:
        break;
    }
    return std::string(name);
}

} // namespace vtrace
