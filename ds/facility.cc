#include "ds/facility.h"

#include "ds/bts.h"
#include "ds/msr.h"

namespace vtrace::ds {

using namespace msr;

namespace {

/// An address that bits 63:48 only extend (SDM vol. 1, 3.3.7.1).
bool is_canonical(uint64_t address) { return static_cast<int64_t>(address << 16) >> 16 == static_cast<int64_t>(address); }

constexpr uint64_t pebs_data_valid =
    PebsData::memory_info | PebsData::gprs | PebsData::xmms | PebsData::lbrs | PebsData::lbr_entries;

} // namespace

Facility::Facility(const CpuModel& model, GuestSpace& memory, PmiLine& pmi)
    : model_(model), pmi_(pmi), pmu_(model, *this), lbr_(model.lbr), area_(model, memory) {}

bool Facility::storing_branches() const {
    const uint64_t on = model_.debugctl.tr | model_.debugctl.bts;
    return (debugctl_ & on) == on;
}

bool Facility::lbr_on() const {
    return (debugctl_ & model_.debugctl.lbr) && model_.lbr.depth && !(pmu_.global_status() & GlobalStatus::lbr_frz);
}

void Facility::update_wants() {
    wants_branches_ = storing_branches() || lbr_on() || steps_on_branches();
    wants_kinds_ = lbr_on() || model_.predicted_flag;
}

void Facility::write_debugctl(uint64_t value) {
    debugctl_ = value;
    pmu_.set_freeze_on_pmi(model_.debugctl.freeze_perfmon_on_pmi & value);
    update_wants();
}

// ---------------------------------------------------------------------------------------------------------------------
// Registers

/// IA32_PERF_CAPABILITIES (SDM vol. 3, 18.8.1).
uint64_t Facility::capabilities() const {
    uint64_t value = model_.lbr.depth ? static_cast<uint64_t>(model_.lbr.format) : 0;
    if (pebs_available())
        value |= PerfCap::pebs_trap | PerfCap::pebs_arch_reg | static_cast<uint64_t>(model_.pebs) << PerfCap::pebs_format_shift;
    if (adaptive())
        value |= PerfCap::pebs_baseline;
    if (model_.pmu.full_width_writes)
        value |= PerfCap::full_width_write;
    return value;
}

std::optional<uint64_t> Facility::read_msr(uint32_t msr) const {
    const auto only_if = [](bool there, uint64_t value) { return there ? std::optional(value) : std::nullopt; };
    switch (msr) {
    case msr::debugctl:
        return debugctl_;
    case msr::ds_area:
        return area_.address();
    case perf_capabilities:
        return only_if(model_.pdcm(), capabilities());
    case msr::pebs_data_cfg:
        return only_if(adaptive(), pebs_data_cfg_);
    case msr::pebs_frontend:
        return only_if(model_.pmu.version >= 4, pebs_frontend_);
    case offcore_rsp_0:
        return only_if(model_.events >= EventFamily::nehalem, offcore_[0]);
    case offcore_rsp_1:
        return only_if(model_.events >= EventFamily::sandy_bridge, offcore_[1]);
    default:
        break;
    }
    if (const auto value = pmu_.read(msr))
        return value;
    return lbr_.read(msr);
}

bool Facility::write_msr(uint32_t msr, uint64_t value) {
    if (!owns(msr))
        return false;
    switch (msr) {
    case msr::debugctl:
        if (value & ~model_.debugctl.all())
            return false;
        write_debugctl(value);
        return true;
    case msr::ds_area:
        if (model_.long_mode ? !is_canonical(value) : value >> 32 != 0)
            return false;
        area_.place(value);
        return true;
    case perf_capabilities:
        return false;
    case msr::pebs_data_cfg:
        if (value & ~pebs_data_valid)
            return false;
        pebs_data_cfg_ = value;
        return true;
    case msr::pebs_frontend:
        pebs_frontend_ = value;
        return true;
    case offcore_rsp_0:
    case offcore_rsp_1:
        offcore_[msr - offcore_rsp_0] = value;
        return true;
    default:
        break;
    }
    if (const auto result = pmu_.write(msr, value); result != Pmu::Write::other) {
        update_wants(); // LBR_Frz may have gone
        return result == Pmu::Write::done;
    }
    return lbr_.write(msr, value) == LbrStack::Write::done;
}

// ---------------------------------------------------------------------------------------------------------------------
// Branches

void Facility::raise_pmi() {
    if (debugctl_ & model_.debugctl.freeze_lbrs_on_pmi) {
        // Version 4 and later freeze by the status register (SDM vol. 3, 18.2.4.2), earlier ones clear LBR.
        if (model_.pmu.version >= 4)
            pmu_.set_status(GlobalStatus::lbr_frz);
        else
            debugctl_ &= ~model_.debugctl.lbr;
        update_wants();
    }
    pmi_.raise_pmi();
}

bool Facility::branch(const Branch& branch) {
    bool mispredicted = false;
    if (wants_branch_kinds()) {
        mispredicted = predictor_.taken(branch.from, branch.to, branch.next, branch.events);
        if (lbr_on())
            lbr_.record(branch, mispredicted);
    }
    // The filter bits test the privilege level after the branch.
    const uint64_t off = branch.cpl == 0 ? model_.debugctl.bts_off_os : model_.debugctl.bts_off_usr;
    if (storing_branches() && !(debugctl_ & off)) {
        const uint64_t flags = model_.predicted_flag && !mispredicted ? BtsFlags::predicted : 0;
        const bool circular = !(debugctl_ & model_.debugctl.btint);
        if (area_.store_branch(branch.from, branch.to, flags, circular) == Stored::threshold)
            pmu_.raise_pmi();
    }
    return mispredicted;
}

void Facility::on_debug_exception() {
    if (debugctl_ & (model_.debugctl.lbr | model_.debugctl.btf))
        write_debugctl(debugctl_ & ~(model_.debugctl.lbr | model_.debugctl.btf));
}

void Facility::init() {
    write_debugctl(0);
    area_.place(0);
}

// ---------------------------------------------------------------------------------------------------------------------
// PEBS

void Facility::take_pebs_records(const std::function<PebsState(const Event&)>& state) {
    while (const auto assist = pmu_.take_assist()) {
        const uint64_t counter = 1ull << assist->bit;
        PebsBytes bytes;
        const size_t size = encode_pebs(model_, state(assist->event), counter, pmu_.global_status(),
                                        assist->adaptive ? pebs_data_cfg_ : 0, lbr_, bytes);
        const Stored stored = area_.store_pebs({bytes.data(), size});
        uint64_t reset;
        const bool written = stored == Stored::written || stored == Stored::threshold;
        const bool reload = written && area_.read_reset(assist->bit, reset);
        pmu_.reload(assist->bit, reload ? std::optional(reset) : std::nullopt);
        // Extended PEBS (SDM vol. 3, 18.5.4.1): an index outside of the buffer counts as an overflow of it.
        if (stored == Stored::threshold || (adaptive() && area_.pebs_index_wild())) {
            pmu_.set_status(GlobalStatus::ovf_buf);
            pmu_.raise_pmi();
        }
    }
}

} // namespace vtrace::ds
