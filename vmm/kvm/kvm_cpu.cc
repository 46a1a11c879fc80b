#include "vmm/kvm/kvm_cpu.h"

#include <algorithm>
#include <cerrno>
#include <string_view>
#include <vector>

#include <sys/ioctl.h>
#include <sys/mman.h>

#include "vmm/guest_memory.h"

namespace vtrace::kvm {
namespace {

constexpr uint64_t synced = KVM_SYNC_X86_REGS | KVM_SYNC_X86_SREGS | KVM_SYNC_X86_EVENTS;

/// KVM_SET_CPUID2's structure ends in an array without a length of its own.
template <typename Header, typename Entry> class WithEntries {
  public:
    explicit WithEntries(size_t count) : words_((sizeof(Header) + count * sizeof(Entry) + 7) / 8) {}
    Header& header() { return *reinterpret_cast<Header*>(words_.data()); }
    Entry* entries() { return reinterpret_cast<Entry*>(reinterpret_cast<uint8_t*>(words_.data()) + sizeof(Header)); }

  private:
    std::vector<uint64_t> words_;
};

constexpr uint32_t max_subleaves = 8, xsave_components = 64;

} // namespace

Result<std::unique_ptr<KvmCpu>> KvmCpu::create(KvmVm& vm, unsigned id, const CpuidModel& cpuid) {
    std::unique_ptr<KvmCpu> cpu(new KvmCpu(vm, id, cpuid));
    VTRACE_TRY(cpu->set_up());
    return cpu;
}

KvmCpu::~KvmCpu() {
    if (run_)
        munmap(run_, vm_.run_size());
}

Result<> KvmCpu::set_up() {
    auto fd = vm_.create_vcpu(id_);
    if (!fd)
        return Unexpected(fd.error());
    fd_ = std::move(*fd);
    void* mapped = mmap(nullptr, vm_.run_size(), PROT_READ | PROT_WRITE, MAP_SHARED, fd_.get(), 0);
    if (mapped == MAP_FAILED)
        return fail("cannot map KVM's state of vCPU {}: {}", id_, errno_text(errno));
    run_ = static_cast<kvm_run*>(mapped);
    const char* module = hardware_module();
    svm_ = module && std::string_view(module) == "kvm-amd";
    can_sync_ = (vm_.host().check(KVM_CAP_SYNC_REGS) & synced) == synced;
    kvm_device_attr offset{};
    offset.group = KVM_VCPU_TSC_CTRL;
    offset.attr = KVM_VCPU_TSC_OFFSET;
    can_set_tsc_offset_ =
        vm_.host().check(KVM_CAP_VCPU_ATTRIBUTES) && ioctl(fd_.get(), KVM_HAS_DEVICE_ATTR, &offset) == 0;
    return set_cpuid();
}

/// All leaves that the model has; KVM itself looks after the bits that depend on state (OSXSAVE, APIC, XSAVE size).
Result<> KvmCpu::set_cpuid() {
    std::vector<kvm_cpuid_entry2> leaves;
    const auto add = [&](uint32_t leaf, uint32_t subleaf, bool indexed) {
        const CpuidResult r = cpuid_.leaf(leaf, subleaf);
        kvm_cpuid_entry2 entry{};
        entry.function = leaf;
        entry.index = subleaf;
        entry.flags = indexed ? KVM_CPUID_FLAG_SIGNIFCANT_INDEX : 0;
        entry.eax = r.eax;
        entry.ebx = r.ebx;
        entry.ecx = r.ecx;
        entry.edx = r.edx;
        if (leaf == 1)
            entry.ebx |= id_ << 24;
        if (leaf == 0xb)
            entry.edx = id_;
        // KVM answers with zeros what isn't in its table, and puts bits of its own into some of what is.
        if (leaf == 0 || entry.eax || entry.ebx || entry.ecx || entry.edx)
            leaves.push_back(entry);
    };
    for (uint32_t base : {0u, 0x4000'0000u, 0x8000'0000u}) {
        const uint32_t last = cpuid_.leaf(base, 0).eax;
        for (uint32_t leaf = base; leaf <= last; ++leaf) {
            const bool indexed = leaf == 4 || leaf == 7 || leaf == 0xb || leaf == 0xd;
            const uint32_t subleaves = leaf == 0xd ? xsave_components : indexed ? max_subleaves : 1;
            for (uint32_t subleaf = 0; subleaf < subleaves; ++subleaf)
                add(leaf, subleaf, indexed);
        }
    }
    VTRACE_TRY(check_supported(leaves));
    WithEntries<kvm_cpuid2, kvm_cpuid_entry2> list(leaves.size());
    list.header().nent = static_cast<uint32_t>(leaves.size());
    std::copy(leaves.begin(), leaves.end(), list.entries());
    if (ioctl(fd_.get(), KVM_SET_CPUID2, &list.header()) < 0)
        return fail("KVM refuses CPU model '{}' for vCPU {}: {}", cpuid_.name(), id_, errno_text(errno));
    return {};
}

/// A feature that KVM doesn't know of would fault where the model promises it.
Result<> KvmCpu::check_supported(std::span<const kvm_cpuid_entry2> leaves) const {
    constexpr size_t most = 256;
    WithEntries<kvm_cpuid2, kvm_cpuid_entry2> list(most);
    list.header().nent = most;
    if (ioctl(vm_.host().fd(), KVM_GET_SUPPORTED_CPUID, &list.header()) < 0)
        return fail("KVM does not say which processor features it has: {}", errno_text(errno));
    const std::span supported(list.entries(), list.header().nent);
    // x2APIC and TSC_DEADLINE are ours, bit 31 says hypervisor; ERMS is a promise of speed only.
    constexpr uint32_t not_of_1 = 1u << 21 | 1u << 24 | 1u << 31, not_of_7 = 1u << 9;
    std::string missing;
    for (const kvm_cpuid_entry2& leaf : leaves) {
        const bool features = leaf.function == 1 || leaf.function == 0x8000'0001 || (leaf.function == 7 && leaf.index == 0);
        if (!features)
            continue;
        const auto found = std::find_if(supported.begin(), supported.end(), [&](const kvm_cpuid_entry2& s) {
            return s.function == leaf.function && s.index == leaf.index;
        });
        const kvm_cpuid_entry2 has = found == supported.end() ? kvm_cpuid_entry2{} : *found;
        const uint32_t ebx = leaf.function == 7 ? leaf.ebx & ~has.ebx & ~not_of_7 : 0;
        const uint32_t ecx = leaf.ecx & ~has.ecx & ~(leaf.function == 1 ? not_of_1 : 0);
        const uint32_t edx = leaf.function == 7 ? 0 : leaf.edx & ~has.edx;
        if (ebx | ecx | edx)
            missing += fmt::format("{}leaf {:#x}: EBX {:#x}, ECX {:#x}, EDX {:#x}", missing.empty() ? "" : "; ",
                                   leaf.function, ebx, ecx, edx);
    }
    if (!missing.empty())
        return fail("KVM here lacks features of CPU model '{}' (CPUID {}): choose another model", cpuid_.name(), missing);
    return {};
}

// ---------------------------------------------------------------------------------------------------------------------

int KvmCpu::call(unsigned long request, void* argument, const char* name) const {
    const int result = ioctl(fd_.get(), request, argument);
    if (result < 0 && failure_.empty())
        failure_ = fmt::format("{} for vCPU {}: {}", name, id_, errno_text(errno));
    return result;
}

int KvmCpu::enter() {
    if (!failure_.empty())
        return EIO;
    if (dirty_) {
        if (sync_) {
            run_->s.regs.regs = registers_;
            run_->kvm_dirty_regs = KVM_SYNC_X86_REGS;
        } else {
            call(KVM_SET_REGS, &registers_, "KVM_SET_REGS");
        }
        dirty_ = false;
    }
    registers_known_ = special_known_ = false;
    const int result = ioctl(fd_.get(), KVM_RUN, 0) < 0 ? errno : 0;
    fresh_ = sync_;
    completed_ = false;
    return result;
}

bool KvmCpu::complete_exit() {
    if (completed_)
        return true;
    // What KVM still has to finish, it does first in KVM_RUN; then it sees the flag.
    const bool before = run_->immediate_exit;
    run_->immediate_exit = 1;
    completed_ = enter() == EINTR;
    run_->immediate_exit = before;
    return completed_;
}

void KvmCpu::set_sync(bool on) {
    sync_ = on && can_sync_;
    run_->kvm_valid_regs = sync_ ? synced : 0;
    run_->kvm_dirty_regs = 0;
    fresh_ = false;
}

const kvm_regs& KvmCpu::registers() const {
    if (!registers_known_ && !dirty_) {
        if (fresh_)
            registers_ = run_->s.regs.regs;
        else
            call(KVM_GET_REGS, &registers_, "KVM_GET_REGS");
        registers_known_ = true;
    }
    return registers_;
}

const kvm_sregs& KvmCpu::special_registers() const {
    if (!special_known_) {
        if (fresh_)
            special_ = run_->s.regs.sregs;
        else
            call(KVM_GET_SREGS, &special_, "KVM_GET_SREGS");
        special_known_ = true;
    }
    return special_;
}

void KvmCpu::set_registers(const kvm_regs& registers) {
    registers_ = registers;
    registers_known_ = dirty_ = true;
}

void KvmCpu::inject_interrupt(uint8_t vector) {
    kvm_interrupt interrupt{vector};
    call(KVM_INTERRUPT, &interrupt, "KVM_INTERRUPT");
}
void KvmCpu::inject_nmi() { call(KVM_NMI, nullptr, "KVM_NMI"); }

void KvmCpu::raise_debug_exception(uint64_t dr6_bits) {
    kvm_debugregs debug{};
    call(KVM_GET_DEBUGREGS, &debug, "KVM_GET_DEBUGREGS");
    debug.dr6 |= dr6_bits;
    call(KVM_SET_DEBUGREGS, &debug, "KVM_SET_DEBUGREGS");
    kvm_vcpu_events events{};
    call(KVM_GET_VCPU_EVENTS, &events, "KVM_GET_VCPU_EVENTS");
    events.exception.injected = 1;
    events.exception.nr = Vector::db;
    events.exception.has_error_code = 0;
    call(KVM_SET_VCPU_EVENTS, &events, "KVM_SET_VCPU_EVENTS");
}

void KvmCpu::set_guest_debug(uint32_t control, std::span<const Gva> breakpoints) {
    if (dirty_) { // KVM steps from the RIP that it knows of
        call(KVM_SET_REGS, &registers_, "KVM_SET_REGS");
        dirty_ = false;
        fresh_ = false;
    }
    kvm_guest_debug debug{};
    debug.control = control;
    constexpr uint64_t dr7_fixed = 0x400, exact = 0x300; // bit 10 is always set; LE and GE
    debug.arch.debugreg[7] = dr7_fixed;
    for (size_t n = 0; n < breakpoints.size(); ++n) {
        debug.arch.debugreg[n] = breakpoints[n];
        debug.arch.debugreg[7] |= exact | 2ull << (2 * n); // Gn; R/W and LEN 0: instruction execution
    }
    call(KVM_SET_GUEST_DEBUG, &debug, "KVM_SET_GUEST_DEBUG");
}

std::optional<Gpa> KvmCpu::translate(Gva address) const {
    kvm_translation translation{};
    translation.linear_address = address;
    if (ioctl(fd_.get(), KVM_TRANSLATE, &translation) < 0 || !translation.valid)
        return std::nullopt;
    return translation.physical_address;
}

} // namespace vtrace::kvm
