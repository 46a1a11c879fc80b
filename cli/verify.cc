// vtrace verify: both engines execute the same instructions, and are compared after each.
#include <memory>

#include <fmt/format.h>

#include "cli/crash_report.h"
#include "cli/guest_options.h"
#include "cli/subcommand.h"
#include "cli/units.h"
#include "vmm/kvm/lockstep.h"

namespace vtrace::cli {
namespace {

struct Options : GuestOptions {
    uint64_t places = 20, length = 50'000, spacing = 70'000'000;
    std::string from;
    VirtualTime native_spacing = 0; // 0: the software engine goes from place to place
};

std::string code_bytes(const std::vector<uint8_t>& code) {
    std::string text;
    for (uint8_t byte : code)
        text += fmt::format("{}{:02x}", text.empty() ? "" : " ", byte);
    return text;
}

void print_difference(const kvm::Difference& difference) {
    fmt::print("DIFFERENCE after {} instructions, at RIP {:#x}, code {}:\n{}\n\nBefore:\n{}\nThe software engine:\n{}\nKVM:\n{}",
               difference.instruction, difference.before.rip, code_bytes(difference.code), difference.what,
               registers_text(difference.before), registers_text(difference.soft), registers_text(difference.kvm));
}

/// Compares from here on. True: no difference. `ended`: the guest has come to its end.
Result<bool> compare_place(Machine& machine, kvm::Lockstep& lockstep, uint64_t length, const RunLimits& limits, bool& ended) {
    RunResult result{};
    const uint64_t end = lockstep.counts().instructions + length;
    ended = machine.settle(limits, result);
    if (ended)
        return true;
    lockstep.begin();
    while (lockstep.counts().instructions < end && !ended) {
        ended = machine.settle(limits, result) || !lockstep.leader_ended().empty();
        if (ended)
            break;
        auto difference = lockstep.step();
        if (!difference)
            return Unexpected(difference.error());
        if (*difference) {
            print_difference(**difference);
            return false;
        }
    }
    auto difference = lockstep.compare_all();
    if (!difference)
        return Unexpected(difference.error());
    if (*difference)
        print_difference(**difference);
    return !*difference;
}

/// From one place to the next. False: the guest has come to its end before.
bool go_on(const Options& options, Machine& machine, kvm::Lockstep& lockstep) {
    lockstep.pause();
    RunLimits limits = options.limits;
    if (options.native_spacing)
        limits.time = std::min(limits.time, machine.clock().now() + options.native_spacing);
    else
        limits.instructions = std::min(limits.instructions, machine.retired() + options.spacing);
    return machine.run(limits).outcome == Outcome::limit;
}

Result<ExitStatus> run(const Options& options) {
    auto host = kvm::KvmHost::open_for_use(options.device);
    if (!host)
        return fail("cannot verify without KVM: {}", host.error().message);
    auto config = machine_config(options);
    if (!config)
        return Unexpected(config.error());
    if (options.native_spacing)
        config->kvm = &*host;
    auto machine = Machine::create(std::move(*config));
    if (!machine)
        return Unexpected(machine.error());
    auto lockstep = kvm::Lockstep::create(*host, **machine);
    if (!lockstep)
        return Unexpected(lockstep.error());

    bool ended = false;
    if (!options.from.empty()) {
        auto trigger = parse_trigger(options.from, false);
        if (!trigger)
            return Unexpected(trigger.error());
        (*machine)->trace_windows({.from = std::move(*trigger)});
        RunLimits limits = options.limits;
        limits.window = true;
        if (const RunResult before = (*machine)->run(limits); before.outcome != Outcome::limit)
            return fail("cannot verify from '{}' on: the run ended before it came ({}{}{})", options.from,
                        describe(before.outcome), before.detail.empty() ? "" : ": ", before.detail);
    }
    (*machine)->trace_nothing();
    uint64_t places = 0;
    while (places < options.places && !ended) {
        const VirtualTime at = (*machine)->clock().now();
        const uint64_t retired = (*machine)->retired();
        const CpuState state = (*machine)->vcpu(0).state();
        auto same = compare_place(**machine, **lockstep, options.length, options.limits, ended);
        if (!same)
            return Unexpected(same.error());
        if (!*same)
            return ExitStatus::engines_differ;
        ++places;
        if (!options.quiet)
            fmt::print("place {:>3}: {:>11} ns, RIP {:016x}, CPL {}: no difference in {}\n", places, at, state.rip,
                       state.cpl(), (*machine)->retired() - retired);
        std::fflush(stdout);
        if (ended)
            break;
        ended = !go_on(options, **machine, **lockstep);
    }
    const kvm::StepCounts& counts = (*lockstep)->counts();
    fmt::print("{} instructions at {} places without a difference: {} of user mode, {} interrupts, {} exceptions, {} system "
               "calls, {} device accesses, {} repeated string instructions; {} branches recorded as KVM took them\n",
               counts.instructions, places, counts.user, counts.interrupts, counts.exceptions, counts.system_calls,
               counts.device_accesses, counts.string_repeats, counts.branches);
    if (counts.resume_flags)
        fmt::print("Left out: {} faults for which this host's processor pushed RFLAGS.RF otherwise than the manual says\n",
                   counts.resume_flags);
    return ExitStatus::success;
}

} // namespace

Action define_verify(CLI::App& app) {
    auto options = std::make_shared<Options>();
    add_guest_options(app, *options);
    const char* group = "What is compared";
    app.add_option("--places", options->places, "Places of the run, the first at its start")
        ->transform(count_with_unit())
        ->default_str("20")
        ->group(group);
    app.add_option("--length", options->length, "Instructions compared at each")
        ->transform(count_with_unit())
        ->default_str("50k")
        ->group(group);
    app.add_option("--spacing", options->spacing, "Instructions between two places")
        ->transform(count_with_unit())
        ->default_str("70M")
        ->group(group);
    app.add_option("--from", options->from, "Where the first place is, as for 'vtrace record'; but no symbol")
        ->type_name("SPEC")
        ->group(group);
    app.add_option("--native-spacing", options->native_spacing,
                   "Go from one place to the next natively under KVM, for so much guest time")
        ->transform(time_with_unit())
        ->type_name("TIME")
        ->group(group);
    app.footer("Exit status: 0 no difference, 4 one (it is printed), 1 error.");
    return [options, &app]() -> Result<ExitStatus> {
        note_given_options(app, *options);
        return run(*options);
    };
}

} // namespace vtrace::cli
