// Forms: every opcode with every mandatory prefix, operand size and kind of ModRM byte that is in scope, found by
// asking the decoder about all of them; and instructions made of a form at random.
#pragma once

#include <vector>

#include "tests/oracle/native/random.h"
#include "tests/oracle/native/scope.h"

namespace vtrace::oracle {

enum class Map : uint8_t { one_byte, escape_0f, escape_0f38, escape_0f3a };

struct Form {
    Mode mode;
    Map map;
    uint8_t opcode;
    uint8_t prefix; // 0, 0x66, 0xf2, 0xf3
    bool rex_w;
    bool modrm;
    bool memory;   // mod != 3
    bool fixed_rm; // rm is part of the opcode, too
    uint8_t reg, rm;
    ZydisMnemonic mnemonic;
};

std::vector<Form> all_forms(Mode mode);

/// An instruction of the form: other fields, prefixes that may be there, displacement and immediate at random. False
/// when the dice gave something that isn't of this form or not in scope: throw again.
bool build(const Form& form, Random& random, Instruction& out);

/// The same, with a memory operand at [pointer + displacement] and no prefix that changes its address.
bool build_at(const Form& form, Gpr pointer, int32_t displacement, Random& random, Instruction& out);

} // namespace vtrace::oracle
