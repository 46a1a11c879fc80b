#include "decode/export/file_sink.h"

#include <cerrno>
#include <utility>

namespace vtrace {

Result<FileSink> FileSink::create(const std::string& path) {
    std::FILE* file = std::fopen(path.c_str(), "wbe");
    if (!file)
        return fail("cannot create '{}': {}", path, errno_text(errno));
    return FileSink(file, path);
}

FileSink::FileSink(FileSink&& other) noexcept
    : file_(std::exchange(other.file_, nullptr)), path_(std::move(other.path_)), offset_(other.offset_),
      error_(other.error_) {}

FileSink::~FileSink() {
    if (file_)
        std::fclose(file_);
}

void FileSink::write(std::string_view bytes) {
    offset_ += bytes.size();
    if (error_ == 0 && std::fwrite(bytes.data(), 1, bytes.size(), file_) != bytes.size())
        error_ = errno ? errno : EIO;
}

void FileSink::seek(uint64_t offset) {
    offset_ = offset;
    if (error_ == 0 && fseeko(file_, static_cast<off_t>(offset), SEEK_SET) != 0)
        error_ = errno;
}

Result<> FileSink::finish() {
    if (std::fclose(std::exchange(file_, nullptr)) != 0 && error_ == 0)
        error_ = errno;
    if (error_ != 0)
        return fail("cannot write '{}': {}", path_, errno_text(error_));
    return {};
}

} // namespace vtrace
