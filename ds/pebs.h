// PEBS records (SDM vol. 3, 18.3.1.1.1, 18.3.8.1.1 and 18.9.2): their layouts, by format.
#pragma once

#include <array>
#include <cstdint>
#include <span>

#include "ds/cpu_model.h"
#include "ds/lbr.h"

namespace vtrace::ds {

/// What a record may tell: the state after the instruction that it is about.
struct PebsState {
    uint64_t rflags, rip;
    std::array<uint64_t, 16> gpr; // by register number: RAX RCX RDX RBX RSP RBP RSI RDI R8..R15
    uint64_t eventing_ip;         // of the instruction
    uint64_t tsc;
    uint64_t data_address = 0; // of its load or store; 0: none
    uint64_t data_source = 0, latency = 0;
    std::span<const uint8_t, 256> xmm; // XMM0..15
};

/// Room for any record: an adaptive one with all groups.
inline constexpr size_t max_pebs_record = 32 + 32 + 144 + 256 + LbrStack::max_depth * 24;
using PebsBytes = std::array<uint8_t, max_pebs_record>;

/// Writes a record of the model's format to `bytes` and returns its size. `counters`: bits of the counters that it is for;
/// `global_status`: IA32_PERF_GLOBAL_STATUS before; `data_cfg`: MSR_PEBS_DATA_CFG, 0 for a counter that isn't adaptive.
size_t encode_pebs(const CpuModel& model, const PebsState& state, uint64_t counters, uint64_t global_status,
                   uint64_t data_cfg, const LbrStack& lbr, PebsBytes& bytes);

} // namespace vtrace::ds
