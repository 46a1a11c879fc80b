// Model-specific registers of the Debug Store, the performance monitoring unit and the last branch records, and their
// bits, by the manual's names (SDM vol. 4, tables 2-2 and following; vol. 3, 17.4 and 18.2).
#pragma once

#include <cstdint>

namespace vtrace::ds::msr {

inline constexpr uint32_t pmc0 = 0xc1, perfevtsel0 = 0x186, offcore_rsp_0 = 0x1a6, offcore_rsp_1 = 0x1a7,
                          lbr_select = 0x1c8, lbr_tos = 0x1c9, debugctl = 0x1d9, fixed_ctr0 = 0x309,
                          perf_capabilities = 0x345, fixed_ctr_ctrl = 0x38d, perf_global_status = 0x38e,
                          perf_global_ctrl = 0x38f, perf_global_ovf_ctrl = 0x390, perf_global_status_set = 0x391,
                          perf_global_inuse = 0x392, pebs_enable = 0x3f1, pebs_data_cfg = 0x3f2, pebs_ld_lat = 0x3f6,
                          pebs_frontend = 0x3f7, a_pmc0 = 0x4c1, ds_area = 0x600;

/// IA32_PERFEVTSELx.
namespace EventSelect {
inline constexpr uint64_t event = 0xff, umask = 0xff00, usr = 1 << 16, os = 1 << 17, edge = 1 << 18, pc = 1 << 19,
                          intr = 1 << 20, any_thread = 1 << 21, en = 1 << 22, inv = 1 << 23, cmask = 0xff00'0000,
                          adaptive_record = 1ull << 34;
inline constexpr unsigned umask_shift = 8, cmask_shift = 24;
} // namespace EventSelect

/// IA32_FIXED_CTR_CTRL: four bits a counter, and Adaptive_Record in bit 32 + 4i.
namespace FixedCtrl {
inline constexpr uint64_t os = 1, usr = 2, any_thread = 4, pmi = 8, field = 0xf;
inline constexpr unsigned field_bits = 4, adaptive_shift = 32;
} // namespace FixedCtrl

/// Numbers of bits in IA32_PERF_GLOBAL_STATUS and its relatives: general-purpose counters from 0 up, fixed from 32 up.
inline constexpr unsigned first_fixed = 32;
namespace GlobalStatus {
inline constexpr uint64_t lbr_frz = 1ull << 58, ctr_frz = 1ull << 59, asci = 1ull << 60, uncore = 1ull << 61,
                          ovf_buf = 1ull << 62, cond_chgd = 1ull << 63, trace_topa = 1ull << 55;
}

/// IA32_PERF_CAPABILITIES.
namespace PerfCap {
inline constexpr uint64_t pebs_trap = 1 << 6, pebs_arch_reg = 1 << 7, full_width_write = 1 << 13, pebs_baseline = 1 << 14;
inline constexpr unsigned pebs_format_shift = 8;
} // namespace PerfCap

/// MSR_PEBS_DATA_CFG: groups of an adaptive record after the basic one.
namespace PebsData {
inline constexpr uint64_t memory_info = 1, gprs = 2, xmms = 4, lbrs = 8, lbr_entries = 0xff00'0000;
inline constexpr unsigned lbr_entries_shift = 24;
} // namespace PebsData

/// MSR_LBR_SELECT: a bit set leaves that kind of branch out (EN_CALLSTACK apart).
namespace LbrSelect {
inline constexpr uint64_t cpl_eq_0 = 1 << 0, cpl_neq_0 = 1 << 1, jcc = 1 << 2, near_rel_call = 1 << 3,
                          near_ind_call = 1 << 4, near_ret = 1 << 5, near_ind_jmp = 1 << 6, near_rel_jmp = 1 << 7,
                          far_branch = 1 << 8, en_callstack = 1 << 9;
inline constexpr uint64_t all = 0x3ff;
} // namespace LbrSelect

} // namespace vtrace::ds::msr
