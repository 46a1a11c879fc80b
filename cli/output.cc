#include "cli/output.h"

#include <cerrno>
#include <utility>

namespace vtrace::cli {

Output::Output() : Output(stdout, "standard output") {}

Result<Output> Output::create(const std::string& path) {
    std::FILE* file = std::fopen(path.c_str(), "wbe");
    if (!file)
        return fail("cannot create '{}': {}", path, errno_text(errno));
    return Output(file, "'" + path + "'");
}

Output::Output(Output&& other) noexcept
    : file_(std::exchange(other.file_, nullptr)), name_(std::move(other.name_)), error_(other.error_) {}

Output::~Output() {
    if (file_ && file_ != stdout)
        std::fclose(file_);
}

void Output::write(std::string_view text) {
    if (error_ == 0 && std::fwrite(text.data(), 1, text.size(), file_) != text.size())
        error_ = errno ? errno : EIO;
}

void Output::flush() {
    if (std::fflush(file_) != 0 && error_ == 0)
        error_ = errno;
}

Result<> Output::finish() {
    flush();
    if (file_ != stdout && std::fclose(std::exchange(file_, nullptr)) != 0 && error_ == 0)
        error_ = errno;
    if (error_ != 0 && error_ != EPIPE)
        return fail("cannot write {}: {}", name_, errno_text(error_));
    return {};
}

} // namespace vtrace::cli
