#include "cli/progress.h"

#include <unistd.h>

#include <fmt/format.h>

namespace vtrace::cli {

std::string short_count(uint64_t count) {
    static constexpr const char* units[] = {"", " k", " M", " G", " T", " P", " E"};
    double value = static_cast<double>(count);
    unsigned unit = 0;
    while (value >= 999.5 && unit + 1 < std::size(units)) {
        value /= 1000;
        ++unit;
    }
    if (unit == 0)
        return fmt::format("{}", count);
    return fmt::format("{:.{}f}{}", value, value < 9.995 ? 2 : value < 99.95 ? 1 : 0, units[unit]);
}

Progress::Progress(bool wanted) : enabled_(wanted && isatty(STDERR_FILENO)) {}

double Progress::seconds() const { return std::chrono::duration<double>(HostClock::now() - start_).count(); }

void Progress::update(const Numbers& numbers) {
    constexpr auto period = std::chrono::milliseconds(200);
    if (!enabled_)
        return;
    const auto now = HostClock::now();
    if (now - last_ < period)
        return;
    const double elapsed = std::chrono::duration<double>(now - last_).count();
    const double mips = static_cast<double>(numbers.instructions - last_instructions_) / elapsed / 1e6;
    last_ = now;
    last_instructions_ = numbers.instructions;
    fmt::print(stderr, "\r\033[K{} branches  {:.0f} MIPS  {}B trace  {:.3f} s guest time",
               short_count(numbers.branches), mips, short_count(numbers.trace_bytes),
               static_cast<double>(numbers.guest_ns) / 1e9);
    std::fflush(stderr);
    shown_ = true;
}

void Progress::clear() {
    if (!shown_)
        return;
    fmt::print(stderr, "\r\033[K");
    std::fflush(stderr);
    shown_ = false;
}

} // namespace vtrace::cli
