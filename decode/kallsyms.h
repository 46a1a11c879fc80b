// The symbols of a Linux guest, out of its own memory.
//
// A kernel with CONFIG_KALLSYMS carries the names of its functions as compressed tables in its read-only data. Nothing
// points to them from outside; they are found by what they must look like, and accepted only when all of them agree.
// So no debug package is needed, and addresses are right under any KASLR offset: the kernel has relocated the tables'
// base itself, early in its boot.
//
// The tables (scripts/kallsyms.c of the kernel), each aligned to 8 bytes:
//
//   offsets        u32 per symbol: an address relative to relative_base, or an absolute one of a per-CPU symbol
//   relative_base  u64
//   num_syms       u32
//   names          per symbol: length (1 or 2 bytes of LEB128), then bytes that each stand for a token
//   markers        u32 per 256 symbols: where their names begin
//   seqs_of_names  3 bytes per symbol (6.2 on), of no use here
//   token_table    256 strings, zero-terminated
//   token_index    256 u16: where they begin
//
// in this order up to 6.3; from 6.4 on offsets, relative_base and seqs_of_names follow token_index.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "decode/trace_format.h"
#include "ds/result.h"

namespace vtrace {

/// A stretch of guest-physical memory that is RAM, as the host sees it.
struct RamRange {
    uint64_t gpa; // of bytes[0], a multiple of 8
    std::span<const uint8_t> bytes;
};

/// What there is to know of a guest's memory. Borrowed: valid and unchanging during the call that takes it.
struct MemoryView {
    std::vector<RamRange> ram;
    /// Optional: the physical address behind a linear one, for the guest as it is now.
    std::function<std::optional<uint64_t>(uint64_t linear)> translate;
};

/// Symbols of the kernel that lies in memory, ascending by address; per-CPU symbols, whose values are offsets and not
/// addresses, have type 'A'. Sizes are unknown (0), modules are not included. Reads kernels 4.6 to 6.14 or so, x86-64,
/// with CONFIG_KALLSYMS_BASE_RELATIVE (as all distributions have it).
///
/// Where several tables lie in memory, the one is taken by which `translate` finds the kernel's banner; without
/// `translate`, the first. Costs one pass over memory up to the tables. Memory is hostile: the work, the number of
/// symbols and the bytes of their names are bounded.
/// Errors: no tables found; look-alikes only; too many of them.
Result<std::vector<TraceSymbol>> find_kallsyms(const MemoryView& memory);

} // namespace vtrace
