#include "decode/trace_code.h"

#include <algorithm>
#include <cstring>

#include "decode/code_lines.h"

namespace vtrace {

namespace {
constexpr uint64_t page_mask = ~(code_page_bytes - 1);
constexpr uint64_t cr3_address = 0x000f'ffff'ffff'f000; // CR3 without PCID, LAM and no-flush bits
constexpr uint64_t max_cached_bytes = 64u << 20;
} // namespace

bool CodeIndex::add_pages(size_t chunk, std::span<const CodePage> pages) {
    for (uint32_t i = 0; i < pages.size(); ++i) {
        if (page_count_ == max_entries)
            return false;
        ++page_count_;
        pages_[pages[i].gpa].push_back({pages[i].place, 0, chunk, i});
    }
    return true;
}

bool CodeIndex::add_mappings(std::span<const CodeMapping> mappings) {
    for (const auto& mapping : mappings) {
        if (mapping_count_ == max_entries)
            return false;
        ++mapping_count_;
        mappings_[mapping.gva].push_back({mapping.place, 0, mapping.cr3 & cr3_address, mapping.gpa, mapping.global});
    }
    return true;
}

void CodeIndex::finish(unsigned vcpus, CodeWindows windows) {
    windows_ = std::move(windows);
    const auto by_order = [](const auto& a, const auto& b) { return a.place.order < b.place.order; };
    told_.resize(vcpus);
    const auto note = [&](const SidePlace& place) {
        if (vcpus > 1 && place.vcpu < vcpus)
            told_[place.vcpu].emplace_back(place.position, place.order);
    };
    for (auto& [gpa, versions] : pages_) {
        std::stable_sort(versions.begin(), versions.end(), by_order);
        for (auto& version : versions) {
            version.window = windows_.at(version.place.vcpu, version.place.position);
            note(version.place);
        }
    }
    for (auto& [gva, mapped] : mappings_) {
        std::stable_sort(mapped.begin(), mapped.end(), by_order);
        for (auto& mapping : mapped) {
            mapping.window = windows_.at(mapping.place.vcpu, mapping.place.position);
            note(mapping.place);
        }
    }
    for (auto& told : told_)
        std::sort(told.begin(), told.end());
}

/// What other vCPUs told counts up to this order: that of the first thing which `vcpu` itself told after `position`.
uint64_t CodeIndex::others_before(unsigned vcpu, uint64_t position) const {
    if (vcpu >= told_.size())
        return 0;
    const auto& told = told_[vcpu];
    const auto after = std::upper_bound(told.begin(), told.end(), std::pair(position, UINT64_MAX));
    return after == told.end() ? UINT64_MAX : after->second;
}

bool CodeIndex::in_force(const SidePlace& told, uint64_t window, const Place& place) {
    return window == place.window &&
           (told.vcpu == place.vcpu ? told.position <= place.position : told.order < place.others);
}

const CodeIndex::Mapped* CodeIndex::mapping(const Place& place, uint64_t cr3, uint64_t page) const {
    const auto found = mappings_.find(page);
    if (found == mappings_.end())
        return nullptr;
    for (auto it = found->second.rbegin(); it != found->second.rend(); ++it) {
        if ((it->global || it->cr3 == (cr3 & cr3_address)) && in_force(it->place, it->window, place))
            return &*it;
    }
    return nullptr;
}

/// Bytes of one line from `gpa` on: from the newest version in force that has the line. False: none has.
bool CodeIndex::line_at(const Place& place, uint64_t gpa, std::span<uint8_t> out) {
    const auto found = pages_.find(gpa & page_mask);
    if (found == pages_.end())
        return false;
    const size_t at = gpa & ~page_mask;
    for (auto it = found->second.rbegin(); it != found->second.rend(); ++it) {
        if (!in_force(it->place, it->window, place))
            continue;
        const auto pages = load(it->chunk);
        if (!pages)
            return false;
        const uint8_t* page = pages->bytes.data() + it->in_chunk * code_page_bytes;
        if (CodeLines::is_empty(page + at / CodeLines::line_bytes * CodeLines::line_bytes))
            continue;
        std::memcpy(out.data(), page + at, out.size());
        return true;
    }
    return false;
}

std::shared_ptr<const DecodedCodePages> CodeIndex::load(size_t chunk) {
    const std::lock_guard lock(mutex_);
    for (auto it = cache_.begin(); it != cache_.end(); ++it) {
        if (it->first == chunk) {
            cache_.splice(cache_.begin(), cache_, it);
            return it->second;
        }
    }
    auto loaded = loader_(chunk);
    if (!loaded)
        return nullptr;
    cache_.emplace_front(chunk, loaded);
    uint64_t bytes = 0;
    for (auto it = cache_.begin(); it != cache_.end();) {
        bytes += it->second->bytes.size();
        it = bytes > max_cached_bytes && it != cache_.begin() ? cache_.erase(it) : std::next(it);
    }
    return loaded;
}

size_t CodeIndex::code_at(unsigned vcpu, uint64_t position, uint64_t cr3, uint64_t gva, std::span<uint8_t> buffer) {
    const Place place{vcpu, position, windows_.at(vcpu, position), others_before(vcpu, position)};
    size_t done = 0;
    while (done < buffer.size()) {
        const uint64_t address = gva + done;
        const Mapped* mapped = mapping(place, cr3, address & page_mask);
        const size_t count =
            std::min<size_t>(buffer.size() - done, CodeLines::line_bytes - address % CodeLines::line_bytes);
        if (!mapped || !line_at(place, mapped->gpa | (address & ~page_mask), buffer.subspan(done, count)))
            break;
        done += count;
    }
    return done;
}

} // namespace vtrace
