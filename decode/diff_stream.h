// One vCPU's branches as a window of comparable keys that moves on: what `diff` compares.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "decode/symbols.h"
#include "decode/trace_reader.h"

namespace vtrace {

/// Makes a key out of an address: the same in two recordings exactly where the places are the same.
class PlaceKeys {
  public:
    /// By address where `symbols` is null. Borrows it.
    explicit PlaceKeys(const SymbolTable* symbols);
    uint64_t of(uint64_t address);

  private:
    struct Cached {
        uint64_t address = 0, key = 0;
        bool known = false;
    };
    uint64_t compute(uint64_t address) const;

    const SymbolTable* symbols_;
    std::vector<uint64_t> functions_; // key of each function: of name, module, and which of several with that name
    std::vector<Cached> cache_;       // direct-mapped
};

/// Not thread-safe; streams of different readers may live on different threads.
class KeyStream {
  public:
    /// An empty stream where `reader` has no such vCPU.
    KeyStream(const TraceReader& reader, unsigned vcpu, const SymbolTable* symbols);

    /// Reads on until the window holds `count` branches, or the stream ends.
    void fill(size_t count);
    /// Takes the first `count` branches of the window away.
    void drop(size_t count) { begin_ += count; }
    /// Takes all that is left of the stream away; returns how many branches that were.
    uint64_t drain();

    std::span<const uint64_t> keys() const { return {keys_.data() + begin_, keys_.size() - begin_}; }
    size_t size() const { return keys_.size() - begin_; }
    /// Nothing lies behind the window.
    bool ended() const { return ended_; }
    /// Number of the window's first branch, or, in an empty window, of the one that would follow.
    uint64_t number() const { return begin_ < numbers_.size() ? numbers_[begin_] : next_number_; }

  private:
    std::optional<RecordCursor> cursor_;
    PlaceKeys places_;
    std::vector<uint64_t> keys_, numbers_;
    size_t begin_ = 0; // of the window, in both
    uint64_t next_number_ = 0;
    bool ended_ = false;
};

/// The nearest place where both windows go on alike: how many branches to drop of each, with the least sum. Windows are
/// filled as needed, up to diff_window. nullopt: there is none.
struct Alignment {
    size_t drop_a = 0, drop_b = 0;
};
std::optional<Alignment> align(KeyStream& a, KeyStream& b);

/// Fills both, at the same time.
void fill_both(KeyStream& a, KeyStream& b, size_t count);

} // namespace vtrace
