// Folded stacks and callgrind's format: both are the call tree, written down.
#include "decode/export/stacks.h"

#include <algorithm>
#include <map>
#include <unordered_map>

namespace vtrace {

CallTree build_call_tree(const ExportSource& source, CodeNames& names, ExportNotes& notes) {
    CallTree tree;
    uint64_t unknown = 0, overflows = 0;
    for (unsigned vcpu = source.first_vcpu(); vcpu < source.end_vcpu(); ++vcpu) {
        BranchStream stream(source.reader, vcpu, source.first, source.last);
        CallStack stack(names);
        tree.add(stream, stack);
        unknown += stream.unknown_blocks();
        overflows += stack.overflows();
    }
    if (unknown)
        notes.push_back(
            fmt::format("{} branches followed code that is not in the trace: its instructions count as 0", unknown));
    if (overflows)
        notes.push_back(fmt::format("call stacks were deeper than {} frames {} times: the outermost were left out",
                                    CallStack::max_depth, overflows));
    if (tree.left_out())
        notes.push_back(fmt::format("more than {} different call stacks: what lay deeper counts for the caller ({} "
                                    "calls); --from and --to select a part",
                                    CallTree::max_nodes, tree.left_out()));
    return tree;
}

namespace {

/// A frame of a folded stack: ';' parts frames, and the line ends it.
std::string folded_name(std::string name) {
    std::replace(name.begin(), name.end(), ';', ':');
    std::replace(name.begin(), name.end(), '\n', '?');
    return name;
}

/// One function as callgrind has it: self cost, and its calls.
struct CallgrindFunction {
    CallWeights self;
    struct Call {
        uint64_t count = 0;
        CallWeights inclusive;
    };
    std::map<FunctionId, Call> calls;
};

/// Sums up the tree by function and by pair of functions. A stretch that recurs within itself counts once a level, as
/// callgrind counts it.
std::map<FunctionId, CallgrindFunction> by_function(const CallTree& tree) {
    const auto& nodes = tree.nodes();
    std::vector<CallWeights> inclusive(nodes.size());
    for (size_t i = nodes.size(); i-- > 1;) {
        inclusive[i] += nodes[i].self;
        inclusive[nodes[i].parent] += inclusive[i];
    }
    std::map<FunctionId, CallgrindFunction> functions;
    for (size_t i = 1; i < nodes.size(); ++i) {
        functions[nodes[i].function].self += nodes[i].self;
        if (nodes[i].parent == CallTree::root)
            continue;
        auto& call = functions[nodes[nodes[i].parent].function].calls[nodes[i].function];
        call.count += nodes[i].calls;
        call.inclusive += inclusive[i];
    }
    return functions;
}

/// Names as callgrind compresses them: "(1) memcpy" the first time, "(1)" from then on.
class CompressedNames {
  public:
    std::string of(const std::string& name) {
        auto [known, fresh] = ids_.emplace(name, ids_.size() + 1);
        return fresh ? fmt::format("({}) {}", known->second, name) : fmt::format("({})", known->second);
    }

  private:
    std::unordered_map<std::string, size_t> ids_;
};

} // namespace

Result<ExportNotes> export_folded(const ExportSource& source, StackWeight weight, ExportSink& sink) {
    ExportNotes notes;
    CodeNames names(source.symbols, source.user_symbols);
    const CallTree tree = build_call_tree(source, names, notes);
    std::vector<FunctionId> path;
    std::string line;
    for (const CallTree::Node& node : tree.nodes()) {
        const uint64_t count = weight == StackWeight::branches ? node.self.branches : node.self.instructions;
        if (count == 0)
            continue;
        path.clear();
        for (const CallTree::Node* at = &node; at != &tree.nodes()[CallTree::root]; at = &tree.nodes()[at->parent])
            path.push_back(at->function);
        line.clear();
        for (size_t i = path.size(); i-- > 0;) {
            line += folded_name(names.name(path[i]));
            line += i ? ';' : ' ';
        }
        line += fmt::format("{}\n", count);
        sink.write(line);
    }
    return notes;
}

Result<ExportNotes> export_callgrind(const ExportSource& source, ExportSink& sink) {
    ExportNotes notes;
    CodeNames names(source.symbols, source.user_symbols);
    const CallTree tree = build_call_tree(source, names, notes);
    const auto functions = by_function(tree);
    CallWeights total;
    for (const auto& [id, function] : functions)
        total += function.self;
    sink.write(fmt::format("# callgrind format\nversion: 1\ncreator: vtrace\ncmd: guest\npart: 1\npositions: line\n"
                           "events: Branches Ir\nsummary: {0} {1}\n\n",
                           total.branches, total.instructions));
    CompressedNames functions_named, objects_named;
    // Two static functions may have one name: their addresses tell them apart, or they would be one to the tools.
    std::unordered_map<std::string, uint32_t> times;
    std::unordered_map<FunctionId, std::string> unique;
    for (const auto& [id, function] : functions) {
        std::string name = names.name(id);
        if (times[name]++)
            name += fmt::format("@{:#x}", names.address(id));
        unique.emplace(id, std::move(name));
    }
    for (const auto& [id, function] : functions) {
        sink.write(fmt::format("ob={}\nfl=(0) ???\nfn={}\n0 {} {}\n", objects_named.of(names.module(id)),
                               functions_named.of(unique.at(id)), function.self.branches, function.self.instructions));
        for (const auto& [callee, call] : function.calls)
            sink.write(fmt::format("cob={}\ncfn={}\ncalls={} 0\n0 {} {}\n", objects_named.of(names.module(callee)),
                                   functions_named.of(unique.at(callee)), call.count, call.inclusive.branches,
                                   call.inclusive.instructions));
        sink.write("\n");
    }
    sink.write(fmt::format("totals: {} {}\n", total.branches, total.instructions));
    return notes;
}

} // namespace vtrace
