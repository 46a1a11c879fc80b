// Trigger: what begins or ends a traced window, as the command line's SPEC says it.
//
//   console:TEXT         the guest prints TEXT within one line (as ConsoleWatch finds it)
//   marker[:VALUE]       the guest writes VALUE, or anything, to its marker register (vmm/devices/marker.h)
//   time:500ms           guest time: of the machine for a begin, of the window for an end; s, ms, us or ns
//   instructions:N       retired instructions, likewise
//   symbol:NAME[+OFF]    a processor is about to execute there
//   address:0xHEX        the same, by linear address
//   end                  the end of the run; for an end only
//
// Numbers are decimal or, after 0x, hexadecimal; only address is always hexadecimal.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "ds/result.h"

namespace vtrace {

struct Trigger {
    enum class Kind : uint8_t { console, marker, time, instructions, symbol, address, end };
    Kind kind = Kind::end;
    std::string text = {};  // console: what to wait for, 1 to ConsoleWatch::max_text bytes; symbol: its name
    uint64_t value = 0;     // marker: 32 bits; time: ns, above 0; instructions: above 0; symbol: offset; address
    bool any_value = false; // marker without a VALUE

    bool operator==(const Trigger&) const = default;

    /// Whether a write of `written` to the marker register is it.
    bool matches_marker(uint32_t written) const { return kind == Kind::marker && (any_value || value == written); }
};

/// Parses a SPEC; `for_end` if it is to end a window. Error: which part is wrong, and what there could be.
Result<Trigger> parse_trigger(std::string_view spec, bool for_end);

/// The trigger as a SPEC that parses to the same.
std::string describe(const Trigger& trigger);

} // namespace vtrace
