#include "cli/record_options.h"

#include "cli/units.h"

namespace vtrace::cli {

void add_record_options(CLI::App& app, RecordOptions& o) {
    add_guest_options(app, o);
    const char* trace = "The trace";
    app.add_option("-o,--output", o.output, "Trace file")->type_name("FILE")->capture_default_str()->group(trace);
    auto* kernel_only = app.add_flag("--kernel-only", o.kernel_only, "Only branches to CPL 0")->group(trace);
    app.add_flag("--user-only", o.user_only, "Only branches to user mode")->excludes(kernel_only)->group(trace);
    app.add_option("--from", o.from,
                   "Where a traced window begins (default: at the start); see below")
        ->type_name("SPEC")
        ->group(trace);
    app.add_option("--to", o.to, "Where it ends: as --from, or 'end' (default)")->type_name("SPEC")->group(trace);
    app.footer("SPEC is one of console:TEXT, marker[:VALUE], time:500ms, instructions:COUNT, symbol:NAME[+OFFSET],\n"
               "address:0xHEX.\n\n" +
               app.get_footer());
    app.add_option("--keep-last", o.keep_last,
                   "Flight recorder: keep only the last COUNT branches, or slightly more; units as --limit")
        ->transform(count_with_unit())
        ->check(CLI::PositiveNumber)
        ->type_name("COUNT")
        ->group(trace);
    app.add_option("--times", o.times, "So many windows at most")
        ->check(CLI::PositiveNumber)
        ->capture_default_str()
        ->group(trace);
}

Result<WindowPlan> window_plan(const RecordOptions& o, bool native) {
    WindowPlan plan;
    plan.times = o.times;
    if (!o.from.empty()) {
        auto from = parse_trigger(o.from, false);
        if (!from)
            return Unexpected(from.error());
        plan.from = std::move(*from);
    }
    if (!o.to.empty()) {
        auto to = parse_trigger(o.to, true);
        if (!to)
            return Unexpected(to.error());
        plan.to = std::move(*to);
    }
    if (native && plan.from->kind == Trigger::Kind::instructions)
        return fail("cannot begin a window at '{}': instructions are not counted under KVM; say --accel soft, or begin it "
                    "by time, console, marker or symbol",
                    describe(*plan.from));
    if (plan.times > 1 && !plan.from)
        return fail("cannot trace {} windows: say where the later ones begin (--from)", plan.times);
    if (plan.times > 1 && plan.to.kind == Trigger::Kind::end)
        return fail("cannot trace {} windows: the first one has no end (--to)", plan.times);
    return plan;
}

nlohmann::json trace_config(const RecordOptions& o, const Machine& machine) {
    nlohmann::json json = guest_json(o, machine);
    json["vtrace"] = VTRACE_VERSION;
    json["filter"] = o.kernel_only ? "kernel" : o.user_only ? "user" : "all";
    if (o.keep_last)
        json["keep_last"] = o.keep_last;
    if (o.windows())
        json["windows"] = {{"from", o.from.empty() ? "start" : o.from}, {"to", o.to.empty() ? "end" : o.to}, {"times", o.times}};
    return json;
}

} // namespace vtrace::cli
