// Files that a boot reads whole: kernel, initrd, modules.
#pragma once

#include <memory>
#include <span>
#include <string>

#include "ds/result.h"

namespace vtrace {

struct FileContents {
    std::unique_ptr<uint8_t[]> storage;
    uint64_t size = 0;
    std::span<const uint8_t> bytes() const { return {storage.get(), size}; }
};

/// Reads a regular file of 1 to `most` bytes. `role` ("kernel") stands in the messages, `limit_reason` explains `most`.
/// Errors: missing, no permission, a directory or device, empty, too large, shrinking while it is read.
Result<FileContents> read_boot_file(const std::string& path, std::string_view role, uint64_t most,
                                    std::string_view limit_reason);

} // namespace vtrace
