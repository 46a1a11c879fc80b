// How a run ended, in words. The keys of the outcome that `record` writes, all optional:
//   outcome    "power-off", "panic", "triple-fault", "hang", "limit", "interrupted", "reset", "guest-exit", ...
//   exit_code  a number: what the guest wrote to the debug-exit port
//   detail     a sentence fragment: more about it
#pragma once

#include <optional>
#include <string>

#include <nlohmann/json.hpp>

namespace vtrace::cli {

/// "power-off", "guest-exit 3", "panic: Attempted to kill init" ...; without an outcome, that the recording did not
/// end.
std::string outcome_text(const std::optional<nlohmann::json>& outcome);

} // namespace vtrace::cli
