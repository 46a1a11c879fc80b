// Standard output, or a file, as commands write it: buffered, and with an answer to what can go wrong.
#pragma once

#include <cstdio>
#include <string>
#include <string_view>

#include <fmt/format.h>

#include "ds/result.h"

namespace vtrace::cli {

/// Writing after the reader of a pipe has gone (`vtrace dump | head`) is no error: it sets closed(), and the command
/// should stop. Any other failure is an Error from finish(). SIGPIPE must be ignored (main does it).
class Output {
  public:
    /// Standard output.
    Output();
    /// Creates or truncates the file; errors name it.
    static Result<Output> create(const std::string& path);
    Output(Output&& other) noexcept;
    Output& operator=(Output&&) = delete;
    ~Output();

    void write(std::string_view text);
    template <class... Args>
    void print(fmt::format_string<Args...> format, Args&&... args) {
        write(fmt::format(format, std::forward<Args>(args)...));
    }
    /// Hands on what is buffered.
    void flush();
    /// Nothing more will be read, or can be written.
    bool closed() const { return error_ != 0; }
    /// Flushes and, for a file, closes. Errors: what could not be written, and why.
    Result<> finish();

  private:
    Output(std::FILE* file, std::string name) : file_(file), name_(std::move(name)) {}

    std::FILE* file_;
    std::string name_;
    int error_ = 0;
};

} // namespace vtrace::cli
