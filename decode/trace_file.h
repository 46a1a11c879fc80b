// Chunks in a file: what TraceWriter and TraceReader have in common below the meaning of the chunks.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "decode/trace_format.h"
#include "ds/result.h"

namespace vtrace {

/// XXH3-64.
uint64_t checksum(std::span<const uint8_t> bytes);

/// The checksum of a FileHeader, ChunkHeader or FileFooter: of the bytes before its `checksum` field.
uint64_t header_checksum(const FileHeader& header);
uint64_t header_checksum(const ChunkHeader& header);
uint64_t header_checksum(const FileFooter& footer);

/// Magic, checksum and limits hold: the fields may be used.
bool is_sound(const ChunkHeader& header);

constexpr uint64_t padded(uint64_t bytes) {
    return (bytes + chunk_alignment - 1) & ~(chunk_alignment - 1);
}

/// Bytes that a chunk takes in the file.
constexpr uint64_t chunk_file_bytes(const ChunkHeader& header) {
    return sizeof(ChunkHeader) + padded(header.stored_bytes);
}

/// A payload ready to be written: stored form in `bytes`, with codec and sizes in the header.
struct StoredChunk {
    ChunkHeader header{};
    std::vector<uint8_t> bytes;
};

/// Compresses; stores it as it is where that is shorter.
StoredChunk store_chunk(ChunkHeader header, std::span<const uint8_t> payload, int level);

/// Verifies the checksum and uncompresses. Error: damaged; the message tells how.
Result<std::vector<uint8_t>> load_payload(const ChunkHeader& header, std::span<const uint8_t> stored);

/// The file under construction. After an error the incomplete chunk is cut off, and each further call returns that
/// error.
class ChunkFile {
  public:
    /// Creates or truncates `path`.
    static Result<ChunkFile> create(const std::string& path, unsigned vcpus, TraceVersion version = TraceVersion::first);
    /// A new file beside this one, to be put in its place by replace_by(); removed again if it is not. Error: also where
    /// this one is no regular file.
    Result<ChunkFile> create_successor(unsigned vcpus, TraceVersion version) const;
    ChunkFile(ChunkFile&& other) noexcept;
    ChunkFile& operator=(ChunkFile&& other) noexcept;
    ~ChunkFile();

    Result<> write(StoredChunk chunk);
    /// Index and footer; then fdatasync and close.
    Result<> finish(int level);

    /// The chunks so far.
    const std::vector<IndexEntry>& chunks() const { return chunks_; }
    /// A chunk written before, as stored. Error: cannot be read.
    Result<StoredChunk> read(const IndexEntry& chunk) const;
    /// Puts the successor, which is synced first, in the place of this file: at any moment, whatever happens, the file's
    /// name leads to a whole one of them. Error: this file goes on as it was.
    Result<> replace_by(ChunkFile successor);

    uint64_t bytes() const { return bytes_; }

  private:
    ChunkFile() = default;
    Result<> write_header(unsigned vcpus, TraceVersion version);
    Result<> write_bytes(std::span<const uint8_t> bytes);

    int fd_ = -1;
    std::string path_;
    uint64_t bytes_ = 0; // complete
    uint32_t sequence_ = 0;
    std::vector<IndexEntry> chunks_;
    bool successor_ = false; // not in its place yet
};

} // namespace vtrace
