// One guest's run, from options to exit status.
#pragma once

#include "cli/exit_status.h"
#include "cli/record_options.h"
#include "ds/result.h"

namespace vtrace::cli {

/// Runs the guest to its outcome. Errors: of the options, the files, or the host.
Result<ExitStatus> run_guest(const GuestOptions& options);
/// Also leaves a trace. Errors: as well those of writing it; what was recorded until then is readable.
Result<ExitStatus> record_guest(const RecordOptions& options);

} // namespace vtrace::cli
