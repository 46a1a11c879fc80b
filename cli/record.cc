// vtrace record: boots a guest and leaves a trace of every branch that it took, or of those in windows.
#include <memory>

#include "cli/guest_run.h"
#include "cli/subcommand.h"

namespace vtrace::cli {

Action define_record(CLI::App& app) {
    auto options = std::make_shared<RecordOptions>();
    add_record_options(app, *options);
    return [options, &app]() -> Result<ExitStatus> {
        note_given_options(app, *options);
        return record_guest(*options);
    };
}

} // namespace vtrace::cli
