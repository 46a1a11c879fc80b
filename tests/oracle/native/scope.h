// Which instructions are compared with the host, and which not, with the reason.
#pragma once

#include <string>

#include <Zydis/Zydis.h>

#include "tests/oracle/native/machine.h"

namespace vtrace::oracle {

/// An encoding as Zydis sees it.
struct Instruction {
    std::array<uint8_t, 15> bytes{};
    Mode mode = Mode::bits64;
    ZydisDecodedInstruction info;
    ZydisDecodedOperand operands[ZYDIS_MAX_OPERAND_COUNT];

    ZydisMnemonic mnemonic() const { return info.mnemonic; }
    /// Decodes `bytes`; false if they are no instruction.
    bool decode();
    std::string text() const;
    bool has(uint64_t attribute) const { return info.attributes & attribute; }
    bool repeated() const { return has(ZYDIS_ATTRIB_HAS_REP | ZYDIS_ATTRIB_HAS_REPE | ZYDIS_ATTRIB_HAS_REPNE); }
    const ZydisDecodedOperand* visible_memory() const;
};

/// True if both processors are to execute it and agree.
bool in_scope(const Instruction& instruction);

/// The guest's processor.
inline constexpr const char* guest_model = "x86-64-v2";

/// The host and the guest's model offer what the instruction needs, where some don't.
bool both_offer(const Instruction& instruction);

/// x87 instructions that the manuals let processors compute differently in the last bits are out of scope;
/// approximations that are in scope: RCPSS and the like, compared within the documented error.
bool is_approximate(ZydisMnemonic mnemonic);

} // namespace vtrace::oracle
