// libFuzzer target: any bytes as a kernel, with and without an initrd, by every protocol. The loader must come back
// with a guest that lies in memory, or with one line of error.
//
// The input's first byte chooses the options, the rest is the kernel's file.
#include <cstdint>
#include <cstdlib>

#include "vmm/boot/boot.h"

using namespace vtrace;

namespace {

constexpr uint64_t memory_size = 32 << 20;

void check(bool holds) {
    if (!holds)
        std::abort();
}

BootOptions options_of(uint8_t choice) {
    BootOptions options;
    options.as_shipped = choice & 1;
    options.protocol = static_cast<BootProtocol>(choice >> 1 & 3);
    if (choice & 0x20)
        options.command_line = "console=ttyS0";
    if (choice & 0x80)
        options.flat = FlatOptions{static_cast<FlatOptions::Mode>((choice >> 3 & 3) % 3), {}, {}};
    return options;
}

} // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    if (size == 0)
        return 0;
    // One memory for all inputs: its contents don't change what the loader decides, and mapping it anew costs most.
    static GuestMemory memory = *GuestMemory::create(memory_size);
    const uint8_t choice = data[0];
    const std::span<const uint8_t> bytes(data + 1, size - 1);
    BootFiles files{{"kernel", bytes, {}}, {}, {}};
    if (choice & 0x40)
        files.initrd = BootFile{"initrd", bytes, {}};
    const auto guest = load_guest(memory, files, options_of(choice), 0xe'0000);
    if (!guest) {
        check(!guest.error().message.empty());
        check(guest.error().message.find('\n') == std::string::npos);
        return 0;
    }
    check(guest->kernel.size() != 0 && memory.at(guest->kernel.start, guest->kernel.size()));
    check(guest->entry >= guest->kernel.start && guest->entry < guest->kernel.end);
    check(!files.initrd || memory.at(guest->initrd.start, guest->initrd.size()));
    return 0;
}
