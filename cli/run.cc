// vtrace run: boots a guest as `vtrace record` does, and records nothing: to see that it runs, and at what speed.
#include <memory>

#include "cli/guest_run.h"
#include "cli/subcommand.h"

namespace vtrace::cli {

Action define_run(CLI::App& app) {
    auto options = std::make_shared<GuestOptions>();
    add_guest_options(app, *options);
    return [options, &app]() -> Result<ExitStatus> {
        note_given_options(app, *options);
        return run_guest(*options);
    };
}

} // namespace vtrace::cli
