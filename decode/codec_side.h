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

/// Symbols ascend by address.
std::vector<uint8_t> encode_symbols(std::span<const TraceSymbol> symbols);
Result<std::vector<TraceSymbol>> decode_symbols(std::span<const uint8_t> payload, uint32_t count);

} // namespace vtrace
