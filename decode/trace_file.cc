#include "decode/trace_file.h"

#include <cerrno>
#include <csignal>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <memory>
#include <utility>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>
#include <zstd.h>

namespace vtrace {

namespace {

template <class T>
std::span<const uint8_t> bytes_of(const T& object, size_t size = sizeof(T)) {
    return {reinterpret_cast<const uint8_t*>(&object), size};
}

/// While it lives, a write to a pipe that nobody reads gives EPIPE to this thread and no SIGPIPE.
class NoSigpipe {
  public:
    NoSigpipe() {
        sigset_t pending;
        sigemptyset(&pending);
        sigpending(&pending);
        was_pending_ = sigismember(&pending, SIGPIPE);
        sigemptyset(&sigpipe_);
        sigaddset(&sigpipe_, SIGPIPE);
        pthread_sigmask(SIG_BLOCK, &sigpipe_, &before_);
    }
    ~NoSigpipe() {
        if (!was_pending_) {
            const timespec now{};
            while (sigtimedwait(&sigpipe_, nullptr, &now) == -1 && errno == EINTR) {
            }
        }
        pthread_sigmask(SIG_SETMASK, &before_, nullptr);
    }

  private:
    sigset_t sigpipe_, before_;
    bool was_pending_ = false;
};

} // namespace

uint64_t checksum(std::span<const uint8_t> bytes) {
    return XXH3_64bits(bytes.data(), bytes.size());
}

uint64_t header_checksum(const FileHeader& header) {
    return checksum(bytes_of(header, offsetof(FileHeader, checksum)));
}
uint64_t header_checksum(const ChunkHeader& header) {
    return checksum(bytes_of(header, offsetof(ChunkHeader, header_checksum)));
}
uint64_t header_checksum(const FileFooter& footer) {
    return checksum(bytes_of(footer, offsetof(FileFooter, checksum)));
}

bool is_sound(const ChunkHeader& header) {
    if (header.magic != chunk_magic || header.header_checksum != header_checksum(header))
        return false;
    const bool index = header.type == static_cast<uint16_t>(ChunkType::index);
    const uint64_t most = index ? max_index_bytes : max_chunk_bytes;
    return header.stored_bytes <= most && header.raw_bytes <= most;
}

StoredChunk store_chunk(ChunkHeader header, std::span<const uint8_t> payload, int level) {
    StoredChunk chunk{.header = header, .bytes = std::vector<uint8_t>(ZSTD_compressBound(payload.size()))};
    const size_t size = ZSTD_compress(chunk.bytes.data(), chunk.bytes.size(), payload.data(), payload.size(), level);
    if (ZSTD_isError(size) || size >= payload.size()) {
        chunk.header.codec = static_cast<uint8_t>(ChunkCodec::none);
        chunk.bytes.assign(payload.begin(), payload.end());
    } else {
        chunk.header.codec = static_cast<uint8_t>(ChunkCodec::zstd);
        chunk.bytes.resize(size);
        chunk.bytes.shrink_to_fit();
    }
    chunk.header.magic = chunk_magic;
    chunk.header.stored_bytes = chunk.bytes.size();
    chunk.header.raw_bytes = payload.size();
    chunk.header.payload_checksum = checksum(chunk.bytes);
    return chunk;
}

Result<std::vector<uint8_t>> load_payload(const ChunkHeader& header, std::span<const uint8_t> stored) {
    if (stored.size() != header.stored_bytes || checksum(stored) != header.payload_checksum)
        return fail("its checksum does not match");
    switch (static_cast<ChunkCodec>(header.codec)) {
    case ChunkCodec::none:
        if (header.raw_bytes != header.stored_bytes)
            return fail("its sizes contradict each other");
        return std::vector<uint8_t>(stored.begin(), stored.end());
    case ChunkCodec::zstd: {
        if (ZSTD_getFrameContentSize(stored.data(), stored.size()) != header.raw_bytes)
            return fail("its compressed size and its header contradict each other");
        std::vector<uint8_t> payload(header.raw_bytes);
        const size_t size = ZSTD_decompress(payload.data(), payload.size(), stored.data(), stored.size());
        if (ZSTD_isError(size))
            return fail("it does not uncompress: {}", ZSTD_getErrorName(size));
        if (size != payload.size())
            return fail("it uncompresses to {} bytes in place of {}", size, payload.size());
        return payload;
    }
    }
    return fail("it has an unknown codec {}: a newer vtrace may read it", header.codec);
}

ChunkFile::ChunkFile(ChunkFile&& other) noexcept
    : fd_(std::exchange(other.fd_, -1)), path_(std::move(other.path_)), bytes_(other.bytes_),
      sequence_(other.sequence_), chunks_(std::move(other.chunks_)),
      successor_(std::exchange(other.successor_, false)) {}

ChunkFile& ChunkFile::operator=(ChunkFile&& other) noexcept {
    std::swap(fd_, other.fd_);
    std::swap(path_, other.path_);
    std::swap(bytes_, other.bytes_);
    std::swap(sequence_, other.sequence_);
    std::swap(chunks_, other.chunks_);
    std::swap(successor_, other.successor_);
    return *this;
}

ChunkFile::~ChunkFile() {
    if (fd_ >= 0)
        ::close(fd_);
    if (successor_)
        ::unlink(path_.c_str());
}

Result<ChunkFile> ChunkFile::create(const std::string& path, unsigned vcpus, TraceVersion version) {
    ChunkFile file;
    file.path_ = path;
    file.fd_ = ::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (file.fd_ < 0)
        return fail("cannot create the trace file '{}': {}", path, errno_text(errno));
    VTRACE_TRY(file.write_header(vcpus, version));
    return file;
}

Result<ChunkFile> ChunkFile::create_successor(unsigned vcpus, TraceVersion version) const {
    struct stat status;
    if (::fstat(fd_, &status) != 0)
        return fail("cannot drop old branches from the trace file '{}': {}", path_, errno_text(errno));
    if (!S_ISREG(status.st_mode))
        return fail("cannot drop old branches from '{}': it is not a regular file", path_);
    // The name may be a link: its target is what gets replaced.
    const std::unique_ptr<char, decltype(&std::free)> target(::realpath(path_.c_str(), nullptr), std::free);
    if (!target)
        return fail("cannot drop old branches from the trace file '{}': {}", path_, errno_text(errno));
    ChunkFile file;
    file.path_ = std::string(target.get()) + ".XXXXXX";
    file.fd_ = ::mkostemp(file.path_.data(), O_CLOEXEC);
    if (file.fd_ < 0)
        return fail("cannot create '{}', to drop old branches from the trace: {}", file.path_, errno_text(errno));
    file.successor_ = true;
    if (::fchmod(file.fd_, status.st_mode & 07777) != 0)
        return fail("cannot drop old branches from the trace file '{}': {}", path_, errno_text(errno));
    VTRACE_TRY(file.write_header(vcpus, version));
    return file;
}

Result<StoredChunk> ChunkFile::read(const IndexEntry& entry) const {
    // fd_ is for writing only, as a pipe's must be; and the file's name may lead elsewhere by now.
    const int fd = ::open(fmt::format("/proc/self/fd/{}", fd_).c_str(), O_RDONLY | O_CLOEXEC);
    StoredChunk chunk{.header = entry.header, .bytes = std::vector<uint8_t>(entry.header.stored_bytes)};
    size_t done = 0;
    int error = fd < 0 ? errno : 0;
    while (!error && done < chunk.bytes.size()) {
        const ssize_t count = ::pread(fd, chunk.bytes.data() + done, chunk.bytes.size() - done,
                                      static_cast<off_t>(entry.offset + sizeof(ChunkHeader) + done));
        if (count < 0 && errno != EINTR)
            error = errno;
        else if (count == 0)
            error = EIO; // somebody made the file shorter
        else if (count > 0)
            done += count;
    }
    if (fd >= 0)
        ::close(fd);
    if (error)
        return fail("cannot read back the trace file '{}': {}", path_, errno_text(error));
    return chunk;
}

Result<> ChunkFile::replace_by(ChunkFile successor) {
    const std::unique_ptr<char, decltype(&std::free)> target(::realpath(path_.c_str(), nullptr), std::free);
    // Synced first: the new name may reach the disk before the bytes do.
    if (!target || ::fdatasync(successor.fd_) != 0 || ::rename(successor.path_.c_str(), target.get()) != 0)
        return fail("cannot drop old branches from the trace file '{}': {}", path_, errno_text(errno));
    successor.successor_ = false;
    std::swap(fd_, successor.fd_);
    bytes_ = successor.bytes_;
    sequence_ = successor.sequence_;
    chunks_ = std::move(successor.chunks_);
    return {};
}

Result<> ChunkFile::write_header(unsigned vcpus, TraceVersion version) {
    FileHeader header{.magic = file_magic,
                      .version = static_cast<uint32_t>(version),
                      .vcpus = vcpus,
                      .flags = 0,
                      .checksum = 0};
    header.checksum = header_checksum(header);
    return write_bytes(bytes_of(header));
}

Result<> ChunkFile::write_bytes(std::span<const uint8_t> bytes) {
    const NoSigpipe guard;
    for (size_t done = 0; done < bytes.size();) {
        const ssize_t count = ::write(fd_, bytes.data() + done, bytes.size() - done);
        if (count < 0 && errno == EINTR)
            continue;
        if (count <= 0) {
            const int error = count < 0 ? errno : ENOSPC;
            // A pipe has no end to cut; the reader then finds the incomplete chunk itself.
            const bool cut = ::ftruncate(fd_, static_cast<off_t>(bytes_)) == 0;
            return fail("cannot write the trace file '{}' after {} bytes: {}{}", path_, bytes_, errno_text(error),
                        cut && bytes_ != 0 ? "; what was recorded until then is readable" : "");
        }
        done += count;
    }
    bytes_ += bytes.size();
    return {};
}

Result<> ChunkFile::write(StoredChunk chunk) {
    ChunkHeader& header = chunk.header;
    header.sequence = sequence_;
    header.header_checksum = header_checksum(header);
    const uint64_t offset = bytes_;
    // One write for the whole chunk: a recorder that is killed leaves it complete, or cut.
    std::vector<uint8_t> bytes;
    bytes.reserve(chunk_file_bytes(header));
    const auto head = bytes_of(header);
    bytes.insert(bytes.end(), head.begin(), head.end());
    bytes.insert(bytes.end(), chunk.bytes.begin(), chunk.bytes.end());
    bytes.resize(chunk_file_bytes(header));
    VTRACE_TRY(write_bytes(bytes));
    ++sequence_;
    chunks_.push_back({offset, header});
    return {};
}

Result<> ChunkFile::finish(int level) {
    ChunkHeader header{};
    header.type = static_cast<uint16_t>(ChunkType::index);
    header.count = static_cast<uint32_t>(chunks_.size());
    const std::span<const uint8_t> payload{reinterpret_cast<const uint8_t*>(chunks_.data()),
                                           chunks_.size() * sizeof(IndexEntry)};
    const uint64_t offset = bytes_;
    if (payload.size() <= max_index_bytes) { // else the reader walks the chunks
        VTRACE_TRY(write(store_chunk(header, payload, level)));
        FileFooter footer{
            .index_offset = offset, .file_bytes = bytes_ + sizeof(FileFooter), .checksum = 0, .magic = footer_magic};
        footer.checksum = header_checksum(footer);
        VTRACE_TRY(write_bytes(bytes_of(footer)));
    }
    // A pipe or character device cannot be synced, and needs not.
    const int synced = ::fdatasync(fd_) == 0 || errno == EINVAL || errno == EROFS ? 0 : errno;
    const int closed = ::close(std::exchange(fd_, -1)) == 0 ? 0 : errno;
    if (synced || closed)
        return fail("cannot complete the trace file '{}': {}", path_, errno_text(synced ? synced : closed));
    return {};
}

} // namespace vtrace
