#include "ds/pmu.h"

#include <algorithm>
#include <utility>

namespace vtrace::ds {

using namespace msr;

namespace {

constexpr uint64_t low_bits(unsigned count) { return count >= 64 ? ~0ull : (1ull << count) - 1; }

/// A legacy write gives a counter 32 bits, sign-extended (SDM vol. 3, 18.2.2).
uint64_t sign_extended(uint64_t value) { return static_cast<uint64_t>(static_cast<int64_t>(static_cast<int32_t>(value))); }

constexpr uint32_t rdpmc_fixed = 1u << 30;
constexpr uint64_t load_latency_mask = 0xffff;
/// MSR_PEBS_ENABLE beside the counters' bits, before adaptive PEBS: LL_EN_PMCi and PS_EN (precise store).
constexpr unsigned ll_en_shift = 32;
constexpr uint64_t ps_en = 1ull << 63;

} // namespace

Pmu::Pmu(const CpuModel& model, PmiLine& pmi) : model_(model), pmi_(pmi) {
    global_ctrl_ = low_bits(model.pmu.counters); // after RESET (SDM vol. 3, table 9-1)
    for (unsigned i = 0; i < max_fixed; ++i)
        counters_[max_counters + i].event = every_instruction;
}

bool Pmu::exists(unsigned slot) const {
    return is_fixed(slot) ? slot - max_counters < model_.pmu.fixed_counters : slot < model_.pmu.counters;
}

uint64_t Pmu::width_mask(unsigned slot) const {
    return low_bits(is_fixed(slot) ? model_.pmu.fixed_width : model_.pmu.counter_width);
}

uint64_t Pmu::counter_bits() const {
    return low_bits(model_.pmu.counters) | low_bits(model_.pmu.fixed_counters) << first_fixed;
}

uint64_t Pmu::pebs_valid() const {
    if (model_.pebs == PebsFormat::none)
        return 0;
    uint64_t valid = low_bits(model_.pebs_counters);
    if (model_.pebs == PebsFormat::adaptive) // Extended PEBS: fixed counters too
        return valid | low_bits(model_.pmu.fixed_counters) << first_fixed;
    if (model_.pebs != PebsFormat::core)
        valid |= low_bits(model_.pebs_counters) << ll_en_shift;
    if (model_.events == EventFamily::sandy_bridge)
        valid |= ps_en;
    return valid;
}

// ---------------------------------------------------------------------------------------------------------------------
// Which counters run

Pmu::Mode Pmu::mode_of(unsigned slot) const {
    const Counter& counter = counters_[slot];
    if (!exists(slot) || !(global_ctrl_ >> bit_of(slot) & 1) || (global_status_ & GlobalStatus::ctr_frz))
        return Mode::off;
    if (is_fixed(slot))
        return counter.select & (cpl_ == 0 ? FixedCtrl::os : FixedCtrl::usr) ? Mode::every : Mode::off;
    const uint64_t select = counter.select;
    if (!(select & EventSelect::en) || !(select & (cpl_ == 0 ? EventSelect::os : EventSelect::usr)))
        return Mode::off;
    // Edge detection counts changes of a state that cycles have; there is none here.
    if (!counter.event.modelled || (select & EventSelect::edge))
        return Mode::off;
    if (counter.event.load_latency && load_latency_threshold_ > load_latency_cycles)
        return Mode::off;
    const bool all = !counter.event.required && !counter.event.forbidden;
    // One instruction retires in a cycle, so that an event happens at most once in it.
    const uint64_t at_least = (select & EventSelect::cmask) >> EventSelect::cmask_shift;
    const bool inverted = select & EventSelect::inv;
    if (at_least == 0 || (at_least == 1 && !inverted))
        return all ? Mode::every : Mode::matching;
    if (!inverted)
        return Mode::off;
    if (at_least > 1)
        return Mode::every;
    return all ? Mode::off : Mode::other_than_matching;
}

/// After any change of what mode_of() depends on.
void Pmu::refresh() {
    running_count_ = 0;
    needs_events_ = false;
    for (unsigned slot = 0; slot < slots; ++slot) {
        Counter& counter = counters_[slot];
        counter.mode = mode_of(slot);
        counter.pebs = pebs_enable_ >> bit_of(slot) & 1 && (is_fixed(slot) ? model_.pebs == PebsFormat::adaptive : true);
        if (!counter.pebs)
            counter.armed = false;
        counter.interrupts = counter.select & (is_fixed(slot) ? FixedCtrl::pmi : EventSelect::intr);
        if (counter.mode == Mode::off)
            continue;
        running_[running_count_++] = static_cast<uint8_t>(slot);
        needs_events_ |= counter.mode != Mode::every;
    }
}

uint64_t Pmu::instructions_left() const {
    uint64_t left = no_limit;
    for (unsigned i = 0; i < running_count_; ++i) {
        const Counter& counter = counters_[running_[i]];
        left = std::min(left, counter.armed ? 1 : width_mask(running_[i]) - counter.value + 1);
    }
    return left;
}

// ---------------------------------------------------------------------------------------------------------------------
// Counting

void Pmu::raise_pmi() {
    // SDM vol. 3, 18.2.4 and 18.2.5 (version 4: "streamlined freeze").
    if (freeze_on_pmi_) {
        if (model_.pmu.version >= 4)
            global_status_ |= GlobalStatus::ctr_frz;
        else
            global_ctrl_ = 0;
        refresh();
    }
    pmi_.raise_pmi();
}

/// True: it asks for an interrupt, which comes once all counters have counted.
bool Pmu::add(unsigned slot, uint64_t count) {
    Counter& counter = counters_[slot];
    const uint64_t mask = width_mask(slot);
    const bool overflows = count > mask - counter.value;
    counter.value = (counter.value + count) & mask;
    if (!overflows)
        return false;
    global_status_ |= 1ull << bit_of(slot);
    if (counter.pebs)
        counter.armed = true;
    return counter.interrupts;
}

template <class CountOf>
void Pmu::count_all(CountOf count_of) {
    bool interrupt = false;
    for (unsigned i = 0; i < running_count_; ++i) {
        Counter& counter = counters_[running_[i]];
        const uint64_t count = count_of(counter);
        if (!count)
            continue;
        if (std::exchange(counter.armed, false))
            counter.assist = assist_due_ = true;
        interrupt |= add(running_[i], count);
    }
    if (interrupt)
        raise_pmi();
}

void Pmu::retire(uint64_t count) {
    count_all([count](const Counter&) { return count; });
}

void Pmu::retire(std::span<const InstructionEvents> instructions) {
    count_all([&](const Counter& counter) -> uint64_t {
        if (counter.mode == Mode::every)
            return instructions.size();
        const bool wanted = counter.mode == Mode::matching;
        return static_cast<uint64_t>(std::count_if(
            instructions.begin(), instructions.end(),
            [&](InstructionEvents events) { return counter.event.matches(events) == wanted; }));
    });
}

std::optional<Pmu::Assist> Pmu::take_assist() {
    for (unsigned slot = 0; slot < slots; ++slot) {
        Counter& counter = counters_[slot];
        if (!std::exchange(counter.assist, false))
            continue;
        const bool adaptive = is_fixed(slot)
                                  ? fixed_ctrl_ >> (FixedCtrl::adaptive_shift + 4 * (slot - max_counters)) & 1
                                  : bool(counter.select & EventSelect::adaptive_record);
        return Assist{bit_of(slot), counter.event, adaptive};
    }
    assist_due_ = false;
    return std::nullopt;
}

void Pmu::reload(unsigned bit, std::optional<uint64_t> value) {
    Counter& counter = counters_[slot_of(bit)];
    if (value)
        counter.value = *value & width_mask(slot_of(bit));
    global_status_ &= ~(1ull << bit);
}

// ---------------------------------------------------------------------------------------------------------------------
// Registers

std::optional<uint64_t> Pmu::read_counter(uint32_t selector) const {
    const unsigned slot = selector & rdpmc_fixed ? (selector & ~rdpmc_fixed) + max_counters : selector;
    const bool fixed = selector & rdpmc_fixed;
    if ((selector & ~rdpmc_fixed) >= (fixed ? model_.pmu.fixed_counters : model_.pmu.counters))
        return std::nullopt;
    return counters_[slot].value;
}

std::optional<uint64_t> Pmu::read(uint32_t msr) const {
    const PmuModel& pmu = model_.pmu;
    if (!pmu.version)
        return std::nullopt;
    if (msr >= pmc0 && msr < pmc0 + pmu.counters)
        return counters_[msr - pmc0].value;
    if (pmu.full_width_writes && msr >= a_pmc0 && msr < a_pmc0 + pmu.counters)
        return counters_[msr - a_pmc0].value;
    if (msr >= perfevtsel0 && msr < perfevtsel0 + pmu.counters)
        return counters_[msr - perfevtsel0].select;
    if (msr >= fixed_ctr0 && msr < fixed_ctr0 + pmu.fixed_counters)
        return counters_[max_counters + msr - fixed_ctr0].value;
    switch (msr) {
    case fixed_ctr_ctrl:
        return pmu.fixed_counters ? std::optional(fixed_ctrl_) : std::nullopt;
    case perf_global_status:
        return global_status_;
    case perf_global_ctrl:
        return global_ctrl_;
    case perf_global_ovf_ctrl:
        return 0;
    case perf_global_status_set:
        return pmu.version >= 4 ? std::optional<uint64_t>(0) : std::nullopt;
    case perf_global_inuse: {
        if (pmu.version < 4)
            return std::nullopt;
        uint64_t in_use = 0;
        for (unsigned slot = 0; slot < slots; ++slot)
            if (exists(slot) && counters_[slot].select)
                in_use |= 1ull << bit_of(slot);
        return in_use;
    }
    case msr::pebs_enable:
        return model_.pebs != PebsFormat::none ? std::optional(pebs_enable_) : std::nullopt;
    case pebs_ld_lat:
        return model_.pebs != PebsFormat::none && model_.pebs != PebsFormat::core ? std::optional(load_latency_threshold_)
                                                                                  : std::nullopt;
    default:
        return std::nullopt;
    }
}

Pmu::Write Pmu::write_counter(unsigned slot, uint64_t value, bool full_width) {
    if (full_width) {
        if (value & ~width_mask(slot))
            return Write::refused;
        counters_[slot].value = value;
    } else {
        counters_[slot].value = sign_extended(value) & width_mask(slot);
    }
    return Write::done;
}

Pmu::Write Pmu::write(uint32_t msr, uint64_t value) {
    const PmuModel& pmu = model_.pmu;
    if (!read(msr))
        return Write::other;
    if (msr >= pmc0 && msr < pmc0 + pmu.counters)
        return write_counter(msr - pmc0, value, false);
    if (msr >= a_pmc0 && msr < a_pmc0 + pmu.counters)
        return write_counter(msr - a_pmc0, value, true);
    if (msr >= fixed_ctr0 && msr < fixed_ctr0 + pmu.fixed_counters)
        return write_counter(max_counters + msr - fixed_ctr0, value, true);
    if (msr >= perfevtsel0 && msr < perfevtsel0 + pmu.counters) {
        uint64_t valid = 0xffff'ffff;
        if (model_.pebs == PebsFormat::adaptive)
            valid |= EventSelect::adaptive_record;
        if (value & ~valid)
            return Write::refused;
        Counter& counter = counters_[msr - perfevtsel0];
        counter.select = value;
        counter.event = find_event(model_.events, value & (EventSelect::event | EventSelect::umask));
        counter.armed = false;
        refresh();
        return Write::done;
    }
    switch (msr) {
    case fixed_ctr_ctrl: {
        uint64_t valid = low_bits(FixedCtrl::field_bits * pmu.fixed_counters);
        for (unsigned i = 0; i < pmu.fixed_counters && model_.pebs == PebsFormat::adaptive; ++i)
            valid |= 1ull << (FixedCtrl::adaptive_shift + 4 * i);
        if (value & ~valid)
            return Write::refused;
        fixed_ctrl_ = value;
        for (unsigned i = 0; i < pmu.fixed_counters; ++i)
            counters_[max_counters + i].select = value >> (FixedCtrl::field_bits * i) & FixedCtrl::field;
        break;
    }
    case perf_global_ctrl:
        if (value & ~counter_bits())
            return Write::refused;
        global_ctrl_ = value;
        break;
    case perf_global_status: // read-only
        return Write::refused;
    case perf_global_ovf_ctrl: {
        uint64_t valid = counter_bits() | GlobalStatus::uncore | GlobalStatus::ovf_buf | GlobalStatus::cond_chgd;
        if (pmu.version >= 4)
            valid |= GlobalStatus::lbr_frz | GlobalStatus::ctr_frz | GlobalStatus::asci | GlobalStatus::trace_topa;
        if (value & ~valid)
            return Write::refused;
        global_status_ &= ~value;
        break;
    }
    case perf_global_status_set: {
        if (value & ~(counter_bits() | GlobalStatus::lbr_frz | GlobalStatus::ctr_frz | GlobalStatus::ovf_buf))
            return Write::refused;
        global_status_ |= value;
        break;
    }
    case perf_global_inuse:
        return Write::refused;
    case msr::pebs_enable:
        if (value & ~pebs_valid())
            return Write::refused;
        pebs_enable_ = value;
        break;
    case pebs_ld_lat:
        if (value & ~load_latency_mask)
            return Write::refused;
        load_latency_threshold_ = value;
        break;
    default:
        return Write::other;
    }
    refresh();
    return Write::done;
}

} // namespace vtrace::ds
