#include "vmm/guest_memory.h"

#include <cerrno>
#include <cstring>
#include <sys/mman.h>

namespace vtrace {

Result<GuestMemory> GuestMemory::create(uint64_t size) {
    if (size < (1u << 20) || size % page_size != 0)
        return fail("cannot make guest memory of {} bytes: it must be a multiple of 4 KiB and at least 1 MiB", size);
    // Large pages where the host has them: a software TLB miss then rarely costs a hardware one too, and KVM maps a large
    // page at once, if guest and host agree on where it begins. Advice only.
    constexpr uint64_t large_page = 2 << 20;
    const uint64_t reserved = size + large_page;
    void* start = mmap(nullptr, reserved, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (start == MAP_FAILED)
        return fail("cannot reserve {} MiB of guest memory: {}", size >> 20, errno_text(errno));
    auto* const first = static_cast<uint8_t*>(start);
    const uint64_t before = -reinterpret_cast<uintptr_t>(first) % large_page;
    if (before)
        munmap(first, before);
    munmap(first + before + size, reserved - before - size);
    madvise(first + before, size, MADV_HUGEPAGE);
    return GuestMemory(first + before, size, std::min<uint64_t>(size, pci_hole_start));
}

GuestMemory::GuestMemory(GuestMemory&& other) noexcept
    : base_(std::exchange(other.base_, nullptr)), size_(std::exchange(other.size_, 0)),
      low_size_(std::exchange(other.low_size_, 0)) {}

GuestMemory& GuestMemory::operator=(GuestMemory&& other) noexcept {
    std::swap(base_, other.base_);
    std::swap(size_, other.size_);
    std::swap(low_size_, other.low_size_);
    return *this;
}

GuestMemory::~GuestMemory() {
    if (base_)
        munmap(base_, size_);
}

Result<> GuestMemory::write(Gpa gpa, std::span<const uint8_t> bytes) {
    uint8_t* host = at(gpa, bytes.size());
    if (!host)
        return fail("cannot write {} bytes at guest address {:#x}: not all of it is guest memory ({} MiB)", bytes.size(),
                    gpa, size_ >> 20);
    if (!bytes.empty())
        std::memcpy(host, bytes.data(), bytes.size());
    return {};
}

Result<> GuestMemory::read(Gpa gpa, std::span<uint8_t> bytes) const {
    const uint8_t* host = at(gpa, bytes.size());
    if (!host)
        return fail("cannot read {} bytes at guest address {:#x}: not all of it is guest memory ({} MiB)", bytes.size(),
                    gpa, size_ >> 20);
    if (!bytes.empty())
        std::memcpy(bytes.data(), host, bytes.size());
    return {};
}

} // namespace vtrace
