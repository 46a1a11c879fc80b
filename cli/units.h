// Numbers with units, as options take them. Each turns "200M" into "200000000", as its units say; anything else, or what
// is too large, is an error that names what is expected.
#pragma once

#include <CLI/CLI.hpp>

namespace vtrace::cli {

CLI::Validator count_with_unit(); // k, M, G, T: powers of 1000
CLI::Validator size_with_unit();  // K, M, G, T: powers of 1024
CLI::Validator time_with_unit();  // ns (without a unit), us, ms, s

} // namespace vtrace::cli
