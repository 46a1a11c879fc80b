// A DS area that the guest owns: its management area and buffers, in guest memory, in the model's layout.
//
// What it holds is the guest's to say, and may be anything. A record is written whole or not at all, and only within the
// buffer that the area names; one that can't be is dropped and counted.
#pragma once

#include <cstdint>
#include <span>

#include "ds/cpu_model.h"
#include "ds/guest.h"

namespace vtrace::ds {

/// What became of a record.
enum class Stored : uint8_t {
    written,
    threshold, // written, and the index is now at or above the interrupt threshold
    full,      // dropped: no room
    unusable,  // dropped: the area isn't there, isn't RAM, or makes no sense
};

class GuestArea {
  public:
    struct Counts {
        uint64_t written = 0, dropped = 0;
    };

    GuestArea(const CpuModel& model, GuestSpace& memory) : model_(model), memory_(memory) {}

    /// IA32_DS_AREA, and whether IA-32e mode is active, from now on.
    void place(uint64_t address) { address_ = address; }
    void set_ia32e(bool active) { field_ = model_.field_size(active); }
    uint64_t address() const { return address_; }

    /// SDM vol. 3, 17.4.9.2. `circular`: DEBUGCTL.BTINT is clear.
    Stored store_branch(uint64_t from, uint64_t to, uint64_t flags, bool circular);
    Stored store_pebs(std::span<const uint8_t> record);
    /// The value that a counter starts again from; false: it can't be read.
    bool read_reset(unsigned global_status_bit, uint64_t& value);

    const Counts& branches() const { return branches_; }
    const Counts& pebs() const { return pebs_; }
    /// The last store_pebs() found an index outside of the buffer.
    bool pebs_index_wild() const { return pebs_index_wild_; }

  private:
    struct Buffer {
        uint64_t base, index, absolute_maximum, threshold;
    };
    enum class Part : uint8_t { bts, pebs };

    static unsigned first_field(Part part);
    uint64_t field_address(unsigned number) const;
    bool read_buffer(Part part, Buffer& buffer);
    bool write_index(Part part, uint64_t index);
    /// `size`: of the record; Size is the same where it is known beforehand, else 0.
    template <size_t Size>
    Stored store(Part part, const uint8_t* record, bool circular, size_t size = Size);

    const CpuModel& model_;
    GuestSpace& memory_;
    uint64_t address_ = 0;
    size_t field_ = 8;
    Counts branches_, pebs_;
    bool pebs_index_wild_ = false;
};

} // namespace vtrace::ds
