// Finding the chunks of a trace file: by its index, or, where there is none, by walking from chunk to chunk.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "decode/trace_format.h"
#include "ds/result.h"

namespace vtrace {

/// A file to read at any offset, from several threads.
class InputFile {
  public:
    static Result<InputFile> open(const std::string& path);
    InputFile(InputFile&& other) noexcept;
    InputFile& operator=(InputFile&& other) noexcept;
    ~InputFile();

    /// Fills `buffer` from `offset`. Error: not readable, or the file ends before.
    Result<> read(uint64_t offset, std::span<uint8_t> buffer) const;
    uint64_t size() const { return size_; } // when it was opened
    const std::string& path() const { return path_; }

  private:
    InputFile() = default;
    int fd_ = -1;
    uint64_t size_ = 0;
    std::string path_;
};

struct ScannedFile {
    FileHeader header{};
    std::vector<IndexEntry> chunks;    // ascending offsets; sound headers, payloads inside the file; no index chunk
    std::vector<ChunkHeader> cut;      // sound headers whose payload the file does not hold
    std::vector<std::string> warnings; // what is wrong, a line each
    bool indexed = false;              // by a sound index
};

/// Error: not readable, not a trace file, or of a later version.
Result<ScannedFile> scan_trace(const InputFile& file);

} // namespace vtrace
