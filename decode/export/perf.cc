// perf.data, as `perf record -e intel_bts//` would have written it: the branches as AUX data of an intel_bts event.
//
// Layout: linux/perf_event.h and tools/perf/Documentation/perf.data-file-format.txt. perf finds the instructions at the
// branches' addresses in the files that MMAP events name, or, for the kernel's, in the vmlinux that it is given. Each
// page table of the guest becomes a process; on each vCPU that process is a thread of its own.
#include <array>
#include <filesystem>
#include <map>
#include <memory>
#include <unordered_set>

#include "decode/branch_line.h"
#include "decode/branch_stream.h"
#include "decode/export/code_image.h"
#include "decode/export/file_sink.h"

namespace vtrace {
namespace {

// linux/perf_event.h
constexpr uint32_t record_mmap = 1, record_comm = 3;
constexpr uint16_t misc_kernel = 1, misc_user = 2;
constexpr uint64_t sample_ip = 1 << 0, sample_tid = 1 << 1, sample_identifier = 1 << 16;
constexpr uint64_t format_id = 1 << 2;
// tools/lib/perf/include/perf/event.h
constexpr uint32_t record_finished_round = 68, record_auxtrace_info = 70, record_auxtrace = 71;
constexpr uint32_t auxtrace_intel_bts = 2;

constexpr uint32_t pmu_type = 6; // any: that of the event and that of the AUX data have to be the same
constexpr uint64_t event_id = 1;
constexpr size_t buffer_records = 1u << 15; // of one AUXTRACE event
constexpr uint32_t first_pid = 1000;
constexpr uint64_t image_start = 0xffff'ffff'8000'0000, image_end = 0xffff'ffff'c000'0000; // of a Linux kernel

struct FileSection {
    uint64_t offset, size;
};
struct FileHeader {
    std::array<char, 8> magic;
    uint64_t size;      // of this header
    uint64_t attr_size; // of attribute and its ids' section
    FileSection attrs, data, event_types;
    std::array<uint64_t, 4> features;
};
static_assert(sizeof(FileHeader) == 104);

struct EventAttr { // struct perf_event_attr, PERF_ATTR_SIZE_VER0
    uint32_t type, size;
    uint64_t config, sample_period, sample_type, read_format, flags;
    uint32_t wakeup_events, bp_type;
    uint64_t config1;
};
static_assert(sizeof(EventAttr) == 64);
constexpr uint64_t attr_disabled = 1 << 0, attr_sample_id_all = 1 << 18;

struct EventHeader {
    uint32_t type;
    uint16_t misc, size;
};
struct SampleId { // behind each event, by sample_type
    uint32_t pid, tid;
    uint64_t id;
};
struct AuxtraceInfo {
    EventHeader header;
    uint32_t type, reserved;
    std::array<uint64_t, 6> priv; // pmu type, time shift, mult, zero, cap_user_time_zero, snapshot
};
static_assert(sizeof(AuxtraceInfo) == 64);
struct Auxtrace {
    EventHeader header;
    uint64_t size, offset, reference;
    uint32_t idx, tid, cpu, reserved;
};
static_assert(sizeof(Auxtrace) == 48);

template <class T>
std::string_view bytes_of(const T& object) {
    return {reinterpret_cast<const char*>(&object), sizeof object};
}

/// Text with its NUL, filled up to a multiple of 8.
std::string padded(std::string text) {
    text += '\0';
    text.resize((text.size() + 7) / 8 * 8);
    return text;
}

class PerfExport {
  public:
    PerfExport(const ExportSource& source, FileSink file, std::string path)
        : source_(source), file_(std::move(file)), path_(std::move(path)) {}

    Result<ExportNotes> run() {
        write_head();
        for (unsigned vcpu = source_.first_vcpu(); vcpu < source_.end_vcpu() && !file_.closed(); ++vcpu)
            add_vcpu(vcpu);
        VTRACE_TRY(write_code());
        write_event({record_finished_round, 0, sizeof(EventHeader)}, {});
        patch_head();
        VTRACE_TRY(file_.finish());
        return notes_;
    }

  private:
    struct Process {
        uint32_t pid;
        CodeImage code; // of the lower half
        std::unordered_set<uint64_t> seen;
    };

    void write_head() {
        file_.write(bytes_of(FileHeader{})); // patched at the end
        ids_offset_ = file_.offset();
        file_.write(bytes_of(event_id));
        attrs_offset_ = file_.offset();
        file_.write(bytes_of(EventAttr{pmu_type, sizeof(EventAttr), 0, 1, sample_ip | sample_tid | sample_identifier,
                                       format_id, attr_disabled | attr_sample_id_all, 0, 0, 0}));
        file_.write(bytes_of(FileSection{ids_offset_, sizeof event_id}));
        data_offset_ = file_.offset();
        file_.write(bytes_of(AuxtraceInfo{
            {record_auxtrace_info, 0, sizeof(AuxtraceInfo)}, auxtrace_intel_bts, 0, {pmu_type, 0, 0, 0, 0, 0}}));
    }

    void patch_head() {
        const uint64_t end = file_.offset();
        file_.seek(0);
        file_.write(bytes_of(FileHeader{{'P', 'E', 'R', 'F', 'I', 'L', 'E', '2'},
                                        sizeof(FileHeader),
                                        sizeof(EventAttr) + sizeof(FileSection),
                                        {attrs_offset_, sizeof(EventAttr) + sizeof(FileSection)},
                                        {data_offset_, end - data_offset_},
                                        {0, 0},
                                        {}}));
    }

    void write_event(EventHeader header, std::string_view payload) {
        file_.write(bytes_of(header));
        file_.write(payload);
    }

    void write_mmap(uint32_t pid, uint16_t misc, uint64_t start, uint64_t size, uint64_t offset,
                    const std::string& name) {
        const bool kernel = misc == misc_kernel;
        std::string payload;
        payload += bytes_of(std::array<uint32_t, 2>{kernel ? UINT32_MAX : pid, kernel ? 0 : pid});
        payload += bytes_of(std::array<uint64_t, 3>{start, size, offset});
        payload += padded(name);
        payload += bytes_of(SampleId{pid, pid, event_id});
        write_event({record_mmap, misc, static_cast<uint16_t>(sizeof(EventHeader) + payload.size())}, payload);
    }

    Process& process(uint64_t space) {
        auto& known = processes_[space];
        if (!known) {
            known = std::make_unique<Process>();
            known->pid = first_pid + static_cast<uint32_t>(processes_.size()) - 1;
        }
        return *known;
    }

    /// The thread that a process is on a vCPU, announced when it is met first.
    uint32_t thread(const Process& process, unsigned vcpu) {
        auto [known, fresh] = threads_.try_emplace({process.pid, vcpu}, 0);
        if (fresh) {
            known->second = first_pid + 1'000'000 + static_cast<uint32_t>(threads_.size());
            std::string payload;
            payload += bytes_of(std::array<uint32_t, 2>{process.pid, known->second});
            payload += padded(fmt::format("cpu{}", vcpu));
            payload += bytes_of(SampleId{process.pid, known->second, event_id});
            write_event({record_comm, 0, static_cast<uint16_t>(sizeof(EventHeader) + payload.size())}, payload);
        }
        return known->second;
    }

    void add_vcpu(unsigned vcpu) {
        BranchStream stream(source_.reader, vcpu, source_.first, source_.last);
        std::vector<ds::BtsRecord> run;
        Process* running = nullptr;
        uint64_t space = 0;
        while (const StreamBranch* branch = file_.closed() ? nullptr : stream.next()) {
            if (!running || branch->space != space || run.size() == buffer_records) {
                write_run(running, vcpu, run);
                space = branch->space;
                running = &process(space);
            }
            run.push_back({branch->record.from, branch->record.to, 0});
            add_code(*branch, *running);
        }
        write_run(running, vcpu, run);
    }

    void write_run(const Process* process, unsigned vcpu, std::vector<ds::BtsRecord>& run) {
        if (!process || run.empty())
            return;
        const uint32_t tid = thread(*process, vcpu);
        run.push_back({}); // perf never looks at the last record of a buffer
        const uint64_t size = run.size() * sizeof(ds::BtsRecord);
        file_.write(bytes_of(Auxtrace{
            {record_auxtrace, 0, sizeof(Auxtrace)}, size, aux_offset_, ++reference_, tid, tid, UINT32_MAX, 0}));
        file_.write({reinterpret_cast<const char*>(run.data()), size});
        aux_offset_ += size;
        run.clear();
    }

    void add_code(const StreamBranch& branch, Process& process) {
        const uint64_t from = branch.record.from;
        const bool upper = upper_half(from);
        if (!(upper ? kernel_seen_ : process.seen).insert(from).second)
            return;
        std::array<uint8_t, max_instruction> code;
        const size_t known = source_.reader.code_at(branch.record.vcpu, branch.record.position, branch.cr3, from, code);
        const std::span<const uint8_t> bytes(code.data(), known);
        if (!upper)
            process.code.add(from, bytes);
        else if (from >= image_start && from < image_end)
            kernel_code_.add(from, bytes);
        else
            elsewhere_.add(from, bytes);
    }

    /// The names of all functions, and one of our own for the last byte: the first look at a file without any symbol
    /// fails in perf, and with it the first branch.
    static std::vector<CodeImage::Symbol> image_symbols(const std::vector<CodeImage::Section>& sections,
                                                        std::initializer_list<const SymbolTable*> tables) {
        std::vector<CodeImage::Symbol> symbols;
        symbols.push_back({sections.back().start + sections.back().size - 1, 1, "end_of_code"});
        for (const SymbolTable* table : tables)
            for (const Function& function : table->functions())
                symbols.push_back({function.address, function.size, function.name});
        return symbols;
    }

    Result<> write_code() {
        const std::string absolute = std::filesystem::absolute(path_).string();
        for (auto& [space, process] : processes_) {
            if (process->code.empty())
                continue;
            const std::string path = fmt::format("{}.{}", absolute, process->pid);
            auto sections = process->code.sections(CodeImage::page_bytes);
            VTRACE_TRY(process->code.write(path, sections,
                                           image_symbols(sections, {&source_.symbols, &source_.user_symbols})));
            for (const auto& section : sections)
                write_mmap(process->pid, misc_user, section.start, section.size, section.offset, path);
        }
        if (!kernel_code_.empty()) {
            auto sections = kernel_code_.sections(image_end - image_start);
            auto symbols = image_symbols(sections, {&source_.symbols});
            symbols.push_back({sections[0].start, 0, "_text"}); // by which perf sees that nothing was moved
            VTRACE_TRY(kernel_code_.write(absolute + ".vmlinux", sections, symbols));
            write_mmap(0, misc_kernel, sections[0].start, sections[0].size, sections[0].start,
                       "[kernel.kallsyms]_text");
            notes_.push_back(fmt::format("the kernel's code and symbols are in '{0}.vmlinux': perf script -i '{0}' -k "
                                         "'{0}.vmlinux' --itrace=b",
                                         path_));
        }
        if (!elsewhere_.empty()) {
            auto sections = elsewhere_.sections(CodeImage::page_bytes);
            const std::string path = absolute + ".modules";
            VTRACE_TRY(elsewhere_.write(path, sections, image_symbols(sections, {&source_.symbols})));
            for (const auto& section : sections)
                write_mmap(0, misc_kernel, section.start, section.size, section.offset, path);
        }
        return {};
    }

    const ExportSource& source_;
    FileSink file_;
    std::string path_;
    ExportNotes notes_;
    std::map<uint64_t, std::unique_ptr<Process>> processes_; // by page table
    std::map<std::pair<uint32_t, unsigned>, uint32_t> threads_;
    CodeImage kernel_code_, elsewhere_; // of the kernel's image; of modules and BPF programs
    std::unordered_set<uint64_t> kernel_seen_;
    uint64_t ids_offset_ = 0, attrs_offset_ = 0, data_offset_ = 0, aux_offset_ = 0, reference_ = 0;
};

} // namespace

Result<ExportNotes> export_perf(const ExportSource& source, const std::string& path) {
    auto file = FileSink::create(path);
    if (!file)
        return Unexpected(std::move(file.error()));
    return PerfExport(source, std::move(*file), path).run();
}

} // namespace vtrace
