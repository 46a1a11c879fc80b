// What kind of branch a record is: from the instruction at its `from`, as the trace has it.
//
// Capstone decodes. What Debian's 4.0.2 gets wrong is worked around here, and tests/decode/classify_test.cc holds it
// against Zydis over all branch opcodes, prefixes and modes.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <unordered_map>

#include "ds/bts.h"

namespace vtrace {

enum class BranchClass : uint8_t {
    unknown,     // the code at `from` is not in the trace
    other,       // the code is there, and is no branch: RSM, say, or code that was changed since
    conditional, // Jcc, JCXZ, LOOP
    jump,        // direct
    call,        // direct
    ret,         // near
    indirect_jump,
    indirect_call,
    far_jump,
    far_call,
    far_ret,
    syscall,
    sysret,
    sysenter,
    sysexit,
    int_n, // INT n, INT3, INT1, INTO
    iret,
    transaction, // XBEGIN or XABORT: the way to the fallback path
    interrupt,   // external interrupt or NMI; not from code but from the record
    exception,   // likewise
};
inline constexpr size_t branch_classes = static_cast<size_t>(BranchClass::exception) + 1;

/// Short lower-case name: "conditional", "indirect call", "interrupt" ...
std::string_view branch_class_name(BranchClass branch_class);

/// Near or far call, of whichever kind.
constexpr bool is_call(BranchClass c) {
    return c == BranchClass::call || c == BranchClass::indirect_call || c == BranchClass::far_call;
}

/// Architectural mnemonic of an exception vector, such as "#PF" (SDM vol. 3, table 6-1); empty where there is none.
std::string_view exception_name(uint8_t vector);

enum class CodeSize : uint8_t { bits64, bits32, bits16 };

/// A decoded instruction, independent of where it lies.
struct BranchInstruction {
    BranchClass branch_class = BranchClass::unknown;
    uint8_t length = 0;       // bytes; of branches only: for others Capstone is not to be trusted
    bool direct = false;      // `displacement` is there
    uint8_t vector = 0;       // int_n: that it asks for
    int32_t displacement = 0; // relative to the end of the instruction
    uint64_t target(uint64_t address) const { return address + length + displacement; }
};

/// Longest instruction there is, in bytes: give decode() and classify() that many where they are known.
inline constexpr size_t max_instruction = 15;

/// Holds Capstone and a cache of what it said. Not thread-safe: each thread has its own.
class Classifier {
  public:
    Classifier();
    ~Classifier();
    Classifier(Classifier&&) noexcept;
    Classifier& operator=(Classifier&&) noexcept;

    /// The instruction at the start of `code`. class `unknown` where the bytes end within it, `other` for anything that
    /// is no branch, undefined opcodes included.
    BranchInstruction decode(std::span<const uint8_t> code, CodeSize size);

    /// The class of a record. `code`: the bytes at from, possibly none.
    ///
    /// A trace does not say whether code ran in 64-, 32- or 16-bit mode. Above 4 GiB it is 64-bit. Below, the first of
    /// the three is taken in which the instruction is a direct branch to `to`, else the first in which it is a branch
    /// at all; the class of one is nearly always the same in all three.
    BranchInstruction classify(std::span<const uint8_t> code, const ds::BtsRecord& record);

  private:
    struct Engine;
    struct Key {
        uint64_t low, high; // up to 15 bytes of code; top byte: their number and the code size
        bool operator==(const Key&) const = default;
    };
    struct Hash {
        size_t operator()(const Key& key) const;
    };
    BranchInstruction decode_uncached(std::span<const uint8_t> code, CodeSize size);

    std::unique_ptr<Engine> engine_;
    std::unordered_map<Key, BranchInstruction, Hash> cache_;
};

} // namespace vtrace
