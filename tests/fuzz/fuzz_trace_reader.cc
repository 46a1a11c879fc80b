// The trace reader on any bytes: it answers or refuses, and never crashes, hangs or takes memory without bound.
//
// The first byte chooses: the bytes behind it are a whole file, with all checksums made right (0: so that the fuzzer
// gets behind them) or as they are (1), or a bare payload of one of the codecs (2 to 8). Checksums right: every chunk
// header that lies where the one before ends.
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <span>
#include <vector>

#include <nlohmann/json.hpp>
#include <sys/mman.h>
#include <unistd.h>

#include "decode/codec_branch.h"
#include "decode/codec_side.h"
#include "decode/trace_file.h"
#include "decode/trace_reader.h"
#include "decode/trace_windows.h"

namespace {

using namespace vtrace;

template <class T>
void seal_checksum(std::vector<uint8_t>& file, size_t at, uint64_t T::*field) {
    T header;
    std::memcpy(&header, file.data() + at, sizeof header);
    header.*field = header_checksum(header);
    std::memcpy(file.data() + at, &header, sizeof header);
}

void make_checksums_right(std::vector<uint8_t>& file) {
    if (file.size() < sizeof(FileHeader))
        return;
    FileHeader head;
    std::memcpy(&head, file.data(), sizeof head);
    head.magic = file_magic;
    head.version = 1 + head.version % 2;
    std::memcpy(file.data(), &head, sizeof head);
    seal_checksum(file, 0, &FileHeader::checksum);
    size_t at = sizeof(FileHeader);
    while (file.size() - at >= sizeof(ChunkHeader)) {
        ChunkHeader header;
        std::memcpy(&header, file.data() + at, sizeof header);
        header.magic = chunk_magic;
        const uint64_t left = file.size() - at - sizeof header;
        if (header.stored_bytes <= left)
            header.payload_checksum = checksum({file.data() + at + sizeof header, header.stored_bytes});
        std::memcpy(file.data() + at, &header, sizeof header);
        seal_checksum(file, at, &ChunkHeader::header_checksum);
        if (header.stored_bytes > left || chunk_file_bytes(header) > file.size() - at)
            break;
        at += chunk_file_bytes(header);
    }
    if (file.size() - at == sizeof(FileFooter))
        seal_checksum(file, at, &FileFooter::checksum);
}

void read_file(std::span<const uint8_t> bytes) {
    static const int fd = ::memfd_create("trace", 0);
    static const std::string path = "/proc/self/fd/" + std::to_string(fd);
    if (::ftruncate(fd, 0) != 0 || ::pwrite(fd, bytes.data(), bytes.size(), 0) != static_cast<ssize_t>(bytes.size()))
        std::abort();
    const auto reader = TraceReader::open(path);
    if (!reader)
        return;
    for (unsigned vcpu = 0; vcpu < std::min(reader->vcpus(), 2u); ++vcpu) {
        auto cursor = reader->records(vcpu, 3, 2000, true);
        while (cursor.next()) {
        }
    }
    (void)reader->config();
    (void)reader->symbols();
    (void)reader->console();
    std::vector<uint8_t> code(16);
    (void)find_windows(*reader);
    (void)reader->code_at(0, 50, 0x1000, 0xffffffff81000ff8, code);
    (void)reader->check();
}

} // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    if (size < 9)
        return 0;
    const std::span<const uint8_t> rest(data + 9, size - 9);
    uint32_t count, branches;
    std::memcpy(&count, data + 1, sizeof count);
    std::memcpy(&branches, data + 5, sizeof branches);
    std::vector<uint8_t> file(rest.begin(), rest.end());
    switch (data[0]) {
    case 0:
        make_checksums_right(file);
        read_file(file);
        break;
    case 1:
        read_file(file);
        break;
    case 2: {
        static BranchDecoder decoder;
        std::vector<ds::BtsRecord> out;
        if (decoder.decode(rest, count % 10000, branches % 10000, out) && out.size() != count % 10000)
            std::abort();
        break;
    }
    case 3:
        (void)decode_code_pages(rest, count);
        break;
    case 4:
        (void)decode_code_mappings(rest, count);
        break;
    case 5:
        (void)decode_console(rest, count);
        break;
    case 6:
        (void)decode_symbols(rest, count);
        break;
    case 7:
        (void)decode_windows(rest, count);
        break;
    case 8:
        (void)decode_dropped(rest, count);
        break;
    }
    return 0;
}
