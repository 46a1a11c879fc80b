#include "vmm/console_watch.h"

namespace vtrace {
namespace {

// Linux's panic() prints this in one line with the reason.
constexpr std::string_view panic_words = "Kernel panic - not syncing";

} // namespace

void ConsoleWatch::feed(std::string_view bytes) {
    for (char c : bytes) {
        if (c == '\n')
            end_line();
        else if (c != '\r')
            add(c);
    }
}

void ConsoleWatch::add(char c) {
    if (line_.size() >= max_line) {
        if (announcing_)
            return;
        line_.erase(0, max_line - max_text); // what is looked for may lie across the cut
    }
    line_ += c;
    if (!found_ && !text_.empty() && line_.ends_with(text_))
        found_ = true;
    // At once, not at the line's end: a machine that resets or halts may never send that.
    if (!panicked_ && line_.ends_with(panic_words))
        panicked_ = announcing_ = true;
}

void ConsoleWatch::end_line() {
    if (announcing_)
        panic_line_ = line_;
    announcing_ = false;
    line_.clear();
}

} // namespace vtrace
