// Alarm: a thread that sleeps until a time that others may set while it does, without waking it.
#pragma once

#include <chrono>

#include "ds/result.h"
#include "vmm/kvm/host.h"

namespace vtrace::kvm {

class Alarm {
  public:
    using HostClock = std::chrono::steady_clock;

    /// Error: the host has no more file descriptors.
    static Result<Alarm> create();

    /// When wait() is to return; replaces what was set before. A time that has passed: at once. From any thread.
    void set(HostClock::time_point time);
    /// Returns once the time that was set has come; each counts once. May return early.
    void wait();

  private:
    explicit Alarm(Fd timer) : timer_(std::move(timer)) {}
    Fd timer_;
};

} // namespace vtrace::kvm
