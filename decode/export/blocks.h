// Straight lines of code that ran, each once, with how often: what coverage is made of.
#pragma once

#include <cstdint>
#include <vector>

#include "decode/export/export.h"

namespace vtrace {

/// Code from where a branch led to up to and with the next branch.
struct CodeBlock {
    uint64_t space = 0;          // page table, for user code; 0: the kernel's
    uint64_t start = 0, end = 0; // [start, end)
    Privilege privilege = Privilege::kernel;
    uint64_t count = 0;
};

/// Blocks of all vCPUs of the source, ascending by (privilege, space, start, end). At most 4 million different ones
/// (about 250 MB while they are counted): a note tells of those left out. `branches` counts all the source's branches.
std::vector<CodeBlock> count_blocks(const ExportSource& source, ExportNotes& notes, uint64_t& branches);

} // namespace vtrace
