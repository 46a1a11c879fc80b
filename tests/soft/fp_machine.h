// FpMachine: a software CPU in 64-bit mode that executes single instructions, for the tests of the floating-point side.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "tests/soft/no_pins.h"
#include "vmm/clock.h"
#include "vmm/soft/cpu.h"
#include "vmm/soft/decode.h"

namespace vtrace::soft {

/// How an instruction ended.
struct Outcome {
    bool faulted = false;
    Fault fault;
    bool operator==(uint8_t vector) const { return faulted && fault.vector == vector; }
};

/// Linear addresses equal those of host memory at `data`, so that the same instruction with the same registers can be
/// executed by the host too. Layout: data_pages pages, writable; then one that isn't present; then one read-only.
class FpMachine {
  public:
    static constexpr uint64_t data = 0x1000'0000;
    static constexpr unsigned data_pages = 4;
    static constexpr uint64_t data_end = data + data_pages * page_size; // of the not-present page
    static constexpr uint64_t read_only = data_end + page_size;

    explicit FpMachine(std::string_view model = "x86-64-v2");
    ~FpMachine();

    Cpu& cpu() { return *cpu_; }
    /// Guest memory behind a linear address of the data pages.
    uint8_t* memory(uint64_t linear);

    /// Decodes; a null handler never results: what isn't an instruction gets raise_undefined.
    Op decode(std::span<const uint8_t> bytes, CodeMode mode = CodeMode::bits64);
    Outcome run(const Op& op);
    Outcome run(std::initializer_list<int> bytes);
    Outcome run(std::span<const uint8_t> bytes, CodeMode mode = CodeMode::bits64) { return run(decode(bytes, mode)); }

    /// Compatibility mode with flat segments (or back).
    void set_mode(CodeMode mode);

  private:
    GuestMemory memory_;
    NoPins pins_;
    Clock clock_;
    CpuidModel model_;
    std::unique_ptr<Cpu> cpu_;
    std::vector<uint64_t> block_; // storage of one Block
};

} // namespace vtrace::soft
