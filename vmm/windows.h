// Windows: when a guest is traced: all of the run, or from one trigger to the next, a number of times.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

#include "vmm/clock.h"
#include "vmm/console_watch.h"
#include "vmm/guest_memory.h"
#include "vmm/trigger.h"

namespace vtrace {

/// Symbols are looked up before: no trigger here is of kind `symbol`.
struct WindowPlan {
    /// None: one window from the start. `time` and `instructions` of a later window count from the end of the last.
    std::optional<Trigger> from = {};
    Trigger to = {};    // `time` and `instructions` count from the begin of the window
    uint64_t times = 1; // windows at most
};

/// The machine tells it what happens; when due() it calls turn() at an instruction boundary, at once. Its thread's, or
/// under its lock.
class Windows {
  public:
    /// Without a plan one window is open from the start, and stays so.
    void follow(WindowPlan plan);
    /// No window at all.
    void trace_nothing() {
        plan_.reset();
        open_ = false;
        count_ = 0;
    }

    /// follow() was called.
    bool planned() const { return plan_.has_value(); }
    /// The guest is to be traced.
    bool open() const { return open_; }
    /// Windows so far, the open one included.
    uint64_t count() const { return count_; }
    /// What was waited for has come.
    bool due() const { return due_; }
    /// Opens or closes a window.
    void turn(VirtualTime now, uint64_t retired);

    void on_console(std::string_view bytes);
    void on_marker(uint32_t value);
    /// At breakpoint().
    void on_breakpoint() { due_ = true; }
    /// To be called when next_time() or next_retired() may have been reached.
    void on_progress(VirtualTime now, uint64_t retired);

    VirtualTime next_time() const;
    /// Of instructions retired by all processors.
    uint64_t next_retired() const;
    std::optional<Gva> breakpoint() const;
    /// The trigger that is waited for; null: none.
    const Trigger* awaited() const;

  private:
    void await();

    std::optional<WindowPlan> plan_;
    bool open_ = true, due_ = false;
    uint64_t count_ = 1;
    ConsoleWatch console_;
    VirtualTime since_ = 0;      // when the last turn was
    uint64_t retired_since_ = 0; // and how many instructions had retired then
};

} // namespace vtrace
