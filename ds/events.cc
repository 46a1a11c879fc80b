// Event numbers: SDM vol. 3, table 18-1 (architectural) and chapter 19 (each family's). docs/debug-store.md lists what is
// here, for users.
#include "ds/events.h"

namespace vtrace::ds {
namespace {

using namespace Retired;

constexpr Event counts(InstructionEvents required, InstructionEvents forbidden = 0) {
    return {.required = required, .forbidden = forbidden, .modelled = true};
}
constexpr Event loads() { return {.required = load, .modelled = true, .precise_load = true}; }
constexpr Event stores() { return {.required = store, .modelled = true, .precise_store = true}; }
constexpr Event slow_loads() {
    return {.required = load, .modelled = true, .precise_load = true, .load_latency = true};
}

constexpr InstructionEvents taken_branch = branch | taken;

struct Row {
    uint16_t select; // unit mask << 8 | event
    Event event;
};

constexpr Row architectural[] = {
    {0x003c, every_instruction},              // UnHalted Core Cycles
    {0x013c, every_instruction},              // UnHalted Reference Cycles: the TSC ticks once a cycle
    {0x00c0, every_instruction},              // Instructions Retired
    {0x00c4, counts(branch)},                 // Branch Instructions Retired
    {0x00c5, counts(branch | mispredicted)},  // Branch Misses Retired
};

constexpr Row core[] = {
    {0x01c0, loads()},                                    // INST_RETIRED.LOADS
    {0x02c0, stores()},                                   // INST_RETIRED.STORES
    {0x01c4, counts(branch, taken | mispredicted)},       // BR_INST_RETIRED.PRED_NOT_TAKEN
    {0x02c4, counts(branch | mispredicted, taken)},       // BR_INST_RETIRED.MISPRED_NOT_TAKEN
    {0x04c4, counts(taken_branch, mispredicted)},         // BR_INST_RETIRED.PRED_TAKEN
    {0x08c4, counts(taken_branch | mispredicted)},        // BR_INST_RETIRED.MISPRED_TAKEN
    {0x0cc4, counts(taken_branch)},                       // BR_INST_RETIRED.TAKEN
};

constexpr Row atom[] = {
    {0x00c5, counts(branch | mispredicted)},              // BR_INST_RETIRED.MISPRED
    {0x01c4, counts(branch, taken | mispredicted)},       // BR_INST_RETIRED.PRED_NOT_TAKEN
    {0x02c4, counts(branch | mispredicted, taken)},       // BR_INST_RETIRED.MISPRED_NOT_TAKEN
    {0x04c4, counts(taken_branch, mispredicted)},         // BR_INST_RETIRED.PRED_TAKEN
    {0x08c4, counts(taken_branch | mispredicted)},        // BR_INST_RETIRED.MISPRED_TAKEN
    {0x0ac4, counts(branch | mispredicted)},              // BR_INST_RETIRED.MISPRED
    {0x0cc4, counts(taken_branch)},                       // BR_INST_RETIRED.TAKEN
    {0x0fc4, counts(branch)},                             // BR_INST_RETIRED.ANY
};

// BR_INST_RETIRED and BR_MISP_RETIRED have the same unit masks from Nehalem to Skylake.
constexpr Row nehalem_branches[] = {
    {0x01c0, every_instruction},               // INST_RETIRED.ANY_P, with Sandy Bridge INST_RETIRED.PREC_DIST
    {0x01c4, counts(branch | conditional)},    // CONDITIONAL
    {0x02c4, counts(branch | near_call)},      // NEAR_CALL
    {0x04c4, counts(branch)},                  // ALL_BRANCHES
    {0x08c4, counts(branch | near_return)},    // NEAR_RETURN
    {0x10c4, counts(branch, taken)},           // NOT_TAKEN
    {0x20c4, counts(taken_branch, far)},       // NEAR_TAKEN
    {0x40c4, counts(branch | far)},            // FAR_BRANCH
    {0x01c5, counts(branch | conditional | mispredicted)},
    {0x02c5, counts(branch | near_call | mispredicted)},
    {0x04c5, counts(branch | mispredicted)},
    {0x08c5, counts(branch | near_return | mispredicted)},
    {0x10c5, counts(branch | mispredicted, taken)},
    {0x20c5, counts(taken_branch | mispredicted, far)},
};

constexpr Row nehalem[] = {
    {0x010b, loads()},      // MEM_INST_RETIRED.LOADS
    {0x020b, stores()},     // MEM_INST_RETIRED.STORES
    {0x100b, slow_loads()}, // MEM_INST_RETIRED.LATENCY_ABOVE_THRESHOLD
};

constexpr Row sandy_bridge[] = {
    {0x81d0, loads()},      // MEM_UOPS_RETIRED.ALL_LOADS
    {0x82d0, stores()},     // MEM_UOPS_RETIRED.ALL_STORES
    {0x01cd, slow_loads()}, // MEM_TRANS_RETIRED.LOAD_LATENCY
    {0x02cd, stores()},     // MEM_TRANS_RETIRED.PRECISE_STORE
};

// Haswell and Skylake: MEM_UOPS_RETIRED, later MEM_INST_RETIRED.
constexpr Row haswell[] = {
    {0x81d0, loads()},
    {0x82d0, stores()},
    {0x01cd, slow_loads()},
};

constexpr Row ice_lake[] = {
    {0x01c0, every_instruction},                            // INST_RETIRED.PREC_DIST
    {0x01c4, counts(branch | conditional | taken)},         // COND_TAKEN
    {0x02c4, counts(branch | near_call)},                   // NEAR_CALL
    {0x08c4, counts(branch | near_return)},                 // NEAR_RETURN
    {0x10c4, counts(branch | conditional, taken)},          // COND_NTAKEN
    {0x11c4, counts(branch | conditional)},                 // COND
    {0x20c4, counts(taken_branch, far)},                    // NEAR_TAKEN
    {0x40c4, counts(branch | far)},                         // FAR_BRANCH
    {0x80c4, counts(branch | indirect)},                    // INDIRECT
    {0x01c5, counts(branch | conditional | taken | mispredicted)},
    {0x02c5, counts(branch | near_call | indirect | mispredicted)}, // INDIRECT_CALL
    {0x08c5, counts(branch | near_return | mispredicted)},
    {0x10c5, counts(branch | conditional | mispredicted, taken)},
    {0x11c5, counts(branch | conditional | mispredicted)},
    {0x20c5, counts(taken_branch | mispredicted, far)},
    {0x80c5, counts(branch | indirect | mispredicted)},
    {0x81d0, loads()},
    {0x82d0, stores()},
    {0x01cd, slow_loads()},
};

std::span<const Row> branches_of(EventFamily family) {
    switch (family) {
    case EventFamily::nehalem:
    case EventFamily::sandy_bridge:
    case EventFamily::haswell:
        return nehalem_branches;
    default:
        return {};
    }
}

std::span<const Row> others_of(EventFamily family) {
    switch (family) {
    case EventFamily::core:
        return core;
    case EventFamily::atom:
        return atom;
    case EventFamily::nehalem:
        return nehalem;
    case EventFamily::sandy_bridge:
        return sandy_bridge;
    case EventFamily::haswell:
        return haswell;
    case EventFamily::ice_lake:
        return ice_lake;
    case EventFamily::none:
        break;
    }
    return {};
}

} // namespace

Event find_event(EventFamily family, uint16_t select) {
    if (family == EventFamily::none)
        return {};
    for (std::span<const Row> rows : {std::span<const Row>(architectural), branches_of(family), others_of(family)})
        for (const Row& row : rows)
            if (row.select == select)
                return row.event;
    return {};
}

} // namespace vtrace::ds
