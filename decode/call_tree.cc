#include "decode/call_tree.h"

namespace vtrace {

CallTree::NodeId CallTree::child(NodeId parent, FunctionId function) {
    const uint64_t key = uint64_t{parent} << 32 | function;
    if (auto known = children_.find(key); known != children_.end())
        return known->second;
    if (nodes_.size() == max_nodes) {
        ++left_out_;
        return parent;
    }
    const auto id = static_cast<NodeId>(nodes_.size());
    nodes_.push_back({parent, function, 0, {}});
    children_.emplace(key, id);
    return id;
}

void CallTree::follow(CallStack& stack) {
    if (!stack.changed())
        return;
    const auto frames = stack.frames();
    path_.resize(stack.unchanged());
    for (size_t i = path_.size(); i < frames.size(); ++i) {
        const NodeId parent = i == 0 ? root : path_[i - 1];
        const NodeId node = frames[i].shown() ? child(parent, frames[i].function) : parent;
        if (frames[i].fresh && frames[i].shown() && frames[i].entry != CallStack::Entry::base && node != parent)
            ++nodes_[node].calls;
        path_.push_back(node);
    }
    stack.accept_changes();
}

void CallTree::add(BranchStream& stream, CallStack& stack) {
    path_.clear();
    while (const StreamBranch* branch = stream.next()) {
        stack.arrive(*branch);
        follow(stack);
        nodes_[path_.back()].self += {1, branch->instructions};
        stack.take(*branch);
        follow(stack);
    }
}

} // namespace vtrace
