// FileSink: a file of an export's own, which it may also patch.
#pragma once

#include <cstdio>
#include <string>

#include "decode/export/export.h"

namespace vtrace {

class FileSink final : public ExportSink {
  public:
    /// Creates or truncates. Errors name the file.
    static Result<FileSink> create(const std::string& path);
    FileSink(FileSink&& other) noexcept;
    FileSink& operator=(FileSink&&) = delete;
    ~FileSink() override;

    void write(std::string_view bytes) override;
    bool closed() const override { return error_ != 0; }
    /// Goes on writing at `offset`; what lies between is a hole. Error, told by finish(): a pipe.
    void seek(uint64_t offset);
    uint64_t offset() const { return offset_; }
    /// Flushes and closes. Errors: what could not be written, and why.
    Result<> finish();

  private:
    FileSink(std::FILE* file, std::string path) : file_(file), path_(std::move(path)) {}

    std::FILE* file_;
    std::string path_;
    uint64_t offset_ = 0;
    int error_ = 0;
};

} // namespace vtrace
