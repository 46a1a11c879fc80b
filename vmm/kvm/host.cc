#include "vmm/kvm/host.h"

#include <cerrno>
#include <fstream>

#include <fcntl.h>
#include <grp.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "vmm/kvm/kvm_api.h"

namespace vtrace::kvm {
namespace {

/// What to do when there is no KVM behind the device.
std::string how_to_get_kvm() {
    if (const char* module = hardware_module())
        return fmt::format(
            "the kernel module is not loaded, or virtualization is off in the firmware; try 'modprobe {}'", module);
    return "the processor, or the hypervisor around this machine, offers no virtualization (no svm or vmx in "
           "/proc/cpuinfo)";
}

std::string group_name(gid_t id) {
    const group* entry = getgrgid(id); // at start-up, before there are threads
    return entry ? entry->gr_name : std::to_string(id);
}

/// Who may open the device, and how to become one of them.
std::string how_to_get_permission(const std::string& device) {
    struct stat status {};
    if (stat(device.c_str(), &status) < 0)
        return "its folder can't be searched by you";
    constexpr gid_t root_group = 0; // no group for users to be in
    if (!(status.st_mode & S_IRGRP) || !(status.st_mode & S_IWGRP) || status.st_gid == root_group)
        return fmt::format("it is for root only; try 'sudo chown root:kvm {0} && sudo chmod 660 {0}'", device);
    const std::string group = group_name(status.st_gid);
    return fmt::format("it is for group '{0}'; try 'sudo usermod -aG {0} $USER', and log in again", group);
}

std::string why_not_opened(const std::string& device, int error) {
    switch (error) {
    case ENOENT:
    case ENODEV:
    case ENXIO:
        return how_to_get_kvm();
    case EACCES:
        return how_to_get_permission(device);
    case EPERM:
        return "a container's device rules forbid it, it seems; a container needs '--device /dev/kvm'";
    case EBUSY:
        return "another hypervisor holds the processor's virtualization";
    default:
        return "see 'dmesg | grep kvm'";
    }
}

} // namespace

const std::vector<Capability>& capabilities() {
#define CAPABILITY(name, required, used_for)                                                                           \
    { name, #name, required, used_for }
    static const std::vector<Capability> list = {
        CAPABILITY(KVM_CAP_USER_MEMORY, true, "guest memory"),
        CAPABILITY(KVM_CAP_EXT_CPUID, true, "the guest's CPUID"),
        CAPABILITY(KVM_CAP_SET_TSS_ADDR, true, "real mode"),
        CAPABILITY(KVM_CAP_SET_IDENTITY_MAP_ADDR, true, "real mode"),
        CAPABILITY(KVM_CAP_MP_STATE, true, "halted processors, and those that wait for start-up"),
        CAPABILITY(KVM_CAP_VCPU_EVENTS, true, "hand-over of pending exceptions, interrupts and NMIs"),
        CAPABILITY(KVM_CAP_DEBUGREGS, true, "hand-over of the debug registers"),
        CAPABILITY(KVM_CAP_XSAVE, true, "hand-over of FPU and vector registers"),
        CAPABILITY(KVM_CAP_XCRS, false, "hand-over of XCR0, where the host has XSAVE"),
        CAPABILITY(KVM_CAP_SYNC_REGS, true, "registers without a system call for each"),
        CAPABILITY(KVM_CAP_IMMEDIATE_EXIT, true, "stopping a vCPU without a race"),
        CAPABILITY(KVM_CAP_X86_USER_SPACE_MSR, true, "the machine's own MSRs (APIC, Debug Store)"),
        CAPABILITY(KVM_CAP_X86_MSR_FILTER, true, "the machine's own MSRs (APIC, Debug Store)"),
        CAPABILITY(KVM_CAP_GET_TSC_KHZ, true, "time that goes on across a hand-over"),
        CAPABILITY(KVM_CAP_SET_GUEST_DEBUG, true, "windows by symbol or address, and 'vtrace verify'"),
        CAPABILITY(KVM_CAP_SET_GUEST_DEBUG2, false, "single-stepping with interrupts held back"),
        CAPABILITY(KVM_CAP_EXCEPTION_PAYLOAD, false,
                   "hand-over of a pending page fault's or debug exception's details"),
        CAPABILITY(KVM_CAP_TSC_CONTROL, false, "a time stamp counter at the machine's rate; else at the host's"),
        CAPABILITY(KVM_CAP_VCPU_ATTRIBUTES, false, "an exact time stamp counter offset"),
        CAPABILITY(KVM_CAP_READONLY_MEM, false, "read-only guest memory"),
        CAPABILITY(KVM_CAP_NR_VCPUS, false, "how many vCPUs are advised"),
        CAPABILITY(KVM_CAP_MAX_VCPUS, false, "how many vCPUs are possible"),
    };
#undef CAPABILITY
    return list;
}

const char* hardware_module() {
    std::ifstream file("/proc/cpuinfo");
    for (std::string line; std::getline(file, line);) {
        if (line.rfind("flags", 0) != 0)
            continue;
        line += ' ';
        if (line.find(" svm ") != std::string::npos)
            return "kvm-amd";
        if (line.find(" vmx ") != std::string::npos)
            return "kvm-intel";
        return nullptr;
    }
    return nullptr;
}

Fd::~Fd() {
    if (fd_ >= 0)
        close(fd_);
}

Result<KvmHost> KvmHost::open(const std::string& device) {
    Fd fd(::open(device.c_str(), O_RDWR | O_CLOEXEC));
    if (fd.get() < 0) {
        const int error = errno;
        return fail("cannot open '{}': {}: {}", device, errno_text(error), why_not_opened(device, error));
    }
    const int version = ioctl(fd.get(), KVM_GET_API_VERSION, 0);
    if (version < 0)
        return fail("cannot use '{}': it does not answer as KVM does: {}", device, errno_text(errno));
    if (version != KVM_API_VERSION)
        return fail("cannot use '{}': its API has version {}, but must have {}; use a kernel of at least 5.10", device,
                    version, KVM_API_VERSION);
    return KvmHost(std::move(fd));
}

Result<KvmHost> KvmHost::open_for_use(const std::string& device) {
    auto host = open(device);
    if (!host)
        return host;
    std::string missing;
    for (const Capability& capability : capabilities())
        if (capability.required && host->check(capability.number) == 0)
            missing += (missing.empty() ? "" : ", ") + std::string(capability.name);
    if (!missing.empty())
        return fail("cannot use '{}': it lacks {}; a kernel of at least 5.10 has them all", device, missing);
    return host;
}

int KvmHost::check(int capability) const {
    const int value = ioctl(fd(), KVM_CHECK_EXTENSION, capability);
    return value < 0 ? 0 : value;
}

} // namespace vtrace::kvm
