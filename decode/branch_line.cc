#include "decode/branch_line.h"

#include <algorithm>
#include <array>
#include <iterator>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

namespace vtrace {
namespace {

constexpr size_t max_names = 1u << 16;

std::string hex(uint64_t value) {
    return fmt::format("{:#x}", value);
}

std::string kind_text(const TraceRecord& record, const BranchInstruction& branch) {
    switch (branch.branch_class) {
    case BranchClass::interrupt:
        return fmt::format("interrupt:{:#x}", record.vector);
    case BranchClass::exception: {
        std::string_view name = exception_name(record.vector);
        std::string text = name.empty() ? fmt::format("exception:{:#x}", record.vector) : std::string(name);
        if (record.error_code)
            text += fmt::format(":{:#x}", record.error_code);
        return text;
    }
    case BranchClass::int_n:
        return fmt::format("int:{:#x}", branch.vector);
    default:
        break;
    }
    std::string text(branch_class_name(branch.branch_class));
    std::replace(text.begin(), text.end(), ' ', '-');
    return text;
}

} // namespace

BranchInstruction BranchDescriber::classify(const TraceRecord& record, const StreamState& state) {
    std::array<uint8_t, max_instruction> code;
    size_t known = 0;
    if (record.kind == ds::BtsKind::branch)
        known = reader_.code_at(record.vcpu, record.position, state.cr3.value_or(0), record.from, code);
    return classifier_.classify(std::span(code).first(known), to_bts_record(record));
}

const std::string& BranchDescriber::symbol(uint64_t address) {
    if (auto known = names_.find(address); known != names_.end())
        return known->second;
    if (names_.size() >= max_names)
        names_.clear();
    return names_.emplace(address, symbols_.find(address) ? symbols_.describe(address) : std::string()).first->second;
}

void BranchDescriber::append_text(const TraceRecord& record, const StreamState& state, std::string& line) {
    auto out = std::back_inserter(line);
    fmt::format_to(out, "{:>3} {:>11}  ", record.vcpu, record.number);
    if (record.kind == ds::BtsKind::time) {
        fmt::format_to(out, "time {} ns {} instructions", record.from, record.to);
        return;
    }
    if (record.kind == ds::BtsKind::cr3) {
        fmt::format_to(out, "cr3 {:#x}", record.from);
        return;
    }
    if (record.is_window()) {
        const std::string& at = symbol(record.from);
        fmt::format_to(out, "window {} {} at {:016x} {}", record.to,
                       record.kind == ds::BtsKind::window_begin ? "begins" : "ends", record.from, at.empty() ? "-" : at);
        return;
    }
    if (!record.is_branch()) {
        fmt::format_to(out, "event {:#x} {:#x} {:#x}", static_cast<unsigned>(record.kind), record.from, record.to);
        return;
    }
    // By value: the second look-up may move what the first one found.
    std::string from = symbol(record.from);
    const std::string& to = symbol(record.to);
    fmt::format_to(out, "{:016x} -> {:016x}  {:<14} {} -> {}", record.from, record.to,
                   kind_text(record, classify(record, state)), from.empty() ? "-" : from, to.empty() ? "-" : to);
}

void BranchDescriber::append_json(const TraceRecord& record, const StreamState& state, std::string& line) {
    nlohmann::ordered_json object = {{"cpu", record.vcpu}, {"number", record.number}};
    if (record.kind == ds::BtsKind::time) {
        object["event"] = "time";
        object["time_ns"] = record.from;
        object["retired"] = record.to;
    } else if (record.kind == ds::BtsKind::cr3) {
        object["event"] = "cr3";
        object["cr3"] = hex(record.from);
    } else if (record.is_window()) {
        object["event"] = record.kind == ds::BtsKind::window_begin ? "window_begin" : "window_end";
        object["window"] = record.to;
        object["at"] = hex(record.from);
    } else if (!record.is_branch()) {
        object["event"] = hex(static_cast<unsigned>(record.kind));
        object["from"] = hex(record.from);
        object["to"] = hex(record.to);
    } else {
        BranchInstruction branch = classify(record, state);
        object["from"] = hex(record.from);
        object["to"] = hex(record.to);
        object["kind"] = branch_class_name(branch.branch_class);
        if (const std::string& name = symbol(record.from); !name.empty())
            object["from_symbol"] = name;
        if (const std::string& name = symbol(record.to); !name.empty())
            object["to_symbol"] = name;
        bool delivered = record.kind == ds::BtsKind::interrupt || record.kind == ds::BtsKind::exception;
        if (delivered)
            object["vector"] = record.vector;
        else if (branch.branch_class == BranchClass::int_n)
            object["vector"] = branch.vector;
        if (record.kind == ds::BtsKind::exception)
            object["error_code"] = record.error_code;
    }
    // A name is the guest's to choose: what is not UTF-8 in it becomes U+FFFD.
    line += object.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
}

ds::BtsRecord to_bts_record(const TraceRecord& record) {
    return {record.from, record.to, ds::BtsFlags::make(record.kind, record.vector, record.error_code)};
}

Result<std::vector<std::string>> last_branches(const TraceReader& reader, const SymbolTable& symbols, unsigned vcpu,
                                               uint64_t count) {
    if (vcpu >= reader.info().vcpus.size())
        return fail("cannot show the last branches of vCPU {}: the trace has {}", vcpu, reader.info().vcpus.size());
    uint64_t end = reader.info().vcpus[vcpu].end_number;
    RecordCursor cursor = reader.records(vcpu, end - std::min(end, count), end);
    BranchDescriber describer(reader, symbols);
    std::vector<std::string> lines;
    while (const TraceRecord* record = cursor.next())
        describer.append_text(*record, cursor.state(), lines.emplace_back());
    return lines;
}

} // namespace vtrace
