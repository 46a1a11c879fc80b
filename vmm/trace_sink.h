// What the machine tells a recorder beside the branch records: code, mappings and console output.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "vmm/clock.h"
#include "vmm/guest_memory.h"

namespace vtrace {

/// Implemented by the recorder. Called on the machine's thread, in the guest's order. `position` is the number of records
/// (branches and events) that the vCPU had appended to its stream before: what is told here holds from there on.
class TraceSink {
  public:
    virtual ~TraceSink() = default;

    /// Bytes of a page of guest-physical memory, when code on it is about to run for the first time, or for the first time
    /// since these bytes changed: only the 64-byte lines that do are told, all others are zeros. What was told of those
    /// before still holds.
    virtual void code_page(unsigned vcpu, uint64_t position, Gpa gpa, std::span<const uint8_t, page_size> bytes) = 0;
    /// Code is fetched from linear page `gva` (page-aligned) through physical page `gpa`, under the address space `cr3`
    /// (page-table address without PCID and flag bits). `global`: a supervisor page, the same under any cr3.
    virtual void code_mapping(unsigned vcpu, uint64_t position, uint64_t cr3, Gva gva, Gpa gpa, bool global) = 0;

    virtual void console(VirtualTime time, std::string_view bytes) = 0;
};

} // namespace vtrace
