// CallStack's other stacks: those of tasks that do not run now, and which of them comes back.
#include <algorithm>

#include "decode/call_stack.h"

namespace vtrace {
namespace {

/// Returns after which a choice counts as right.
constexpr size_t guess_returns = 32;

} // namespace

bool CallStack::in_switch() const {
    for (size_t i = frames_.size(); i-- > chain_start();)
        if (std::find(switch_functions_.begin(), switch_functions_.end(), frames_[i].function) !=
            switch_functions_.end())
            return true;
    return false;
}

/// How likely a stack that fits is to be the one that runs now: user code needs its own page table, kernel threads run
/// under whichever was in use. (A task that has given up its memory and is about to exit runs so, too.)
unsigned CallStack::likelihood(const Suspended& stack) const {
    const bool same = same_space(stack.space, space_);
    for (const Frame& frame : stack.frames)
        if (frame.privilege == Privilege::user)
            return same ? 3 : 0;
    return same ? 2 : 1;
}

/// Of the stacks put aside that would have returned to these addresses, the likeliest, of those the latest.
std::optional<CallStack::Candidate> CallStack::best_candidate(std::span<const uint64_t> returns) const {
    std::optional<Candidate> best;
    size_t fitting = 0;
    for (size_t i = suspended_.size(); i-- > 0;) {
        const auto left = unwind(suspended_[i].frames, returns);
        if (!left)
            continue;
        ++fitting;
        const unsigned likely = likelihood(suspended_[i]);
        if (!best || likely > best->likelihood)
            best = Candidate{i, *left, likely, false};
    }
    if (best)
        best->alone = fitting == 1;
    return best;
}

/// How many frames are left of a stack once it has returned to these addresses, one after the other, each as its top
/// expects; nullopt: it would not have.
std::optional<size_t> CallStack::unwind(const std::vector<Frame>& frames, std::span<const uint64_t> returns) {
    size_t left = frames.size();
    for (uint64_t address : returns) {
        while (left > 0 && (frames[left - 1].entry == Entry::tail ||
                            (frames[left - 1].entry == Entry::internal && frames[left - 1].return_address != address)))
            --left;
        if (left <= 1 || frames[left - 1].return_address != address)
            return std::nullopt;
        --left;
    }
    return left;
}

void CallStack::switch_stacks(uint64_t to, Privilege privilege) {
    // Linux loads the next task's page table before it switches stacks: what counts is that of the caller.
    const size_t start = chain_start();
    Suspended left{frames_, frames_[start > 0 ? start - 1 : 0].space};
    guess_.reset();
    const uint64_t returns[] = {to};
    if (const auto best = best_candidate(returns)) {
        Suspended chosen = std::move(suspended_[best->index]);
        suspended_.erase(suspended_.begin() + static_cast<std::ptrdiff_t>(best->index));
        set_stack({chosen.frames.begin(), chosen.frames.begin() + static_cast<std::ptrdiff_t>(best->left)});
        if (!best->alone)
            guess_ = Guess{std::move(chosen), best->left, {to}};
    } else {
        restart(names_.at(to, privilege), privilege);
    }
    suspended_.push_back(std::move(left));
    if (suspended_.size() > max_suspended)
        suspended_.pop_front();
}

/// To be told before the frame at `index` goes: one of a chosen stack bears witness to the choice.
void CallStack::note_return(uint64_t to, size_t index) {
    if (!guess_ || index >= guess_->depth)
        return;
    guess_->returned.push_back(to);
    if (guess_->returned.size() >= guess_returns)
        guess_.reset();
}

/// The stack that was chosen does not return to `to`: takes another one that would have returned as this one did, and
/// there next. False: there is none.
bool CallStack::choose_again(uint64_t to) {
    std::vector<uint64_t> returns = guess_->returned;
    returns.push_back(to);
    const auto best = best_candidate(returns);
    if (!best)
        return false;
    Suspended chosen = std::move(suspended_[best->index]);
    suspended_[best->index] = std::move(guess_->original);
    set_stack({chosen.frames.begin(), chosen.frames.begin() + static_cast<std::ptrdiff_t>(best->left)});
    guess_ = Guess{std::move(chosen), best->left, std::move(returns)};
    return true;
}

} // namespace vtrace
