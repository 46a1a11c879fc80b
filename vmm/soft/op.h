// Op and Block: what the decoder makes of guest code and the handlers execute.
//
// A block is a straight run of instructions of one physical page; its last op is always one that leaves the block. Each
// handler ends by calling the next op's handler as a tail call, so a block runs without returning to a loop.
#pragma once

#include <cstdint>

#include "ds/events.h"
#include "vmm/guest_memory.h"

namespace vtrace::soft {

struct Cpu;
struct Op;

/// Executes one op. Leaves to the next one through VTRACE_NEXT or an `enter` function; a null result leaves to the run
/// loop, with Cpu::rip at the instruction boundary and Cpu::leave saying why.
using Handler = const Op* (*)(Cpu&, const Op*);

struct Op {
    Handler fn;
    int64_t imm;  // immediate, sign-extended; in a direct branch the linked successor (see link_of)
    int32_t disp; // memory operand; RIP-relative ones are relative to the block's start. Direct branch: displacement
    // Operand registers as byte offsets into Cpu::gpr (AH..BH are odd), so that handlers need no case for them.
    uint8_t reg; // first register operand (usually the destination)
    uint8_t rm;  // second register operand
    uint8_t base, index;
    uint8_t scale;  // shift count of the index, 0..3
    uint8_t seg;    // Seg of the memory operand
    uint8_t len;    // instruction length in bytes
    uint8_t left;    // instructions of the block from this one on, itself included
    uint16_t offset; // of the instruction from the start of the block, in bytes
    uint16_t aux;    // meaning is the handler's own
};
static_assert(sizeof(Op) == 32);

/// Widths of code (D and L bits of CS).
enum class CodeMode : uint8_t { bits16, bits32, bits64 };

struct Block {
    Block* next;        // in the list of its 64-byte line
    Gpa gpa;            // of the first byte
    uint32_t count;     // instructions
    uint16_t length;    // bytes
    CodeMode mode;
    uint8_t op_count;   // of ops: one more than instructions where the last one only leaves the block
    Op ops[];           // at most max_block_instructions + 1; then `count` InstructionEvents

    /// What each instruction is to performance counters.
    ds::InstructionEvents* events() { return reinterpret_cast<ds::InstructionEvents*>(ops + op_count); }
    const ds::InstructionEvents* events() const { return const_cast<Block*>(this)->events(); }
    static constexpr size_t bytes(unsigned op_count, unsigned count);
};
constexpr size_t Block::bytes(unsigned op_count, unsigned count) {
    return sizeof(Block) + op_count * sizeof(Op) + count * sizeof(ds::InstructionEvents);
}

/// The block that a direct branch or a block's end leads to, kept in the op itself once known: null, or a block of the same
/// page, which is forgotten only together with the one that links to it.
inline Block* link_of(const Op* op) { return reinterpret_cast<Block*>(op->imm); }
inline void set_link(const Op* op, Block* successor) {
    const_cast<Op*>(op)->imm = reinterpret_cast<int64_t>(successor);
}

inline constexpr unsigned max_block_instructions = 32;
inline constexpr unsigned max_instruction_length = 15;

// Tail calls need gcc's optimiser, and no sanitizer in its way; else each handler returns the next op to the run loop.
#if defined(__OPTIMIZE__) && !defined(__clang__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define VTRACE_RUN_OP(cpu, op) return (op)->fn((cpu), (op))
#else
#define VTRACE_RUN_OP(cpu, op) return static_cast<void>(cpu), (op)
#endif
#define VTRACE_NEXT(cpu, op) VTRACE_RUN_OP(cpu, (op) + 1)
// For handlers with locals whose address is taken, which keeps the compiler from a tail call: a call would let the stack
// grow with each instruction.
#define VTRACE_NEXT_BY_LOOP(cpu, op) return static_cast<void>(cpu), (op) + 1

// A handler that touches memory is compiled twice: `Fast` knows the fast path only, and where that doesn't do calls the
// other, as a tail call. So the fast one needs no stack frame. For use in a handler template with a parameter Fast.
#define VTRACE_ACCESS(fast, slow, slow_handler)                                                                        \
    do {                                                                                                               \
        if constexpr (Fast) {                                                                                          \
            if (VTRACE_UNLIKELY(!(fast)))                                                                              \
                return (slow_handler)(cpu, op);                                                                        \
        } else if (!(slow)) {                                                                                          \
            return nullptr;                                                                                            \
        }                                                                                                              \
    } while (0)

#define VTRACE_LIKELY(condition) __builtin_expect(!!(condition), 1)
#define VTRACE_UNLIKELY(condition) __builtin_expect(!!(condition), 0)

} // namespace vtrace::soft
