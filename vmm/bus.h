// The bus: which device answers an I/O port or a physical address that is not RAM.
//
// Reads that nobody answers give all ones and writes vanish, as on a PC; both are counted, for the log.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "ds/result.h"
#include "vmm/guest_memory.h"

namespace vtrace {

/// A device on a bus. `offset` is relative to the range that it was attached at; `size` is 1, 2, 4 (or 8 for memory).
/// The clock is exact (Clock::now()) during each call. Called on the machine's thread only.
class Device {
  public:
    virtual ~Device() = default;
    virtual uint64_t read(uint64_t offset, unsigned size) = 0;
    virtual void write(uint64_t offset, unsigned size, uint64_t value) = 0;
};

/// One address space. Devices are borrowed and must outlive the bus.
class Bus {
  public:
    /// Fails when the range overlaps one that is attached.
    Result<> attach(uint64_t start, uint64_t length, Device& device, std::string name);
    uint64_t read(uint64_t address, unsigned size);
    void write(uint64_t address, unsigned size, uint64_t value);
    uint64_t unclaimed() const { return unclaimed_; }

  private:
    struct Range {
        uint64_t start, length;
        Device* device;
        std::string name;
    };
    Range* find(uint64_t address, unsigned size);

    std::vector<Range> ranges_; // sorted by start
    uint64_t unclaimed_ = 0;
};

} // namespace vtrace
