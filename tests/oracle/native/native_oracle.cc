// Judges vtrace's processor by the host's: the same instruction with the same inputs on both must give the same answer.
#include <CLI/CLI.hpp>
#include <sys/personality.h>
#include <unistd.h>

#include "tests/oracle/native/oracle.h"

int main(int argc, char** argv) {
    using namespace vtrace::oracle;
    // The same addresses in each run: the base of FS is an input.
    if (int now = personality(0xffffffff); now != -1 && !(now & ADDR_NO_RANDOMIZE)) {
        personality(static_cast<unsigned long>(now) | ADDR_NO_RANDOMIZE);
        execv("/proc/self/exe", argv);
    }
    Options options;
    CLI::App app{"Executes random instructions on vtrace's processor and on the host's, and compares"};
    app.add_option("--seed", options.seed, "Seed of everything")->capture_default_str();
    app.add_option("--cases", options.cases, "Random cases after the systematic ones")->capture_default_str();
    app.add_option("--sequences", options.sequences, "Random sequences")->capture_default_str();
    app.add_option("--first-sequence", options.first_sequence, "Number of the first sequence");
    app.add_option("--first", options.first, "Number of the first case");
    app.add_option("--rounds", options.rounds, "Systematic passes over all forms")->capture_default_str();
    app.add_option("--max-failures", options.max_failures, "Stop after so many")->capture_default_str();
    app.add_option("--per-mnemonic", options.per_mnemonic, "Print so many failures of each mnemonic")
        ->capture_default_str();
    app.add_option("--only", options.only, "One mnemonic only");
    app.add_flag("--self", options.self, "Judge the host by itself: tests the test");
    app.add_flag("--sabotage", options.sabotage, "Spoil OF of an ADC now and then: must be noticed");
    app.add_flag("--skip-32", options.skip32, "No compatibility mode");
    app.add_flag("--verbose", options.verbose, "Count of every mnemonic, inputs of failures");
    CLI11_PARSE(app, argc, argv);
    auto result = Oracle(options).run();
    if (!result) {
        fmt::print(stderr, "native_oracle: {}\n", result.error().message);
        return 2;
    }
    return *result ? 0 : 1;
}
