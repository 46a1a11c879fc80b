// The architectural performance monitoring unit of one virtual CPU (SDM vol. 3, chapter 18): general-purpose and fixed
// counters, exact.
//
// A counter counts the instructions that retire while it is enabled, at the privilege levels that it wants, and that its
// event names (ds/events.h). Time is counted in instructions: a cycle is one. Nothing here locks; the engine's thread.
#pragma once

#include <array>
#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <utility>

#include "ds/cpu_model.h"
#include "ds/events.h"
#include "ds/guest.h"
#include "ds/msr.h"

namespace vtrace::ds {

class Pmu {
  public:
    static constexpr unsigned max_counters = 8, max_fixed = 4;
    static constexpr uint64_t no_limit = std::numeric_limits<uint64_t>::max();

    Pmu(const CpuModel& model, PmiLine& pmi);

    // --- what the processor's program sees

    /// nullopt: no such register.
    std::optional<uint64_t> read(uint32_t msr) const;
    enum class Write : uint8_t { done, refused, other };
    Write write(uint32_t msr, uint64_t value);
    /// RDPMC's ECX: a counter's number, or 4000'0000h and a fixed one's. nullopt: #GP.
    std::optional<uint64_t> read_counter(uint32_t selector) const;

    // --- what the engine tells

    /// The privilege level from now on.
    void set_cpl(unsigned cpl) {
        if (cpl_ != cpl) {
            cpl_ = cpl;
            refresh();
        }
    }
    /// `count` instructions retired at this privilege level, of which nothing else matters: only while !needs_events(), and
    /// at most instructions_left() of them.
    void retire(uint64_t count);
    /// These instructions retired, in this order: at most instructions_left().
    void retire(std::span<const InstructionEvents> instructions);

    // --- what the engine must know

    bool counting() const { return running_count_ != 0; }
    /// A running counter asks what each instruction is.
    bool needs_events() const { return needs_events_; }
    /// Instructions that may retire before the engine must look again; no_limit: any number. 1: a PEBS counter is armed, the
    /// next instruction may be the one that it takes a record of.
    uint64_t instructions_left() const;

    // --- PEBS (ds/facility.cc has the rest of it)

    /// A counter that the last instruction has made take a record.
    struct Assist {
        unsigned bit; // its number in IA32_PERF_GLOBAL_STATUS
        Event event;
        bool adaptive;
    };
    bool assist_due() const { return assist_due_; }
    /// The next one that is due, lowest first; nullopt: none.
    std::optional<Assist> take_assist();
    /// The record was written (or dropped): the counter goes on from `value`, if there is one.
    void reload(unsigned bit, std::optional<uint64_t> value);
    uint64_t global_status() const { return global_status_; }
    void set_status(uint64_t bits) { global_status_ |= bits; }
    /// Raises the PMI; with DEBUGCTL.FREEZE_PERFMON_ON_PMI, freezes the counters.
    void raise_pmi();
    void set_freeze_on_pmi(bool on) { freeze_on_pmi_ = on; }

  private:
    enum class Mode : uint8_t { off, every, matching, other_than_matching };
    struct Counter {
        uint64_t value = 0;
        uint64_t select = 0; // IA32_PERFEVTSELx; of a fixed counter its four bits of IA32_FIXED_CTR_CTRL
        Event event;
        Mode mode = Mode::off;
        bool pebs = false, armed = false, assist = false;
        bool interrupts = false;
    };
    static constexpr unsigned slots = max_counters + max_fixed;

    bool is_fixed(unsigned slot) const { return slot >= max_counters; }
    unsigned bit_of(unsigned slot) const { return is_fixed(slot) ? msr::first_fixed + slot - max_counters : slot; }
    unsigned slot_of(unsigned bit) const { return bit >= msr::first_fixed ? bit - msr::first_fixed + max_counters : bit; }
    uint64_t width_mask(unsigned slot) const;
    uint64_t counter_bits() const; // of all counters in the global registers
    uint64_t pebs_valid() const;
    bool exists(unsigned slot) const;
    void refresh();
    Mode mode_of(unsigned slot) const;
    template <class CountOf>
    void count_all(CountOf count_of);
    bool add(unsigned slot, uint64_t count);
    Write write_counter(unsigned slot, uint64_t value, bool full_width);

    const CpuModel& model_;
    PmiLine& pmi_;
    std::array<Counter, slots> counters_{};
    std::array<uint8_t, slots> running_{};
    unsigned running_count_ = 0;
    bool needs_events_ = false;
    bool freeze_on_pmi_ = false, assist_due_ = false;
    unsigned cpl_ = 0;
    uint64_t fixed_ctrl_ = 0, global_ctrl_ = 0, global_status_ = 0, pebs_enable_ = 0;
    uint64_t load_latency_threshold_ = 0;
};

} // namespace vtrace::ds
