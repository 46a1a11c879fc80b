// The local APIC's timer (SDM vol. 3, 10.5.4): the count is arithmetic on virtual time; an event is scheduled only when
// an interrupt will come of it.
#include <limits>

#include "vmm/devices/lapic.h"
#include "vmm/devices/lapic_bits.h"
#include "vmm/devices/ticks.h"

namespace vtrace {

using namespace apic;

namespace {

constexpr VirtualTime crystal_period = Oscillator::ns_per_second / platform::crystal_hz;
static_assert(crystal_period * platform::crystal_hz == Oscillator::ns_per_second);
constexpr uint32_t divide_valid = 0b1011;

} // namespace

uint32_t Lapic::timer_mode() const {
    return state_.lvt[timer] & LvtBit::timer_mode;
}

// Figure 10-10: bits 3, 1, 0 are a code: 0 is 2, 1 is 4, ..., 6 is 128 and 7 is 1.
VirtualTime Lapic::tick_length() const {
    const unsigned code = (state_.divide_configuration >> 1 & 4) | (state_.divide_configuration & 3);
    return crystal_period << (code + 1) % 8;
}

uint32_t Lapic::current_count() const {
    if (state_.initial_count == 0 || timer_mode() == TimerMode::tsc_deadline)
        return 0;
    const uint64_t ticks = (clock_.now() - state_.timer_start) / tick_length();
    if (timer_mode() == TimerMode::periodic)
        return static_cast<uint32_t>(state_.initial_count - ticks % state_.initial_count);
    return ticks >= state_.initial_count ? 0 : static_cast<uint32_t>(state_.initial_count - ticks);
}

void Lapic::write_initial_count(uint32_t value) {
    if (timer_mode() == TimerMode::tsc_deadline)
        return;
    state_.initial_count = value;
    state_.timer_start = clock_.now();
    arm_timer();
}

void Lapic::write_divide(uint32_t value) {
    const uint32_t count = current_count();
    state_.divide_configuration = value & divide_valid;
    // The count goes on from where it is, at the new rate. The start may wrap below zero: only differences are used.
    state_.timer_start = clock_.now() - (state_.initial_count - count) * tick_length();
    arm_timer();
}

void Lapic::write_tsc_deadline(uint64_t value) {
    if (timer_mode() != TimerMode::tsc_deadline)
        return;
    state_.tsc_deadline = value;
    arm_timer();
}

void Lapic::set_tsc_offset(uint64_t offset) {
    state_.tsc_offset = offset;
    arm_timer();
}

void Lapic::timer_lvt_changed(uint32_t before) {
    const uint32_t mode_before = before & LvtBit::timer_mode;
    if (mode_before != timer_mode()) {
        const VirtualTime length = state_.initial_count * tick_length();
        const VirtualTime passed = clock_.now() - state_.timer_start;
        // To or from deadline mode disarms (10.5.4.1). Between the others the count goes on.
        if (mode_before == TimerMode::tsc_deadline || timer_mode() == TimerMode::tsc_deadline) {
            state_.initial_count = 0;
            state_.tsc_deadline = 0;
        } else if (passed >= length) {
            if (mode_before == TimerMode::periodic && length != 0)
                state_.timer_start += passed - passed % length; // this period is the last
            else
                state_.initial_count = 0; // it has run out: nothing comes that periodic mode would reload it at
        }
    }
    arm_timer();
}

void Lapic::arm_timer() {
    VirtualTime due = never;
    if (!enabled()) {
        // nothing runs
    } else if (timer_mode() == TimerMode::tsc_deadline) {
        if (state_.tsc_deadline != 0) {
            const uint64_t tsc = clock_.now() + state_.tsc_offset;
            due = state_.tsc_deadline <= tsc ? clock_.now() : clock_.now() + (state_.tsc_deadline - tsc);
            if (due < clock_.now()) // beyond the end of time
                due = never;
        }
    } else if (state_.initial_count != 0 && !(state_.lvt[timer] & LvtBit::mask)) {
        const VirtualTime length = state_.initial_count * tick_length();
        const VirtualTime passed = clock_.now() - state_.timer_start;
        if (timer_mode() == TimerMode::periodic)
            due = clock_.now() + (length - passed % length);
        else if (passed < length)
            due = clock_.now() + (length - passed);
    }
    clock_.schedule(timer_event_, due);
}

void Lapic::timer_fired() {
    if (timer_mode() == TimerMode::tsc_deadline)
        state_.tsc_deadline = 0;
    deliver_local(timer);
    // A periodic timer that is late by whole periods gives one interrupt, as IRR could hold no more.
    arm_timer();
}

} // namespace vtrace
