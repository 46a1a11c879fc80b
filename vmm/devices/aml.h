// A small writer of ACPI Machine Language (ACPI Specification 6.4, chapter 20): terms nest as C++ expressions do.
//
// Each function returns the encoding of one term; a term that contains others takes them as an argument. Names are
// given as ASL writes them: "\\_SB", "_CRS", "PCI0"; segments shorter than four characters are padded.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string_view>
#include <vector>

namespace vtrace::aml {

using Term = std::vector<uint8_t>;

/// Several terms in sequence.
Term sequence(std::initializer_list<Term> terms);
void append(Term& to, const Term& what);

/// A path of at most two segments, with a leading backslash or without.
Term name_string(std::string_view path);
/// The shortest encoding of an integer.
Term integer(uint64_t value);
Term string(std::string_view text);
/// A compressed EISA ID such as "PNP0A03", as an integer (19.3.4).
Term eisa_id(std::string_view id);
Term package(std::initializer_list<Term> elements);
/// The same for a number of elements, up to 255, that isn't known at compile time.
Term package(const std::vector<Term>& elements);
Term buffer(const Term& bytes);

Term name(std::string_view path, const Term& value);
Term scope(std::string_view path, const Term& content);
Term device(std::string_view path, const Term& content);

// Resource descriptors (6.4), for resource_template().

/// A range of I/O ports that decodes 16 bits and doesn't move.
Term io(uint16_t start, uint8_t length);
/// An ISA interrupt: edge-triggered, active high, exclusive (6.4.2.1).
Term irq(unsigned line);
/// Fixed 32-bit memory, read and write.
Term memory32_fixed(uint32_t start, uint32_t length);
/// What a bridge passes on (6.4.3.5); both limits belong to the range.
Term bus_number_window(uint16_t first, uint16_t last);
Term io_window(uint16_t first, uint16_t last);
Term memory_window(uint32_t first, uint32_t last, bool cacheable);

/// A buffer of descriptors with the end tag: what _CRS is.
Term resource_template(std::initializer_list<Term> descriptors);

} // namespace vtrace::aml
