#include "ds/lbr.h"

#include "ds/events.h"
#include "ds/msr.h"

namespace vtrace::ds {
namespace {

// LBR_FORMAT_EIP_FLAGS: bit 63 of FROM; LBR_FORMAT_INFO: bit 63 of INFO (SDM vol. 3, tables 17-7 and 17-15).
constexpr uint64_t mispredict_bit = 1ull << 63;
// Above a FROM's address with EIP_FLAGS_TSX: bit 62 in TSX, bit 61 abort; both are 0 here.
constexpr uint64_t tsx_address = (1ull << 61) - 1;

} // namespace

bool LbrStack::selected(const Branch& branch) const {
    namespace S = msr::LbrSelect;
    if (!select_)
        return true;
    if (select_ & (branch.cpl == 0 ? S::cpl_eq_0 : S::cpl_neq_0))
        return false;
    using namespace Retired;
    const uint16_t events = branch.events;
    const bool is_indirect = events & indirect;
    const uint64_t kind = events & far           ? S::far_branch
                          : events & conditional ? S::jcc
                          : events & near_return ? S::near_ret
                          : events & near_call   ? (is_indirect ? S::near_ind_call : S::near_rel_call)
                                                 : (is_indirect ? S::near_ind_jmp : S::near_rel_jmp);
    return !(select_ & kind);
}

void LbrStack::record(const Branch& branch, bool mispredicted) {
    if (!model_.depth || !selected(branch))
        return;
    if ((select_ & msr::LbrSelect::en_callstack) && (branch.events & Retired::near_return)) {
        // SDM vol. 3, 17.11: a return takes the call's record off.
        entries_[tos_] = {};
        tos_ = (tos_ - 1) % model_.depth;
        return;
    }
    tos_ = (tos_ + 1) % model_.depth;
    Entry& entry = entries_[tos_];
    entry = {branch.from, branch.to, 0};
    if (model_.format == LbrFormat::info) {
        entry.info = mispredicted ? mispredict_bit : 0;
    } else if (model_.format == LbrFormat::eip_flags || model_.format == LbrFormat::eip_flags_tsx) {
        if (model_.format == LbrFormat::eip_flags_tsx)
            entry.from &= tsx_address;
        entry.from = (entry.from & ~mispredict_bit) | (mispredicted ? mispredict_bit : 0);
    }
}

const uint64_t* LbrStack::find(uint32_t msr) const {
    const unsigned depth = model_.depth;
    if (msr >= model_.from && msr < model_.from + depth)
        return &entries_[msr - model_.from].from;
    if (msr >= model_.to && msr < model_.to + depth)
        return &entries_[msr - model_.to].to;
    if (model_.info && msr >= model_.info && msr < model_.info + depth)
        return &entries_[msr - model_.info].info;
    return nullptr;
}

std::optional<uint64_t> LbrStack::read(uint32_t msr) const {
    if (!model_.depth)
        return std::nullopt;
    if (msr == msr::lbr_tos)
        return tos_;
    if (msr == msr::lbr_select && model_.select)
        return select_;
    if (const uint64_t* value = find(msr))
        return *value;
    return std::nullopt;
}

LbrStack::Write LbrStack::write(uint32_t msr, uint64_t value) {
    if (!model_.depth)
        return Write::other;
    if (msr == msr::lbr_tos) {
        if (value >= model_.depth)
            return Write::refused;
        tos_ = static_cast<unsigned>(value);
        return Write::done;
    }
    if (msr == msr::lbr_select && model_.select) {
        if (value & ~msr::LbrSelect::all)
            return Write::refused;
        select_ = value;
        return Write::done;
    }
    if (const uint64_t* place = find(msr)) {
        *const_cast<uint64_t*>(place) = value;
        return Write::done;
    }
    return Write::other;
}

} // namespace vtrace::ds
