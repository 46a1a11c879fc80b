// The ACPI tables: found by scanning, sums right, fields as the specification places them; and judged by ACPICA's iasl.
#include <catch2/catch.hpp>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <sstream>

#include "vmm/devices/acpi_tables.h"
#include "vmm/devices/aml.h"
#include "vmm/devices/platform.h"

using namespace vtrace;

namespace {

struct Tables {
    explicit Tables(unsigned vcpus) : memory(std::move(*GuestMemory::create(16 << 20))) {
        rsdp = *write_acpi_tables(memory, vcpus);
    }
    template <class T>
    T get(Gpa at) const {
        T value;
        std::memcpy(&value, memory.at(at, sizeof value), sizeof value);
        return value;
    }
    std::string text(Gpa at, size_t length) const {
        return {reinterpret_cast<const char*>(memory.at(at, length)), length};
    }
    uint8_t sum(Gpa at, size_t length) const {
        uint8_t total = 0;
        for (size_t i = 0; i < length; ++i)
            total = static_cast<uint8_t>(total + *memory.at(at + i));
        return total;
    }
    Gpa xsdt() const { return get<uint64_t>(rsdp + 24); }
    Gpa table(std::string_view signature) const {
        for (Gpa entry = xsdt() + 36; entry < xsdt() + get<uint32_t>(xsdt() + 4); entry += 8)
            if (const Gpa at = get<uint64_t>(entry); text(at, 4) == signature)
                return at;
        return 0;
    }

    GuestMemory memory;
    Gpa rsdp;
};

} // namespace

TEST_CASE("ACPI tables: found from the BIOS area, all checksums right") {
    const Tables t(4);
    Gpa found = 0;
    for (Gpa at = platform::acpi_area_start; at < platform::acpi_area_end && !found; at += 16)
        if (t.text(at, 8) == "RSD PTR ")
            found = at;
    REQUIRE(found == t.rsdp);
    CHECK(t.sum(found, 20) == 0);
    CHECK(t.sum(found, 36) == 0);
    CHECK(t.get<uint8_t>(found + 15) == 2);
    REQUIRE(t.text(t.xsdt(), 4) == "XSDT");
    const Gpa fadt = t.table("FACP"), madt = t.table("APIC");
    REQUIRE(fadt);
    REQUIRE(madt);
    const Gpa dsdt = t.get<uint64_t>(fadt + 140);
    CHECK(t.get<uint32_t>(fadt + 40) == dsdt);
    REQUIRE(t.text(dsdt, 4) == "DSDT");
    for (const Gpa at : {t.xsdt(), fadt, madt, dsdt}) {
        CHECK(t.sum(at, t.get<uint32_t>(at + 4)) == 0);
        CHECK(at + t.get<uint32_t>(at + 4) <= platform::acpi_area_end);
    }
    const Gpa facs = t.get<uint32_t>(fadt + 36);
    CHECK(t.text(facs, 4) == "FACS");
    CHECK(facs % 64 == 0);
}

TEST_CASE("ACPI tables: FADT says where the fixed hardware is") {
    const Tables t(1);
    const Gpa fadt = t.table("FACP");
    CHECK(t.get<uint32_t>(fadt + 4) == 276);
    CHECK(t.get<uint16_t>(fadt + 46) == 9); // SCI
    CHECK(t.get<uint32_t>(fadt + 48) == 0); // no SMI port: ACPI mode from the start
    CHECK(t.get<uint32_t>(fadt + 56) == 0x600);
    CHECK(t.get<uint32_t>(fadt + 64) == 0x604);
    CHECK(t.get<uint32_t>(fadt + 76) == 0x608);
    CHECK(t.get<uint8_t>(fadt + 88) == 4);
    CHECK(t.get<uint8_t>(fadt + 89) == 2);
    CHECK(t.get<uint8_t>(fadt + 91) == 4);
    CHECK(t.get<uint8_t>(fadt + 108) == 0x32);
    CHECK((t.get<uint32_t>(fadt + 112) & 1 << 10) != 0); // reset register
    CHECK(t.get<uint64_t>(fadt + 120) == 0xcf9);
    CHECK(t.get<uint8_t>(fadt + 128) == 6);
    CHECK(t.get<uint64_t>(fadt + 152) == 0x600);
    CHECK(t.get<uint64_t>(fadt + 176) == 0x604);
    CHECK(t.get<uint64_t>(fadt + 212) == 0x608);
}

TEST_CASE("ACPI tables: MADT has the processors, the IOAPIC, the overrides and LINT1") {
    for (const unsigned vcpus : {1u, 7u, platform::max_vcpus}) {
        const Tables t(vcpus);
        const Gpa madt = t.table("APIC");
        CHECK(t.get<uint32_t>(madt + 36) == 0xfee00000);
        CHECK(t.get<uint32_t>(madt + 40) == 1);
        unsigned processors = 0, ioapics = 0, overrides = 0, nmis = 0;
        const Gpa end = madt + t.get<uint32_t>(madt + 4);
        Gpa at = madt + 44;
        for (; at < end; at += t.get<uint8_t>(at + 1)) {
            REQUIRE(t.get<uint8_t>(at + 1) >= 6);
            switch (t.get<uint8_t>(at)) {
            case 0:
                CHECK(t.get<uint8_t>(at + 3) == processors++);
                CHECK(t.get<uint32_t>(at + 4) == 1);
                break;
            case 1:
                ++ioapics;
                CHECK(t.get<uint32_t>(at + 4) == 0xfec00000);
                CHECK(t.get<uint32_t>(at + 8) == 0);
                break;
            case 2:
                if (overrides++ == 0) {
                    CHECK(t.get<uint8_t>(at + 3) == 0);
                    CHECK(t.get<uint32_t>(at + 4) == 2);
                    CHECK(t.get<uint16_t>(at + 8) == 0);
                } else {
                    CHECK(t.get<uint8_t>(at + 3) == 9);
                    CHECK(t.get<uint32_t>(at + 4) == 9);
                    CHECK(t.get<uint16_t>(at + 8) == 0x0d); // active high, level
                }
                break;
            case 4:
                ++nmis;
                CHECK(t.get<uint8_t>(at + 2) == 0xff);
                CHECK(t.get<uint8_t>(at + 5) == 1);
                break;
            default:
                FAIL("unknown structure");
            }
        }
        CHECK(at == end);
        CHECK(processors == vcpus);
        CHECK(ioapics == 1);
        CHECK(overrides == 2);
        CHECK(nmis == 1);
    }
}

TEST_CASE("ACPI tables: impossible numbers of processors are refused") {
    auto memory = std::move(*GuestMemory::create(16 << 20));
    CHECK_FALSE(write_acpi_tables(memory, 0));
    CHECK_FALSE(write_acpi_tables(memory, platform::max_vcpus + 1));
}

TEST_CASE("AML: encodings by the specification") {
    using namespace aml;
    CHECK(integer(0) == Term{0x00});
    CHECK(integer(1) == Term{0x01});
    CHECK(integer(0x7f) == Term{0x0a, 0x7f});
    CHECK(integer(0x1234) == Term{0x0b, 0x34, 0x12});
    CHECK(integer(0x12345678) == Term{0x0c, 0x78, 0x56, 0x34, 0x12});
    CHECK(integer(1ull << 32) == Term{0x0e, 0, 0, 0, 0, 1, 0, 0, 0});
    CHECK(eisa_id("PNP0A03") == Term{0x0c, 0x41, 0xd0, 0x0a, 0x03});
    CHECK(name_string("\\_SB") == Term{0x5c, '_', 'S', 'B', '_'});
    CHECK(name_string("_SB.PCI0") == Term{0x2e, '_', 'S', 'B', '_', 'P', 'C', 'I', '0'});
    CHECK(package({integer(5), integer(0)}) == Term{0x12, 0x05, 0x02, 0x0a, 0x05, 0x00});
    // Package lengths: one byte up to 63, two up to 4095, three beyond.
    CHECK(scope("AAAA", Term(58)).at(1) == 63);
    CHECK(scope("AAAA", Term(59)).at(1) == (0x40 | (65 & 15)));
    CHECK(scope("AAAA", Term(59)).at(2) == 65 >> 4);
    CHECK(scope("AAAA", Term(4089)).at(1) == (0x40 | 15));
    CHECK(scope("AAAA", Term(4090)).at(1) == (0x80 | (4097 & 15)));
}

TEST_CASE("ACPI tables: iasl disassembles them without complaint, and the DSDT says what we mean") {
    if (std::system("command -v iasl >/dev/null 2>&1") != 0) {
        std::cout << "skipped: iasl is not installed (Debian package acpica-tools)\n";
        return;
    }
    const Tables t(2);
    char pattern[] = "/tmp/vtrace-acpi-XXXXXX";
    REQUIRE(mkdtemp(pattern));
    const std::filesystem::path folder = pattern;
    const Gpa fadt = t.table("FACP");
    const std::pair<const char*, Gpa> tables[] = {{"dsdt", t.get<uint64_t>(fadt + 140)},
                                                  {"facp", fadt},
                                                  {"apic", t.table("APIC")},
                                                  {"xsdt", t.xsdt()},
                                                  {"facs", t.get<uint32_t>(fadt + 36)}};
    const auto slurp = [](const std::filesystem::path& path) {
        std::stringstream content;
        content << std::ifstream(path).rdbuf();
        return content.str();
    };
    for (const auto& [name, at] : tables) {
        INFO(name);
        std::ofstream(folder / (std::string(name) + ".dat"), std::ios::binary) << t.text(at, t.get<uint32_t>(at + 4));
        const std::string command = "cd " + folder.string() + " && iasl -d " + name + ".dat > " + name + ".log 2>&1";
        CHECK(std::system(command.c_str()) == 0);
        const std::string log = slurp(folder / (std::string(name) + ".log")),
                          source = slurp(folder / (std::string(name) + ".dsl"));
        INFO(log);
        CHECK(log.find("Error") == std::string::npos);
        CHECK(log.find("Warning") == std::string::npos);
        CHECK(log.find("ncorrect") == std::string::npos); // checksums
        CHECK_FALSE(source.empty());
        CHECK(source.find("Unknown") == std::string::npos);
    }
    const std::string dsdt = slurp(folder / "dsdt.dsl");
    for (const char* wanted : {"EisaId (\"PNP0A03\")", "EisaId (\"PNP0501\")", "EisaId (\"PNP0B00\")", "\"QEMU0001\"",
                               "\\_S5", "0x03F8", "0x0505", "_PRT", "IRQNoFlags", "WordBusNumber", "DWordMemory"})
        CHECK(dsdt.find(wanted) != std::string::npos);
    // And it compiles again: the disassembly is a valid definition block.
    const std::string compile = "cd " + folder.string() + " && iasl -p again dsdt.dsl > again.log 2>&1";
    CHECK(std::system(compile.c_str()) == 0);
    CHECK(slurp(folder / "again.log").find("0 Errors") != std::string::npos);
    std::filesystem::remove_all(folder);
}
