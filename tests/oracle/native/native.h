// The host's own processor as judge: runs code of the arena in this process, one case a call.
#pragma once

#include "ds/result.h"
#include "tests/oracle/native/machine.h"

namespace vtrace::oracle {

/// One per process: maps the arena at its fixed addresses and takes SIGTRAP, SIGSEGV, SIGBUS, SIGILL and SIGFPE. A
/// fault outside of the arena's code is our own bug and is reported as the system would.
class Native {
  public:
    static Result<> start();

    static uint8_t* code() { return reinterpret_cast<uint8_t*>(Arena::code); }
    static uint8_t* data() { return reinterpret_cast<uint8_t*>(Arena::data); }
    /// Sets the contents of the read-only page.
    static void set_read_only_page(const uint8_t* bytes);

    /// Base of FS, which this process needs for itself.
    static uint64_t fs_base();

    /// Loads all registers, jumps to `in.rip`, and returns at the first exception. INT3 of the fence is `completed`,
    /// with RIP at it.
    static Answer run(const UserState& in, Mode mode);
};

} // namespace vtrace::oracle
