// The firmware configuration device: named blobs for the guest at ports 0x510 (selector) and 0x511 (data), without DMA.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "ds/result.h"
#include "vmm/bus.h"

namespace vtrace {

class FwCfg final : public Device {
  public:
    static constexpr unsigned ports = 2;

    /// Sizes in bytes.
    FwCfg(unsigned vcpus, uint64_t memory_size);

    /// Adds a file to the directory. Fails for a name that is too long (55 characters) or taken.
    Result<> add_file(std::string_view name, std::vector<uint8_t> content);

    uint64_t read(uint64_t offset, unsigned size) override;
    void write(uint64_t offset, unsigned size, uint64_t value) override;

  private:
    struct File {
        std::string name;
        uint16_t key;
    };
    struct State {
        uint16_t selected = 0;
        size_t position = 0;
    };
    void update_directory();

    std::map<uint16_t, std::vector<uint8_t>> items_;
    std::vector<File> files_;
    State state_;
};

} // namespace vtrace
