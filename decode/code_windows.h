// CodeWindows: which window a place of a stream lies in. What was told of code in one window holds in no other.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "decode/codec_side.h"

namespace vtrace {

class CodeWindows {
  public:
    /// `begins`, in any order.
    explicit CodeWindows(std::span<const WindowBegin> begins = {}) {
        for (const WindowBegin& begin : begins) {
            if (begin.vcpu >= max_trace_vcpus)
                continue; // of a damaged file
            if (begin.vcpu >= by_vcpu_.size())
                by_vcpu_.resize(begin.vcpu + 1);
            by_vcpu_[begin.vcpu].emplace_back(begin.position, begin.number);
        }
        for (auto& list : by_vcpu_)
            std::sort(list.begin(), list.end());
    }

    /// The number of the last window that began before `position`; 0: none did.
    uint64_t at(unsigned vcpu, uint64_t position) const {
        if (vcpu >= by_vcpu_.size())
            return 0;
        const auto& list = by_vcpu_[vcpu];
        const auto after = std::lower_bound(list.begin(), list.end(), std::pair(position, uint64_t{0}));
        return after == list.begin() ? 0 : std::prev(after)->second;
    }

  private:
    std::vector<std::vector<std::pair<uint64_t, uint64_t>>> by_vcpu_; // position, number; ascending
};

} // namespace vtrace
