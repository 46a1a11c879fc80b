// vtrace's processor as the judged: a guest with the arena in user mode, whose every exception ends in HLT.
#pragma once

#include <memory>

#include "tests/oracle/native/machine.h"
#include "vmm/vcpu.h"

namespace vtrace::oracle {

class Guest {
  public:
    /// The segment bases are the host's, for FS and GS operands.
    static Result<std::unique_ptr<Guest>> create(uint64_t fs_base, uint64_t gs_base);
    ~Guest();

    uint8_t* code();
    uint8_t* data();

    /// Runs at most `budget` instructions from `in`. `completed` when the budget was used up, or at an INT3 (RIP at
    /// it). Fails when the engine did what no processor may do (exit `unsupported` or `shutdown`), with its detail.
    /// With `slice`, in runs of so many instructions each.
    Result<> run(const UserState& in, Mode mode, uint64_t budget, Answer& out, uint64_t slice = 0);

  private:
    struct Parts;
    explicit Guest(std::unique_ptr<Parts> parts);
    void build_tables();

    std::unique_ptr<Parts> parts_;
    CpuState initial_;
};

} // namespace vtrace::oracle
