// JSON lines: one object a branch.
#include <iterator>
#include <unordered_map>

#include <nlohmann/json.hpp>

#include "decode/branch_stream.h"
#include "decode/export/export.h"

namespace vtrace {
namespace {

constexpr size_t buffer_bytes = 1u << 16;
constexpr size_t max_names = 1u << 16;

/// "memcpy+0x12" in quotes, or null; remembered.
class QuotedNames {
  public:
    explicit QuotedNames(const ExportSource& source) : source_(source) {}

    const std::string& of(uint64_t address, Privilege privilege) {
        const uint64_t key = address << 1 | (privilege == Privilege::user);
        if (auto known = known_.find(key); known != known_.end())
            return known->second;
        if (known_.size() >= max_names)
            known_.clear();
        const SymbolTable& table = privilege == Privilege::user ? source_.user_symbols : source_.symbols;
        std::string text = "null";
        if (table.find(address)) // a name is the guest's to choose: what is not UTF-8 in it becomes U+FFFD
            text =
                nlohmann::json(table.describe(address)).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
        return known_.emplace(key, std::move(text)).first->second;
    }

  private:
    const ExportSource& source_;
    std::unordered_map<uint64_t, std::string> known_;
};

void append(const StreamBranch& branch, QuotedNames& names, std::string& out) {
    const TraceRecord& record = branch.record;
    auto to = std::back_inserter(out);
    fmt::format_to(to, R"({{"cpu":{},"number":{},"from":"{:#x}","to":"{:#x}","kind":"{}","privilege":"{}")",
                   record.vcpu, record.number, record.from, record.to,
                   branch_class_name(branch.instruction.branch_class),
                   branch.from_privilege == Privilege::user ? "user" : "kernel");
    fmt::format_to(to, R"(,"from_symbol":{})", names.of(record.from, branch.from_privilege));
    fmt::format_to(to, R"(,"to_symbol":{},"instructions":{})", names.of(record.to, branch.to_privilege),
                   branch.instructions);
    if (branch.delivered())
        fmt::format_to(to, R"(,"vector":{})", record.vector);
    else if (branch.instruction.branch_class == BranchClass::int_n)
        fmt::format_to(to, R"(,"vector":{})", branch.instruction.vector);
    if (record.kind == ds::BtsKind::exception)
        fmt::format_to(to, R"(,"error_code":{})", record.error_code);
    if (branch.space)
        fmt::format_to(to, R"(,"page_table":"{:#x}")", branch.space);
    if (branch.event_time)
        fmt::format_to(to, R"(,"time_ns":{})", *branch.event_time);
    out += "}\n";
}

} // namespace

Result<ExportNotes> export_jsonl(const ExportSource& source, ExportSink& sink) {
    QuotedNames names(source);
    std::string buffer;
    for (unsigned vcpu = source.first_vcpu(); vcpu < source.end_vcpu(); ++vcpu) {
        BranchStream stream(source.reader, vcpu, source.first, source.last);
        while (const StreamBranch* branch = sink.closed() ? nullptr : stream.next()) {
            append(*branch, names, buffer);
            if (buffer.size() >= buffer_bytes) {
                sink.write(buffer);
                buffer.clear();
            }
        }
    }
    sink.write(buffer);
    return ExportNotes{};
}

} // namespace vtrace
