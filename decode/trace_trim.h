// Dropping the oldest branches of a trace file that is being written: the flight recorder.
//
// The file is written anew with what the rest needs, and takes the old one's place in one step. So it is a whole one at
// any moment, on any file system.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "decode/codec_side.h"
#include "decode/trace_file.h"
#include "ds/result.h"

namespace vtrace {

/// Console output before the branches that are kept: so many bytes of payload, the latest.
inline constexpr uint64_t max_kept_console_bytes = 4u << 20;

/// What dropping would give.
struct TrimPlan {
    size_t first_kept = 0;  // index of a chunk: branch chunks before it can go
    bool drops = false;     // there are such
    uint64_t kept_bytes = 0, // of the file: that stay as they are
        old_bytes = 0;       // that go, or that are looked through for what is still of use
};

/// Plans to keep the chunks with the last `branches` branches, of all vCPUs together, in the order of the file.
TrimPlan plan_trim(std::span<const IndexEntry> chunks, uint64_t branches);

/// Does it. Of code, what can be in force at a branch that is kept stays, so that TraceReader::code_at() answers there
/// as before; places and numbers don't change. `dropped`, one a vCPU: of earlier calls in, of all calls out, but for
/// entered_user, which the caller knows: `user_entered[vcpu]` is the number of the first branch into user space,
/// UINT64_MAX where there is none. Memory: the code that is still of use, uncompressed. After an error the file is as
/// before. Errors: no room for the new file, not a regular file, the old one cannot be read back.
Result<> trim(ChunkFile& file, const TrimPlan& plan, std::span<const uint64_t> user_entered,
              std::vector<DroppedStart>& dropped, int compression);

} // namespace vtrace
