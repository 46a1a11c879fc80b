// What the Debug Store needs of the processor around it: the guest's memory and its interrupt line.
#pragma once

#include <cstddef>
#include <cstdint>

#include "ds/events.h"

namespace vtrace::ds {

/// Guest memory by linear address, through the page tables as they are now, with the rights of the supervisor, whatever
/// the CPL (SDM vol. 3, 17.4.9.3).
class GuestSpace {
  public:
    virtual ~GuestSpace() = default;
    /// All of it, or false and nothing: a page isn't there, isn't RAM, or forbids it. Never a fault for the guest.
    virtual bool read(uint64_t linear, void* bytes, size_t size) = 0;
    virtual bool write(uint64_t linear, const void* bytes, size_t size) = 0;
    /// Where [linear, +size) lies in host memory, for reading and writing right away; null: not known at once, or not in one
    /// piece, or someone must hear of a write. Valid until the guest executes again.
    virtual uint8_t* fast(uint64_t linear, size_t size) = 0;
};

/// The performance monitoring interrupt: the local APIC's LVT PC.
class PmiLine {
  public:
    virtual ~PmiLine() = default;
    virtual void raise_pmi() = 0;
};

/// One branch that was taken, or an interrupt or exception that was delivered.
struct Branch {
    uint64_t from, to; // linear
    uint64_t next;     // of the instruction that follows in memory
    InstructionEvents events; // of the instruction; Retired::far for interrupts and exceptions
    uint8_t cpl;              // after it
};

} // namespace vtrace::ds
