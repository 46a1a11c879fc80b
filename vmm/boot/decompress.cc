#include "vmm/boot/decompress.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <memory>

#include <lz4.h>
#include <lzma.h>
#include <zlib.h>
#include <zstd.h>

#include "vmm/boot/bytes.h"

namespace vtrace {
namespace {

constexpr uint64_t window_limit = 256 << 20;
constexpr int zstd_window_log_limit = 27; // 128 MiB: what `zstd --ultra -22`, as the kernel's build uses it, needs

using Input = std::span<const uint8_t>;
using Output = std::span<uint8_t>;

Result<Decompressed> inflate_gzip(Input input, Output output) {
    constexpr int gzip_with_largest_window = 16 + MAX_WBITS;
    z_stream stream{};
    if (inflateInit2(&stream, gzip_with_largest_window) != Z_OK)
        return fail("gzip: out of host memory");
    std::unique_ptr<z_stream, int (*)(z_stream*)> end(&stream, inflateEnd);

    constexpr uint64_t most = std::numeric_limits<uInt>::max();
    stream.next_in = const_cast<Bytef*>(input.data());
    stream.avail_in = static_cast<uInt>(std::min<uint64_t>(input.size(), most));
    stream.next_out = output.data();
    stream.avail_out = static_cast<uInt>(std::min<uint64_t>(output.size(), most));
    const int status = inflate(&stream, Z_FINISH);
    if (status == Z_STREAM_END)
        return Decompressed{stream.total_out, true};
    if ((status == Z_OK || status == Z_BUF_ERROR) && stream.avail_out == 0)
        return Decompressed{stream.total_out, false};
    if (status == Z_BUF_ERROR || status == Z_OK)
        return fail("gzip: the data ends too early");
    return fail("gzip: the data is damaged ({})", stream.msg ? stream.msg : "no reason given");
}

Result<Decompressed> decode_lzma(Compression compression, Input input, Output output) {
    const auto name = name_of(compression);
    lzma_stream stream = LZMA_STREAM_INIT;
    const lzma_ret opened = compression == Compression::xz ? lzma_stream_decoder(&stream, window_limit, 0)
                                                           : lzma_alone_decoder(&stream, window_limit);
    if (opened != LZMA_OK)
        return fail("{}: out of host memory", name);
    std::unique_ptr<lzma_stream, void (*)(lzma_stream*)> end(&stream, lzma_end);

    stream.next_in = input.data();
    stream.avail_in = input.size();
    stream.next_out = output.data();
    stream.avail_out = output.size();
    lzma_ret status = LZMA_OK;
    while (status == LZMA_OK && stream.avail_out != 0)
        status = lzma_code(&stream, LZMA_FINISH);
    // The output may be full with only the stream's end mark and checksums left: no room to write tells whether it was.
    if (status == LZMA_OK)
        status = lzma_code(&stream, LZMA_FINISH);
    switch (status) {
    case LZMA_STREAM_END:
        return Decompressed{stream.total_out, true};
    case LZMA_OK:
    case LZMA_BUF_ERROR:
        if (stream.avail_out == 0)
            return Decompressed{stream.total_out, false};
        return fail("{}: the data ends too early", name);
    case LZMA_MEMLIMIT_ERROR:
        return fail("{}: the data needs a window of more than {} MiB", name, window_limit >> 20);
    case LZMA_MEM_ERROR:
        return fail("{}: out of host memory", name);
    case LZMA_OPTIONS_ERROR:
        return fail("{}: the data uses a filter or check that liblzma doesn't know", name);
    default:
        return fail("{}: the data is damaged", name);
    }
}

// The legacy frame (lz4's doc/lz4_Frame_format.md, "Legacy frame"): magic, then blocks of at most 8 MiB, each with its
// compressed size in front, up to the end of the data; another magic starts another frame.
Result<Decompressed> decode_lz4_legacy(Input input, Output output) {
    constexpr uint32_t magic = 0x184c2102;
    constexpr uint64_t block_size = 8 << 20;
    uint64_t at = 0, produced = 0;
    while (at != input.size()) {
        const auto size = load_le<uint32_t>(input, at);
        if (!size)
            return fail("lz4: the data ends too early");
        at += sizeof(uint32_t);
        if (*size == magic)
            continue;
        if (*size > input.size() - at)
            return fail("lz4: the data ends too early");
        if (*size == 0 || *size > static_cast<uint64_t>(LZ4_compressBound(block_size)))
            return fail("lz4: the data is damaged (a block of {} bytes)", *size);

        const auto* source = reinterpret_cast<const char*>(input.data() + at);
        auto* target = reinterpret_cast<char*>(output.data() + produced);
        const uint64_t room = output.size() - produced;
        const int capacity = static_cast<int>(std::min(room, block_size));
        const int length = static_cast<int>(*size);
        int written = LZ4_decompress_safe(source, target, length, capacity);
        if (written < 0 && room < block_size) {
            written = LZ4_decompress_safe_partial(source, target, length, capacity, capacity);
            if (written == capacity)
                return Decompressed{produced + written, false};
        }
        if (written < 0)
            return fail("lz4: the data is damaged");
        produced += written;
        at += *size;
    }
    return Decompressed{produced, true};
}

Result<Decompressed> decode_zstd(Input input, Output output) {
    std::unique_ptr<ZSTD_DCtx, size_t (*)(ZSTD_DCtx*)> context(ZSTD_createDCtx(), ZSTD_freeDCtx);
    if (!context)
        return fail("zstd: out of host memory");
    ZSTD_DCtx_setParameter(context.get(), ZSTD_d_windowLogMax, zstd_window_log_limit);
    ZSTD_inBuffer in{input.data(), input.size(), 0};
    ZSTD_outBuffer out{output.data(), output.size(), 0};
    for (;;) {
        const size_t before_in = in.pos, before_out = out.pos;
        const size_t left = ZSTD_decompressStream(context.get(), &out, &in);
        if (ZSTD_isError(left))
            return fail("zstd: the data is damaged or not supported ({})", ZSTD_getErrorName(left));
        if (left == 0)
            return Decompressed{out.pos, true};
        if (in.pos == before_in && out.pos == before_out) {
            if (out.pos == out.size)
                return Decompressed{out.pos, false};
            return fail("zstd: the data ends too early");
        }
    }
}

bool starts_with(std::span<const uint8_t> bytes, std::initializer_list<uint8_t> magic) {
    return bytes.size() >= magic.size() && std::equal(magic.begin(), magic.end(), bytes.begin());
}

} // namespace

Compression compression_of(std::span<const uint8_t> bytes) {
    if (starts_with(bytes, {0x1f, 0x8b, 0x08}))
        return Compression::gzip;
    if (starts_with(bytes, {0xfd, '7', 'z', 'X', 'Z', 0x00}))
        return Compression::xz;
    if (starts_with(bytes, {0x5d, 0x00, 0x00})) // lc=3 lp=0 pb=2, and a window that is a multiple of 64 KiB
        return Compression::lzma;
    if (starts_with(bytes, {0x02, 0x21, 0x4c, 0x18}))
        return Compression::lz4;
    if (starts_with(bytes, {0x28, 0xb5, 0x2f, 0xfd}))
        return Compression::zstd;
    if (starts_with(bytes, {'B', 'Z', 'h'}))
        return Compression::bzip2;
    if (starts_with(bytes, {0x89, 'L', 'Z', 'O', 0x00, 0x0d, 0x0a, 0x1a, 0x0a}))
        return Compression::lzo;
    return Compression::none;
}

std::string_view name_of(Compression compression) {
    switch (compression) {
    case Compression::none:
        return "none";
    case Compression::gzip:
        return "gzip";
    case Compression::xz:
        return "xz";
    case Compression::lzma:
        return "lzma";
    case Compression::lz4:
        return "lz4";
    case Compression::zstd:
        return "zstd";
    case Compression::bzip2:
        return "bzip2";
    case Compression::lzo:
        return "lzo";
    }
    return "unknown";
}

Result<Decompressed> decompress(Compression compression, std::span<const uint8_t> input, std::span<uint8_t> output) {
    switch (compression) {
    case Compression::gzip:
        return inflate_gzip(input, output);
    case Compression::xz:
    case Compression::lzma:
        return decode_lzma(compression, input, output);
    case Compression::lz4:
        return decode_lz4_legacy(input, output);
    case Compression::zstd:
        return decode_zstd(input, output);
    case Compression::none:
        return fail("none: the data is not compressed");
    case Compression::bzip2:
    case Compression::lzo:
        break;
    }
    return fail("{}: not supported; build the kernel with gzip, xz, lzma, lz4 or zstd", name_of(compression));
}

} // namespace vtrace
