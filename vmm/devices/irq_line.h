// One interrupt wire from a device to whoever listens.
#pragma once

#include <functional>
#include <utility>

namespace vtrace {

/// The driver's end of a wire. The level is logical: true is asserted, whatever the electrical polarity. Tells the
/// listener of changes only, so that drivers may state the level as often as they like.
class IrqLine {
  public:
    using Listener = std::function<void(bool)>;

    IrqLine() = default;
    explicit IrqLine(Listener listener) : listener_(std::move(listener)) {}

    void set(bool level) {
        if (level == level_)
            return;
        level_ = level;
        if (listener_)
            listener_(level);
    }
    bool level() const { return level_; }

  private:
    Listener listener_;
    bool level_ = false;
};

} // namespace vtrace
