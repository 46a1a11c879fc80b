#include "decode/export/blocks.h"

#include <algorithm>
#include <tuple>
#include <unordered_map>

#include "decode/branch_stream.h"

namespace vtrace {
namespace {

constexpr size_t max_blocks = 4u << 20;

struct Key {
    uint64_t space, start, end;
    Privilege privilege;
    bool operator==(const Key&) const = default;
};
struct Hash {
    size_t operator()(const Key& key) const {
        return (key.start * 0x9e37'79b9'7f4a'7c15 ^ key.end * 0xc2b2'ae3d'27d4'eb4f ^ key.space) >> 7;
    }
};

/// One past the last byte of the block's last instruction: of one that is no branch, or not known, at least a byte.
uint64_t block_end(const StreamBranch& branch) {
    if (branch.delivered())
        return branch.record.from;
    return branch.record.from + std::max<unsigned>(branch.instruction.length, 1);
}

} // namespace

std::vector<CodeBlock> count_blocks(const ExportSource& source, ExportNotes& notes, uint64_t& branches) {
    std::unordered_map<Key, uint64_t, Hash> counts;
    uint64_t left_out = 0;
    branches = 0;
    for (unsigned vcpu = source.first_vcpu(); vcpu < source.end_vcpu(); ++vcpu) {
        BranchStream stream(source.reader, vcpu, source.first, source.last);
        while (const StreamBranch* branch = stream.next()) {
            ++branches;
            const uint64_t end = block_end(*branch);
            if (end <= branch->block_start)
                continue; // interrupted before its first instruction
            const bool user = branch->from_privilege == Privilege::user;
            const Key key{user ? branch->space : 0, branch->block_start, end, branch->from_privilege};
            if (auto known = counts.find(key); known != counts.end())
                ++known->second;
            else if (counts.size() < max_blocks)
                counts.emplace(key, 1);
            else
                ++left_out;
        }
    }
    if (left_out)
        notes.push_back(
            fmt::format("more than {} different blocks of code: {} runs of others were left out; --from and "
                        "--to select a part",
                        max_blocks, left_out));
    std::vector<CodeBlock> blocks;
    blocks.reserve(counts.size());
    for (const auto& [key, count] : counts)
        blocks.push_back({key.space, key.start, key.end, key.privilege, count});
    std::sort(blocks.begin(), blocks.end(), [](const CodeBlock& a, const CodeBlock& b) {
        return std::tie(a.privilege, a.space, a.start, a.end) < std::tie(b.privilege, b.space, b.start, b.end);
    });
    return blocks;
}

} // namespace vtrace
