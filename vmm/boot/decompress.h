// Decompression of kernel payloads, by the formats' own libraries.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "ds/result.h"

namespace vtrace {

/// Every format that Linux can be compressed with; `bzip2` and `lzo` are recognized but not decompressed.
enum class Compression : uint8_t { none, gzip, xz, lzma, lz4, zstd, bzip2, lzo };

/// By the first bytes; `none` when they are no known format's.
Compression compression_of(std::span<const uint8_t> bytes);
std::string_view name_of(Compression compression);

struct Decompressed {
    uint64_t size; // bytes written
    bool complete; // false: the output was full before the stream ended
};

/// Decompresses the stream at the start of `input` into `output`, and never beyond it: the caller's buffer bounds what
/// a hostile stream can cost, together with at most 256 MiB for the format's own window. What follows the stream is
/// ignored, except with lz4, whose legacy frames have no end mark: `input` must end with it.
/// Errors: damaged or truncated stream; window too large; a format that isn't supported. The message starts with the
/// format's name.
Result<Decompressed> decompress(Compression compression, std::span<const uint8_t> input, std::span<uint8_t> output);

} // namespace vtrace
