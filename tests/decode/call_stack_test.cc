// CallStack on made-up streams: each case is a short program whose stacks are known.
#define CATCH_CONFIG_MAIN
#include <map>
#include <string>

#include <catch2/catch.hpp>

#include "decode/call_stack.h"

using namespace vtrace;
using Class = BranchClass;

namespace {

constexpr uint64_t kernel = 0xffff'ffff'8100'0000, user = 0x40'0000;
constexpr unsigned call_length = 5, syscall_length = 2;

/// Functions of 0x100 bytes each, by name; a stack is printed as "a;b;c".
class Guest {
  public:
    Guest()
        : symbols_(table(kernel, kernel_names())), user_(table(user, user_names())), names_(symbols_, user_),
          stack_(names_) {}

    uint64_t at(const std::string& name, uint64_t offset = 0) const {
        for (const SymbolTable* table : {&symbols_, &user_})
            if (auto index = table->find_name(name))
                return (*table)[*index].address + offset;
        FAIL("no function " << name);
        return 0;
    }

    /// Takes a branch; then the stack.
    std::string take(Class branch_class, uint64_t from, uint64_t to, bool after_gap = false) {
        StreamBranch branch;
        branch.record.from = from;
        branch.record.to = to;
        branch.record.kind = branch_class == Class::interrupt   ? ds::BtsKind::interrupt
                             : branch_class == Class::exception ? ds::BtsKind::exception
                                                                : ds::BtsKind::branch;
        branch.instruction.branch_class = branch_class;
        branch.instruction.length = branch_class == Class::call      ? call_length
                                    : branch_class == Class::syscall ? syscall_length
                                                                     : 1;
        const auto privilege = [](uint64_t address) {
            return upper_half(address) ? Privilege::kernel : Privilege::user;
        };
        branch.from_privilege = privilege(from);
        branch.to_privilege = privilege(to);
        branch.space = space;
        branch.after_gap = after_gap;
        branch.block_start = from;
        stack_.arrive(branch);
        stack_.take(branch);
        return print();
    }
    std::string call(const std::string& from, uint64_t offset, const std::string& to) {
        return take(Class::call, at(from, offset), at(to));
    }
    /// Returns out of `from` behind the call at `to`+`offset`.
    std::string ret(const std::string& from, const std::string& to, uint64_t offset) {
        return take(Class::ret, at(from, 0xf0), at(to, offset + call_length));
    }
    std::string print() const {
        std::string text;
        for (const auto& frame : stack_.frames())
            if (frame.shown())
                text += (text.empty() ? "" : ";") + names_.name(frame.function);
        return text;
    }
    CallStack& stack() { return stack_; }

    uint64_t space = 0x1000'0000;

  private:
    static std::vector<std::string> kernel_names() {
        return {"a",
                "b",
                "c",
                "a.cold",
                "thunk",
                "entry",
                "sys",
                "schedule",
                "__switch_to_asm",
                "__switch_to",
                "ret_from_fork",
                "wait1",
                "wait2",
                "timer"};
    }
    static std::vector<std::string> user_names() {
        return {"main", "f", "g", "setjmp", "longjmp", "handler", "restorer"};
    }
    static SymbolTable table(uint64_t base, const std::vector<std::string>& names) {
        std::vector<TraceSymbol> symbols;
        for (size_t i = 0; i < names.size(); ++i)
            symbols.push_back({base + i * 0x100, 0x100, 'T', names[i], {}});
        return SymbolTable(std::move(symbols));
    }

    SymbolTable symbols_, user_;
    CodeNames names_;
    CallStack stack_;
};

} // namespace

TEST_CASE("Calls and returns") {
    Guest guest;
    CHECK(guest.call("a", 0x10, "b") == "a;b");
    CHECK(guest.take(Class::conditional, guest.at("b", 0x20), guest.at("b", 0x10)) == "a;b");
    CHECK(guest.call("b", 0x20, "b") == "a;b;b");
    CHECK(guest.call("b", 0x20, "b") == "a;b;b;b");
    CHECK(guest.ret("b", "b", 0x20) == "a;b;b");
    CHECK(guest.ret("b", "b", 0x20) == "a;b");
    CHECK(guest.ret("b", "a", 0x10) == "a");
    // Past the start of the stream: the caller was never seen.
    CHECK(guest.ret("a", "c", 0x40) == "c");
}

TEST_CASE("A return past several frames unwinds them all") {
    Guest guest;
    guest.call("a", 0x10, "b");
    CHECK(guest.call("b", 0x10, "c") == "a;b;c");
    CHECK(guest.ret("c", "a", 0x10) == "a");
}

TEST_CASE("Tail calls leave together with the call they stand for") {
    Guest guest;
    guest.call("a", 0x10, "b");
    CHECK(guest.take(Class::jump, guest.at("b", 0x30), guest.at("c")) == "a;b;c");
    SECTION("returned from") {
        CHECK(guest.take(Class::indirect_jump, guest.at("c", 0x30), guest.at("thunk")) == "a;b;c;thunk");
        CHECK(guest.ret("thunk", "a", 0x10) == "a");
    }
    SECTION("between two functions, for ever") {
        for (int i = 0; i < 3; ++i) {
            CHECK(guest.take(Class::jump, guest.at("c", 0x30), guest.at("b")) == "a;b");
            CHECK(guest.take(Class::jump, guest.at("b", 0x30), guest.at("c")) == "a;b;c");
        }
    }
}

TEST_CASE("The cold part of a function, and back") {
    Guest guest;
    guest.call("b", 0x10, "a");
    CHECK(guest.take(Class::conditional, guest.at("a", 0x30), guest.at("a.cold", 0x20)) == "b;a;a.cold");
    CHECK(guest.take(Class::jump, guest.at("a.cold", 0x40), guest.at("a", 0x50)) == "b;a");
    CHECK(guest.ret("a", "b", 0x10) == "b");
}

TEST_CASE("Falling from one symbol into the next is seen at the next branch") {
    Guest guest;
    guest.call("c", 0x10, "a");
    CHECK(guest.take(Class::conditional, guest.at("b", 0x10), guest.at("b", 0x40)) == "c;a;b");
    CHECK(guest.ret("b", "c", 0x10) == "c");
}

TEST_CASE("Calls that are none: retpoline, get PC, stuffing of the return stack buffer") {
    Guest guest;
    guest.call("a", 0x10, "b");
    SECTION("retpoline") {
        CHECK(guest.call("b", 0x20, "thunk") == "a;b;thunk");
        CHECK(guest.take(Class::call, guest.at("thunk"), guest.at("thunk", 0x10)) == "a;b;thunk");
        CHECK(guest.take(Class::ret, guest.at("thunk", 0x14), guest.at("c")) == "a;b;thunk;c");
        CHECK(guest.ret("c", "b", 0x20) == "a;b");
    }
    SECTION("get PC, stuffing") {
        CHECK(guest.take(Class::call, guest.at("b", 0x20), guest.at("b", 0x25)) == "a;b");
        CHECK(guest.take(Class::call, guest.at("b", 0x25), guest.at("b", 0x30)) == "a;b");
        CHECK(guest.call("b", 0x30, "c") == "a;b;c");
        CHECK(guest.ret("c", "b", 0x30) == "a;b");
    }
    CHECK(guest.ret("b", "a", 0x10) == "a");
}

TEST_CASE("Code that the trace lacks: what goes to a function's start is a call") {
    Guest guest;
    guest.call("c", 0x10, "a");
    CHECK(guest.take(Class::other, guest.at("a"), guest.at("b")) == "c;a;b");
    CHECK(guest.ret("b", "a", 0) == "c;a");
}

TEST_CASE("Interrupts and exceptions are contexts of their own") {
    Guest guest;
    guest.call("a", 0x10, "b");
    CHECK(guest.take(Class::interrupt, guest.at("b", 0x33), guest.at("entry")) == "a;b;entry");
    CHECK(guest.call("entry", 0x10, "timer") == "a;b;entry;timer");
    CHECK(guest.take(Class::exception, guest.at("timer", 0x20), guest.at("entry")) == "a;b;entry;timer;entry");
    // A fixup: the handler goes on elsewhere in the function that faulted.
    CHECK(guest.take(Class::iret, guest.at("entry", 0x80), guest.at("timer", 0x60)) == "a;b;entry;timer");
    // IRET to the next instruction, to serialize.
    CHECK(guest.take(Class::iret, guest.at("timer", 0x64), guest.at("timer", 0x65)) == "a;b;entry;timer");
    // A return inside a handler does not find frames of the code that it interrupted.
    CHECK(guest.ret("timer", "entry", 0x10) == "a;b;entry");
    CHECK(guest.take(Class::iret, guest.at("entry", 0x80), guest.at("b", 0x33)) == "a;b");
    CHECK(guest.ret("b", "a", 0x10) == "a");
}

TEST_CASE("System calls, signals, a new program") {
    Guest guest;
    guest.call("main", 0x10, "f");
    CHECK(guest.take(Class::syscall, guest.at("f", 0x20), guest.at("entry")) == "main;f;entry");
    CHECK(guest.call("entry", 0x10, "sys") == "main;f;entry;sys");
    SECTION("back to where it came from") {
        guest.ret("sys", "entry", 0x10);
        CHECK(guest.take(Class::sysret, guest.at("entry", 0x40), guest.at("f", 0x22)) == "main;f");
        CHECK(guest.ret("f", "main", 0x10) == "main");
    }
    SECTION("a signal handler, and sigreturn") {
        CHECK(guest.take(Class::iret, guest.at("entry", 0x40), guest.at("handler")) == "main;f;handler");
        CHECK(guest.call("handler", 0x10, "g") == "main;f;handler;g");
        CHECK(guest.ret("g", "handler", 0x10) == "main;f;handler");
        CHECK(guest.take(Class::ret, guest.at("handler", 0x40), guest.at("restorer")) == "main;f;handler;restorer");
        guest.take(Class::syscall, guest.at("restorer", 7), guest.at("entry"));
        CHECK(guest.take(Class::iret, guest.at("entry", 0x40), guest.at("f", 0x22)) == "main;f");
        CHECK(guest.ret("f", "main", 0x10) == "main");
    }
    SECTION("execve") {
        guest.space = 0x2000'0000;
        CHECK(guest.take(Class::iret, guest.at("entry", 0x40), guest.at("g", 0x10)) == "g");
    }
    SECTION("restarted") {
        CHECK(guest.take(Class::iret, guest.at("entry", 0x40), guest.at("f", 0x20)) == "main;f");
    }
}

TEST_CASE("A trace of user branches alone has no way back from the kernel") {
    Guest guest;
    guest.call("main", 0x10, "f");
    CHECK(guest.take(Class::syscall, guest.at("f", 0x20), guest.at("entry")) == "main;f;entry");
    CHECK(guest.call("f", 0x30, "g") == "main;f;g");
}

TEST_CASE("longjmp goes to the frame that setjmp returned to") {
    Guest guest;
    guest.call("main", 0x10, "f");
    guest.call("f", 0x20, "setjmp");
    CHECK(guest.ret("setjmp", "f", 0x20) == "main;f");
    // The same function again, which has not called setjmp: the latest that has is meant.
    guest.call("f", 0x30, "g");
    guest.call("g", 0x10, "f");
    CHECK(guest.call("f", 0x40, "longjmp") == "main;f;g;f;longjmp");
    CHECK(guest.take(Class::indirect_jump, guest.at("longjmp", 0x30), guest.at("f", 0x25)) == "main;f");
    CHECK(guest.ret("f", "main", 0x10) == "main");
}

TEST_CASE("An unwinder lands in the middle of a function on the stack") {
    Guest guest;
    guest.call("main", 0x10, "f");
    guest.call("f", 0x20, "g");
    CHECK(guest.take(Class::indirect_jump, guest.at("g", 0x30), guest.at("f", 0x77)) == "main;f");
}

namespace {

/// schedule() up to the other stack: `to` is where the next task goes on.
std::string switch_task(Guest& guest, uint64_t to) {
    guest.call("schedule", 0x40, "__switch_to_asm");
    guest.take(Class::jump, guest.at("__switch_to_asm", 0x20), guest.at("__switch_to"));
    return guest.take(Class::ret, guest.at("__switch_to", 0x60), to);
}

} // namespace

TEST_CASE("Linux switches tasks") {
    Guest guest;
    const uint64_t resumed = guest.at("schedule", 0x40 + call_length);
    // Task 1 waits in wait1; task 2 is new and waits in wait2; task 3 is new.
    guest.call("a", 0x10, "wait1");
    guest.call("wait1", 0x10, "schedule");
    CHECK(switch_task(guest, guest.at("ret_from_fork")) == "ret_from_fork");
    guest.call("ret_from_fork", 0x10, "wait2");
    CHECK(guest.call("wait2", 0x10, "schedule") == "ret_from_fork;wait2;schedule");
    SECTION("one choice") {
        CHECK(switch_task(guest, resumed) == "a;wait1;schedule");
        CHECK(guest.ret("schedule", "wait1", 0x10) == "a;wait1");
    }
    SECTION("the wrong one first: what it returns to tells") {
        switch_task(guest, guest.at("ret_from_fork"));
        guest.call("ret_from_fork", 0x10, "b");
        guest.call("b", 0x10, "schedule");
        // The latest, task 2, is taken; then it returns into wait1, after a call of its own.
        CHECK(switch_task(guest, resumed) == "ret_from_fork;wait2;schedule");
        guest.call("schedule", 0x60, "c");
        guest.ret("c", "schedule", 0x60);
        CHECK(guest.ret("schedule", "wait1", 0x10) == "a;wait1");
        // Task 2 is still there.
        guest.call("wait1", 0x10, "schedule");
        switch_task(guest, resumed);
        CHECK(guest.ret("schedule", "wait2", 0x10) == "ret_from_fork;wait2");
        CHECK(guest.ret("wait2", "ret_from_fork", 0x10) == "ret_from_fork");
    }
    SECTION("user code has its own page table") {
        guest.space = 0x3000'0000;
        guest.take(Class::iret, guest.at("schedule", 0x80), guest.at("main"), true);
        guest.call("main", 0x20, "f");
        guest.take(Class::syscall, guest.at("f", 0x20), guest.at("entry"));
        CHECK(guest.call("entry", 0x10, "schedule") == "main;f;entry;schedule");
        guest.space = 0x1000'0000;
        switch_task(guest, guest.at("ret_from_fork"));
        guest.call("ret_from_fork", 0x10, "schedule");
        guest.space = 0x3000'0000;
        CHECK(switch_task(guest, resumed) == "main;f;entry;schedule");
        guest.ret("schedule", "entry", 0x10);
        CHECK(guest.take(Class::sysret, guest.at("entry", 0x40), guest.at("f", 0x22)) == "main;f");
    }
}

TEST_CASE("Coroutines: a stack left is found again by where it goes on") {
    Guest guest;
    guest.call("main", 0x10, "f"); // f switches to g's stack, which was never seen
    CHECK(guest.ret("f", "g", 0x50) == "g");
    guest.call("g", 0x60, "f");
    CHECK(guest.ret("f", "main", 0x10) == "main");
    guest.call("main", 0x30, "f");
    CHECK(guest.ret("f", "g", 0x60) == "g");
}

TEST_CASE("What is missing forgets the stack, and depth is bounded") {
    Guest guest;
    guest.call("a", 0x10, "b");
    CHECK(guest.take(Class::conditional, guest.at("c", 0x10), guest.at("c", 0x20), true) == "c");
    for (size_t i = 0; i < CallStack::max_depth * 3; ++i) {
        guest.call("c", 0x20, "c");
        REQUIRE(guest.stack().frames().size() <= CallStack::max_depth);
    }
    CHECK(guest.stack().overflows() > 0);
    for (size_t i = 0; i < CallStack::max_depth * 3; ++i)
        guest.ret("c", "c", 0x20);
    CHECK(guest.print() == "c");
}

TEST_CASE("Observers learn what is new, and what came back") {
    Guest guest;
    CallStack& stack = guest.stack();
    guest.call("a", 0x10, "b");
    REQUIRE(stack.changed());
    CHECK(stack.unchanged() == 0);
    CHECK(stack.frames()[1].fresh);
    stack.accept_changes();
    CHECK_FALSE(stack.changed());
    guest.take(Class::conditional, guest.at("b", 0x10), guest.at("b", 0x20));
    CHECK_FALSE(stack.changed());
    guest.call("b", 0x30, "c");
    CHECK(stack.unchanged() == 2);
    stack.accept_changes();
    guest.ret("c", "b", 0x30);
    CHECK(stack.changed());
    CHECK(stack.unchanged() == 2);
    stack.accept_changes();
    CHECK_FALSE(stack.changed());
    guest.call("b", 0x40, "c");
    stack.accept_changes();
    guest.ret("c", "b", 0x40);
    guest.call("b", 0x40, "c"); // as deep as before, and another frame
    REQUIRE(stack.changed());
    CHECK(stack.unchanged() == 2);
    CHECK(stack.frames()[2].fresh);
}
