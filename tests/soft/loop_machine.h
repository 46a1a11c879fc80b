// A machine whose guest is an endless loop with something of every family of handlers: what must hold for any code is tried
// on it.
#pragma once

#include <array>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "ds/debug_store.h"
#include "vmm/machine.h"

namespace vtrace {

/// The loop writes at data and above, and to its stack.
struct LoopMachine {
    static constexpr Gpa data = 0x300000, data_size = 0x11000;

    std::unique_ptr<Machine> machine;

    /// `code`: another loop, position-independent 64-bit code; empty: the one in loop_machine.cc.
    explicit LoopMachine(std::string_view model = "x86-64-v2", std::span<const uint8_t> code = {});
    Vcpu& vcpu() { return machine->vcpu(0); }

    /// Retires exactly `count` instructions, at most `slice` at a time.
    void run(uint64_t count, uint64_t slice);
};

/// The same, with the host's own recording on.
class RecordedLoop : public LoopMachine {
  public:
    explicit RecordedLoop(std::string_view model = "x86-64-v2", std::span<const uint8_t> code = {});
    /// From, to and flags of each since the last call; at most 2^17 records at a time.
    std::vector<std::array<uint64_t, 3>> branches();

  private:
    struct Sink final : TraceSink {
        void code_page(unsigned, uint64_t, Gpa, std::span<const uint8_t, page_size>) override {}
        void code_mapping(unsigned, uint64_t, uint64_t, Gva, Gpa, bool) override {}
        void console(VirtualTime, std::string_view) override {}
    } sink_;
    ds::Doorbell bell_;
    ds::Ring ring_;
    std::unique_ptr<ds::DebugStore> store_;
};

} // namespace vtrace
