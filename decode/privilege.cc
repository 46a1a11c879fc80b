#include "decode/privilege.h"

#include <nlohmann/json.hpp>

namespace vtrace {

bool user_branches_only(const TraceReader& reader) {
    auto config = reader.config();
    if (!config || !config->is_object())
        return false;
    auto filter = config->find("filter");
    return filter != config->end() && filter->is_string() && *filter == "user";
}

bool entered_user_before(const TraceReader& reader, unsigned vcpu) {
    return user_branches_only(reader) || (vcpu < reader.vcpus() && reader.dropped()[vcpu].entered_user);
}

uint64_t first_user_branch(const TraceReader& reader, unsigned vcpu, uint64_t limit) {
    if (entered_user_before(reader, vcpu))
        return 0;
    RecordCursor cursor = reader.records(vcpu, 0, limit);
    while (const TraceRecord* record = cursor.next())
        if (enters_user(record->from, record->to))
            return record->number + 1;
    return limit;
}

} // namespace vtrace
