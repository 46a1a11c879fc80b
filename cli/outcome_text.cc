#include "cli/outcome_text.h"

#include <fmt/format.h>

#include "decode/text.h"

namespace vtrace::cli {

std::string outcome_text(const std::optional<nlohmann::json>& outcome) {
    if (!outcome)
        return "unknown: the recording was not completed";
    std::string text = "unknown";
    if (!outcome->is_object())
        return text;
    if (auto kind = outcome->find("outcome"); kind != outcome->end() && kind->is_string())
        text = printable(kind->get_ref<const std::string&>());
    if (auto code = outcome->find("exit_code"); code != outcome->end() && code->is_number_integer())
        text += fmt::format(" {}", code->get<int64_t>());
    if (auto detail = outcome->find("detail");
        detail != outcome->end() && detail->is_string() && !detail->get_ref<const std::string&>().empty())
        text += ": " + printable(detail->get_ref<const std::string&>());
    return text;
}

} // namespace vtrace::cli
