// Where an engine's branch records go, and what goes with them.
#pragma once

#include "ds/debug_store.h"
#include "vmm/trace_sink.h"

namespace vtrace::soft {

/// Both borrowed, both null when nothing is recorded. The store's DEBUGCTL says what is.
struct Recording {
    ds::DebugStore* store = nullptr;
    TraceSink* sink = nullptr;
    unsigned vcpu = 0; // what the sink knows this vCPU as
};

} // namespace vtrace::soft
