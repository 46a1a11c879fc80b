#include "vmm/devices/fw_cfg.h"

#include <algorithm>

namespace vtrace {
namespace {

enum Key : uint16_t {
    SIGNATURE = 0x00,
    ID = 0x01,
    RAM_SIZE = 0x03,
    NB_CPUS = 0x05,
    MAX_CPUS = 0x0f,
    FILE_DIR = 0x19,
    FILE_FIRST = 0x20,
};
constexpr uint32_t id_traditional = 1 << 0; // the port interface; bit 1 would be DMA
constexpr size_t name_field = 56;

// Items are little-endian, the directory is big-endian.
std::vector<uint8_t> little(uint64_t value, unsigned bytes) {
    std::vector<uint8_t> out;
    for (unsigned i = 0; i < bytes; ++i)
        out.push_back(static_cast<uint8_t>(value >> 8 * i));
    return out;
}

void append_big(std::vector<uint8_t>& out, uint64_t value, unsigned bytes) {
    for (unsigned i = bytes; i-- > 0;)
        out.push_back(static_cast<uint8_t>(value >> 8 * i));
}

} // namespace

FwCfg::FwCfg(unsigned vcpus, uint64_t memory_size) {
    items_[SIGNATURE] = {'Q', 'E', 'M', 'U'};
    items_[ID] = little(id_traditional, 4);
    items_[RAM_SIZE] = little(memory_size, 8);
    items_[NB_CPUS] = little(vcpus, 2);
    items_[MAX_CPUS] = little(vcpus, 2);
    update_directory();
}

Result<> FwCfg::add_file(std::string_view name, std::vector<uint8_t> content) {
    if (name.empty() || name.size() >= name_field)
        return fail("cannot add fw_cfg file '{}': the name must have 1 to {} characters", name, name_field - 1);
    if (std::any_of(files_.begin(), files_.end(), [&](const File& file) { return file.name == name; }))
        return fail("cannot add fw_cfg file '{}': there is one of this name", name);
    const auto key = static_cast<uint16_t>(FILE_FIRST + files_.size());
    files_.push_back({std::string(name), key});
    items_[key] = std::move(content);
    update_directory();
    return {};
}

void FwCfg::update_directory() {
    std::vector<uint8_t> out;
    append_big(out, files_.size(), 4);
    for (const File& file : files_) {
        append_big(out, items_[file.key].size(), 4);
        append_big(out, file.key, 2);
        append_big(out, 0, 2);
        out.insert(out.end(), file.name.begin(), file.name.end());
        out.resize(out.size() + name_field - file.name.size());
    }
    items_[FILE_DIR] = std::move(out);
}

// Wider reads of the data port take several bytes, the first in the low byte. Beyond the end there are zeros.
uint64_t FwCfg::read(uint64_t offset, unsigned size) {
    uint64_t value = 0;
    const auto item = items_.find(state_.selected);
    for (unsigned i = 0; i < size; ++i) {
        if (offset + i == 0)
            continue; // the selector is write-only
        if (item != items_.end() && state_.position < item->second.size())
            value |= uint64_t{item->second[state_.position++]} << 8 * i;
    }
    return value;
}

void FwCfg::write(uint64_t offset, unsigned size, uint64_t value) {
    if (offset != 0 || size != 2)
        return; // data is read-only
    state_.selected = static_cast<uint16_t>(value);
    state_.position = 0;
}

} // namespace vtrace
