// Facility: what a virtual CPU's own program sees of the Debug Store: IA32_DEBUGCTL, IA32_DS_AREA and the DS area in guest
// memory, PEBS, the performance counters, and the last branch records, of one processor model.
//
// The engine tells it what retires and asks it what it must be told; the host's own recording (ds/debug_store.h) goes on
// beside it and knows nothing of it. All calls are the engine's thread's; nothing here locks.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>

#include "ds/cpu_model.h"
#include "ds/guest.h"
#include "ds/guest_area.h"
#include "ds/lbr.h"
#include "ds/pebs.h"
#include "ds/pmu.h"
#include "ds/predictor.h"

namespace vtrace::ds {

class Facility final : private PmiLine {
  public:
    /// All borrowed. `pmi` is the processor's line.
    Facility(const CpuModel& model, GuestSpace& memory, PmiLine& pmi);
    Facility(const Facility&) = delete;
    Facility& operator=(const Facility&) = delete;

    const CpuModel& model() const { return model_; }

    // --- what the processor's program sees

    /// The register is one of the facility's, on this model.
    bool owns(uint32_t msr) const { return read_msr(msr).has_value(); }
    std::optional<uint64_t> read_msr(uint32_t msr) const; // nullopt: #GP
    bool write_msr(uint32_t msr, uint64_t value);         // false: #GP
    std::optional<uint64_t> read_pmc(uint32_t selector) const { return pmu_.read_counter(selector); } // nullopt: #GP
    /// IA32_MISC_ENABLE's read-only bits.
    bool bts_available() const { return true; }
    bool pebs_available() const { return model_.pebs != PebsFormat::none; }
    bool counters_available() const { return model_.pmu.version != 0; }

    // --- what the engine must know; any of it may change with a register, a privilege level or an interrupt

    /// Every taken branch, interrupt and exception is to be told by branch().
    bool wants_branches() const { return wants_branches_; }
    /// Also what kind of branch each is (Branch::events and next).
    bool wants_branch_kinds() const { return wants_kinds_ || pmu_.needs_events(); }
    /// Counters count: retirement is to be told.
    bool counting() const { return pmu_.counting(); }
    /// By the instructions' events, not just by their number.
    bool wants_events() const { return pmu_.needs_events(); }
    /// Instructions that may retire before they must be told.
    uint64_t instructions_left() const { return pmu_.instructions_left(); }
    /// With RFLAGS.TF, a trap after a taken branch only (DEBUGCTL.BTF).
    bool steps_on_branches() const { return debugctl_ & model_.debugctl.btf; }

    // --- what the engine tells, in program order

    void set_cpl(unsigned cpl) { pmu_.set_cpl(cpl); }
    void set_ia32e(bool active) { area_.set_ia32e(active); }
    /// As it retires; for an interrupt or exception as its handler is entered. True: it was mispredicted.
    bool branch(const Branch& branch);
    void retire(uint64_t instructions) { pmu_.retire(instructions); }
    void retire(std::span<const InstructionEvents> instructions) { pmu_.retire(instructions); }
    /// After retire() of one instruction: the PEBS records that it causes, if records_due().
    bool records_due() const { return pmu_.assist_due(); }
    void take_pebs_records(const std::function<PebsState(const Event&)>& state);
    /// A #DB was delivered (SDM vol. 3, 17.4.4 and 17.4.3).
    void on_debug_exception();
    /// INIT: the Debug Store goes off, the counters stay.
    void init();

    /// Records of the guest's own area, for the end of the run.
    const GuestArea::Counts& branches() const { return area_.branches(); }
    const GuestArea::Counts& pebs_records() const { return area_.pebs(); }

  private:
    bool storing_branches() const;
    bool lbr_on() const;
    void write_debugctl(uint64_t value);
    void update_wants();
    void raise_pmi() override; // of the counters and of the areas alike
    uint64_t capabilities() const;
    bool adaptive() const { return model_.pebs == PebsFormat::adaptive; }

    const CpuModel& model_;
    PmiLine& pmi_;
    Pmu pmu_;
    LbrStack lbr_;
    GuestArea area_;
    Predictor predictor_;
    uint64_t debugctl_ = 0, pebs_data_cfg_ = 0;
    uint64_t pebs_frontend_ = 0, offcore_[2] = {}; // what they choose isn't modelled: they only store
    bool wants_branches_ = false, wants_kinds_ = false;
};

} // namespace vtrace::ds
