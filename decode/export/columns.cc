// Columns: CSV (RFC 4180) with a header line, compressed by zstd. DuckDB, Spark, pandas and polars read it as it is.
//
// Debian 12 has no Parquet or Arrow library for C++; CSV within zstd takes about as much room for this data.
#include <iterator>
#include <memory>

#include <zstd.h>

#include "decode/branch_stream.h"
#include "decode/export/export.h"

namespace vtrace {
namespace {

constexpr size_t buffer_bytes = 1u << 17;

/// Compresses what is written into a sink.
class ZstdSink {
  public:
    explicit ZstdSink(ExportSink& sink) : sink_(sink), context_(ZSTD_createCCtx(), ZSTD_freeCCtx) {
        ZSTD_CCtx_setParameter(context_.get(), ZSTD_c_compressionLevel, 3);
        ZSTD_CCtx_setParameter(context_.get(), ZSTD_c_checksumFlag, 1);
    }
    Result<> write(std::string_view bytes, bool last) {
        ZSTD_inBuffer in{bytes.data(), bytes.size(), 0};
        for (;;) {
            ZSTD_outBuffer out{out_.data(), out_.size(), 0};
            const size_t left = ZSTD_compressStream2(context_.get(), &out, &in, last ? ZSTD_e_end : ZSTD_e_continue);
            if (ZSTD_isError(left))
                return fail("cannot compress the columns: {}", ZSTD_getErrorName(left));
            sink_.write({out_.data(), out.pos});
            if (last ? left == 0 : in.pos == in.size)
                return {};
        }
    }

  private:
    ExportSink& sink_;
    std::unique_ptr<ZSTD_CCtx, size_t (*)(ZSTD_CCtx*)> context_;
    std::string out_ = std::string(ZSTD_CStreamOutSize(), '\0');
};

std::string csv_text(const std::string& text) {
    if (text.find_first_of(",\"\r\n") == std::string::npos)
        return text;
    std::string quoted = "\"";
    for (char c : text) {
        quoted += c;
        if (c == '"')
            quoted += c;
    }
    return quoted + '"';
}

/// A function's name and the offset into it, as two columns; both empty where there is no symbol.
class NameColumns {
  public:
    explicit NameColumns(const CodeNames& names) : names_(names) {}
    void append(uint64_t address, Privilege privilege, std::string& out) {
        const CodeRange range = names_.at(address, privilege);
        if (!range.named()) {
            out += ",,";
            return;
        }
        auto [known, fresh] = known_.try_emplace(range.id);
        if (fresh)
            known->second = csv_text(names_.name(range.id));
        fmt::format_to(std::back_inserter(out), ",{},{}", known->second, address - range.start);
    }

  private:
    const CodeNames& names_;
    std::unordered_map<FunctionId, std::string> known_;
};

void append(const StreamBranch& branch, NameColumns& names, std::string& out) {
    const TraceRecord& record = branch.record;
    auto to = std::back_inserter(out);
    fmt::format_to(to, "{},{},{},{},{},{}", record.vcpu, record.number, record.from, record.to,
                   branch_class_name(branch.instruction.branch_class),
                   branch.from_privilege == Privilege::user ? "user" : "kernel");
    names.append(record.from, branch.from_privilege, out);
    names.append(record.to, branch.to_privilege, out);
    fmt::format_to(to, ",{},", branch.instructions);
    if (branch.delivered())
        fmt::format_to(to, "{}", record.vector);
    else if (branch.instruction.branch_class == BranchClass::int_n)
        fmt::format_to(to, "{}", branch.instruction.vector);
    out += ',';
    if (record.kind == ds::BtsKind::exception)
        fmt::format_to(to, "{}", record.error_code);
    out += ',';
    if (branch.space)
        fmt::format_to(to, "{}", branch.space);
    out += ',';
    if (branch.event_time)
        fmt::format_to(to, "{}", *branch.event_time);
    out += '\n';
}

} // namespace

Result<ExportNotes> export_columns(const ExportSource& source, ExportSink& sink) {
    const CodeNames code_names(source.symbols, source.user_symbols);
    NameColumns names(code_names);
    ZstdSink compressed(sink);
    std::string buffer = "cpu,number,from,to,kind,privilege,from_symbol,from_offset,to_symbol,to_offset,instructions,"
                         "vector,error_code,page_table,time_ns\n";
    for (unsigned vcpu = source.first_vcpu(); vcpu < source.end_vcpu(); ++vcpu) {
        BranchStream stream(source.reader, vcpu, source.first, source.last);
        while (const StreamBranch* branch = sink.closed() ? nullptr : stream.next()) {
            append(*branch, names, buffer);
            if (buffer.size() >= buffer_bytes) {
                VTRACE_TRY(compressed.write(buffer, false));
                buffer.clear();
            }
        }
    }
    VTRACE_TRY(compressed.write(buffer, true));
    return ExportNotes{};
}

} // namespace vtrace
