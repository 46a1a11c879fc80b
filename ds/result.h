// Expected failures as values: every fallible function of vtrace's libraries returns a Result.
//
// An Error is one line that says what was attempted, on what, why it failed and, where there is something, what the user
// can do. No exception crosses a library border; a broken invariant of our own is an assert, never an Error.
#pragma once

#include <string>
#include <system_error>
#include <utility>

#include <fmt/format.h>
#include <tl/expected.hpp>

namespace vtrace {

struct Error {
    std::string message; // complete sentence fragment without a final period, e.g. "cannot open 'x': No such file"
};

template <class T = void>
using Result = tl::expected<T, Error>;

using Unexpected = tl::unexpected<Error>;

/// Makes the error value of any Result; arguments as for fmt::format.
template <class... Args>
[[nodiscard]] Unexpected fail(fmt::format_string<Args...> format, Args&&... args) {
    return Unexpected(Error{fmt::format(format, std::forward<Args>(args)...)});
}

/// Text of an errno value, thread-safe.
inline std::string errno_text(int error) { return std::generic_category().message(error); }

} // namespace vtrace

/// Leaves the enclosing function with the error of `expr` (a Result) if it has one.
#define VTRACE_TRY(expr)                                                                                               \
    do {                                                                                                               \
        if (auto vtrace_try_result = (expr); !vtrace_try_result)                                                       \
            return ::vtrace::Unexpected(std::move(vtrace_try_result.error()));                                         \
    } while (0)
