#include "vmm/devices/pit_counter.h"

namespace vtrace {
namespace {

constexpr unsigned access_shift = 4, mode_shift = 1;
constexpr uint8_t bcd_bit = 1 << 0, control_bits = 0x3f;
constexpr uint8_t status_null_count = 1 << 6, status_output = 1 << 7;

uint16_t to_bcd(uint32_t value) {
    return static_cast<uint16_t>(value / 1000 % 10 << 12 | value / 100 % 10 << 8 | value / 10 % 10 << 4 | value % 10);
}

uint32_t from_bcd(uint32_t value) {
    return (value >> 12 & 15) * 1000 + (value >> 8 & 15) * 100 + (value >> 4 & 15) * 10 + (value & 15);
}

} // namespace

void PitCounter::control(uint8_t word, PitTick now) {
    const auto access = static_cast<Access>(word >> access_shift & 3);
    if (access == latch) {
        latch_count(now);
        return;
    }
    State fresh;
    fresh.control_word = word & control_bits;
    fresh.access = access;
    const unsigned mode = word >> mode_shift & 7;
    fresh.mode = static_cast<Mode>(mode >= 6 ? mode - 4 : mode); // bit 2 is ignored in modes 2 and 3
    fresh.bcd = word & bcd_bit;
    fresh.gate = state_.gate;
    // The counting element keeps its content until a new count is loaded.
    fresh.elapsed = position(now);
    fresh.reload = state_.reload;
    state_ = fresh;
}

void PitCounter::write(uint8_t value, PitTick now) {
    switch (state_.access) {
    case low_byte:
        load(value, now);
        break;
    case high_byte:
        load(uint32_t{value} << 8, now);
        break;
    default:
        if (!state_.write_high) {
            state_.write_low = value;
            state_.write_high = true;
            if (state_.mode == interrupt_on_terminal_count) { // the first byte stops the counting; OUT goes low
                state_.elapsed = 0;
                state_.counting = state_.loaded = false;
            }
        } else {
            state_.write_high = false;
            load(state_.write_low | uint32_t{value} << 8, now);
        }
    }
}

void PitCounter::load(uint32_t raw, PitTick now) {
    take_over(now);
    uint32_t reload = state_.bcd ? from_bcd(raw) : raw;
    if (reload == 0)
        reload = modulus();
    const bool first = !state_.loaded;
    state_.loaded = true;
    switch (state_.mode) {
    case interrupt_on_terminal_count:
    case software_strobe:
        restart(reload, now + 1); // loaded by the next clock pulse
        break;
    case rate_generator:
    case square_wave:
        if (first || !state_.counting) {
            restart(reload, now + 1);
        } else { // takes over when the current period ends
            const PitTick done = now < state_.start ? 0 : (now - state_.start) / state_.reload;
            state_.next_start = now < state_.start ? state_.start : state_.start + (done + 1) * state_.reload;
            state_.next_reload = reload;
            state_.next_loaded = true;
        }
        break;
    case one_shot:
    case hardware_strobe: // waits for the trigger
        if (!state_.triggered) {
            state_.reload = reload;
            state_.elapsed = 0;
        } else {
            state_.next_reload = reload;
            state_.next_start = ~PitTick{0}; // only a trigger takes it
            state_.next_loaded = true;
        }
        break;
    }
}

// The counting element holds `reload` at tick `at`; counts from there if the gate lets it.
void PitCounter::restart(uint32_t reload, PitTick at) {
    state_.reload = reload;
    state_.start = at;
    state_.elapsed = 0;
    state_.next_loaded = false;
    state_.counting = state_.gate || state_.mode == one_shot || state_.mode == hardware_strobe;
}

void PitCounter::take_over(PitTick now) {
    if (state_.next_loaded && state_.counting && now >= state_.next_start)
        restart(state_.next_reload, state_.next_start);
}

// Ticks counted since the counting element was loaded.
PitTick PitCounter::position(PitTick now) const {
    if (!state_.counting)
        return state_.elapsed;
    return now < state_.start ? 0 : now - state_.start;
}

void PitCounter::set_gate(bool level, PitTick now) {
    take_over(now);
    const bool rises = level && !state_.gate;
    const bool falls = !level && state_.gate;
    if (state_.mode == one_shot || state_.mode == hardware_strobe) {
        state_.gate = level;
        if (rises && state_.loaded) { // the trigger loads by the next clock pulse
            state_.triggered = true;
            restart(state_.next_loaded ? state_.next_reload : state_.reload, now + 1);
        }
        return;
    }
    if (falls) {
        state_.elapsed = position(now);
        state_.counting = false;
    }
    state_.gate = level;
    if (rises && state_.loaded) {
        if (periodic()) {
            restart(state_.next_loaded ? state_.next_reload : state_.reload, now + 1);
        } else {
            state_.start = now - state_.elapsed; // goes on from where it stopped; may wrap, the difference is exact
            state_.counting = true;
        }
    }
}

bool PitCounter::output(PitTick now) {
    take_over(now);
    if (!state_.loaded)
        return state_.mode != interrupt_on_terminal_count;
    const PitTick done = position(now);
    switch (state_.mode) {
    case interrupt_on_terminal_count:
        return done >= state_.reload;
    case one_shot:
        return !state_.triggered || now < state_.start || done >= state_.reload;
    case rate_generator:
        return !state_.counting || now < state_.start || done % state_.reload != state_.reload - 1;
    case square_wave:
        return !state_.counting || now < state_.start || done % state_.reload < (state_.reload + 1) / 2;
    case software_strobe:
        return done != state_.reload;
    case hardware_strobe:
        return !state_.triggered || done != state_.reload;
    }
    return true;
}

std::optional<PitTick> PitCounter::next_rise(PitTick now) {
    take_over(now);
    if (!state_.loaded || !state_.counting)
        return std::nullopt;
    PitTick rise = state_.start + state_.reload;
    switch (state_.mode) {
    case interrupt_on_terminal_count:
    case one_shot:
        break;
    case rate_generator:
    case square_wave:
        if (now >= state_.start)
            rise = state_.start + ((now - state_.start) / state_.reload + 1) * state_.reload;
        break;
    case software_strobe:
    case hardware_strobe:
        rise += 1;
        break;
    }
    // Differences, since `start` may have wrapped below zero.
    if (now >= state_.start && rise - state_.start <= now - state_.start)
        return std::nullopt;
    return rise;
}

uint16_t PitCounter::count(PitTick now) {
    take_over(now);
    const PitTick done = position(now);
    uint32_t value;
    switch (state_.mode) {
    case rate_generator:
        value = state_.reload ? static_cast<uint32_t>(state_.reload - done % state_.reload) : 0;
        break;
    case square_wave: {
        // Counts down by two, twice a period; an odd count is loaded less one.
        const uint32_t even = state_.reload & ~1u;
        const uint32_t high = (state_.reload + 1) / 2;
        const uint32_t phase = state_.reload ? static_cast<uint32_t>(done % state_.reload) : 0;
        value = even - 2 * (phase < high ? phase : phase - high);
        break;
    }
    default: // wraps around after the terminal count
        value = static_cast<uint32_t>((state_.reload % modulus() + modulus() - done % modulus()) % modulus());
    }
    value %= modulus();
    return state_.bcd ? to_bcd(value) : static_cast<uint16_t>(value);
}

void PitCounter::latch_count(PitTick now) {
    if (!state_.latched_count)
        state_.latched_count = count(now);
}

void PitCounter::latch_status(PitTick now) {
    if (state_.latched_status)
        return;
    const bool null_count = !state_.loaded || state_.next_loaded || now < state_.start;
    state_.latched_status = static_cast<uint8_t>(state_.control_word | (null_count ? status_null_count : 0) |
                                                 (output(now) ? status_output : 0));
}

uint8_t PitCounter::read(PitTick now) {
    if (state_.latched_status) {
        const uint8_t status = *state_.latched_status;
        state_.latched_status.reset();
        return status;
    }
    const uint16_t value = state_.latched_count ? *state_.latched_count : count(now);
    const auto low = static_cast<uint8_t>(value), high = static_cast<uint8_t>(value >> 8);
    if (state_.access != word) {
        state_.latched_count.reset();
        return state_.access == low_byte ? low : high;
    }
    if (!state_.read_high) {
        state_.read_high = true;
        return low;
    }
    state_.read_high = false;
    state_.latched_count.reset();
    return high;
}

} // namespace vtrace
