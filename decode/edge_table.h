// A hash table for counting edges: open addressing, power-of-two size, nothing is ever removed.
#pragma once

#include <bit>
#include <cstdint>
#include <vector>

namespace vtrace {

class EdgeTable {
  public:
    struct Entry {
        uint64_t from;
        uint64_t to;
        uint64_t count; // 0: empty
        uint32_t tag;   // whatever else tells edges apart
        uint32_t first; // value of `place` at the first add()
    };

    explicit EdgeTable(unsigned bits = 12) : slots_(size_t{1} << bits), shift_(64 - bits) {}

    void add(uint64_t from, uint64_t to, uint32_t tag, uint64_t count, uint32_t place) {
        for (size_t slot = hash(from, to, tag) >> shift_;; slot = (slot + 1) & (slots_.size() - 1)) {
            Entry& entry = slots_[slot];
            if (entry.count == 0) {
                entry = {from, to, count, tag, place};
                if (++used_ * 2 > slots_.size())
                    grow();
                return;
            }
            if (entry.from == from && entry.to == to && entry.tag == tag) {
                entry.count += count;
                return;
            }
        }
    }

    /// The edges, in no particular order.
    std::vector<Entry> entries() const {
        std::vector<Entry> all;
        all.reserve(used_);
        for (const Entry& entry : slots_)
            if (entry.count != 0)
                all.push_back(entry);
        return all;
    }
    size_t size() const { return used_; }

  private:
    // Not proof against chosen collisions: a guest that makes its edges collide makes its own report slow, no more.
    static uint64_t hash(uint64_t from, uint64_t to, uint32_t tag) {
        uint64_t mixed = (from * 0x9e37'79b9'7f4a'7c15) ^ std::rotl(to * 0xc2b2'ae3d'27d4'eb4f, 29) ^ tag;
        return mixed * 0xff51'afd7'ed55'8ccd;
    }

    void grow() {
        std::vector<Entry> old(slots_.size() * 2);
        old.swap(slots_);
        --shift_;
        for (const Entry& entry : old) {
            if (entry.count == 0)
                continue;
            size_t slot = hash(entry.from, entry.to, entry.tag) >> shift_;
            while (slots_[slot].count != 0)
                slot = (slot + 1) & (slots_.size() - 1);
            slots_[slot] = entry;
        }
    }

    std::vector<Entry> slots_;
    size_t used_ = 0;
    unsigned shift_;
};

} // namespace vtrace
