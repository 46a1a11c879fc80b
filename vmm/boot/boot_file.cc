#include "vmm/boot/boot_file.h"

#include <cerrno>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "vmm/boot/placement.h"

namespace vtrace {
namespace {

struct FileDescriptor {
    int fd;
    explicit FileDescriptor(int fd) : fd(fd) {}
    FileDescriptor(const FileDescriptor&) = delete;
    FileDescriptor& operator=(const FileDescriptor&) = delete;
    ~FileDescriptor() {
        if (fd >= 0)
            close(fd);
    }
};

std::string_view kind_of(mode_t mode) {
    if (S_ISDIR(mode))
        return "a directory";
    if (S_ISFIFO(mode))
        return "a pipe";
    if (S_ISSOCK(mode))
        return "a socket";
    return "a device";
}

} // namespace

Result<FileContents> read_boot_file(const std::string& path, std::string_view role, uint64_t most,
                                    std::string_view limit_reason) {
    if (path.empty())
        return fail("no {} is given", role);
    // O_NONBLOCK: a pipe without a writer must not hang us before fstat() tells that it is one.
    FileDescriptor file(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY));
    if (file.fd < 0)
        return fail("cannot open the {} '{}': {}", role, path, errno_text(errno));
    struct stat status;
    if (fstat(file.fd, &status) != 0)
        return fail("cannot read the {} '{}': {}", role, path, errno_text(errno));
    if (!S_ISREG(status.st_mode))
        return fail("cannot read the {} '{}': it is {}, not a file", role, path, kind_of(status.st_mode));
    const auto size = static_cast<uint64_t>(status.st_size);
    if (size == 0)
        return fail("cannot use the {} '{}': the file is empty", role, path);
    if (size > most)
        return fail("cannot use the {} '{}': it is {}, {} ({})", role, path, size_text(size), limit_reason,
                    size_text(most));

    FileContents contents{std::make_unique_for_overwrite<uint8_t[]>(size), size};
    for (uint64_t done = 0; done != size;) {
        const ssize_t got = pread(file.fd, contents.storage.get() + done, size - done, static_cast<off_t>(done));
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0)
            return fail("cannot read the {} '{}': {}", role, path, errno_text(errno));
        if (got == 0)
            return fail("cannot read the {} '{}': it became shorter meanwhile", role, path);
        done += static_cast<uint64_t>(got);
    }
    return contents;
}

} // namespace vtrace
