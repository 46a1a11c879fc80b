// CodeIndex: which bytes of code lay at a linear address, at a place of a stream.
#pragma once

#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "decode/code_windows.h"
#include "decode/codec_side.h"
#include "ds/result.h"

namespace vtrace {

/// Holds where each version of each page is, and a few decoded chunks of pages. Filled by one thread; then lookups are
/// thread-safe (one mutex).
class CodeIndex {
  public:
    /// Loads the chunk of pages with this number again. Called with no lock held that the caller of code_at() could
    /// need.
    using Loader = std::function<std::shared_ptr<const DecodedCodePages>(size_t chunk)>;

    explicit CodeIndex(Loader loader) : loader_(std::move(loader)) {}

    /// False: more entries than a reader keeps; the rest is left out.
    bool add_pages(size_t chunk, std::span<const CodePage> pages);
    bool add_mappings(std::span<const CodeMapping> mappings);
    /// After the last add.
    void finish(unsigned vcpus, CodeWindows windows);

    size_t code_at(unsigned vcpu, uint64_t position, uint64_t cr3, uint64_t gva, std::span<uint8_t> buffer);

    static constexpr size_t max_entries = size_t{4} << 20; // pages, and mappings

  private:
    struct Version {
        SidePlace place;
        uint64_t window;
        size_t chunk;
        uint32_t in_chunk;
    };
    struct Mapped {
        SidePlace place;
        uint64_t window;
        uint64_t cr3, gpa;
        bool global;
    };

    /// Where code is asked for.
    struct Place {
        unsigned vcpu;
        uint64_t position;
        uint64_t window;
        uint64_t others; // what other vCPUs told holds there if its order is below
    };
    static bool in_force(const SidePlace& told, uint64_t window, const Place& place);
    uint64_t others_before(unsigned vcpu, uint64_t position) const;
    const Mapped* mapping(const Place& place, uint64_t cr3, uint64_t page) const;
    bool line_at(const Place& place, uint64_t gpa, std::span<uint8_t> out);
    std::shared_ptr<const DecodedCodePages> load(size_t chunk);

    Loader loader_;
    std::unordered_map<uint64_t, std::vector<Version>> pages_;     // by gpa, ascending order
    std::unordered_map<uint64_t, std::vector<Mapped>> mappings_;   // by gva, ascending order
    std::vector<std::vector<std::pair<uint64_t, uint64_t>>> told_; // by vCPU: position, order; ascending
    size_t page_count_ = 0, mapping_count_ = 0;
    CodeWindows windows_;

    std::mutex mutex_;                                                            // guards the cache
    std::list<std::pair<size_t, std::shared_ptr<const DecodedCodePages>>> cache_; // latest first
};

} // namespace vtrace
