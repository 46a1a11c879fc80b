// The last branch record stack (SDM vol. 3, 17.4.8, 17.4.9 and the families' sections).
#pragma once

#include <array>
#include <cstdint>
#include <optional>

#include "ds/cpu_model.h"
#include "ds/guest.h"

namespace vtrace::ds {

class LbrStack {
  public:
    static constexpr unsigned max_depth = 32;
    struct Entry {
        uint64_t from = 0, to = 0, info = 0; // as the MSRs show them
    };

    explicit LbrStack(const LbrModel& model) : model_(model) {}

    /// While DEBUGCTL.LBR is set: takes the branch unless MSR_LBR_SELECT leaves it out.
    void record(const Branch& branch, bool mispredicted);

    /// The entry `age` branches back, 0 the newest; age below depth().
    const Entry& entry(unsigned age) const { return entries_[(tos_ - age) % model_.depth]; }
    unsigned depth() const { return model_.depth; }

    /// nullopt: not one of the stack's registers.
    std::optional<uint64_t> read(uint32_t msr) const;
    enum class Write : uint8_t { done, refused, other };
    Write write(uint32_t msr, uint64_t value); // other: not one of the stack's

  private:
    bool selected(const Branch& branch) const;
    const uint64_t* find(uint32_t msr) const;

    LbrModel model_;
    std::array<Entry, max_depth> entries_{};
    unsigned tos_ = 0; // of the newest entry
    uint64_t select_ = 0;
};

} // namespace vtrace::ds
