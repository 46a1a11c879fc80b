// What CPUID tells the guest, and so which instructions exist: one model, immutable, shared by all vCPUs.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "ds/cpu_model.h"
#include "ds/result.h"
#include "vmm/clock.h"

namespace vtrace {

/// Instruction set extensions that the software engine knows to leave out: what CPUID doesn't offer raises #UD.
enum class Feature : uint8_t { // clang-format off
    sse3, ssse3, sse4_1, sse4_2, popcnt, cx16, movbe, lahf_lm, rdtscp, fsgsbase, smep, smap, umip, pcid, invpcid, xsave,
    xsaveopt, monitor, rdrand, rdseed, clflushopt, x2apic, tsc_deadline, tsc_adjust, nx, gbpages, pge, sep, syscall,
    erms, lzcnt, bmi1, bmi2, adx, lm, arch_capabilities, count
}; // clang-format on

struct CpuidResult {
    uint32_t eax, ebx, ecx, edx;
};

class CpuidModel {
  public:
    /// Models by name: those of ds::cpu_models(), among them "atom" (Bonnell 6/28/10, the default: no mitigations needed), and
    /// "x86-64-v2" (all that the software engine has, without a Debug Store). Fails naming those that exist.
    static Result<CpuidModel> by_name(std::string_view name);
    static std::vector<std::string> names();

    /// The same without Debug Store, counters and last branch records.
    CpuidModel without_debug_store() const;
    /// The same processor without this feature.
    CpuidModel without(Feature feature) const;
    /// The same with a time stamp counter of this rate. Leaf 15H is empty where its ratio to the crystal isn't whole.
    CpuidModel with_tsc_hz(uint64_t hz) const;

    /// What it has of Debug Store and counters; null: nothing. Static.
    const ds::CpuModel* debug_store() const { return debug_store_; }
    bool has(Feature feature) const { return features_ >> static_cast<unsigned>(feature) & 1; }
    uint64_t tsc_hz() const { return tsc_hz_; }
    const std::string& name() const { return name_; }
    /// Static part of the leaf; the engine patches what depends on state (OSXSAVE, APIC enable and id, XSAVE size).
    CpuidResult leaf(uint32_t leaf, uint32_t subleaf) const;
    unsigned physical_address_bits() const { return 40; }

  private:
    std::string name_;
    uint64_t features_ = 0;
    uint32_t signature_ = 0; // leaf 1 EAX
    const ds::CpuModel* debug_store_ = nullptr;
    uint64_t tsc_hz_ = default_tsc_hz;
};

} // namespace vtrace
