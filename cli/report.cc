// vtrace report: where the guest went.
#include <limits>
#include <malloc.h>
#include <memory>

#include <nlohmann/json.hpp>

#include "cli/outcome_text.h"
#include "cli/output.h"
#include "cli/subcommand.h"
#include "cli/trace_argument.h"
#include "decode/analysis_report.h"
#include "decode/text.h"

namespace vtrace::cli {
namespace {

struct Options {
    TraceSelection selection;
    size_t top = 20;
    bool json = false;
};

using Json = nlohmann::ordered_json;

std::string hex(uint64_t value) {
    return fmt::format("{:#x}", value);
}

std::string full_name(const CodePlace& place) {
    return place.module.empty() ? place.name : place.name + " [" + place.module + "]";
}

std::string plural(uint64_t count, std::string_view noun) {
    return fmt::format("{} {}{}", grouped(count), noun, count == 1 ? "" : "s");
}

void print_head(Output& out, const std::string& path, const Report& report) {
    out.print("{}: {} {}, {:.1f} % kernel, {:.1f} % user\n", printable(path), grouped(report.branches),
              report.branches == 1 ? "branch" : "branches", percent(report.kernel, report.branches),
              percent(report.user, report.branches));
    for (const VcpuTime& time : report.time) {
        out.print("cpu {}: {} to {} of guest time, {} instructions retired", time.vcpu, duration(time.first_time),
                  duration(time.last_time), grouped(time.retired));
        if (time.branches && time.retired)
            out.print(", {:.1f} a branch", static_cast<double>(time.retired) / static_cast<double>(time.branches));
        out.write("\n");
    }
    if (report.windows)
        out.print("Recorded in {}\n", plural(report.windows, "window"));
    if (report.dropped)
        out.print("{} before these were not kept\n", report.dropped == 1 ? "1 branch" : grouped(report.dropped) + " branches");
    out.print("Outcome: {}\n", outcome_text(report.outcome));
    for (const std::string& warning : report.warnings)
        out.print("Warning: {}\n", printable(warning));
    if (report.symbols == 0)
        out.write("Warning: the trace has no symbols: addresses stay as they are\n");
}

void print_functions(Output& out, const char* title, const std::vector<FunctionCount>& functions,
                     const Report& report) {
    if (functions.empty())
        return;
    out.print("\n{} ({} executed)\n", title, plural(report.functions_seen, "function"));
    out.print("{:>15} {:>7} {:>13}  function\n", "branches", "%", "entries");
    for (const FunctionCount& function : functions)
        out.print("{:>15} {:>7.2f} {:>13}  {}\n", grouped(function.branches),
                  percent(function.branches, report.branches), function.place.address ? grouped(function.entries) : "-",
                  full_name(function.place));
}

void print_edges(Output& out, const Report& report) {
    if (report.edges.empty())
        return;
    out.print("\nHottest edges ({} taken)\n{:>15} {:>7}  {:<14} from -> to\n", plural(report.edges_seen, "edge"),
              "count", "%", "kind");
    for (const NamedEdge& edge : report.edges)
        out.print("{:>15} {:>7.2f}  {:<14} {} -> {}\n", grouped(edge.edge.count),
                  percent(edge.edge.count, report.branches), branch_class_name(edge.edge.branch_class), edge.from,
                  edge.to);
}

void print_classes(Output& out, const Report& report) {
    out.print("\nKinds\n{:>15} {:>15} {:>7}  kind\n", "kernel", "user", "%");
    for (size_t i = 0; i < branch_classes; ++i) {
        uint64_t kernel = report.classes[static_cast<size_t>(Privilege::kernel)][i];
        uint64_t user = report.classes[static_cast<size_t>(Privilege::user)][i];
        if (kernel + user)
            out.print("{:>15} {:>15} {:>7.2f}  {}\n", grouped(kernel), grouped(user),
                      percent(kernel + user, report.branches), branch_class_name(static_cast<BranchClass>(i)));
    }
}

void print_vectors(Output& out, const char* title, const std::vector<VectorCount>& vectors) {
    if (vectors.empty())
        return;
    out.print("\n{}\n{:>15} {:>15} {:>7}  handler\n", title, "in kernel", "in user", "vector");
    for (const VectorCount& vector : vectors)
        out.print("{:>15} {:>15} {:>7}  {}\n", grouped(vector.kernel), grouped(vector.user),
                  vector.name.empty() ? hex(vector.vector) : vector.name,
                  vector.handler.empty() ? "-" : vector.handler);
}

void print_syscalls(Output& out, const Report& report) {
    if (report.syscalls == 0 && report.syscall_handlers.empty())
        return;
    out.print("\nSyscalls: {} from user space\n", grouped(report.syscalls));
    for (const HandlerCount& handler : report.syscall_handlers)
        out.print("{:>15}  {}\n", grouped(handler.entries), handler.name);
}

void print_console(Output& out, const Report& report) {
    if (report.console.empty())
        return;
    out.print("\nConsole, the last {}\n", plural(report.console.size(), "line"));
    for (const std::string& line : report.console)
        out.print("  {}\n", line);
}

void print_text(Output& out, const std::string& path, const Report& report) {
    print_head(out, path, report);
    if (report.branches) {
        print_functions(out, "Functions by branches executed inside them", report.by_branches, report);
        print_functions(out, "Functions by entries", report.by_entries, report);
        print_edges(out, report);
        print_classes(out, report);
        print_vectors(out, "Interrupts", report.interrupts);
        print_vectors(out, "Exceptions", report.exceptions);
        print_syscalls(out, report);
    }
    print_console(out, report);
}

Json to_json(const std::vector<FunctionCount>& functions) {
    Json list = Json::array();
    for (const FunctionCount& function : functions) {
        Json entry = {{"name", function.place.name}, {"branches", function.branches}};
        if (function.place.address) {
            entry["address"] = hex(function.place.address);
            entry["entries"] = function.entries;
        }
        if (!function.place.module.empty())
            entry["module"] = function.place.module;
        list.push_back(std::move(entry));
    }
    return list;
}

Json to_json(const std::vector<VectorCount>& vectors) {
    Json list = Json::array();
    for (const VectorCount& vector : vectors) {
        Json entry = {{"vector", vector.vector}, {"kernel", vector.kernel}, {"user", vector.user}};
        if (!vector.name.empty())
            entry["name"] = vector.name;
        if (!vector.handler.empty())
            entry["handler"] = vector.handler;
        list.push_back(std::move(entry));
    }
    return list;
}

Json to_json(const std::string& path, const Report& report) {
    Json json = {{"file", path},
                 {"complete", report.complete},
                 {"branches", report.branches},
                 {"kernel", report.kernel},
                 {"user", report.user},
                 {"windows", report.windows},
                 {"dropped", report.dropped},
                 {"symbols", report.symbols},
                 {"functions_executed", report.functions_seen},
                 {"edges_taken", report.edges_seen}};
    json["vcpus"] = Json::array();
    for (const VcpuTime& time : report.time)
        json["vcpus"].push_back({{"cpu", time.vcpu},
                                 {"branches", time.branches},
                                 {"first_time_ns", time.first_time},
                                 {"last_time_ns", time.last_time},
                                 {"retired", time.retired}});
    json["outcome"] = report.outcome ? Json(*report.outcome) : Json(nullptr);
    json["functions_by_branches"] = to_json(report.by_branches);
    json["functions_by_entries"] = to_json(report.by_entries);
    json["edges"] = Json::array();
    for (const NamedEdge& edge : report.edges)
        json["edges"].push_back({{"from", hex(edge.edge.from)},
                                 {"to", hex(edge.edge.to)},
                                 {"from_name", edge.from},
                                 {"to_name", edge.to},
                                 {"kind", branch_class_name(edge.edge.branch_class)},
                                 {"count", edge.edge.count}});
    json["kinds"] = Json::object();
    for (size_t i = 0; i < branch_classes; ++i) {
        uint64_t kernel = report.classes[static_cast<size_t>(Privilege::kernel)][i];
        uint64_t user = report.classes[static_cast<size_t>(Privilege::user)][i];
        if (kernel + user)
            json["kinds"][std::string(branch_class_name(static_cast<BranchClass>(i)))] = {{"kernel", kernel},
                                                                                          {"user", user}};
    }
    json["interrupts"] = to_json(report.interrupts);
    json["exceptions"] = to_json(report.exceptions);
    json["syscalls"] = {{"entries", report.syscalls}, {"handlers", Json::array()}};
    for (const HandlerCount& handler : report.syscall_handlers)
        json["syscalls"]["handlers"].push_back({{"name", handler.name}, {"entries", handler.entries}});
    json["console"] = report.console;
    json["warnings"] = report.warnings;
    return json;
}

/// Chunks of 100 MB come and go by the dozen: glibc would fetch each anew from the kernel, page by page, which costs a
/// third of the time of a report. One heap that never shrinks hands them on instead.
void keep_freed_memory() {
    mallopt(M_ARENA_MAX, 1);
    mallopt(M_MMAP_MAX, 0);
    mallopt(M_TRIM_THRESHOLD, std::numeric_limits<int>::max());
}

Result<ExitStatus> run(const Options& options) {
    keep_freed_memory();
    auto reader = options.selection.open();
    if (!reader)
        return Unexpected(std::move(reader.error()));
    auto ranges = options.selection.window_ranges(*reader);
    if (!ranges)
        return Unexpected(std::move(ranges.error()));
    ReportOptions report_options;
    report_options.edges = {options.selection.cpu, options.selection.from.value_or(0),
                            options.selection.to.value_or(UINT64_MAX), options.selection.filter(), 0,
                            std::move(*ranges)};
    report_options.top = options.top;
    auto report = make_report(*reader, report_options);
    if (!report)
        return Unexpected(std::move(report.error()));
    Output out;
    if (options.json)
        out.print("{}\n", to_json(options.selection.path, *report).dump(2, ' ', false, Json::error_handler_t::replace));
    else
        print_text(out, options.selection.path, *report);
    VTRACE_TRY(out.finish());
    return ExitStatus::success;
}

} // namespace

Action define_report(CLI::App& app) {
    auto options = std::make_shared<Options>();
    options->selection.add_options(app);
    app.add_option("--top", options->top, "How many functions, edges and syscalls to list (20)")->type_name("N");
    app.add_flag("--json", options->json, "Print one JSON object");
    app.footer("Functions and edges are counted over the whole trace, or the part that the options select.\n"
               "[user] is code of user space, whose programs' symbols a trace does not hold; [kernel] is kernel code\n"
               "without a symbol, [boot] the same at low addresses, before user space is entered.");
    return [options] { return run(*options); };
}

} // namespace vtrace::cli
