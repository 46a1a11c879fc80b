#include "vmm/console_watch.h"

namespace vtrace {

void ConsoleWatch::feed(std::string_view bytes) {
    for (char c : bytes) {
        if (c == '\n' || line_.size() >= max_line)
            end_line();
        if (c != '\n' && c != '\r')
            line_ += c;
        if (!found_ && !text_.empty() && line_.ends_with(text_))
            found_ = true;
    }
}

void ConsoleWatch::end_line() {
    // Linux's panic() prints this in one line with the reason.
    if (!panicked_ && line_.find("Kernel panic - not syncing") != std::string::npos) {
        panicked_ = true;
        panic_line_ = line_;
    }
    line_.clear();
}

} // namespace vtrace
