// Reproducible random numbers, and values at which processors tend to go wrong.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>
#include <iterator>

namespace vtrace::oracle {

/// xoshiro256** seeded through splitmix64: the same stream on every host.
class Random {
  public:
    explicit Random(uint64_t seed, uint64_t stream = 0) {
        uint64_t x = seed ^ (stream * 0x9e3779b97f4a7c15 + 0x1234567);
        for (uint64_t& word : state_) {
            uint64_t z = (x += 0x9e3779b97f4a7c15);
            z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
            z = (z ^ z >> 27) * 0x94d049bb133111eb;
            word = z ^ z >> 31;
        }
    }
    uint64_t next() {
        uint64_t result = std::rotl(state_[1] * 5, 7) * 9, t = state_[1] << 17;
        state_[2] ^= state_[0];
        state_[3] ^= state_[1];
        state_[1] ^= state_[2];
        state_[0] ^= state_[3];
        state_[2] ^= t;
        state_[3] = std::rotl(state_[3], 45);
        return result;
    }
    /// Uniform in [0, n), n > 0 and small.
    uint32_t below(uint32_t n) { return static_cast<uint32_t>((next() >> 32) * n >> 32); }
    bool chance(uint32_t percent) { return below(100) < percent; }
    template <class T, size_t N>
    T pick(const T (&values)[N]) {
        return values[below(N)];
    }

    /// An integer of any interesting kind.
    uint64_t integer() {
        switch (below(12)) {
        case 0:
            return pick<uint64_t>({0, 1, 2, ~0ull, ~1ull});
        case 1:
            return uint64_t{1} << below(64);
        case 2:
            return (uint64_t{1} << below(64)) - 1;
        case 3:
            return -(uint64_t{1} << below(64));
        case 4:
            return pick<uint64_t>({0x7f, 0x80, 0xff, 0x7fff, 0x8000, 0xffff, 0x7fffffff, 0x80000000, 0xffffffff,
                                   0x100000000, 0x7fffffffffffffff, 0x8000000000000000, 0xffffffff80000000,
                                   0xffffffffffff8000, 0xffffffffffffff80, 0x8080808080808080, 0x7f7f7f7f7f7f7f7f});
        case 5:
            return below(70);
        case 6:
            return below(0x10000);
        case 7:
            return static_cast<int64_t>(next()) >> below(64);
        default:
            return next();
        }
    }
    uint32_t single() {
        uint32_t sign = below(2) ? 0x80000000 : 0;
        switch (below(9)) {
        case 0:
            return sign | pick<uint32_t>({0, 1, 0x7fffff, 0x800000, 0x7f7fffff, 0x3f800000, 0x3f7fffff, 0x3f800001});
        case 1:
            return sign | 0x7f800000; // infinity
        case 2:
            return sign | pick<uint32_t>({0x7fc00000, 0x7f800001, 0x7fbfffff, 0x7fffffff, 0x7fc01234, 0x7f812345});
        case 3:
            return sign | (next() & 0x7fffff); // denormal
        case 4:                                // near the ends of the integer types
            return std::bit_cast<uint32_t>(static_cast<float>(static_cast<int64_t>(integer())));
        case 5: // halves: rounding
            return std::bit_cast<uint32_t>((static_cast<float>(below(4096)) - 2048.0f) / 2);
        case 6: // moderate exponents: sums that cancel
            return sign | (120 + below(16)) << 23 | (next() & 0x7fffff);
        default:
            return static_cast<uint32_t>(next());
        }
    }
    uint64_t double_precision() {
        uint64_t sign = next() & 0x8000000000000000;
        switch (below(9)) {
        case 0:
            return sign | pick<uint64_t>({0, 1, 0xfffffffffffff, 0x10000000000000, 0x7fefffffffffffff,
                                          0x3ff0000000000000, 0x3fefffffffffffff, 0x3ff0000000000001});
        case 1:
            return sign | 0x7ff0000000000000;
        case 2:
            return sign | pick<uint64_t>({0x7ff8000000000000, 0x7ff0000000000001, 0x7ff7ffffffffffff,
                                          0x7fffffffffffffff, 0x7ff8000012345678, 0x7ff0123456789abc});
        case 3:
            return sign | (next() & 0xfffffffffffff);
        case 4:
            return std::bit_cast<uint64_t>(static_cast<double>(static_cast<int64_t>(integer())));
        case 5:
            return std::bit_cast<uint64_t>((static_cast<double>(below(65536)) - 32768.0) / 2);
        case 6: // near single precision's limits, and moderate
            return sign | (below(2) ? uint64_t{1023 - 150 + below(30)} : uint64_t{1023 - 8 + below(140)}) << 52 |
                   (next() & 0xfffffffffffff);
        default:
            return next();
        }
    }
    /// 80-bit extended; unnormals and pseudo-denormals too.
    void extended(uint8_t* bytes) {
        uint64_t mantissa = next() | 0x8000000000000000;
        uint16_t sign = below(2) ? 0x8000 : 0, exponent = 0;
        switch (below(10)) {
        case 0:
            mantissa = 0;
            break;
        case 1:
            exponent = 0x7fff;
            mantissa = 0x8000000000000000;
            break;
        case 2:
            exponent = 0x7fff;
            mantissa = pick<uint64_t>({0xc000000000000000, 0x8000000000000001, 0xbfffffffffffffff, 0xffffffffffffffff,
                                       0xc000000012345678, 0x8123456789abcdef});
            break;
        case 3:
            mantissa = next() >> (1 + below(63)); // denormal
            break;
        case 4: // anything: unnormals, pseudo-NaNs
            exponent = next() & 0x7fff;
            mantissa = next();
            break;
        case 5: // integers
            mantissa = 0x8000000000000000 | next() << below(63);
            exponent = static_cast<uint16_t>(16383 + below(66));
            break;
        case 6: // one
            exponent = 16383;
            mantissa = 0x8000000000000000;
            break;
        case 7: // near the limits of double and single
            exponent = static_cast<uint16_t>(
                pick<int>({16383 - 1075, 16383 - 1022, 16383 + 1023, 16383 - 150, 16383 - 126, 16383 + 127}) - 3 +
                static_cast<int>(below(6)));
            if (below(2))
                mantissa = 0xfffffffffffff800 | (next() & 0xfff);
            break;
        case 8:
            exponent = static_cast<uint16_t>(below(2) ? below(70) : 0x7ffe - below(70));
            break;
        default:
            exponent = static_cast<uint16_t>(16383 - 8 + below(16));
        }
        exponent |= sign;
        std::memcpy(bytes, &mantissa, 8);
        std::memcpy(bytes + 8, &exponent, 2);
    }
    /// Fills `size` bytes with values of one kind, so that vectors get what their elements are sensitive to.
    void fill(uint8_t* bytes, size_t size) {
        uint32_t kind = below(6);
        for (size_t i = 0; i < size;) {
            uint8_t value[16];
            size_t length = 8;
            uint64_t word = 0;
            switch (kind) {
            case 0:
                word = single();
                length = 4;
                break;
            case 1:
                word = double_precision();
                break;
            case 2:
                extended(value);
                length = 10;
                break;
            case 3:
                word = integer();
                length = 2;
                break;
            case 4:
                word = integer();
                break;
            default:
                word = below(2) ? next() : integer();
                length = size_t{1} << below(4);
            }
            if (length != 10)
                std::memcpy(value, &word, 8);
            if (length > size - i)
                length = size - i;
            std::memcpy(bytes + i, value, length);
            i += length;
        }
    }

  private:
    uint64_t state_[4];
};

} // namespace vtrace::oracle
