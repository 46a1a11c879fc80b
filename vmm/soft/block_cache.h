// BlockCache: translated blocks, found by physical address and code width, and forgotten when their bytes change.
//
// Which pages hold code is known per RAM page; the MMU gives such pages no write tag, so every store to them comes to
// the slow path, which asks is_code(). Invalidation is by page: links between blocks never leave a page, so none can dangle.
//
// One cache serves all vCPUs of a machine, so that code which one changes is forgotten for all.
#pragma once

#include <bitset>
#include <cstdint>
#include <memory>
#include <vector>

#include "vmm/guest_memory.h"
#include "vmm/soft/op.h"

namespace vtrace::soft {

struct Cpu;

class BlockCache {
  public:
    static constexpr unsigned line_size = 64; // granularity of the question "does this store hit code?"
    /// Blocks kept at most; beyond, all are forgotten: a guest can't make us grow without bound.
    static constexpr unsigned max_blocks = 400'000;

    explicit BlockCache(GuestMemory& memory);
    ~BlockCache();
    BlockCache(const BlockCache&) = delete;
    BlockCache& operator=(const BlockCache&) = delete;

    /// A processor that runs blocks of this cache, from here to remove().
    void add(Cpu& cpu) { users_.push_back(&cpu); }
    void remove(Cpu& cpu) { std::erase(users_, &cpu); }

    /// The block that starts at `gpa` (RAM, in code of this width), built if need be.
    /// Null when its first instruction crosses the page's end: then it can only be executed alone.
    Block* get(Cpu& cpu, Gpa gpa);

    bool page_has_code(Gpa gpa) const { return pages_[memory_.page_index(gpa)] != nullptr; }
    /// True if [gpa, +size), within one page, meets bytes of a block.
    bool is_code(Gpa gpa, unsigned size) const;
    /// Forgets the blocks of the page and makes the page writable again for the TLBs.
    void invalidate_page(Gpa gpa);
    void invalidate_all();
    /// Frees what was invalidated; only while no block executes.
    void free_graveyard();

    /// Tells the log that the bytes at `gpa` are about to run, if it doesn't have them as they are.
    void log_code(Cpu& cpu, Gpa gpa, unsigned length);
    /// There is a new log, which has been told nothing.
    void forget_log();

    uint64_t built() const { return built_; }
    uint64_t invalidations() const { return invalidations_; }

  private:
    struct CodePage {
        Block* lines[page_size / line_size] = {}; // by the line in which a block starts
        std::bitset<page_size / line_size> used;  // lines that any block's bytes lie in
    };

    GuestMemory& memory_;
    std::vector<Cpu*> users_;
    std::vector<std::unique_ptr<CodePage>> pages_;         // by RAM page index
    std::vector<std::unique_ptr<uint8_t[]>> logged_pages_; // what the log has been told of each page; zeros: nothing
    std::vector<Block*> graveyard_;
    uint64_t live_ = 0, built_ = 0, invalidations_ = 0;
};

} // namespace vtrace::soft
