// ConsoleWatch: finds lines of interest in what the guest prints, however it is cut into writes.
#pragma once

#include <string>
#include <string_view>

namespace vtrace {

class ConsoleWatch {
  public:
    /// True once a kernel has announced its panic.
    bool panicked() const { return panicked_; }
    /// The line that announced it, as far as it has come.
    const std::string& panic_line() const { return announcing_ ? line_ : panic_line_; }

    /// The longest text that can be waited for.
    static constexpr size_t max_text = 512;
    /// From now on found() waits for a text that ends from here on, within one line; empty: for nothing.
    void wait_for(std::string text) {
        text_ = std::move(text);
        found_ = false;
    }
    bool found() const { return found_; }

    void feed(std::string_view bytes);

  private:
    static constexpr size_t max_line = 1024; // of a longer line only the last part is kept
    void add(char c);
    void end_line();

    std::string line_;
    std::string panic_line_;
    std::string text_;
    bool panicked_ = false, found_ = false;
    bool announcing_ = false; // line_ is the panic's
};

} // namespace vtrace
