#include "decode/trace_format.h"

namespace vtrace {

const char* chunk_type_name(uint16_t type) {
    switch (static_cast<ChunkType>(type)) {
    case ChunkType::config:
        return "configuration";
    case ChunkType::branches:
        return "branches";
    case ChunkType::code_pages:
        return "code pages";
    case ChunkType::code_mappings:
        return "code mappings";
    case ChunkType::console:
        return "console";
    case ChunkType::symbols:
        return "symbols";
    case ChunkType::outcome:
        return "outcome";
    case ChunkType::index:
        return "index";
    case ChunkType::windows:
        return "windows";
    case ChunkType::dropped:
        return "dropped";
    }
    return "unknown";
}

} // namespace vtrace
