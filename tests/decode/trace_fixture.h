// Streams and trace files for the tests: made up, but shaped like a guest's, and always the same.
#pragma once

#include <array>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include <unistd.h>

#include "ds/bts.h"

namespace vtrace_test {

using vtrace::ds::BtsKind;
using vtrace::ds::BtsRecord;
using vtrace::ds::BtsFlags::make;

/// A small generator with a fixed sequence.
class Random {
  public:
    explicit Random(uint64_t seed) : state_(seed * 2 + 1) {}
    uint64_t next() {
        state_ = state_ * 6364136223846793005 + 1442695040888963407;
        return state_ >> 11;
    }
    uint64_t below(uint64_t limit) { return next() % limit; }

  private:
    uint64_t state_;
};

/// Loops, calls and returns over a few hundred places, interrupts, faults, events; `seed` also moves the addresses.
inline std::vector<BtsRecord> guest_stream(uint64_t seed, size_t records) {
    Random random(seed);
    std::vector<BtsRecord> stream;
    uint64_t time = 1000, retired = 10, at = 0xffffffff81000000 + seed * 0x1000;
    while (stream.size() < records) {
        const uint64_t what = random.below(200);
        if (what == 0) {
            time += random.below(100000), retired += random.below(100000);
            stream.push_back({time, retired, make(BtsKind::time)});
        } else if (what == 1) {
            stream.push_back({random.below(1 << 20) << 12, 0, make(BtsKind::cr3)});
        } else if (what == 2) {
            stream.push_back({at, 0xffffffff81800000, make(BtsKind::interrupt, 0xec)});
            at = 0xffffffff81800000;
        } else if (what == 3) {
            stream.push_back(
                {at, 0xffffffff81900000, make(BtsKind::exception, 14, static_cast<uint32_t>(random.below(32)))});
            at = 0xffffffff81900000;
        } else {
            const uint64_t from = at + 4 + random.below(2) * 16;
            const uint64_t to = 0xffffffff81000000 + ((from * 77) & 0xfff0) + random.below(2) * 0x40;
            stream.push_back({from, to, 0});
            at = to;
        }
    }
    return stream;
}

inline bool same(const BtsRecord& a, const BtsRecord& b) {
    return a.from == b.from && a.to == b.to && a.flags == b.flags;
}

inline std::array<uint8_t, 4096> page_of(uint64_t seed) {
    Random random(seed);
    std::array<uint8_t, 4096> bytes;
    for (auto& byte : bytes)
        byte = static_cast<uint8_t>(random.next() & 0x3f);
    return bytes;
}

/// A file name in a directory of its own, removed at the end.
class TempFile {
  public:
    TempFile() {
        std::string pattern = "/tmp/vtrace-test-XXXXXX";
        directory_ = ::mkdtemp(pattern.data());
        path = directory_ + "/test.vtr";
    }
    ~TempFile() {
        ::unlink(path.c_str());
        ::rmdir(directory_.c_str());
    }
    std::string read() const {
        std::ifstream in(path, std::ios::binary);
        return {std::istreambuf_iterator<char>(in), {}};
    }
    void write(const std::string& bytes) const { std::ofstream(path, std::ios::binary | std::ios::trunc) << bytes; }

    std::string path;

  private:
    std::string directory_;
};

} // namespace vtrace_test
