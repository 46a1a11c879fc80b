#include "decode/call_stack.h"

#include <algorithm>

namespace vtrace {
namespace {

constexpr unsigned site_bits = 14;
constexpr unsigned near_call_length = 5; // CALL rel32

size_t site_slot(uint64_t address) {
    return address * 0x9e37'79b9'7f4a'7c15 >> (64 - site_bits);
}

bool in_range(const CallStack::Frame& frame, uint64_t address) {
    return address >= frame.range_start && address < frame.range_end;
}

} // namespace

CallStack::CallStack(CodeNames& names) : names_(names), sites_(1u << site_bits) {
    for (const char* name : {"__switch_to_asm", "__switch_to"})
        for (FunctionId id : names.find_all(name))
            switch_functions_.push_back(id);
}

void CallStack::accept_changes() {
    for (size_t i = unchanged_; i < frames_.size(); ++i)
        frames_[i].fresh = false;
    unchanged_ = observed_ = frames_.size();
}

void CallStack::push(FunctionId function, const CodeRange& range, Entry entry, Privilege privilege,
                     uint64_t return_address, bool from_user) {
    if (frames_.size() == max_depth) {
        frames_.erase(frames_.begin(), frames_.begin() + max_depth / 2);
        unchanged_ = 0;
        guess_.reset();
        ++overflows_;
    }
    frames_.push_back(
        {return_address, space_, range.start, range.end, next_serial_++, function, entry, privilege, from_user, true});
}

void CallStack::pop_to(size_t size) {
    frames_.resize(std::min(size, frames_.size()));
    unchanged_ = std::min(unchanged_, frames_.size());
    if (guess_)
        guess_->depth = std::min(guess_->depth, frames_.size());
}

void CallStack::restart(const CodeRange& range, Privilege privilege) {
    pop_to(0);
    guess_.reset();
    push(range.id, range, Entry::base, privilege, 0);
}

void CallStack::set_stack(std::vector<Frame> frames) {
    frames_ = std::move(frames);
    for (Frame& frame : frames_)
        frame.fresh = false;
    unchanged_ = 0;
}

size_t CallStack::context() const {
    for (size_t i = frames_.size(); i-- > 1;)
        if (frames_[i].begins_context())
            return i;
    return 0;
}

size_t CallStack::chain_start() const {
    size_t i = frames_.size() - 1;
    while (i > 0 && frames_[i].entry == Entry::tail)
        --i;
    return i;
}

std::optional<size_t> CallStack::find_in_context(FunctionId function) const {
    for (size_t i = frames_.size(), first = context(); i-- > first;)
        if (frames_[i].function == function && frames_[i].shown())
            return i;
    return std::nullopt;
}

/// Index of the frame that was entered out of the user code below it; 0: none.
size_t CallStack::user_entry() const {
    size_t i = frames_.size() - 1;
    while (i > 0 && !frames_[i].from_user)
        --i;
    return i;
}

void CallStack::arrive(const StreamBranch& branch) {
    space_ = branch.space;
    const uint64_t at = branch.block_start == branch.record.from ? branch.record.from : branch.block_start;
    if (branch.after_gap || frames_.empty()) {
        suspended_.clear();
        restart(names_.at(at, branch.from_privilege), branch.from_privilege);
    } else if (frames_.back().privilege != branch.from_privilege) {
        // A trace of one privilege alone: how the other was entered or left is not in it.
        if (branch.from_privilege == Privilege::user) {
            const size_t entry = user_entry();
            if (entry == 0)
                restart(names_.at(at, Privilege::user), Privilege::user);
            else
                pop_to(entry);
        } else {
            const CodeRange range = names_.at(at, Privilege::kernel);
            push(range.id, range, Entry::syscall, Privilege::kernel, 0, true);
        }
    }
    // Code may fall out of one symbol into the next.
    if (frames_.back().range_end != 0 && !in_range(frames_.back(), branch.record.from))
        jump(branch.record.from, branch.from_privilege, false);
}

void CallStack::take(const StreamBranch& branch) {
    const uint64_t to = branch.record.to;
    const bool leaves_user = branch.from_privilege == Privilege::user && branch.to_privilege == Privilege::kernel;
    const bool enters_user = branch.from_privilege == Privilege::kernel && branch.to_privilege == Privilege::user;
    switch (branch.instruction.branch_class) {
    case BranchClass::interrupt:
        return enter_context(branch, Entry::interrupt);
    case BranchClass::exception:
    case BranchClass::int_n:
        return enter_context(branch, Entry::exception);
    case BranchClass::syscall:
    case BranchClass::sysenter:
        return enter_context(branch, Entry::syscall);
    case BranchClass::iret:
    case BranchClass::sysret:
    case BranchClass::sysexit:
        return leave_context(branch);
    default:
        break;
    }
    if (leaves_user)
        return enter_context(branch, Entry::syscall);
    if (enters_user)
        return leave_context(branch);
    switch (branch.instruction.branch_class) {
    case BranchClass::call:
    case BranchClass::indirect_call:
    case BranchClass::far_call:
        return call(branch, branch.instruction.length);
    case BranchClass::unknown:
    case BranchClass::other:
        // The trace lacks this code, or has it as it was patched later: what goes to a function's start is a call.
        if (const CodeRange range = names_.at(to, branch.to_privilege); range.named() && to == range.start)
            return call(branch, near_call_length);
        return jump(to, branch.to_privilege, false);
    case BranchClass::ret:
    case BranchClass::far_ret:
        return return_to(to, branch.to_privilege);
    default:
        return jump(to, branch.to_privilege, branch.instruction.branch_class == BranchClass::indirect_jump);
    }
}

void CallStack::call(const StreamBranch& branch, unsigned length) {
    const uint64_t to = branch.record.to, back = branch.record.from + length;
    const Frame& top = frames_.back();
    if (to == back || (in_range(top, to) && to != top.range_start)) {
        const Frame caller = top;
        push(caller.function, {caller.function, caller.range_start, caller.range_end}, Entry::internal,
             caller.privilege, back);
        return;
    }
    const CodeRange range = names_.entered_at(to, branch.to_privilege);
    push(range.id, range, Entry::call, branch.to_privilege, back);
}

void CallStack::enter_context(const StreamBranch& branch, Entry entry) {
    const CodeRange range = names_.entered_at(branch.record.to, branch.to_privilege);
    const bool from_user = branch.from_privilege == Privilege::user;
    const uint64_t back = branch.record.from + (branch.delivered() ? 0 : branch.instruction.length);
    push(range.id, range, entry, branch.to_privilege, back, from_user);
}

void CallStack::jump(uint64_t to, Privilege privilege, bool indirect) {
    if ((indirect && unwind_to_return_site(to)) || in_range(frames_.back(), to))
        return;
    const Frame top = frames_.back();
    const CodeRange range = names_.at(to, privilege);
    if (!range.named() && top.range_end == 0)
        return; // where functions begin and end here, nothing tells
    const size_t first = chain_start();
    for (size_t i = frames_.size(); i-- > first;)
        if (frames_[i].function == range.id)
            return pop_to(i + 1);
    if (indirect && range.named() && to != range.start)
        if (auto frame = find_in_context(range.id))
            return pop_to(*frame + 1);
    push(range.id, range, Entry::tail, privilege, top.return_address);
}

/// longjmp: back to where setjmp has returned before.
bool CallStack::unwind_to_return_site(uint64_t to) {
    const ReturnSite& site = sites_[site_slot(to)];
    if (site.address != to)
        return false;
    const size_t first = context();
    for (size_t i = frames_.size(); i-- > first;)
        if (frames_[i].serial == site.serial) {
            pop_to(i + 1);
            return true;
        }
    return false;
}

void CallStack::return_to(uint64_t to, Privilege privilege) {
    if (in_switch())
        return switch_stacks(to, privilege);
    const size_t start = chain_start();
    for (size_t i = frames_.size(), first = context(); i-- > first;) {
        const Frame& frame = frames_[i];
        if ((frame.entry != Entry::call && frame.entry != Entry::internal) || frame.return_address != to || i == 0)
            continue;
        // Returning past frames of a stack that was only chosen: another may fit better.
        if (guess_ && start < guess_->depth && start != i && choose_again(to))
            return;
        note_return(to, i);
        pop_to(i);
        sites_[site_slot(to)] = {to, frames_.back().serial};
        return;
    }
    if (guess_ && start < guess_->depth && choose_again(to))
        return;
    if (return_without_match(to, privilege))
        return;
    switch_stacks(to, privilege);
}

/// True: it was no switch of stacks.
bool CallStack::return_without_match(uint64_t to, Privilege privilege) {
    const size_t first = context();
    const CodeRange range = names_.at(to, privilege);
    if (frames_.back().entry == Entry::internal) { // a retpoline
        pop_to(frames_.size() - 1);
        jump(to, privilege, true);
        return true;
    }
    const size_t start = chain_start();
    if (frames_[start].entry == Entry::signal) { // a handler returns to what will ask for sigreturn
        push(range.id, range, Entry::tail, privilege, frames_[start].return_address);
        return true;
    }
    if (start == first) { // to a caller that was there before the trace
        if (first == 0)
            restart(range, privilege);
        else
            jump(to, privilege, false);
        return true;
    }
    if (range.named() && to == range.start) {
        jump(to, privilege, false);
        return true;
    }
    if (range.named())
        for (size_t i = start; i-- > first;)
            if (frames_[i].function == range.id) {
                pop_to(i + 1);
                return true;
            }
    return false;
}

void CallStack::leave_context(const StreamBranch& branch) {
    const uint64_t to = branch.record.to;
    const bool same = branch.from_privilege == branch.to_privilege;
    if (same && to == branch.record.from + branch.instruction.length)
        return;
    if (branch.to_privilege == Privilege::user)
        return return_to_user(to, branch.to_privilege);
    const size_t first = context();
    if (first == 0)
        return restart(names_.at(to, branch.to_privilege), branch.to_privilege);
    const Frame left = frames_[first];
    const bool expected = left.return_address == to;
    if (!expected && guess_ && first < guess_->depth && choose_again(to))
        return;
    note_return(to, first);
    pop_to(first);
    if (expected)
        return;
    // Linux emulates a call whose first byte is a breakpoint while it patches it; else it is an exception table's
    // fixup.
    if (const CodeRange range = names_.at(to, branch.to_privilege);
        left.entry == Entry::exception && range.named() && to == range.start)
        push(range.id, range, Entry::call, branch.to_privilege, left.return_address - 1 + near_call_length);
    else
        jump(to, branch.to_privilege, true);
}

void CallStack::return_to_user(uint64_t to, Privilege privilege) {
    const size_t entry = user_entry();
    if (entry == 0)
        return restart(names_.at(to, privilege), privilege);
    const Frame context = frames_[entry];
    if (context.return_address != to && guess_ && entry < guess_->depth && choose_again(to))
        return;
    note_return(to, entry);
    pop_to(entry);
    if (!same_space(frames_.back().space, space_))
        return restart(names_.at(to, privilege), privilege);
    constexpr uint64_t syscall_length = 2; // of SYSCALL, SYSENTER, INT n: a restarted system call goes back to it
    if (context.return_address == to || context.return_address == 0 ||
        (context.entry != Entry::interrupt && context.return_address - syscall_length == to))
        return jump(to, privilege, false);
    for (size_t i = frames_.size(), first = this->context(); i-- > first;)
        if (frames_[i].entry == Entry::signal && frames_[i].return_address == to)
            return pop_to(i);
    const CodeRange range = names_.entered_at(to, privilege);
    push(range.id, range, Entry::signal, privilege, context.return_address);
}

} // namespace vtrace
