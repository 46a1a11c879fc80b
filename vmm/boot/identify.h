// What a file is that was given as a kernel and can't be booted: for the error message.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "vmm/boot/elf_image.h"

namespace vtrace {

/// A phrase that completes "it is ...", with what to do about it where there is something: "a gzip-compressed ARM64
/// Linux Image, not a kernel for x86", "text", ... Looks into compressed files, at a few KiB at most.
std::string identify_foreign(std::span<const uint8_t> bytes);

/// The same for an ELF file that is no kernel of ours, by its machine and type; empty when nothing speaks against it.
std::string identify_foreign_elf(const ElfImage& image);

} // namespace vtrace
