// Kernel or user: what a record does not say and its addresses nearly do.
//
// A BTS record holds no privilege level. Kernels live in the upper half of the address space, so that a branch from
// there is the kernel's. The lower half is user space, but also where boot code runs before a kernel has moved up. So:
// on each vCPU the lower half is the kernel's (boot code, or a bare-metal guest that never leaves it) until the first
// branch from the upper half to the lower one, and user space from there on. A trace recorded with user branches only
// is user space throughout.
#pragma once

#include <cstdint>

#include "decode/trace_reader.h"

namespace vtrace {

enum class Privilege : uint8_t { kernel, user };

constexpr bool upper_half(uint64_t address) {
    return address >> 63;
}

/// Does this branch show that the vCPU has entered user space for the first time, or again?
constexpr bool enters_user(uint64_t from, uint64_t to) {
    return upper_half(from) && !upper_half(to);
}

/// What to record or to show.
enum class PrivilegeFilter : uint8_t { all, kernel_only, user_only };

constexpr bool passes(PrivilegeFilter filter, Privilege privilege) {
    return filter == PrivilegeFilter::all ||
           (filter == PrivilegeFilter::kernel_only) == (privilege == Privilege::kernel);
}

/// Was the trace recorded with user branches only? (`"filter": "user"` in its configuration.)
bool user_branches_only(const TraceReader& reader);

/// Was a vCPU in user space, once at least, before the first branch that the trace has of it?
bool entered_user_before(const TraceReader& reader, unsigned vcpu);

/// Number of the first branch of a vCPU that runs in user space, at most `limit`: decodes the stream up to there.
/// Damaged chunks on the way are passed over.
uint64_t first_user_branch(const TraceReader& reader, unsigned vcpu, uint64_t limit);

} // namespace vtrace
