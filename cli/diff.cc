// vtrace diff: where two recordings part, and what changed.
#include <map>
#include <memory>

#include <nlohmann/json.hpp>

#include "cli/output.h"
#include "cli/subcommand.h"
#include "decode/branch_line.h"
#include "decode/diff.h"
#include "decode/text.h"

namespace vtrace::cli {
namespace {

using Json = nlohmann::ordered_json;

struct Options {
    std::string path_a, path_b;
    DiffOptions diff;
    uint64_t context = 8;
    bool json = false;
};

/// A recording, opened, with what tells its branches in words.
struct Side {
    std::string path;
    TraceReader reader;
    SymbolTable symbols;

    static Result<Side> open(const std::string& path) {
        auto reader = TraceReader::open(path);
        if (!reader)
            return Unexpected(std::move(reader.error()));
        auto symbols = reader->symbols();
        if (!symbols)
            return Unexpected(std::move(symbols.error()));
        return Side{path, std::move(*reader), SymbolTable(std::move(*symbols))};
    }

    /// Lines of `vtrace dump`, or its JSON objects, for branches [first, last) of a vCPU.
    std::vector<std::string> lines(unsigned vcpu, uint64_t first, uint64_t last, bool json) const {
        std::vector<std::string> result;
        if (vcpu >= reader.vcpus())
            return result;
        BranchDescriber describer(reader, symbols);
        RecordCursor cursor = reader.records(vcpu, first, last);
        while (const TraceRecord* record = cursor.next()) {
            std::string& line = result.emplace_back();
            if (json)
                describer.append_json(*record, cursor.state(), line);
            else
                describer.append_text(*record, cursor.state(), line);
        }
        return result;
    }

    bool damaged() const { return !reader.damage().empty() || !reader.info().missing.empty(); }
};

/// A vCPU's first difference: the last branches in common, then how each goes on (nothing: it ends there).
struct Parting {
    std::vector<std::string> before, next_a, next_b;
};

Parting find_parting(const Side& a, const Side& b, const VcpuDiff& vcpu, uint64_t context, bool json) {
    const Difference& first = vcpu.listed.front();
    const uint64_t before = first.number_a - std::min(first.number_a, context);
    return {a.lines(vcpu.vcpu, before, first.number_a, json), a.lines(vcpu.vcpu, first.number_a, first.number_a + 1, json),
            b.lines(vcpu.vcpu, first.number_b, first.number_b + 1, json)};
}

std::string full_name(const FunctionDiff& function) {
    return printable(function.module.empty() ? function.name : fmt::format("{} [{}]", function.name, function.module));
}

void print_next(Output& out, char side, const std::vector<std::string>& next) {
    out.print("{} {}\n", side, next.empty() ? "(ends here)" : next.front());
}

void print_functions(Output& out, const std::string& title, const std::vector<FunctionDiff>& list, size_t count,
                     uint64_t FunctionDiff::*branches, uint64_t FunctionDiff::*entries) {
    if (!count)
        return;
    out.print("\n{}: {} functions\n{:>14} {:>12}  function\n", title, grouped(count), "branches", "entries");
    for (const FunctionDiff& function : list)
        out.print("{:>14} {:>12}  {}\n", grouped(function.*branches), grouped(function.*entries), full_name(function));
}

void print_text(Output& out, const Side& a, const Side& b, const TraceDiff& diff, uint64_t context) {
    out.print("A: {}\nB: {}\nCompared by {}\n", printable(a.path), printable(b.path),
              diff.by_symbol ? "function and offset" : "address");
    for (const VcpuDiff& vcpu : diff.vcpus) {
        if (vcpu.differences == 0) {
            out.print("cpu {}: the same, {} branches\n", vcpu.vcpu, grouped(vcpu.branches_a));
            continue;
        }
        out.print("\ncpu {}: {} differences; {} branches in A, {} in B, {} in common\n", vcpu.vcpu,
                  grouped(vcpu.differences), grouped(vcpu.branches_a), grouped(vcpu.branches_b), grouped(vcpu.common));
        const Parting parting = find_parting(a, b, vcpu, context, false);
        out.print("They part at branch {}:\n", vcpu.listed.front().number_a);
        for (const std::string& line : parting.before)
            out.print("  {}\n", line);
        print_next(out, 'A', parting.next_a);
        print_next(out, 'B', parting.next_b);
        out.print("\nDifferences of cpu {}, the first {} of {}:\n{:>14} {:>12} {:>14} {:>12}\n", vcpu.vcpu,
                  vcpu.listed.size(), grouped(vcpu.differences), "from A", "branches", "from B", "branches");
        for (const Difference& difference : vcpu.listed)
            out.print("{:>14} {:>12} {:>14} {:>12}\n", difference.number_a, grouped(difference.count_a),
                      difference.number_b, grouped(difference.count_b));
        if (!vcpu.aligned)
            out.print("The last difference does not end within {} branches: what follows was not compared.\n",
                      grouped(diff_window));
    }
    print_functions(out, "Only in A", diff.only_a, diff.only_a_count, &FunctionDiff::branches_a,
                    &FunctionDiff::entries_a);
    print_functions(out, "Only in B", diff.only_b, diff.only_b_count, &FunctionDiff::branches_b,
                    &FunctionDiff::entries_b);
    if (!diff.changed_count)
        return;
    out.print("\nIn both, with other counts: {} functions\n{:>14} {:>14} {:>12} {:>12}  function\n",
              grouped(diff.changed_count), "branches A", "branches B", "entries A", "entries B");
    for (const FunctionDiff& function : diff.changed)
        out.print("{:>14} {:>14} {:>12} {:>12}  {}\n", grouped(function.branches_a), grouped(function.branches_b),
                  grouped(function.entries_a), grouped(function.entries_b), full_name(function));
}

Json branches_json(const std::vector<std::string>& lines) {
    Json array = Json::array();
    for (const std::string& line : lines)
        array.push_back(Json::parse(line)); // made by append_json()
    return array;
}

Json functions_json(const std::vector<FunctionDiff>& list, size_t count) {
    Json functions = Json::array();
    for (const FunctionDiff& function : list)
        functions.push_back({{"name", function.name},
                             {"module", function.module},
                             {"branches_a", function.branches_a},
                             {"branches_b", function.branches_b},
                             {"entries_a", function.entries_a},
                             {"entries_b", function.entries_b}});
    return {{"count", count}, {"functions", std::move(functions)}};
}

Json to_json(const Side& a, const Side& b, const TraceDiff& diff, uint64_t context) {
    Json json = {{"a", a.path},
                 {"b", b.path},
                 {"same", diff.same()},
                 {"damaged", a.damaged() || b.damaged()},
                 {"compared_by", diff.by_symbol ? "symbol" : "address"},
                 {"vcpus", Json::array()}};
    for (const VcpuDiff& vcpu : diff.vcpus) {
        Json entry = {{"cpu", vcpu.vcpu},           {"branches_a", vcpu.branches_a},
                      {"branches_b", vcpu.branches_b}, {"common", vcpu.common},
                      {"differences", vcpu.differences}, {"aligned", vcpu.aligned},
                      {"parting", nullptr},         {"listed", Json::array()}};
        if (vcpu.differences) {
            const Parting parting = find_parting(a, b, vcpu, context, true);
            const auto next = [](const std::vector<std::string>& lines) {
                return lines.empty() ? Json(nullptr) : Json::parse(lines.front());
            };
            entry["parting"] = {{"before", branches_json(parting.before)},
                                {"a", next(parting.next_a)},
                                {"b", next(parting.next_b)}};
        }
        for (const Difference& difference : vcpu.listed)
            entry["listed"].push_back({{"first_a", difference.number_a},
                                       {"branches_a", difference.count_a},
                                       {"first_b", difference.number_b},
                                       {"branches_b", difference.count_b}});
        json["vcpus"].push_back(std::move(entry));
    }
    json["only_a"] = functions_json(diff.only_a, diff.only_a_count);
    json["only_b"] = functions_json(diff.only_b, diff.only_b_count);
    json["changed"] = functions_json(diff.changed, diff.changed_count);
    return json;
}

Result<ExitStatus> compare(const Options& options) {
    auto a = Side::open(options.path_a);
    if (!a)
        return Unexpected(std::move(a.error()));
    auto b = Side::open(options.path_b);
    if (!b)
        return Unexpected(std::move(b.error()));
    auto diff = diff_traces(a->reader, a->symbols, b->reader, b->symbols, options.diff);
    if (!diff)
        return Unexpected(std::move(diff.error()));
    Output out;
    if (options.json)
        out.print("{}\n", to_json(*a, *b, *diff, options.context).dump(2, ' ', false, Json::error_handler_t::replace));
    else
        print_text(out, *a, *b, *diff, options.context);
    VTRACE_TRY(out.finish());
    for (const Side* side : {&*a, &*b}) {
        for (const std::string& line : side->reader.damage())
            fmt::print(stderr, "vtrace: warning: '{}': {}\n", side->path, line);
        if (!side->reader.info().missing.empty())
            fmt::print(stderr, "vtrace: warning: '{}' lacks branches: see 'vtrace info'\n", side->path);
    }
    if (a->damaged() || b->damaged())
        return ExitStatus::damaged;
    return diff->same() ? ExitStatus::success : ExitStatus::different;
}

/// As diff and cmp have it: 1 means different, so that no error may.
Result<ExitStatus> run(const Options& options) {
    auto status = compare(options);
    if (status)
        return status;
    fmt::print(stderr, "vtrace: {}\n", status.error().message);
    return ExitStatus::trouble;
}

} // namespace

Action define_diff(CLI::App& app) {
    auto options = std::make_shared<Options>();
    app.add_option("a", options->path_a, "A trace: the good run")->required()->type_name("A");
    app.add_option("b", options->path_b, "Another trace: the bad run")->required()->type_name("B");
    app.add_option("--cpu", options->diff.cpu, "Only this vCPU (from 0)")->type_name("N");
    const std::map<std::string, DiffBy> ways = {
        {"auto", DiffBy::automatic}, {"address", DiffBy::address}, {"symbol", DiffBy::symbol}};
    app.add_option("--by", options->diff.by,
                   "What makes two places the same: their address, their function and offset (symbol), or auto: the "
                   "address where both have the same symbols or one has none, else the symbol")
        ->transform(CLI::CheckedTransformer(ways, CLI::ignore_case))
        ->type_name("WAY");
    app.add_option("--context", options->context, "Branches to show before the place where they part (default 8)")
        ->type_name("N");
    app.add_option("--top", options->diff.top, "Differences and functions in each list (default 20)")->type_name("N");
    app.add_flag("--json", options->json, "Print one JSON object");
    app.footer("Exit status: 0 the same, 1 different, 2 an error, 3 a trace is damaged or lacks branches.\n"
               "What is compared is each vCPU's branches; time and console are not.");
    return [options] { return run(*options); };
}

} // namespace vtrace::cli
