// vtrace info: what a trace file holds, and what it lacks.
#include <memory>

#include <nlohmann/json.hpp>

#include "cli/outcome_text.h"
#include "cli/output.h"
#include "cli/subcommand.h"
#include "cli/trace_argument.h"
#include "decode/symbols.h"
#include "decode/text.h"
#include "decode/trace_format.h"
#include "decode/trace_windows.h"

namespace vtrace::cli {
namespace {

struct Options {
    std::string path;
    bool json = false;
    bool verify = false;
};

using Json = nlohmann::ordered_json;

struct Facts {
    TraceInfo info;
    std::optional<nlohmann::json> config, outcome;
    std::vector<TraceWindow> windows;
    SymbolTable symbols; // for their addresses
    std::optional<std::vector<std::string>> damage; // of --verify
};

const ChunkTypeInfo* find_type(const TraceInfo& info, ChunkType type) {
    for (const ChunkTypeInfo& entry : info.types)
        if (entry.type == static_cast<uint16_t>(type))
            return &entry;
    return nullptr;
}

uint64_t symbol_count(const TraceInfo& info) {
    const ChunkTypeInfo* symbols = find_type(info, ChunkType::symbols);
    return symbols ? symbols->count : 0;
}

/// Bytes of the whole file for each branch.
double bytes_a_branch(const TraceInfo& info) {
    return info.branches() ? static_cast<double>(info.file_bytes) / static_cast<double>(info.branches()) : 0;
}

std::string range_text(const MissingRange& range) {
    std::string count = range.count ? grouped(*range.count) + " branches" : "an unknown number of branches";
    return fmt::format("cpu {}: {} from number {} on: {}", range.vcpu, count, range.first_number, range.reason);
}

/// A configuration's or outcome's values, one a line, with their paths: "machine.memory = 268435456".
void print_values(Output& out, const nlohmann::json& json, const std::string& path) {
    if (json.is_object() && !json.empty()) {
        for (const auto& [key, value] : json.items())
            print_values(out, value, path.empty() ? key : path + "." + key);
        return;
    }
    std::string text = json.is_string() ? json.get<std::string>()
                                        : json.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
    out.print("  {} = {}\n", printable(path), printable(text));
}

std::string time_text(const std::optional<uint64_t>& time) { return time ? duration(*time) : "an unknown time"; }

/// "0xffffffff81000000 (start_kernel+0x0)"; without the name where there is none.
std::string address_text(const SymbolTable& symbols, uint64_t address) {
    const std::string name = symbols.find(address) ? symbols.describe(address) : std::string();
    return name.empty() ? fmt::format("{:#x}", address) : fmt::format("{:#x} ({})", address, name);
}

void print_window(Output& out, const TraceWindow& window, const SymbolTable& symbols) {
    out.print("Window {}, cpu {}: {} branches from number {} on, {} to {}, from {} to {}\n", window.number, window.vcpu,
              grouped(window.last - window.first), window.first, time_text(window.begin_time),
              time_text(window.end_time),
              window.begin_address ? address_text(symbols, *window.begin_address) : "what was not kept",
              window.end_address ? address_text(symbols, *window.end_address) : "the recording's end");
}

void put_address(Json& entry, const char* name, const SymbolTable& symbols, const std::optional<uint64_t>& address) {
    entry[name] = address ? Json(fmt::format("{:#x}", *address)) : Json(nullptr);
    if (address && symbols.find(*address))
        entry[std::string(name) + "_symbol"] = symbols.describe(*address);
}

Json optional_json(const std::optional<uint64_t>& value) { return value ? Json(*value) : Json(nullptr); }

void print_text(Output& out, const std::string& path, const Facts& facts) {
    const TraceInfo& info = facts.info;
    out.print("{}: vtrace trace, version {}, {}, {}\n", printable(path), info.version, byte_size(info.file_bytes),
              info.complete ? "complete" : "not complete");
    out.print("Branches: {}, {:.4f} bytes each\n", grouped(info.branches()), bytes_a_branch(info));
    for (size_t vcpu = 0; vcpu < info.vcpus.size(); ++vcpu) {
        const StreamInfo& stream = info.vcpus[vcpu];
        out.print("  cpu {}: {} branches and {} events in {} chunks of {}, {} to {}, {} instructions retired\n", vcpu,
                  grouped(stream.branches), grouped(stream.events), stream.chunks, byte_size(stream.stored_bytes),
                  duration(stream.first_time), duration(stream.last_time), grouped(stream.last_retired));
        if (stream.dropped)
            out.print("  cpu {}: {} branches before these were recorded and not kept: the first one has number {}\n", vcpu,
                      grouped(stream.dropped), stream.dropped);
    }
    for (const TraceWindow& window : facts.windows)
        print_window(out, window, facts.symbols);
    out.print("Symbols: {}\n", grouped(symbol_count(info)));
    out.print("Outcome: {}\n", outcome_text(facts.outcome));
    out.print("Chunks:\n{:>16} {:>8} {:>12} {:>12} {:>12}\n", "type", "chunks", "items", "stored", "unpacked");
    for (const ChunkTypeInfo& type : info.types)
        out.print("{:>16} {:>8} {:>12} {:>12} {:>12}\n", chunk_type_name(type.type), grouped(type.chunks),
                  grouped(type.count), byte_size(type.stored_bytes), byte_size(type.raw_bytes));
    if (facts.config) {
        out.write("Configuration:\n");
        print_values(out, *facts.config, "");
    }
    for (const MissingRange& range : info.missing)
        out.print("Missing: {}\n", printable(range_text(range)));
    for (const std::string& warning : info.warnings)
        out.print("Warning: {}\n", printable(warning));
    if (facts.damage) {
        for (const std::string& line : *facts.damage)
            out.print("Damage: {}\n", printable(line));
        out.print("Verified: {}\n", facts.damage->empty() ? "all checksums and counts are right" : "damaged");
    }
}

Json to_json(const std::string& path, const Facts& facts) {
    const TraceInfo& info = facts.info;
    Json json = {{"file", path},
                 {"version", info.version},
                 {"bytes", info.file_bytes},
                 {"complete", info.complete},
                 {"branches", info.branches()},
                 {"bytes_a_branch", bytes_a_branch(info)},
                 {"symbols", symbol_count(info)}};
    json["vcpus"] = Json::array();
    for (size_t vcpu = 0; vcpu < info.vcpus.size(); ++vcpu) {
        const StreamInfo& stream = info.vcpus[vcpu];
        json["vcpus"].push_back({{"cpu", vcpu},
                                 {"branches", stream.branches},
                                 {"events", stream.events},
                                 {"dropped", stream.dropped},
                                 {"end_number", stream.end_number},
                                 {"chunks", stream.chunks},
                                 {"stored_bytes", stream.stored_bytes},
                                 {"first_time_ns", stream.first_time},
                                 {"last_time_ns", stream.last_time},
                                 {"retired", stream.last_retired}});
    }
    json["windows"] = Json::array();
    for (const TraceWindow& window : facts.windows) {
        Json entry = {{"number", window.number}, {"cpu", window.vcpu}, {"first", window.first}, {"last", window.last}};
        entry["begin_ns"] = optional_json(window.begin_time);
        entry["end_ns"] = optional_json(window.end_time);
        put_address(entry, "begin", facts.symbols, window.begin_address);
        put_address(entry, "end", facts.symbols, window.end_address);
        json["windows"].push_back(std::move(entry));
    }
    json["chunks"] = Json::array();
    for (const ChunkTypeInfo& type : info.types)
        json["chunks"].push_back({{"type", chunk_type_name(type.type)},
                                  {"chunks", type.chunks},
                                  {"items", type.count},
                                  {"stored_bytes", type.stored_bytes},
                                  {"raw_bytes", type.raw_bytes}});
    json["config"] = facts.config ? Json(*facts.config) : Json(nullptr);
    json["outcome"] = facts.outcome ? Json(*facts.outcome) : Json(nullptr);
    json["missing"] = Json::array();
    for (const MissingRange& range : info.missing) {
        Json entry = {{"cpu", range.vcpu}, {"first_number", range.first_number}, {"reason", range.reason}};
        entry["branches"] = range.count ? Json(*range.count) : Json(nullptr);
        json["missing"].push_back(std::move(entry));
    }
    json["warnings"] = info.warnings;
    if (facts.damage)
        json["damage"] = *facts.damage;
    return json;
}

Result<ExitStatus> run(const Options& options) {
    auto reader = TraceReader::open(options.path);
    if (!reader)
        return Unexpected(std::move(reader.error()));
    Facts facts{reader->info(), {}, {}, {}, {}, {}};
    if (auto config = reader->config())
        facts.config = std::move(*config);
    if (!reader->window_begins().empty()) { // else there is nothing to look for in all of the file
        auto windows = find_windows(*reader);
        if (!windows)
            return Unexpected(std::move(windows.error()));
        facts.windows = std::move(*windows);
        if (auto symbols = reader->symbols())
            facts.symbols = SymbolTable(std::move(*symbols));
    }
    if (auto outcome = reader->outcome())
        facts.outcome = std::move(*outcome);
    if (options.verify)
        facts.damage = reader->check(0);
    Output out;
    if (options.json)
        out.print("{}\n", to_json(options.path, facts).dump(2, ' ', false, Json::error_handler_t::replace));
    else
        print_text(out, options.path, facts);
    VTRACE_TRY(out.finish());
    bool damaged = facts.damage && (!facts.damage->empty() || !facts.info.complete);
    return damaged ? ExitStatus::damaged : ExitStatus::success;
}

} // namespace

Action define_info(CLI::App& app) {
    auto options = std::make_shared<Options>();
    add_trace_path(app, options->path);
    app.add_flag("--json", options->json, "Print one JSON object");
    app.add_flag("--verify", options->verify,
                 "Read all of it and check every checksum; exit status 3 if anything is damaged or missing");
    return [options] { return run(*options); };
}

} // namespace vtrace::cli
