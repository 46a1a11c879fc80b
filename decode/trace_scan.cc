#include "decode/trace_scan.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <optional>
#include <utility>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "decode/trace_file.h"

namespace vtrace {

namespace {

template <class T>
Result<T> read_object(const InputFile& file, uint64_t offset) {
    T object{};
    VTRACE_TRY(file.read(offset, {reinterpret_cast<uint8_t*>(&object), sizeof object}));
    return object;
}

bool is_index(const ChunkHeader& header) {
    return header.type == static_cast<uint16_t>(ChunkType::index);
}

/// The index by way of the footer. Error: why it cannot be used.
Result<std::vector<IndexEntry>> read_index(const InputFile& file) {
    const uint64_t size = file.size();
    if (size < sizeof(FileHeader) + sizeof(ChunkHeader) + sizeof(FileFooter))
        return fail("it has no footer");
    const uint64_t footer_offset = size - sizeof(FileFooter);
    const auto footer = read_object<FileFooter>(file, footer_offset);
    if (!footer)
        return Unexpected(footer.error());
    if (footer->magic != footer_magic || footer->checksum != header_checksum(*footer) || footer->file_bytes != size)
        return fail("it has no footer");
    if (footer->index_offset < sizeof(FileHeader) || footer->index_offset > footer_offset - sizeof(ChunkHeader))
        return fail("its footer is damaged");
    const auto header = read_object<ChunkHeader>(file, footer->index_offset);
    if (!header)
        return Unexpected(header.error());
    if (!is_sound(*header) || !is_index(*header) || chunk_file_bytes(*header) != footer_offset - footer->index_offset ||
        header->raw_bytes != uint64_t{header->count} * sizeof(IndexEntry) ||
        header->count > size / sizeof(ChunkHeader)) // more than there is room for: do not even allocate
        return fail("its index is damaged");
    std::vector<uint8_t> stored(header->stored_bytes);
    VTRACE_TRY(file.read(footer->index_offset + sizeof(ChunkHeader), stored));
    const auto payload = load_payload(*header, stored);
    if (!payload)
        return fail("its index is damaged: {}", payload.error().message);
    std::vector<IndexEntry> entries(header->count);
    if (!entries.empty())
        std::memcpy(entries.data(), payload->data(), payload->size());
    uint64_t expected = sizeof(FileHeader);
    for (size_t i = 0; i < entries.size(); ++i) {
        const IndexEntry& entry = entries[i];
        if (!is_sound(entry.header) || is_index(entry.header) || entry.offset != expected ||
            entry.header.sequence != i || chunk_file_bytes(entry.header) > footer->index_offset - entry.offset)
            return fail("its index is damaged");
        expected = entry.offset + chunk_file_bytes(entry.header);
    }
    if (expected != footer->index_offset)
        return fail("its index is damaged");
    return entries;
}

/// The first sound chunk header at or after `offset` (a multiple of chunk_alignment).
Result<std::optional<uint64_t>> find_chunk(const InputFile& file, uint64_t offset) {
    std::vector<uint8_t> buffer(1u << 20);
    while (offset + sizeof(ChunkHeader) <= file.size()) {
        const size_t size = std::min<uint64_t>(buffer.size(), file.size() - offset);
        VTRACE_TRY(file.read(offset, {buffer.data(), size}));
        size_t at = 0;
        for (; at + sizeof(ChunkHeader) <= size; at += chunk_alignment) {
            uint32_t magic;
            std::memcpy(&magic, buffer.data() + at, sizeof magic);
            if (magic != chunk_magic)
                continue;
            ChunkHeader header;
            std::memcpy(&header, buffer.data() + at, sizeof header);
            if (is_sound(header))
                return offset + at;
        }
        offset += at;
    }
    return std::nullopt;
}

Result<> walk(const InputFile& file, ScannedFile& result) {
    uint64_t offset = sizeof(FileHeader);
    uint64_t next_sequence = 0;
    while (offset < file.size()) {
        std::optional<ChunkHeader> header;
        if (file.size() - offset >= sizeof(ChunkHeader)) {
            const auto read = read_object<ChunkHeader>(file, offset);
            if (!read)
                return Unexpected(read.error());
            if (is_sound(*read))
                header = *read;
        }
        if (!header) {
            const auto found = find_chunk(file, offset + chunk_alignment);
            if (!found)
                return Unexpected(found.error());
            const uint64_t end = found->value_or(file.size());
            const uint64_t footer_at = file.size() >= sizeof(FileFooter) ? file.size() - sizeof(FileFooter) : 0;
            if (offset != footer_at || *found) // the footer itself is no chunk
                result.warnings.push_back(
                    fmt::format("bytes {} to {} hold no readable chunk: damaged or cut off", offset, end));
            offset = end;
            continue;
        }
        const bool fits = chunk_file_bytes(*header) <= file.size() - offset ||
                          sizeof(ChunkHeader) + header->stored_bytes <= file.size() - offset;
        if (!fits) {
            result.warnings.push_back(fmt::format("the file ends inside a chunk ({}) of {} bytes at {}",
                                                  chunk_type_name(header->type), chunk_file_bytes(*header), offset));
            result.cut.push_back(*header);
            // A damaged file can have more behind a header that claims too much.
            const auto found = find_chunk(file, offset + chunk_alignment);
            if (!found)
                return Unexpected(found.error());
            offset = found->value_or(file.size());
            continue;
        }
        if (header->sequence != next_sequence)
            result.warnings.push_back(fmt::format("chunks {} to {} are lost: the next one after them is at {}",
                                                  next_sequence, header->sequence, offset));
        next_sequence = uint64_t{header->sequence} + 1;
        if (!is_index(*header))
            result.chunks.push_back({offset, *header});
        offset += chunk_file_bytes(*header);
    }
    return {};
}

} // namespace

Result<InputFile> InputFile::open(const std::string& path) {
    InputFile file;
    file.path_ = path;
    file.fd_ = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK); // a FIFO must not hang here
    if (file.fd_ < 0)
        return fail("cannot open the trace file '{}': {}", path, errno_text(errno));
    struct stat status;
    if (::fstat(file.fd_, &status) != 0)
        return fail("cannot open the trace file '{}': {}", path, errno_text(errno));
    if (!S_ISREG(status.st_mode))
        return fail("cannot read '{}' as a trace: it is not a regular file", path);
    file.size_ = status.st_size;
    return file;
}

InputFile::InputFile(InputFile&& other) noexcept
    : fd_(std::exchange(other.fd_, -1)), size_(other.size_), path_(std::move(other.path_)) {}

InputFile& InputFile::operator=(InputFile&& other) noexcept {
    std::swap(fd_, other.fd_);
    std::swap(size_, other.size_);
    std::swap(path_, other.path_);
    return *this;
}

InputFile::~InputFile() {
    if (fd_ >= 0)
        ::close(fd_);
}

Result<> InputFile::read(uint64_t offset, std::span<uint8_t> buffer) const {
    for (size_t done = 0; done < buffer.size();) {
        const ssize_t count =
            ::pread(fd_, buffer.data() + done, buffer.size() - done, static_cast<off_t>(offset + done));
        if (count < 0 && errno == EINTR)
            continue;
        if (count <= 0)
            return fail("cannot read '{}' at {}: {}", path_, offset + done,
                        count < 0 ? errno_text(errno) : "it has become shorter");
        done += count;
    }
    return {};
}

Result<ScannedFile> scan_trace(const InputFile& file) {
    if (file.size() == 0)
        return fail("'{}' is empty: not a trace", file.path());
    if (file.size() < sizeof(FileHeader))
        return fail("'{}' is not a vtrace trace: it has only {} bytes", file.path(), file.size());
    ScannedFile result;
    const auto header = read_object<FileHeader>(file, 0);
    if (!header)
        return Unexpected(header.error());
    result.header = *header;
    if (header->magic != file_magic)
        return fail("'{}' is not a vtrace trace: its first bytes are not those of one", file.path());
    if (header->checksum != header_checksum(*header))
        return fail("cannot read '{}': its file header is damaged", file.path());
    if (header->version == 0 || header->version > static_cast<uint32_t>(TraceVersion::latest))
        return fail("cannot read '{}': its format has version {}, and this vtrace knows versions up to {}", file.path(),
                    header->version, static_cast<uint32_t>(TraceVersion::latest));
    if (header->vcpus == 0 || header->vcpus > max_trace_vcpus)
        return fail("cannot read '{}': its file header claims {} vCPUs", file.path(), header->vcpus);

    if (auto index = read_index(file)) {
        result.chunks = std::move(*index);
        result.indexed = true;
        return result;
    } else {
        result.warnings.push_back(fmt::format("{}: its recorder was killed or the file is cut or damaged; "
                                              "what is there was found chunk by chunk",
                                              index.error().message));
    }
    VTRACE_TRY(walk(file, result));
    return result;
}

} // namespace vtrace
