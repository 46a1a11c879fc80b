// Flat binaries: no header, no protocol; bytes at an address, and a mode to start them in.
#include "vmm/boot/entry_state.h"
#include "vmm/boot/protocols.h"

namespace vtrace {
namespace {

constexpr Gpa boot_sector_address = 0x7c00;
constexpr uint64_t stack_size = 16 << 10;

} // namespace

Result<LoadedGuest> boot_flat(Boot& boot, const FlatOptions& options) {
    using Mode = FlatOptions::Mode;
    const auto bytes = boot.files.kernel.bytes;
    if (boot.files.initrd || !boot.files.modules.empty() || !boot.options.command_line.empty())
        return fail("a flat binary takes no initrd, no modules and no command line: there is no protocol to pass them");
    const Gpa load =
        options.load_address.value_or(options.mode == Mode::real16 ? boot_sector_address : extended_memory_start);
    const Gpa entry = options.entry.value_or(load);
    VTRACE_TRY(boot.placement.claim(load, bytes.size(), "the flat binary"));
    VTRACE_TRY(boot.memory.write(load, bytes));
    if (entry < load || entry - load >= bytes.size())
        return fail("its entry {:#x} is outside of the flat binary ({:#x}-{:#x})", entry, load, load + bytes.size());

    LoadedGuest guest;
    guest.kind = KernelKind::flat;
    guest.entry = entry;
    guest.kernel = {load, load + bytes.size()};
    guest.memory_map = memory_map(boot.memory);
    if (options.mode == Mode::real16) {
        constexpr uint64_t segment_size = 0x1'0000;
        if (entry >= extended_memory_start)
            return fail("its entry {:#x} is out of real mode's reach (1 MiB)", entry);
        // The stack's segment is 0, so its top must be below 64 KiB.
        auto stack = boot.placement.place_high(stack_size, 16, {bios_data_end, segment_size - 16}, "the stack");
        if (!stack)
            return Unexpected(std::move(stack.error()));
        const bool first_segment = entry < segment_size;
        guest.state = real_mode_state(first_segment ? 0 : static_cast<uint16_t>(entry >> 4),
                                      static_cast<uint16_t>(first_segment ? entry : entry & 0xf),
                                      static_cast<uint16_t>(*stack + stack_size));
        return guest;
    }
    auto stack = boot.placement.place_high(stack_size, 16, low_memory, "the stack");
    if (!stack)
        return Unexpected(std::move(stack.error()));
    if (options.mode == Mode::protected32 && entry >= GuestMemory::high_start)
        return fail("its entry {:#x} is out of 32-bit mode's reach (4 GiB)", entry);
    auto state = options.mode == Mode::protected32
                     ? protected_mode_state(boot.memory, boot.placement, static_cast<uint32_t>(entry))
                     : long_mode_state(boot.memory, boot.placement, entry, guest.kernel.end);
    if (!state)
        return Unexpected(std::move(state.error()));
    guest.state = *state;
    guest.state.gpr[RSP] = *stack + stack_size;
    return guest;
}

} // namespace vtrace
