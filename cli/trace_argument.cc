#include "cli/trace_argument.h"

#include "decode/trace_windows.h"

namespace vtrace::cli {

void add_trace_path(CLI::App& app, std::string& path) {
    app.add_option("file", path, "The trace, as 'vtrace record' wrote it")->required()->type_name("FILE");
}

void TraceSelection::add_range(CLI::App& app) {
    add_trace_path(app, path);
    app.add_option("--cpu", cpu, "Only this vCPU (from 0)")->type_name("N");
    app.add_option("--from", from, "Only from the branch of this number on, on each vCPU (from 0)")
        ->type_name("NUMBER");
    app.add_option("--to", to, "Only branches below this number, on each vCPU")->type_name("NUMBER");
}

void TraceSelection::add_options(CLI::App& app) {
    add_range(app);
    app.add_option("--window", window, "Only this window of the recording (from 1)")->type_name("N");
    auto* kernel = app.add_flag("--kernel-only", kernel_only, "Only branches of the kernel");
    auto* user = app.add_flag("--user-only", user_only, "Only branches of user space");
    kernel->excludes(user);
}

PrivilegeFilter TraceSelection::filter() const {
    return kernel_only ? PrivilegeFilter::kernel_only : user_only ? PrivilegeFilter::user_only : PrivilegeFilter::all;
}

Result<TraceReader> TraceSelection::open() const {
    if (from && to && *from > *to)
        return fail("--from {} is above --to {}: nothing lies between", *from, *to);
    auto reader = TraceReader::open(path);
    if (reader && cpu && *cpu >= reader->vcpus())
        return fail("'{}' has no vCPU {}: it has {}, counted from 0", path, *cpu, reader->vcpus());
    return reader;
}

Result<std::vector<std::pair<uint64_t, uint64_t>>> TraceSelection::window_ranges(const TraceReader& reader) const {
    std::vector<std::pair<uint64_t, uint64_t>> ranges;
    if (!window)
        return ranges;
    const auto windows = find_windows(reader);
    if (!windows)
        return Unexpected(windows.error());
    ranges.resize(reader.vcpus());
    bool found = false;
    for (const TraceWindow& one : *windows) {
        if (one.number != *window)
            continue;
        ranges[one.vcpu] = {one.first, one.last};
        found = true;
    }
    if (found)
        return ranges;
    if (windows->empty())
        return fail("'{}' has no window {}: all of the run was recorded", path, *window);
    return fail("'{}' has no window {}: it has {} to {}", path, *window, windows->front().number, windows->back().number);
}

} // namespace vtrace::cli
