// The branch predictor that mispredictions are counted by. No processor's own: simple, documented, and the same on every
// host (docs/debug-store.md).
#pragma once

#include <array>
#include <cstdint>

#include "ds/events.h"

namespace vtrace::ds {

/// A conditional branch is predicted taken if it goes backward. Returns are predicted by a stack of 16 calls, other
/// indirect branches by where they went last time (1024 entries, by address). All others are always right. It learns only
/// while something asks for predictions.
class Predictor {
  public:
    /// A taken branch, in program order; says whether it was mispredicted, and learns.
    bool taken(uint64_t from, uint64_t to, uint64_t return_address, InstructionEvents events) {
        using namespace Retired;
        bool wrong = false;
        if (events & conditional) {
            wrong = to > from;
        } else if (events & near_return) {
            wrong = calls_[--top_ % calls_.size()] != to;
        } else if (events & indirect) {
            uint64_t& last = targets_[(from ^ from >> 10) % targets_.size()];
            wrong = last != to;
            last = to;
        }
        if (events & near_call)
            calls_[top_++ % calls_.size()] = return_address;
        return wrong;
    }
    /// A conditional branch that wasn't taken.
    static bool not_taken(uint64_t from, uint64_t target) { return target <= from; }

  private:
    std::array<uint64_t, 16> calls_{};
    unsigned top_ = 0;
    std::array<uint64_t, 1024> targets_{};
};

} // namespace vtrace::ds
