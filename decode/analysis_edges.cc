#include "decode/analysis_edges.h"

#include <algorithm>
#include <memory>
#include <mutex>
#include <tuple>

#include "decode/edge_table.h"

namespace vtrace {
namespace {

// What tells edges of one (from, to) apart, in EdgeTable's tag.
constexpr unsigned kind_shift = 0, vector_shift = 8, class_shift = 16;
constexpr uint32_t user_from = 1u << 24, user_to = 1u << 25;
/// In the lower half, and before any branch of this chunk that enters user space: which it is, what came before tells.
constexpr uint32_t undecided_from = 1u << 26, undecided_to = 1u << 27;

/// Classifiers to borrow: they are not thread-safe, and what they have cached is worth keeping.
class ClassifierPool {
  public:
    std::unique_ptr<Classifier> take() {
        std::lock_guard lock(mutex_);
        if (free_.empty())
            return std::make_unique<Classifier>();
        auto classifier = std::move(free_.back());
        free_.pop_back();
        return classifier;
    }
    void give_back(std::unique_ptr<Classifier> classifier) {
        std::lock_guard lock(mutex_);
        free_.push_back(std::move(classifier));
    }

  private:
    std::mutex mutex_;
    std::vector<std::unique_ptr<Classifier>> free_;
};

struct ChunkEdges {
    unsigned vcpu = 0;
    bool enters_user = false;
    std::vector<EdgeTable::Entry> edges; // tag: as above, all of it
};

/// Counts one chunk's edges, and looks once at the code of each.
ChunkEdges count_chunk(const TraceReader& reader, const ChunkRecords& chunk, const EdgeOptions& options,
                       ClassifierPool& pool) {
    struct Cr3 {
        size_t index; // of the record from which on it holds
        uint64_t value;
    };
    std::vector<Cr3> cr3s = {{0, chunk.start.cr3.value_or(0)}};
    EdgeTable table(15);
    bool entered = false;
    const auto [range_first, range_last] =
        options.ranges.empty() ? std::pair(uint64_t{0}, UINT64_MAX) : options.ranges.at(chunk.vcpu);
    const uint64_t first = std::max(options.first, range_first), last = std::min(options.last, range_last);
    uint64_t number = chunk.first_number;
    for (size_t i = 0; i < chunk.records.size(); ++i) {
        const ds::BtsRecord& record = chunk.records[i];
        if (ds::BtsFlags::is_event(record.flags)) {
            if (ds::BtsFlags::kind(record.flags) == ds::BtsKind::cr3)
                cr3s.push_back({i, record.from});
            continue;
        }
        bool wanted = number >= first && number < last;
        ++number;
        uint32_t tag = static_cast<uint32_t>(ds::BtsFlags::kind(record.flags)) << kind_shift |
                       uint32_t{ds::BtsFlags::vector(record.flags)} << vector_shift;
        bool low_from = !upper_half(record.from), low_to = !upper_half(record.to);
        if (low_from)
            tag |= entered ? user_from : undecided_from;
        if (enters_user(record.from, record.to))
            entered = true;
        if (low_to)
            tag |= entered ? user_to : undecided_to;
        if (wanted)
            table.add(record.from, record.to, tag, 1, static_cast<uint32_t>(i));
    }

    ChunkEdges result{chunk.vcpu, entered, table.entries()};
    // In the order of the code, so that code_at() finds each page once.
    std::sort(result.edges.begin(), result.edges.end(),
              [](const auto& a, const auto& b) { return std::tie(a.from, a.first) < std::tie(b.from, b.first); });
    auto classifier = pool.take();
    std::array<uint8_t, max_instruction> code;
    for (EdgeTable::Entry& edge : result.edges) {
        auto kind = static_cast<ds::BtsKind>(edge.tag >> kind_shift & 0xff);
        size_t known = 0;
        if (kind == ds::BtsKind::branch) {
            auto after = std::upper_bound(cr3s.begin(), cr3s.end(), size_t{edge.first},
                                          [](size_t index, const Cr3& cr3) { return index < cr3.index; });
            known = reader.code_at(chunk.vcpu, chunk.first_position + edge.first, (after - 1)->value, edge.from, code);
        }
        BranchInstruction branch =
            classifier->classify(std::span(code).first(known), {edge.from, edge.to, ds::BtsFlags::make(kind)});
        edge.tag |= static_cast<uint32_t>(branch.branch_class) << class_shift;
        if (branch.branch_class == BranchClass::int_n)
            edge.tag = (edge.tag & ~(0xffu << vector_shift)) | uint32_t{branch.vector} << vector_shift;
    }
    pool.give_back(std::move(classifier));
    return result;
}

} // namespace

Result<std::vector<Edge>> count_edges(const TraceReader& reader, const EdgeOptions& options) {
    ClassifierPool pool;
    std::vector<bool> in_user;
    for (unsigned vcpu = 0; vcpu < reader.vcpus(); ++vcpu)
        in_user.push_back(entered_user_before(reader, vcpu));
    EdgeTable total;
    auto map = [&](const ChunkRecords& chunk) { return count_chunk(reader, chunk, options, pool); };
    auto reduce = [&](ChunkEdges&& chunk) {
        bool user_before = in_user[chunk.vcpu];
        for (const EdgeTable::Entry& edge : chunk.edges) {
            uint32_t tag = edge.tag & ~(undecided_from | undecided_to);
            if (user_before)
                tag |= (edge.tag & undecided_from ? user_from : 0) | (edge.tag & undecided_to ? user_to : 0);
            if (passes(options.filter, tag & user_from ? Privilege::user : Privilege::kernel))
                total.add(edge.from, edge.to, tag, edge.count, 0);
        }
        if (chunk.enters_user)
            in_user[chunk.vcpu] = true;
    };
    // The range is of branches that are counted: whether user space was entered, all before it tells.
    VTRACE_TRY(reader.map_chunks(options.vcpu, options.threads, map, reduce, 0, options.last));

    std::vector<Edge> edges;
    edges.reserve(total.size());
    for (const EdgeTable::Entry& entry : total.entries()) {
        auto side = [&](uint32_t bit) { return entry.tag & bit ? Privilege::user : Privilege::kernel; };
        edges.push_back({entry.from, entry.to, entry.count, static_cast<BranchClass>(entry.tag >> class_shift & 0xff),
                         static_cast<uint8_t>(entry.tag >> vector_shift), side(user_from), side(user_to)});
    }
    std::sort(edges.begin(), edges.end(), [](const Edge& a, const Edge& b) {
        return std::tie(b.count, a.from, a.to, a.branch_class, a.vector, a.privilege, a.to_privilege) <
               std::tie(a.count, b.from, b.to, b.branch_class, b.vector, b.privilege, b.to_privilege);
    });
    return edges;
}

} // namespace vtrace
