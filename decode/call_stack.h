// CallStack: who called whom, out of one vCPU's branches. A trace holds no stack pointer: calls and returns say it.
//
// The rules, in the order in which they are tried:
//   call      pushes a frame. A call to the next instruction or into its own function (get the PC, retpolines, filling
//             the return stack buffer) pushes an `internal` one: no function of its own.
//   return    pops to the topmost frame of this context that expects this address, whatever lies above it. Where none
//             does: a return out of an internal frame, or to the start of a function, is a jump; one into a function
//             that is on the stack unwinds to it; any other is a switch of stacks.
//   jump      within a function changes nothing. To another function, or falling into it, is a tail call: a `tail`
//             frame, which leaves together with the frame that was called. Back into a function of the same chain of
//             tail calls (code split into hot and cold) pops to it. An indirect jump to where a call has returned to
//             before (longjmp), or into the middle of a function on the stack (unwinder), unwinds to that frame.
//   interrupt, exception, syscall, INT n   push the handler and begin a context: returns inside never reach beyond it.
//   iret, sysret, sysexit   leave the latest context (to user: the latest that was entered from user). IRET to the next
//             instruction is none (Linux serializes so). Going elsewhere than expected within user code is a signal:
//             a `signal` frame, popped when the kernel returns to what was interrupted. To another page table: a new
//             program (execve).
//   switch    Linux's __switch_to ends on another task's stack. The stack left is put aside, and the latest one that
//             expects this return address, if possible under the page table in use, comes back; should a later return
//             belie the choice, it is made again among those whose addresses fit all returns since. A task never seen
//             starts with an empty stack. Any other switch of stacks goes by its first return address alone.
// Where the code between two branches is missing (a window ends, a damaged chunk) all stacks are forgotten.
//
// Known limits: stacks are one vCPU's, so that a task that migrates is met as a new one. Without symbols a tail call is
// not told from a jump. A longjmp past frames of the same recursive function goes to the latest of them that has
// returned from setjmp.
#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <span>
#include <vector>

#include "decode/branch_stream.h"
#include "decode/code_names.h"

namespace vtrace {

/// Not thread-safe. Memory: bounded by max_depth frames and max_suspended stacks.
class CallStack {
  public:
    /// How a frame came to be.
    enum class Entry : uint8_t { base, call, tail, internal, signal, syscall, interrupt, exception };
    struct Frame {
        uint64_t return_address = 0;             // where its caller goes on; 0: not known
        uint64_t space = 0;                      // page table when it was entered
        uint64_t range_start = 0, range_end = 0; // as CodeRange
        uint32_t serial = 0;                     // different for each frame
        FunctionId function = 0;
        Entry entry = Entry::base;
        Privilege privilege = Privilege::kernel;
        bool from_user = false; // begins a context, out of user code
        bool fresh = false;     // entered, not come back with its stack, since accept_changes()

        bool begins_context() const { return entry >= Entry::syscall; }
        /// A function's own frame: shown in a stack.
        bool shown() const { return entry != Entry::internal; }
    };

    static constexpr size_t max_depth = 4096; // of frames; the older half is forgotten beyond
    static constexpr size_t max_suspended = 512;

    /// `names` must outlive it.
    explicit CallStack(CodeNames& names);

    /// For each branch, in order: arrive() makes the stack that of the code up to the branch, take() that behind it.
    /// Between the two the block belongs to the function on top.
    void arrive(const StreamBranch& branch);
    void take(const StreamBranch& branch);

    /// Outermost first; never empty after arrive().
    std::span<const Frame> frames() const { return frames_; }

    /// Has the stack changed since accept_changes()? Then frames [0, unchanged()) are as they were, what was above them
    /// is gone, and those from there on are new to the observer; `fresh` tells calls from stacks that came back.
    bool changed() const { return unchanged_ != frames_.size() || observed_ != frames_.size(); }
    size_t unchanged() const { return unchanged_; }
    void accept_changes();

    /// Times that the oldest frames were forgotten for depth.
    uint64_t overflows() const { return overflows_; }

  private:
    struct Suspended {
        std::vector<Frame> frames;
        uint64_t space = 0;
    };
    struct Candidate {
        size_t index; // into suspended_
        size_t left;  // frames that would be left of it
        unsigned likelihood;
        bool alone; // no other fits
    };
    /// A choice among suspended stacks that could be wrong.
    struct Guess {
        Suspended original;
        size_t depth = 0;               // frames of it that are left
        std::vector<uint64_t> returned; // addresses that it has returned to
    };
    struct ReturnSite {
        uint64_t address = 0;
        uint32_t serial = 0; // of the latest frame that a call returned to there
    };

    void push(FunctionId function, const CodeRange& range, Entry entry, Privilege privilege, uint64_t return_address,
              bool from_user = false);
    void pop_to(size_t size);
    void restart(const CodeRange& range, Privilege privilege);
    void set_stack(std::vector<Frame> frames);
    size_t context() const; // index of the frame that begins the latest context; 0: none
    size_t user_entry() const;
    size_t chain_start() const; // index of the frame whose tail calls are on top
    std::optional<size_t> find_in_context(FunctionId function) const;

    void call(const StreamBranch& branch, unsigned length);
    void enter_context(const StreamBranch& branch, Entry entry);
    void jump(uint64_t to, Privilege privilege, bool indirect);
    bool unwind_to_return_site(uint64_t to);
    void return_to(uint64_t to, Privilege privilege);
    bool return_without_match(uint64_t to, Privilege privilege);
    void leave_context(const StreamBranch& branch);
    void return_to_user(uint64_t to, Privilege privilege);

    bool in_switch() const;
    void switch_stacks(uint64_t to, Privilege privilege);
    bool choose_again(uint64_t to);
    void note_return(uint64_t to, size_t index);
    static std::optional<size_t> unwind(const std::vector<Frame>& frames, std::span<const uint64_t> returns);
    unsigned likelihood(const Suspended& stack) const;
    std::optional<Candidate> best_candidate(std::span<const uint64_t> returns) const;
    /// The two page tables of one address space under Linux's page-table isolation differ in bit 12.
    static bool same_space(uint64_t a, uint64_t b) { return ((a ^ b) & ~0x1000ull) == 0; }

    CodeNames& names_;
    std::vector<FunctionId> switch_functions_;
    std::vector<Frame> frames_;
    std::deque<Suspended> suspended_; // latest last
    std::optional<Guess> guess_;
    std::vector<ReturnSite> sites_; // direct-mapped
    uint64_t space_ = 0;
    uint32_t next_serial_ = 1;
    size_t unchanged_ = 0;
    size_t observed_ = 0; // frames at accept_changes()
    uint64_t overflows_ = 0;
};

} // namespace vtrace
