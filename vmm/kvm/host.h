// KvmHost: /dev/kvm, opened, and what it can do.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "ds/result.h"

namespace vtrace::kvm {

/// One capability of KVM that vtrace uses (Linux, Documentation/virt/kvm/api.rst).
struct Capability {
    int number;           // KVM_CAP_*
    const char* name;     // "KVM_CAP_SYNC_REGS"
    bool required;        // without it there is no `--accel kvm`
    const char* used_for; // what is lost without it
};
const std::vector<Capability>& capabilities();

/// The module that makes KVM of this processor's virtualization, "kvm-amd" or "kvm-intel"; null if /proc/cpuinfo shows
/// neither svm nor vmx.
const char* hardware_module();

/// A file descriptor that closes itself.
class Fd {
  public:
    Fd() = default;
    explicit Fd(int fd) : fd_(fd) {}
    Fd(Fd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
    Fd& operator=(Fd&& other) noexcept {
        std::swap(fd_, other.fd_);
        return *this;
    }
    ~Fd();
    int get() const { return fd_; }

  private:
    int fd_ = -1;
};

class KvmHost {
  public:
    static constexpr const char* default_device = "/dev/kvm";

    /// Opens the device and checks the API version. Error: one line that says why not (no such device, no permission,
    /// module not loaded, too old), and what to do about it.
    static Result<KvmHost> open(const std::string& device = default_device);
    /// As open(); also every required capability must be there. Error: as above, or naming all that are missing.
    static Result<KvmHost> open_for_use(const std::string& device = default_device);

    int fd() const { return fd_.get(); }
    /// KVM_CHECK_EXTENSION: 0 if it isn't there, else a positive number whose meaning depends on the capability.
    int check(int capability) const;

  private:
    explicit KvmHost(Fd fd) : fd_(std::move(fd)) {}
    Fd fd_;
};

} // namespace vtrace::kvm
