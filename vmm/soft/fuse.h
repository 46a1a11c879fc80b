// Fusion: a compare and the conditional branch right after it, executed by one handler.
//
// They are one instruction in five of a kernel. Both stay ops of their own, with their own places in the block's count; only
// the first one's handler changes, and does the work of both: so nothing else need know.
#pragma once

#include "vmm/soft/decode.h"

namespace vtrace::soft {

/// The handler for `first` when `second` follows it in a block, or null where they don't fuse.
Handler fused_handler(const Decoded& first, const Decoded& second);

/// Fills in what fused_handler() asks of an instruction.
void note_fusion(const ZydisDecodedInstruction& instruction, const ZydisDecodedOperand* operands, CodeMode mode,
                 Decoded& decoded);

/// decode_branch.cc: the taken branch of a Jcc in 64-bit code.
const Op* take_jcc64(Cpu& cpu, const Op* op);

} // namespace vtrace::soft
