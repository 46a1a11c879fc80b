// Processor models: what each generation's Debug Store facility is, as data. One table row a model.
//
// Sources: SDM vol. 3, chapter 17 ("Last branch, interrupt, and exception recording" of each family), 18.3-18.16
// (performance monitoring), vol. 4 (MSRs), and CPUID leaves 1 and 0AH in vol. 2.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "ds/result.h"

namespace vtrace::ds {

/// Bits of MSR 0x1d9 as one family has them; 0: the family doesn't have it.
struct DebugCtlBits {
    uint64_t lbr, btf, tr, bts, btint, bts_off_os, bts_off_usr;
    uint64_t freeze_lbrs_on_pmi, freeze_perfmon_on_pmi;

    constexpr uint64_t all() const {
        return lbr | btf | tr | bts | btint | bts_off_os | bts_off_usr | freeze_lbrs_on_pmi | freeze_perfmon_on_pmi;
    }
};

/// Layout of a PEBS record: IA32_PERF_CAPABILITIES[11:8].
enum class PebsFormat : uint8_t { core = 0, nehalem = 1, haswell = 2, skylake = 3, adaptive = 4, none = 0xff };

/// IA32_PERF_CAPABILITIES[5:0], how a FROM and a TO register are to be read.
enum class LbrFormat : uint8_t { lip = 1, eip = 2, eip_flags = 3, eip_flags_tsx = 4, info = 5 };

/// The last branch records; depth 0: none that are modelled.
struct LbrModel {
    uint8_t depth;
    LbrFormat format;
    uint32_t from, to, info; // first MSR of each; info 0: none
    bool select;             // MSR_LBR_SELECT filters
};

/// The performance monitoring unit; version 0: no architectural one.
struct PmuModel {
    uint8_t version;
    uint8_t counters, counter_width; // general-purpose
    uint8_t fixed_counters, fixed_width;
    bool full_width_writes; // IA32_A_PMCi
};

/// The generations whose events have the same numbers (ds/events.h).
enum class EventFamily : uint8_t { none, core, atom, nehalem, sandy_bridge, haswell, ice_lake };

struct CpuModel {
    std::string_view name;  // as on the command line
    std::string_view title; // for people
    uint32_t signature;     // CPUID.1:EAX
    bool long_mode;
    bool dtes64; // DS areas are always in the 64-bit layout; else only in IA-32e mode
    bool ds_cpl; // BTS_OFF_OS and BTS_OFF_USR
    DebugCtlBits debugctl;
    LbrModel lbr;
    PmuModel pmu;
    EventFamily events;
    PebsFormat pebs;            // what a guest can use; none: IA32_MISC_ENABLE says so
    uint8_t pebs_counters;      // general-purpose ones that can do PEBS, from counter 0
    uint8_t pebs_reset_slots;   // of the DS area; those of fixed counters not counted
    bool predicted_flag;        // BTS records say whether the branch was predicted

    /// Bytes of a field of the DS management area and of a BTS record. `ia32e`: IA-32e mode is active (CPUID.1:ECX
    /// DTES64: SDM vol. 3, 17.4.9.2).
    constexpr size_t field_size(bool ia32e) const { return dtes64 || ia32e ? 8 : 4; }
    constexpr size_t bts_record_size(bool ia32e) const { return 3 * field_size(ia32e); }
    /// Of a record without adaptive groups, also where a guest can't use PEBS.
    size_t pebs_record_size(bool ia32e) const;
    constexpr bool pdcm() const { return pmu.version >= 2; }
};

std::span<const CpuModel> cpu_models();
/// Fails naming those that exist.
Result<const CpuModel*> find_cpu_model(std::string_view name);

} // namespace vtrace::ds
