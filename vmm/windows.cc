#include "vmm/windows.h"

namespace vtrace {
namespace {

uint64_t sum_or_most(uint64_t a, uint64_t b) { return a > UINT64_MAX - b ? UINT64_MAX : a + b; }

} // namespace

void Windows::follow(WindowPlan plan) {
    plan_ = std::move(plan);
    open_ = !plan_->from;
    count_ = open_;
    due_ = false;
    await();
}

const Trigger* Windows::awaited() const {
    if (!plan_)
        return nullptr;
    if (open_)
        return plan_->to.kind == Trigger::Kind::end ? nullptr : &plan_->to;
    return plan_->from && count_ < plan_->times ? &*plan_->from : nullptr;
}

void Windows::await() {
    const Trigger* trigger = awaited();
    console_.wait_for(trigger && trigger->kind == Trigger::Kind::console ? trigger->text : std::string());
}

void Windows::turn(VirtualTime now, uint64_t retired) {
    open_ = !open_;
    count_ += open_;
    due_ = false;
    since_ = now;
    retired_since_ = retired;
    await();
}

void Windows::on_console(std::string_view bytes) {
    console_.feed(bytes);
    due_ |= console_.found();
}

void Windows::on_marker(uint32_t value) {
    const Trigger* trigger = awaited();
    due_ |= trigger && trigger->matches_marker(value);
}

void Windows::on_progress(VirtualTime now, uint64_t retired) {
    due_ |= now >= next_time() || retired >= next_retired();
}

VirtualTime Windows::next_time() const {
    const Trigger* trigger = awaited();
    return trigger && trigger->kind == Trigger::Kind::time ? sum_or_most(since_, trigger->value) : never;
}

uint64_t Windows::next_retired() const {
    const Trigger* trigger = awaited();
    return trigger && trigger->kind == Trigger::Kind::instructions ? sum_or_most(retired_since_, trigger->value)
                                                                   : UINT64_MAX;
}

std::optional<Gva> Windows::breakpoint() const {
    const Trigger* trigger = awaited();
    return trigger && trigger->kind == Trigger::Kind::address ? std::optional(trigger->value) : std::nullopt;
}

} // namespace vtrace
