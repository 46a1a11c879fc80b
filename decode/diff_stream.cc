#include "decode/diff_stream.h"

#include <algorithm>
#include <future>
#include <string_view>
#include <unordered_map>

#include <xxhash.h>

#include "decode/diff.h"

namespace vtrace {
namespace {

constexpr size_t cache_entries = 1 << 15;
constexpr size_t first_window = 1 << 10;
constexpr size_t window_growth = 1 << 4;
constexpr uint64_t end_key = 0x9d3c'5a8f'0e71'b246; // stands behind the last branch of a stream
constexpr uint64_t gram_base = 0x9e37'79b9'7f4a'7c15;

/// The finalizer of a 64-bit hash: every bit of the result depends on every bit of `value`.
constexpr uint64_t mix(uint64_t value) {
    value ^= value >> 32;
    value *= 0xd6e8'feb8'6659'fd93;
    value ^= value >> 32;
    value *= 0xd6e8'feb8'6659'fd93;
    return value ^ value >> 32;
}

struct Gram {
    uint64_t hash;
    size_t position;
};

/// Keys of at most `window` branches; behind the end of a stream as many end keys as an anchor is long, so that the
/// ends of two streams match.
std::vector<uint64_t> window_keys(const KeyStream& stream, size_t window) {
    const auto keys = stream.keys().first(std::min(stream.size(), window));
    std::vector<uint64_t> result(keys.begin(), keys.end());
    if (stream.ended() && keys.size() == stream.size())
        result.insert(result.end(), diff_anchor, end_key);
    return result;
}

/// Calls visit(hash, position) for every run of diff_anchor keys, in order, until it returns false.
template <class Visit>
void each_gram(const std::vector<uint64_t>& keys, Visit visit) {
    uint64_t leaving = 1; // factor of the key that leaves: gram_base to the power of diff_anchor
    for (size_t i = 0; i < diff_anchor; ++i)
        leaving *= gram_base;
    uint64_t hash = 0;
    for (size_t i = 0; i < keys.size(); ++i) {
        hash = hash * gram_base + keys[i];
        if (i >= diff_anchor)
            hash -= keys[i - diff_anchor] * leaving;
        if (i + 1 >= diff_anchor && !visit(hash, i + 1 - diff_anchor))
            return;
    }
}

std::optional<Alignment> align_windows(const std::vector<uint64_t>& a, const std::vector<uint64_t>& b) {
    std::vector<Gram> grams;
    grams.reserve(a.size());
    each_gram(a, [&](uint64_t hash, size_t position) {
        grams.push_back({hash, position});
        return true;
    });
    std::sort(grams.begin(), grams.end(), [](const Gram& x, const Gram& y) {
        return x.hash != y.hash ? x.hash < y.hash : x.position < y.position;
    });
    std::optional<Alignment> best;
    size_t best_sum = SIZE_MAX;
    each_gram(b, [&](uint64_t hash, size_t position) {
        if (position >= best_sum)
            return false;
        const auto found = std::lower_bound(grams.begin(), grams.end(), hash,
                                            [](const Gram& gram, uint64_t value) { return gram.hash < value; });
        if (found != grams.end() && found->hash == hash && found->position + position < best_sum &&
            std::equal(b.begin() + position, b.begin() + position + diff_anchor, a.begin() + found->position)) {
            best_sum = found->position + position;
            best = {found->position, position};
        }
        return true;
    });
    return best;
}

} // namespace

PlaceKeys::PlaceKeys(const SymbolTable* symbols) : symbols_(symbols), cache_(symbols ? cache_entries : 0) {
    if (!symbols)
        return;
    std::unordered_map<std::string, uint64_t> seen; // of static functions several may have one name
    functions_.reserve(symbols->functions().size());
    for (const Function& function : symbols->functions()) {
        const std::string name = function.name + '\n' + function.module;
        functions_.push_back(XXH3_64bits_withSeed(name.data(), name.size(), seen[name]++));
    }
}

uint64_t PlaceKeys::compute(uint64_t address) const {
    const auto index = symbols_->find(address);
    return index ? functions_[*index] + (address - (*symbols_)[*index].address) : address;
}

uint64_t PlaceKeys::of(uint64_t address) {
    if (!symbols_)
        return address;
    Cached& cached = cache_[mix(address) % cache_entries];
    if (!cached.known || cached.address != address)
        cached = {address, compute(address), true};
    return cached.key;
}

KeyStream::KeyStream(const TraceReader& reader, unsigned vcpu, const SymbolTable* symbols) : places_(symbols) {
    if (vcpu < reader.vcpus())
        cursor_ = reader.records(vcpu);
    else
        ended_ = true;
}

void KeyStream::fill(size_t count) {
    if (ended_ || size() >= count)
        return;
    keys_.erase(keys_.begin(), keys_.begin() + static_cast<ptrdiff_t>(begin_));
    numbers_.erase(numbers_.begin(), numbers_.begin() + static_cast<ptrdiff_t>(begin_));
    begin_ = 0;
    while (keys_.size() < count) {
        const TraceRecord* record = cursor_->next();
        if (!record) {
            ended_ = true;
            return;
        }
        const uint64_t what = static_cast<uint64_t>(record->kind) << 40 | static_cast<uint64_t>(record->vector) << 32 |
                              record->error_code;
        keys_.push_back(mix(mix(places_.of(record->from) + what * gram_base) + places_.of(record->to)));
        numbers_.push_back(record->number);
        next_number_ = record->number + 1;
    }
}

uint64_t KeyStream::drain() {
    uint64_t count = size();
    drop(size());
    while (!ended_) {
        fill(first_window * window_growth);
        count += size();
        drop(size());
    }
    return count;
}

std::optional<Alignment> align(KeyStream& a, KeyStream& b) {
    for (size_t window = first_window;; window = std::min(window * window_growth, diff_window)) {
        fill_both(a, b, window + 1); // one more, to know whether the stream ends here
        if (auto found = align_windows(window_keys(a, window), window_keys(b, window)))
            return found;
        if (window >= diff_window)
            return std::nullopt;
        if (a.ended() && b.ended() && a.size() <= window && b.size() <= window)
            return std::nullopt; // not reached: the ends match
    }
}

void fill_both(KeyStream& a, KeyStream& b, size_t count) {
    // A thread is worth its start only where much is to be read.
    constexpr size_t much = 1 << 14;
    if (count < much || (a.size() >= count && b.size() >= count)) {
        a.fill(count);
        b.fill(count);
        return;
    }
    auto other = std::async(std::launch::async, [&] { b.fill(count); });
    a.fill(count);
    other.get();
}

} // namespace vtrace
