// The trace file, `.vtr`, as it lies on disk. docs/trace-format.md is the full description for other programs.
//
//   FileHeader | chunk | chunk | ... | index chunk | FileFooter
//
// A chunk is a ChunkHeader, its payload, and zero bytes up to the next multiple of `chunk_alignment`. Every chunk can
// be read without any other; the index repeats all chunk headers with their offsets, so that a reader of a whole file
// need not walk it. All integers are little-endian. Nothing in a file depends on the host, its clock or its threads:
// two recordings of the same run are the same bytes.
#pragma once

#include <cstdint>
#include <string>

namespace vtrace {

/// What each version of the file format changed. A reader refuses a file whose version is above its own `latest`.
enum class TraceVersion : uint32_t {
    first = 1, // a recording of all of a run
    parts = 2, // of parts: window records, and chunks of types `windows` and `dropped`; all else is as before
    latest = parts,
};

inline constexpr uint64_t file_magic = 0x0a0d454341525456;   // "VTRACE\r\n": a text-mode copy destroys it
inline constexpr uint32_t chunk_magic = 0x4b484356;          // "VCHK"
inline constexpr uint64_t footer_magic = 0x0a0d444e45525456; // "VTREND\r\n"
inline constexpr uint64_t chunk_alignment = 8;

// Limits: what a writer never exceeds and a reader refuses above, so that a damaged or hostile file cannot make it
// allocate more.
inline constexpr uint64_t max_chunk_bytes = 64ull << 20; // payload, stored or uncompressed, of any chunk but the index
inline constexpr uint64_t max_index_bytes = 1ull << 30;  // uncompressed payload of the index
inline constexpr uint32_t max_chunk_records = 4u << 20;  // records (branches and events) in a branch chunk
inline constexpr uint32_t max_chunk_entries = 1u << 20;  // pages, mappings, console pieces or symbols in a chunk
inline constexpr unsigned max_trace_vcpus = 256;

struct FileHeader {
    uint64_t magic;    // file_magic
    uint32_t version;  // TraceVersion
    uint32_t vcpus;    // streams in the file, 1..max_trace_vcpus
    uint64_t flags;    // 0
    uint64_t checksum; // XXH3-64 of the bytes before
};
static_assert(sizeof(FileHeader) == 32);

enum class ChunkType : uint16_t {
    config = 1,   // machine configuration, JSON text (UTF-8); the first chunk
    branches = 2, // records of one vCPU, see codec_branch.h
    code_pages = 3,
    code_mappings = 4,
    console = 5,
    symbols = 6,
    outcome = 7, // how the run ended, and its totals: JSON text
    index = 8,   // the last chunk
    windows = 9, // where each window begins
    dropped = 10, // how much of each stream's beginning was not kept: directly behind the configuration
};

/// How a chunk's payload is stored.
enum class ChunkCodec : uint8_t {
    none = 0,
    zstd = 1, // one zstd frame
};

/// Bits of ChunkHeader::flags.
namespace ChunkFlags {
inline constexpr uint8_t cr3_known = 1;  // start_cr3 is meaningful
inline constexpr uint8_t time_known = 2; // first_time and first_retired are meaningful
} // namespace ChunkFlags

/// Fields that mean nothing for a chunk's type are 0.
struct ChunkHeader {
    uint32_t magic;          // chunk_magic
    uint16_t type;           // ChunkType; readers skip what they do not know
    uint16_t vcpu;           // whose records (branches)
    uint8_t codec;           // ChunkCodec
    uint8_t flags;           // ChunkFlags
    uint16_t reserved;       // 0
    uint32_t sequence;       // 0, 1, 2 ... in the order of the file: a gap tells of a lost chunk
    uint64_t stored_bytes;   // payload as stored, without the padding behind it
    uint64_t raw_bytes;      // payload uncompressed
    uint64_t first_number;   // branches: branches of this vCPU before the chunk
    uint64_t first_position; // branches: records of this vCPU before the chunk
    uint32_t branches;       // branches: records that are branches
    uint32_t count;          // branches: all records; else: pages, mappings, pieces of console output, symbols, entries
    uint64_t first_time;     // virtual ns: branches, the last time known before the chunk; console, of the first piece
    uint64_t last_time;      // virtual ns: branches, the last time known at its end; console, of the last piece
    uint64_t first_retired;  // branches: instructions retired at first_time
    uint64_t last_retired;   // branches: instructions retired at last_time
    uint64_t start_cr3;      // branches: CR3 at its start
    uint64_t payload_checksum; // XXH3-64 of the payload as stored
    uint64_t header_checksum;  // XXH3-64 of the bytes before
};
static_assert(sizeof(ChunkHeader) == 112);

/// The index chunk's payload: one for each chunk before it, in the order of the file.
struct IndexEntry {
    uint64_t offset; // of the chunk's header in the file
    ChunkHeader header;
};
static_assert(sizeof(IndexEntry) == 120);

/// The last bytes of a file that was closed.
struct FileFooter {
    uint64_t index_offset; // of the index chunk's header
    uint64_t file_bytes;   // size of the whole file, this footer included
    uint64_t checksum;     // XXH3-64 of the bytes before
    uint64_t magic;        // footer_magic
};
static_assert(sizeof(FileFooter) == 32);

/// A symbol of the guest.
struct TraceSymbol {
    uint64_t address = 0; // linear
    uint64_t size = 0;    // bytes; 0: not known, it reaches to the next one
    char type = '?';      // as nm(1) prints it: 't', 'T', 'd' ...
    std::string name;
    std::string module; // empty: the kernel itself

    bool operator==(const TraceSymbol&) const = default;
};

/// The name of a chunk type for messages; "unknown" for one that this version does not know.
const char* chunk_type_name(uint16_t type);

} // namespace vtrace
