// CallTree: what was counted, by call stack. Every stack that occurs is a path in it.
#pragma once

#include <cstdint>
#include <unordered_map>
#include <vector>

#include "decode/call_stack.h"

namespace vtrace {

struct CallWeights {
    uint64_t branches = 0, instructions = 0;

    CallWeights& operator+=(const CallWeights& other) {
        branches += other.branches;
        instructions += other.instructions;
        return *this;
    }
};

/// Not thread-safe. Memory: about 80 bytes a node, at most max_nodes.
class CallTree {
  public:
    using NodeId = uint32_t;
    struct Node {
        NodeId parent = 0;
        FunctionId function = 0;
        uint64_t calls = 0; // entries from the parent: calls, tail calls, interrupts ...; 0 where it was only met
        CallWeights self;
    };
    static constexpr size_t max_nodes = 2u << 20;
    static constexpr NodeId root = 0; // no function

    CallTree() : nodes_(1) {}

    /// Adds one vCPU's branches, all that `stream` still has.
    void add(BranchStream& stream, CallStack& stack);

    /// Parents come before their children.
    const std::vector<Node>& nodes() const { return nodes_; }
    /// Frames that found no room: what they did is their callers'.
    uint64_t left_out() const { return left_out_; }

  private:
    void follow(CallStack& stack);
    NodeId child(NodeId parent, FunctionId function);

    std::vector<Node> nodes_;
    std::unordered_map<uint64_t, NodeId> children_; // by parent and function
    std::vector<NodeId> path_;                      // of each frame of the stack
    uint64_t left_out_ = 0;
};

} // namespace vtrace
