#include "vmm/kvm/vm.h"

#include <array>
#include <cstring>
#include <initializer_list>

#include "vmm/kvm/kvm_api.h"
#include <sys/ioctl.h>

#include "vmm/clock.h"
#include "vmm/msr_index.h"

namespace vtrace::kvm {
namespace {

/// Four pages outside of RAM and devices, for KVM on Intel processors without unrestricted guests: a TSS of three pages,
/// and before it a page table for real mode.
constexpr uint64_t tss_address = 0xfffb'd000, identity_map_address = tss_address - page_size;

constexpr int khz = 1000;

/// One range of KVM's MSR filter: those of `allowed` within [first, first + count) are KVM's, the others are ours.
template <uint32_t count> class FilterRange {
  public:
    FilterRange(uint32_t first, std::initializer_list<uint32_t> allowed) : first_(first) {
        for (uint32_t msr : allowed)
            bitmap_[(msr - first) / 8] |= static_cast<uint8_t>(1u << (msr - first) % 8);
    }
    kvm_msr_filter_range range() {
        return {.flags = KVM_MSR_FILTER_READ | KVM_MSR_FILTER_WRITE, .nmsrs = count, .base = first_, .bitmap = bitmap_.data()};
    }

  private:
    uint32_t first_;
    std::array<uint8_t, count / 8> bitmap_{};
};

} // namespace

Result<std::unique_ptr<KvmVm>> KvmVm::create(const KvmHost& host, GuestMemory& memory) {
    Fd fd(ioctl(host.fd(), KVM_CREATE_VM, 0));
    if (fd.get() < 0)
        return fail("cannot create a virtual machine under KVM: {}", errno_text(errno));
    std::unique_ptr<KvmVm> vm(new KvmVm(host, memory, std::move(fd)));
    VTRACE_TRY(vm->set_up());
    return vm;
}

Result<> KvmVm::set_up() {
    run_size_ = static_cast<size_t>(ioctl(host_.fd(), KVM_GET_VCPU_MMAP_SIZE, 0));
    if (ioctl(fd_.get(), KVM_SET_TSS_ADDR, tss_address) < 0)
        return fail("KVM refuses its task state segment at {:#x}: {}", tss_address, errno_text(errno));
    uint64_t map = identity_map_address;
    if (ioctl(fd_.get(), KVM_SET_IDENTITY_MAP_ADDR, &map) < 0)
        return fail("KVM refuses its real-mode page table at {:#x}: {}", map, errno_text(errno));
    VTRACE_TRY(add_memory());
    VTRACE_TRY(filter_msrs());
    return find_tsc_rate();
}

Result<> KvmVm::add_memory() {
    uint32_t slot = 0;
    for (const auto& [gpa, size] : {std::pair(Gpa{0}, memory_.low_size()), {GuestMemory::high_start, memory_.high_size()}}) {
        if (size == 0)
            continue;
        kvm_userspace_memory_region region{};
        region.slot = slot++;
        region.guest_phys_addr = gpa;
        region.memory_size = size;
        region.userspace_addr = reinterpret_cast<uintptr_t>(memory_.at(gpa, size));
        if (ioctl(fd_.get(), KVM_SET_USER_MEMORY_REGION, &region) < 0)
            return fail("KVM refuses {} MiB of guest memory at {:#x}: {}", size >> 20, gpa, errno_text(errno));
    }
    return {};
}

Result<> KvmVm::filter_msrs() {
    // Before the filter: an access that it denies would be #GP otherwise.
    kvm_enable_cap exits{};
    exits.cap = KVM_CAP_X86_USER_SPACE_MSR;
    exits.args[0] = KVM_MSR_EXIT_REASON_UNKNOWN | KVM_MSR_EXIT_REASON_INVAL | KVM_MSR_EXIT_REASON_FILTER;
    if (ioctl(fd_.get(), KVM_ENABLE_CAP, &exits) < 0)
        return fail("KVM refuses to give MSR accesses to user space: {}", errno_text(errno));

    namespace M = Msr;
    FilterRange<0x400> low(0, {M::tsc, M::tsc_adjust, M::sysenter_cs, M::sysenter_esp, M::sysenter_eip, M::pat});
    FilterRange<0x200> high(0xc000'0000, {M::efer, M::star, M::lstar, M::cstar, M::sfmask, M::fs_base, M::gs_base,
                                          M::kernel_gs_base, M::tsc_aux});
    kvm_msr_filter filter{};
    filter.flags = KVM_MSR_FILTER_DEFAULT_DENY;
    filter.ranges[0] = low.range();
    filter.ranges[1] = high.range();
    if (ioctl(fd_.get(), KVM_X86_SET_MSR_FILTER, &filter) < 0)
        return fail("KVM refuses the MSR filter: {}", errno_text(errno));
    return {};
}

/// With TSC scaling, guests run at the machine's own rate; without, at the host's.
Result<> KvmVm::find_tsc_rate() {
    if (host_.check(KVM_CAP_TSC_CONTROL)) {
        tsc_hz_ = default_tsc_hz;
        return {};
    }
    int rate = ioctl(fd_.get(), KVM_GET_TSC_KHZ, 0);
    if (rate <= 0) { // before Linux 5.16 only a vCPU can be asked, and it can't be taken back out of its machine
        const Fd other(ioctl(host_.fd(), KVM_CREATE_VM, 0));
        const Fd vcpu(ioctl(other.get(), KVM_CREATE_VCPU, 0));
        rate = ioctl(vcpu.get(), KVM_GET_TSC_KHZ, 0);
    }
    if (rate <= 0)
        return fail("KVM does not say how fast its guests' time stamp counter runs: {}", errno_text(errno));
    tsc_hz_ = static_cast<uint64_t>(rate) * khz;
    return {};
}

Result<Fd> KvmVm::create_vcpu(unsigned id) {
    Fd vcpu(ioctl(fd_.get(), KVM_CREATE_VCPU, id));
    if (vcpu.get() < 0)
        return fail("cannot create vCPU {} under KVM: {}", id, errno_text(errno));
    if (host_.check(KVM_CAP_TSC_CONTROL) && ioctl(vcpu.get(), KVM_SET_TSC_KHZ, tsc_hz_ / khz) < 0)
        return fail("KVM refuses a time stamp counter of {} kHz for vCPU {}: {}", tsc_hz_ / khz, id, errno_text(errno));
    return vcpu;
}

} // namespace vtrace::kvm
