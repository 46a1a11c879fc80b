// The live line of a recording, on a terminal only.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

namespace vtrace::cli {

class Progress {
  public:
    struct Numbers {
        uint64_t instructions, branches, trace_bytes, guest_ns;
    };
    /// Prints to standard error if that is a terminal and `wanted`; else never.
    explicit Progress(bool wanted);

    /// Shows the numbers, at most a few times a second; cheap otherwise.
    void update(const Numbers& numbers);
    /// Takes the line off the screen, so that other output starts on a clean one.
    void clear();

    double seconds() const;

  private:
    using HostClock = std::chrono::steady_clock;
    bool enabled_, shown_ = false;
    HostClock::time_point start_ = HostClock::now(), last_ = start_;
    uint64_t last_instructions_ = 0;
};

/// "1.23 G", "45.6 M", "789": three digits and a decimal unit.
std::string short_count(uint64_t count);

} // namespace vtrace::cli
