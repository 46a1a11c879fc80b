// What the exports by call stack have in common.
#pragma once

#include "decode/call_tree.h"
#include "decode/export/export.h"

namespace vtrace {

/// The branches of all vCPUs of the source in one tree; notes tell what it lacks.
CallTree build_call_tree(const ExportSource& source, CodeNames& names, ExportNotes& notes);

} // namespace vtrace
