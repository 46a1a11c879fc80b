// Payloads of what is recorded beside the branches: code pages, code mappings, console output, symbols.
// docs/trace-format.md describes each. Decoders accept any bytes, and never give out more entries than `count`.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "decode/trace_format.h"
#include "ds/result.h"

namespace vtrace {

inline constexpr uint64_t code_page_bytes = 4096;

/// Where in the run a page or mapping became valid. `order` counts the calls of all vCPUs: a later call has a larger
/// one.
struct SidePlace {
    uint64_t order = 0;
    uint32_t vcpu = 0;
    uint64_t position = 0; // records of this vCPU before
};

struct CodePage {
    SidePlace place;
    uint64_t gpa = 0; // page-aligned
};

struct CodeMapping {
    SidePlace place;
    uint64_t cr3 = 0; // page-table address, without PCID and flags
    uint64_t gva = 0; // page-aligned
    uint64_t gpa = 0; // page-aligned
    bool global = false;
};

struct ConsolePiece {
    uint64_t time = 0; // virtual ns
    std::string bytes;
};

/// `bytes` holds the pages one after the other.
std::vector<uint8_t> encode_code_pages(std::span<const CodePage> pages, std::span<const uint8_t> bytes);
struct DecodedCodePages {
    std::vector<CodePage> pages;
    std::vector<uint8_t> bytes;
};
Result<DecodedCodePages> decode_code_pages(std::span<const uint8_t> payload, uint32_t count);

std::vector<uint8_t> encode_code_mappings(std::span<const CodeMapping> mappings);
Result<std::vector<CodeMapping>> decode_code_mappings(std::span<const uint8_t> payload, uint32_t count);

std::vector<uint8_t> encode_console(std::span<const ConsolePiece> pieces);
Result<std::vector<ConsolePiece>> decode_console(std::span<const uint8_t> payload, uint32_t count);

/// Where a window of a vCPU begins. What was told of code before that place may have changed since without being told:
/// it holds for no record of this window.
struct WindowBegin {
    uint64_t number = 0;
    uint32_t vcpu = 0;
    uint64_t position = 0; // of its window_begin record

    bool operator==(const WindowBegin&) const = default;
};

std::vector<uint8_t> encode_windows(std::span<const WindowBegin> windows);
Result<std::vector<WindowBegin>> decode_windows(std::span<const uint8_t> payload, uint32_t count);

/// The beginning of a vCPU's stream that was recorded and not kept.
struct DroppedStart {
    uint64_t branches = 0;
    uint64_t records = 0;
    bool entered_user = false; // some of these branches led into user space, as enters_user() has it

    bool operator==(const DroppedStart&) const = default;
};

/// One a vCPU.
std::vector<uint8_t> encode_dropped(std::span<const DroppedStart> streams);
Result<std::vector<DroppedStart>> decode_dropped(std::span<const uint8_t> payload, uint32_t count);

/// Symbols ascend by address.
std::vector<uint8_t> encode_symbols(std::span<const TraceSymbol> symbols);
Result<std::vector<TraceSymbol>> decode_symbols(std::span<const uint8_t> payload, uint32_t count);

} // namespace vtrace
