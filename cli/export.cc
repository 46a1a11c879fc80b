// vtrace export: a trace as the files of other tools.
#include <fstream>
#include <iterator>
#include <map>
#include <memory>

#include "cli/output.h"
#include "cli/subcommand.h"
#include "cli/trace_argument.h"
#include "decode/elf_symbols.h"
#include "decode/export/export.h"
#include "decode/symbols.h"

namespace vtrace::cli {
namespace {

enum class Format { jsonl, folded, callgrind, perf, chrome, drcov, lcov, columns };

struct Options {
    Format format = Format::folded;
    TraceSelection selection;
    StackWeight weight = StackWeight::branches;
    std::string program;
    std::string output;
};

class OutputSink final : public ExportSink {
  public:
    explicit OutputSink(Output& out) : out_(out) {}
    void write(std::string_view bytes) override { out_.write(bytes); }
    bool closed() const override { return out_.closed(); }

  private:
    Output& out_;
};

Result<std::vector<TraceSymbol>> program_symbols(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    const std::vector<uint8_t> bytes{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
    if (!file && !file.eof())
        return fail("cannot read the symbols of '{}': {}", path, errno_text(errno));
    auto symbols = elf_symbols(bytes);
    if (!symbols)
        return fail("cannot read the symbols of '{}': {}", path, symbols.error().message);
    return symbols;
}

Result<ExportNotes> export_as(const Options& options, const ExportSource& source, ExportSink& sink) {
    switch (options.format) {
    case Format::jsonl:
        return export_jsonl(source, sink);
    case Format::folded:
        return export_folded(source, options.weight, sink);
    case Format::callgrind:
        return export_callgrind(source, sink);
    case Format::chrome:
        return export_chrome(source, sink);
    case Format::drcov:
        return export_drcov(source, sink);
    case Format::columns:
        return export_columns(source, sink);
    case Format::lcov:
        return export_lcov(source, options.program, sink);
    case Format::perf: // writes files of its own
        break;
    }
    return fail("no such format");
}

Result<ExitStatus> run(const Options& options) {
    if (options.format == Format::lcov && options.program.empty())
        return fail("cannot export lines of source code: name the ELF file with their debug information (vmlinux, or a "
                    "program) by --symbols");
    auto reader = options.selection.open();
    if (!reader)
        return Unexpected(std::move(reader.error()));
    auto list = reader->symbols();
    if (!list)
        return Unexpected(std::move(list.error()));
    const SymbolTable symbols(std::move(*list));
    SymbolTable program;
    if (!options.program.empty() && options.format != Format::lcov) { // lcov reads the file itself
        auto read = program_symbols(options.program);
        if (!read)
            return Unexpected(std::move(read.error()));
        program = SymbolTable(std::move(*read));
    }
    std::optional<Output> file;
    const bool own_files = options.format == Format::perf;
    if (own_files && options.output.empty())
        return fail("cannot export to standard output: this format is several files; name the first with --output");
    if (!own_files && !options.output.empty()) {
        auto created = Output::create(options.output);
        if (!created)
            return Unexpected(std::move(created.error()));
        file.emplace(std::move(*created));
    }
    Output standard;
    Output& out = file ? *file : standard;
    OutputSink sink(out);
    const ExportSource source{*reader,
                              symbols,
                              program,
                              options.selection.cpu,
                              options.selection.from.value_or(0),
                              options.selection.to.value_or(UINT64_MAX)};
    auto notes = own_files ? export_perf(source, options.output) : export_as(options, source, sink);
    if (!notes)
        return Unexpected(std::move(notes.error()));
    VTRACE_TRY(out.finish());
    for (const std::string& line : *notes)
        fmt::print(stderr, "vtrace: note: {}\n", line);
    for (const std::string& line : reader->damage())
        fmt::print(stderr, "vtrace: warning: {}\n", line);
    return reader->damage().empty() ? ExitStatus::success : ExitStatus::damaged;
}

} // namespace

Action define_export(CLI::App& app) {
    auto options = std::make_shared<Options>();
    const std::map<std::string, Format> formats = {{"jsonl", Format::jsonl},         {"folded", Format::folded},
                                                   {"callgrind", Format::callgrind}, {"perf", Format::perf},
                                                   {"chrome", Format::chrome},       {"drcov", Format::drcov},
                                                   {"lcov", Format::lcov},           {"columns", Format::columns}};
    app.add_option("format", options->format, "What to make")
        ->required()
        ->transform(CLI::CheckedTransformer(formats))
        ->type_name("FORMAT");
    options->selection.add_range(app);
    const std::map<std::string, StackWeight> weights = {{"branches", StackWeight::branches},
                                                        {"instructions", StackWeight::instructions}};
    app.add_option("--weight", options->weight, "folded: count branches (default) or instructions")
        ->transform(CLI::CheckedTransformer(weights))
        ->type_name("WHAT");
    app.add_option("--symbols", options->program,
                   "ELF file of a user program, linked to a fixed address, whose "
                   "functions name user code; lcov: of the code to show")
        ->type_name("ELF");
    app.add_option("-o,--output", options->output, "Write to this file, not to standard output")->type_name("FILE");
    app.footer(
        "jsonl      one JSON object a branch; docs/branch.schema.json describes it\n"
        "folded     call stacks with their weights, for flamegraph.pl, inferno and speedscope\n"
        "callgrind  for KCachegrind and callgrind_annotate\n"
        "perf       perf.data for perf script and perf report; the kernel's code goes to FILE.vmlinux (option -k)\n"
        "chrome     timeline of functions, interrupts and console, for ui.perfetto.dev\n"
        "drcov      blocks executed, by module, for Lighthouse and the like\n"
        "lcov       lines and functions executed of the ELF file that --symbols names, for genhtml\n"
        "columns    CSV compressed by zstd, a row a branch, for DuckDB, Spark, pandas\n"
        "docs/exports.md says which tool answers what.");
    return [options] { return run(*options); };
}

} // namespace vtrace::cli
