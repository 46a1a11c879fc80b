// CPUID's leaves (SDM vol. 2, CPUID, table 3-8).
#include "vmm/soft/cpuid.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <initializer_list>

#include <fmt/ranges.h>

#include "vmm/clock.h"
#include "vmm/devices/platform.h"
#include "vmm/soft/fp_host.h"

namespace vtrace {
namespace {

constexpr uint32_t max_basic = 0x16, hypervisor_base = 0x4000'0000, extended_base = 0x8000'0000,
                   max_extended = 0x8000'0008;

constexpr uint64_t set_of(std::initializer_list<Feature> features) {
    uint64_t set = 0;
    for (Feature feature : features)
        set |= 1ull << static_cast<unsigned>(feature);
    return set;
}

// What a model has of instructions is what its processor had, as far as the engine has it (no AES, AVX, BMI, TSX); all
// have x2APIC and, with it, what spares a guest time (ERMS, TSC deadlines).
constexpr uint64_t common_features =
    set_of({Feature::x2apic, Feature::tsc_deadline, Feature::pge, Feature::sep, Feature::erms});
constexpr uint64_t netburst64_features =
    common_features | set_of({Feature::lm, Feature::syscall, Feature::nx, Feature::sse3, Feature::cx16, Feature::lahf_lm});
constexpr uint64_t atom_features = netburst64_features | set_of({Feature::ssse3});
constexpr uint64_t core2_features = atom_features | set_of({Feature::sse4_1, Feature::arch_capabilities});
constexpr uint64_t nehalem_features =
    core2_features | set_of({Feature::sse4_2, Feature::popcnt, Feature::rdtscp});
constexpr uint64_t sandybridge_features =
    nehalem_features | set_of({Feature::pcid, Feature::xsave, Feature::xsaveopt});
constexpr uint64_t haswell_features =
    sandybridge_features | set_of({Feature::fsgsbase, Feature::smep, Feature::invpcid, Feature::rdrand,
                                   Feature::tsc_adjust, Feature::gbpages});
constexpr uint64_t skylake_features =
    haswell_features | set_of({Feature::smap, Feature::rdseed, Feature::clflushopt});
constexpr uint64_t icelake_features = skylake_features | set_of({Feature::umip});
constexpr uint64_t v2_features = icelake_features & ~set_of({Feature::arch_capabilities});

/// Features by name; the signature is the row's of the same name in ds::cpu_models(), else Bonnell's. Bonnell executes in
/// order: operating systems know that none of the speculation bugs are in it and leave out their mitigations, which would
/// be in every trace. So "x86-64-v2" has its signature, though no Bonnell has all of those features. (Stepping 2 would have
/// erratum AAE44 and lose PSE.) The others say by IA32_ARCH_CAPABILITIES what they don't suffer from.
struct NamedModel {
    std::string_view name;
    uint64_t features;
};
constexpr NamedModel models[] = {
    {"atom", atom_features},           {"x86-64-v2", v2_features},         {"netburst", common_features},
    {"netburst64", netburst64_features}, {"pentium-m", common_features},   {"core2", core2_features},
    {"nehalem", nehalem_features},     {"sandybridge", sandybridge_features}, {"haswell", haswell_features},
    {"skylake", skylake_features},     {"icelake", icelake_features},
};
constexpr std::string_view bonnell = "atom";

/// A feature's bit in a register of a leaf; `always`: every model has it.
struct FeatureBit {
    Feature feature;
    unsigned bit;
};

uint32_t bits_of(const CpuidModel& model, std::initializer_list<FeatureBit> list) {
    uint32_t bits = 0;
    for (const auto& [feature, bit] : list)
        if (model.has(feature))
            bits |= 1u << bit;
    return bits;
}

constexpr uint32_t bits(std::initializer_list<unsigned> list) {
    uint32_t value = 0;
    for (unsigned bit : list)
        value |= 1u << bit;
    return value;
}

uint32_t four_chars(const char* text) {
    uint32_t value;
    std::memcpy(&value, text, sizeof value);
    return value;
}

/// DTES64, DS-CPL, PDCM.
uint32_t debug_store_ecx(const CpuidModel& model) {
    const ds::CpuModel* store = model.debug_store();
    if (!store)
        return 0;
    return (store->dtes64 ? bits({2}) : 0) | (store->ds_cpl ? bits({4}) : 0) | (store->pdcm() ? bits({15}) : 0);
}

/// Architectural performance monitoring.
CpuidResult leaf_a(const CpuidModel& model) {
    const ds::CpuModel* store = model.debug_store();
    if (!store || !store->pmu.version)
        return {0, 0, 0, 0};
    const ds::PmuModel& pmu = store->pmu;
    // EBX tells by set bits which of the seven architectural events are missing: none is, though cache events count
    // nothing.
    constexpr uint32_t events = 7, no_any_thread = 1 << 15;
    const uint32_t eax = pmu.version | pmu.counters << 8 | pmu.counter_width << 16 | events << 24;
    const uint32_t fixed_mask = pmu.version >= 5 ? (1u << pmu.fixed_counters) - 1 : 0;
    const uint32_t edx = pmu.fixed_counters | pmu.fixed_width << 5 | (pmu.version >= 5 ? no_any_thread : 0);
    return {eax, 0, fixed_mask, edx};
}

CpuidResult leaf_1(const CpuidModel& model, uint32_t signature) {
    using F = Feature;
    constexpr uint32_t clflush_line = 64 / 8 << 8, one_processor = 1 << 16;
    const uint32_t ecx = bits_of(model, {{F::sse3, 0},
                                         {F::monitor, 3},
                                         {F::ssse3, 9},
                                         {F::cx16, 13},
                                         {F::pcid, 17},
                                         {F::sse4_1, 19},
                                         {F::sse4_2, 20},
                                         {F::x2apic, 21},
                                         {F::movbe, 22},
                                         {F::popcnt, 23},
                                         {F::tsc_deadline, 24},
                                         {F::xsave, 26},
                                         {F::rdrand, 30}}) |
                         bits({31}) | debug_store_ecx(model); // hypervisor
    // FPU DE PSE TSC MSR PAE MCE CX8 APIC MTRR MCA CMOV PAT PSE36 CLFSH MMX FXSR SSE SSE2. No VME: there is no VM86.
    const uint32_t edx = bits({0, 2, 3, 4, 5, 6, 7, 8, 9, 12, 14, 15, 16, 17, 19, 23, 24, 25, 26}) |
                         bits_of(model, {{F::sep, 11}, {F::pge, 13}}) | (model.debug_store() ? bits({21}) : 0); // DS
    return {signature, clflush_line | one_processor, ecx, edx};
}

/// Deterministic cache parameters: 24 KiB data, 32 KiB code, 512 KiB second level, lines of 64 bytes.
CpuidResult leaf_4(uint32_t subleaf) {
    struct Cache {
        unsigned type, level, ways, sets;
    };
    constexpr Cache caches[] = {{1, 1, 6, 64}, {2, 1, 8, 64}, {3, 2, 8, 1024}};
    if (subleaf >= std::size(caches))
        return {0, 0, 0, 0};
    const Cache& cache = caches[subleaf];
    constexpr uint32_t self_initializing = 1 << 8, line = 64;
    return {cache.type | cache.level << 5 | self_initializing, (line - 1) | (cache.ways - 1) << 22, cache.sets - 1, 0};
}

CpuidResult leaf_7(const CpuidModel& model, uint32_t subleaf) {
    using F = Feature;
    if (subleaf != 0)
        return {0, 0, 0, 0};
    const uint32_t ebx = bits_of(model, {{F::fsgsbase, 0},
                                         {F::tsc_adjust, 1},
                                         {F::bmi1, 3},
                                         {F::smep, 7},
                                         {F::bmi2, 8},
                                         {F::erms, 9},
                                         {F::invpcid, 10},
                                         {F::rdseed, 18},
                                         {F::adx, 19},
                                         {F::smap, 20},
                                         {F::clflushopt, 23}});
    return {0, ebx, bits_of(model, {{F::umip, 2}}), bits_of(model, {{F::arch_capabilities, 29}})};
}

/// Extended topology: one thread a core, cores up to the eight bits of an APIC id. EDX, the id, is the engine's.
CpuidResult leaf_b(uint32_t subleaf) {
    constexpr uint32_t smt = 1 << 8, core = 2 << 8;
    switch (subleaf) {
    case 0:
        return {0, 1, subleaf | smt, 0};
    case 1:
        return {8, 1, subleaf | core, 0};
    default:
        return {0, 0, subleaf & 0xff, 0};
    }
}

/// XSAVE: x87 and SSE state, in the legacy region and the header; nothing beyond.
CpuidResult leaf_d(const CpuidModel& model, uint32_t subleaf) {
    constexpr uint32_t x87_sse = 3, area = 512 + 64;
    if (!model.has(Feature::xsave) || subleaf > 1)
        return {0, 0, 0, 0};
    if (subleaf == 0)
        return {x87_sse, area, area, 0};
    return {bits_of(model, {{Feature::xsaveopt, 0}}), 0, 0, 0};
}

/// The TSC's ratio to the crystal that clocks the APIC timer, too, and the frequencies in MHz.
CpuidResult leaf_15(uint64_t tsc_hz) {
    if (tsc_hz % platform::crystal_hz)
        return {0, 0, 0, 0};
    return {1, static_cast<uint32_t>(tsc_hz / platform::crystal_hz), static_cast<uint32_t>(platform::crystal_hz), 0};
}
CpuidResult leaf_16(uint64_t tsc_hz) {
    constexpr uint64_t hz_per_mhz = 1'000'000;
    const auto mhz = static_cast<uint32_t>((tsc_hz + hz_per_mhz / 2) / hz_per_mhz);
    return {mhz, mhz, 100, 0};
}

CpuidResult basic_leaf(const CpuidModel& model, uint32_t signature, uint32_t leaf, uint32_t subleaf) {
    switch (leaf) {
    case 0:
        return {max_basic, four_chars("Genu"), four_chars("ntel"), four_chars("ineI")};
    case 1:
        return leaf_1(model, signature);
    case 2: // descriptor FFH: see leaf 4
        return {0x0000ff01, 0, 0, 0};
    case 4:
        return leaf_4(subleaf);
    case 6: // ARAT: the APIC timer never stops
        return {bits({2}), 0, 0, 0};
    case 7:
        return leaf_7(model, subleaf);
    case 0xa:
        return leaf_a(model);
    case 0xb:
        return leaf_b(subleaf);
    case 0xd:
        return leaf_d(model, subleaf);
    case 0x15:
        return leaf_15(model.tsc_hz());
    case 0x16:
        return leaf_16(model.tsc_hz());
    default:
        return {0, 0, 0, 0};
    }
}

/// 48 bytes of text, zero-padded, in three leaves.
CpuidResult brand_leaf(unsigned part) {
    constexpr std::array<char, 48> brand = [] {
        std::array<char, 48> text{};
        constexpr std::string_view name = "vtrace Virtual CPU @ 1.00GHz";
        std::copy(name.begin(), name.end(), text.begin());
        return text;
    }();
    const char* text = brand.data() + part * 16;
    return {four_chars(text), four_chars(text + 4), four_chars(text + 8), four_chars(text + 12)};
}

CpuidResult extended_leaf(const CpuidModel& model, uint32_t leaf) {
    using F = Feature;
    constexpr unsigned linear_bits = 48;
    switch (leaf) {
    case extended_base:
        return {max_extended, 0, 0, 0};
    case extended_base + 1:
        return {0, 0, bits_of(model, {{F::lahf_lm, 0}, {F::lzcnt, 5}}),
                bits_of(model, {{F::syscall, 11}, {F::nx, 20}, {F::gbpages, 26}, {F::rdtscp, 27}, {F::lm, 29}})};
    case extended_base + 2:
    case extended_base + 3:
    case extended_base + 4:
        return brand_leaf(leaf - (extended_base + 2));
    case extended_base + 6: // second-level cache: 512 KiB, 8 ways, 64-byte lines
        return {0, 0, 512u << 16 | 6 << 12 | 64, 0};
    case extended_base + 7: // invariant TSC
        return {0, 0, 0, bits({8})};
    case extended_base + 8:
        return {model.physical_address_bits() | linear_bits << 8, 0, 0, 0};
    default:
        return {0, 0, 0, 0};
    }
}

} // namespace

Result<CpuidModel> CpuidModel::by_name(std::string_view name) {
    for (const NamedModel& candidate : models) {
        if (candidate.name != name)
            continue;
        CpuidModel model;
        model.name_ = candidate.name;
        model.features_ = candidate.features;
        const auto own = ds::find_cpu_model(candidate.name);
        model.debug_store_ = own ? *own : nullptr;
        model.signature_ = (own ? *own : *ds::find_cpu_model(bonnell))->signature;
        for (unsigned i = 0; i < static_cast<unsigned>(Feature::count); ++i) {
            const auto feature = static_cast<Feature>(i);
            if (model.has(feature) && !soft::host_supports(feature))
                return fail("this host can't execute all of CPU model '{}': it lacks SSE extensions that the model has", name);
        }
        return model;
    }
    return fail("no CPU model '{}'; there are: {}", name, fmt::join(names(), ", "));
}

CpuidModel CpuidModel::without_debug_store() const {
    CpuidModel model = *this;
    model.debug_store_ = nullptr;
    return model;
}

CpuidModel CpuidModel::without(Feature feature) const {
    CpuidModel model = *this;
    model.features_ &= ~set_of({feature});
    return model;
}

CpuidModel CpuidModel::with_tsc_hz(uint64_t hz) const {
    CpuidModel model = *this;
    model.tsc_hz_ = hz;
    return model;
}

std::vector<std::string> CpuidModel::names() {
    std::vector<std::string> list;
    for (const NamedModel& model : models)
        list.emplace_back(model.name);
    return list;
}

CpuidResult CpuidModel::leaf(uint32_t leaf, uint32_t subleaf) const {
    if (leaf <= max_basic)
        return basic_leaf(*this, signature_, leaf, subleaf);
    if (leaf == hypervisor_base) // the hypervisor's own leaves: there are no others
        return {hypervisor_base, four_chars("vtra"), four_chars("ceVM"), four_chars("M\0\0\0")};
    if (leaf >= extended_base && leaf <= max_extended)
        return extended_leaf(*this, leaf);
    return basic_leaf(*this, signature_, max_basic, subleaf); // beyond the last: the highest basic leaf
}

} // namespace vtrace
