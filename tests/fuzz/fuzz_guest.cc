// libFuzzer target: any bytes as a guest. Whatever it executes, reads, writes or tells the devices, the machine must come
// back with an outcome, within its budget.
//
// The input's first byte chooses mode, CPU model and number of processors; the rest is the code.
#include <cstdint>
#include <cstdlib>
#include <string>

#include <sys/mman.h>
#include <unistd.h>

#include "vmm/machine.h"

using namespace vtrace;

namespace {

constexpr uint64_t instructions = 2'000;

void check(bool holds) {
    if (!holds)
        std::abort();
}

} // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    if (size < 2)
        return 0;
    const uint8_t choice = data[0];
    const int fd = memfd_create("guest", MFD_CLOEXEC);
    check(fd >= 0 && write(fd, data + 1, size - 1) == static_cast<ssize_t>(size - 1));

    MachineConfig config{.memory = 4u << 20,
                         .vcpus = 1u + (choice >> 6 & 1),
                         .cpuid = *CpuidModel::by_name(choice & 0x20 ? "atom" : "x86-64-v2"),
                         .boot = {}};
    config.boot.kernel_path = "/proc/self/fd/" + std::to_string(fd);
    config.boot.flat = FlatOptions{static_cast<FlatOptions::Mode>(choice % 3), {}, {}};
    auto machine = Machine::create(std::move(config));
    close(fd);
    check(machine.has_value());

    // Virtual time is bounded too: a guest that sleeps costs nothing, but may wake for ever.
    const RunResult result = (*machine)->run({.instructions = instructions, .time = 1'000'000'000});
    check(result.instructions <= instructions);
    check(!describe(result.outcome).empty());
    return 0;
}
