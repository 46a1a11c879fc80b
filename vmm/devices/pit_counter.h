// One counter of an 8254 (Intel 82C54 data sheet, 231244), as arithmetic on the tick number of its clock input.
//
// Nothing here happens "at" a tick: output, count and the next rise of OUT are computed when asked, from the tick of
// the last event. The caller passes the current tick, which never goes back.
#pragma once

#include <cstdint>
#include <optional>

namespace vtrace {

using PitTick = uint64_t;

class PitCounter {
  public:
    explicit PitCounter(bool gate) { state_.gate = gate; }

    /// A control word for this counter: access mode, counting mode, BCD (bits 5:0 of the word).
    void control(uint8_t word, PitTick now);
    void write(uint8_t value, PitTick now);
    uint8_t read(PitTick now);
    void latch_count(PitTick now);
    void latch_status(PitTick now);
    void set_gate(bool level, PitTick now);
    bool gate() const { return state_.gate; }

    bool output(PitTick now);
    /// The first tick after `now` at which OUT rises, if it will without further writes.
    std::optional<PitTick> next_rise(PitTick now);

  private:
    enum Mode : uint8_t {
        interrupt_on_terminal_count = 0,
        one_shot = 1,
        rate_generator = 2,
        square_wave = 3,
        software_strobe = 4,
        hardware_strobe = 5,
    };
    enum Access : uint8_t { latch = 0, low_byte = 1, high_byte = 2, word = 3 };

    struct State {
        Mode mode = interrupt_on_terminal_count;
        Access access = word;
        bool bcd = false, gate = false;
        uint8_t control_word = 0x30;

        bool loaded = false;      // a count was written since the control word
        bool counting = false;    // running at the present: loaded, triggered if need be, and the gate lets it
        bool triggered = false;   // modes 1 and 5: a gate edge has come
        uint32_t reload = 0;      // 1..65536 (or 10000)
        PitTick start = 0;        // tick at which `reload` is in the counting element
        PitTick elapsed = 0;      // ticks counted since then, while not counting
        bool next_loaded = false; // a count that takes over at next_start
        uint32_t next_reload = 0;
        PitTick next_start = 0;

        bool write_high = false, read_high = false; // the second byte of a word access is due
        uint8_t write_low = 0;
        std::optional<uint16_t> latched_count;
        std::optional<uint8_t> latched_status;
    };

    void load(uint32_t raw, PitTick now);
    void restart(uint32_t reload, PitTick at);
    void take_over(PitTick now);
    bool periodic() const { return state_.mode == rate_generator || state_.mode == square_wave; }
    uint32_t modulus() const { return state_.bcd ? 10000 : 65536; }
    PitTick position(PitTick now) const;
    uint16_t count(PitTick now);

    State state_;
};

} // namespace vtrace
