// What far RET and IRET have in common.
#pragma once

#include <cstdint>

#include "vmm/soft/descriptor.h"

namespace vtrace::soft {

/// CS as a real-mode far transfer loads it.
void set_real_mode_code(Cpu& cpu, uint16_t selector);

/// Where a return goes, once checked.
struct ReturnTarget {
    Descriptor code, stack; // stack: unless null
    uint16_t cs = 0, ss = 0;
    unsigned level = 0; // CPL after it
};

/// Selector, type, privilege and presence of the code segment that was popped: #GP, #NP.
bool check_return_code(Cpu& cpu, uint16_t cs, ReturnTarget& target);
/// The same for SS: #GP, #SS. Null is allowed where 64-bit code returns to 64-bit code inside of level 3.
bool check_return_stack(Cpu& cpu, uint16_t ss, ReturnTarget& target);
/// After all checks: accessed bits, the only part that may still fault.
bool mark_return_accessed(Cpu& cpu, ReturnTarget& target);
/// RSP, SS, CS and CPL; data segments that the new level may not see become null.
void enter_return(Cpu& cpu, const ReturnTarget& target, bool load_stack, uint64_t rsp);

} // namespace vtrace::soft
