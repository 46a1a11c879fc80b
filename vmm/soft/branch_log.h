// BranchLog: where the engine's branch records go, and what goes with them.
#pragma once

#include <cstdint>

#include "ds/bts.h"
#include "vmm/clock.h"
#include "vmm/trace_sink.h"

namespace vtrace::soft {

/// One for each vCPU, implemented over ds/ by the recorder. Called on the machine's thread.
class BranchLog {
  public:
    virtual ~BranchLog() = default;

    /// Sets the cursor's stride (and places) for the CPL that now runs.
    virtual void set_cpl(ds::BtsCursor& cursor, unsigned cpl) = 0;
    /// Empties the area into the ring; may wait for the consumer. `retired` is exact at the last record.
    virtual void drain(ds::BtsCursor& cursor, VirtualTime time, uint64_t retired) = 0;
    /// Records appended so far, drained or not.
    virtual uint64_t position(const ds::BtsCursor& cursor) const = 0;

    virtual TraceSink& sink() = 0;
    virtual unsigned vcpu() const = 0;
};

} // namespace vtrace::soft
