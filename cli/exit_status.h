// The exit statuses of vtrace. README.md and docs/ repeat them for users: scripts depend on these numbers.
#pragma once

#include <cstdint>

namespace vtrace::cli {

enum class ExitStatus : int {
    success = 0, // all done; record: the guest powered itself off
    failure = 1, // one line on standard error says why
    usage = 2,   // wrong options
    different = 1, // diff: the recordings differ
    trouble = 2,   // diff: one line on standard error says why; 1 would say that they differ
    damaged = 3, // the trace lacks something: `info --verify` found damage, or what was asked for is not in it
    engines_differ = 4, // verify

    // Outcomes of a recorded guest. The trace is whole in all of these.
    panic = 10,        // kernel panic or oops: pvpanic, or the pattern on the console
    triple_fault = 11, // the processor shut down
    hang = 12,         // no vCPU can ever run again, or no progress
    limit = 13,        // --limit reached
    interrupted = 14,  // Ctrl-C or SIGTERM
    reset = 15,        // the guest asked for a reset (reboot)
    unsupported = 16,  // the guest asked for what the processor does not do

    // The guest wrote a byte to the debug-exit port (0xf4): this plus that byte, at most guest_exit_last.
    guest_exit = 64,
    guest_exit_last = 127,
};

/// What a guest's exit code becomes: 0 -> 64, 1 -> 65 ...; codes of 63 and above all become 127.
constexpr ExitStatus guest_exit_status(uint32_t code) {
    constexpr uint32_t most =
        static_cast<uint32_t>(ExitStatus::guest_exit_last) - static_cast<uint32_t>(ExitStatus::guest_exit);
    return static_cast<ExitStatus>(static_cast<uint32_t>(ExitStatus::guest_exit) + (code < most ? code : most));
}

} // namespace vtrace::cli
