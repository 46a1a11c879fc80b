// Straight runs of random instructions with forward branches, perhaps looped: what one instruction alone can't show,
// such as flags that live from one to the next, blocks and their links, and budgets that end within a block.
#pragma once

#include <vector>

#include "tests/oracle/native/form.h"
#include "tests/oracle/native/operands.h"

namespace vtrace::oracle {

struct Sequence {
    Mode mode;
    std::vector<uint8_t> code;
    std::vector<std::string> listing;
    UserState in;
    Data data;
    uint64_t undefined_flags = 0; // at the end, if no exception came before
    uint16_t undefined_fsw = 0;
};

inline constexpr unsigned max_sequence_bytes = 496;

/// `forms`, all of `mode`, by mnemonic. `text`: fill the listing.
Sequence make_sequence(const std::vector<std::vector<const Form*>>& forms, Mode mode, uint64_t rip,
                       const Data& background, Random& random, bool text);

} // namespace vtrace::oracle
