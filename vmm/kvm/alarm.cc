#include "vmm/kvm/alarm.h"

#include <algorithm>
#include <cerrno>

#include <sys/timerfd.h>
#include <unistd.h>

namespace vtrace::kvm {

Result<Alarm> Alarm::create() {
    Fd timer(timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC));
    if (timer.get() < 0)
        return fail("cannot make a timer for the guest's devices: {}", errno_text(errno));
    return Alarm(std::move(timer));
}

void Alarm::set(HostClock::time_point time) {
    constexpr int64_t ns_per_second = 1'000'000'000;
    // Zero would disarm it.
    const int64_t ns = std::max<int64_t>(
        1, std::chrono::duration_cast<std::chrono::nanoseconds>(time.time_since_epoch()).count());
    itimerspec spec{};
    spec.it_value = {ns / ns_per_second, ns % ns_per_second};
    timerfd_settime(timer_.get(), TFD_TIMER_ABSTIME, &spec, nullptr);
}

void Alarm::wait() {
    uint64_t expirations;
    [[maybe_unused]] const ssize_t ignored = read(timer_.get(), &expirations, sizeof expirations);
}

} // namespace vtrace::kvm
