#include "vmm/clock.h"

#include <algorithm>

namespace vtrace {

Clock::Handle Clock::create(std::string name, std::function<void()> fire) {
    events_.push_back({std::move(name), std::move(fire)});
    return static_cast<Handle>(events_.size() - 1);
}

void Clock::schedule(Handle event, VirtualTime due) {
    events_[event].due = due;
    update_next();
}

void Clock::run_due() {
    while (next_due_ <= now_) {
        auto first = std::min_element(events_.begin(), events_.end(),
                                      [](const Event& a, const Event& b) { return a.due < b.due; });
        first->due = never;
        update_next();
        first->fire();
    }
}

void Clock::update_next() {
    next_due_ = never;
    for (const Event& event : events_)
        next_due_ = std::min(next_due_, event.due);
}

} // namespace vtrace
