// A small trace of a made-up guest, with one of everything that reports tell apart: boot code, kernel and user code, a
// loop, calls, a syscall, a page fault, a timer interrupt, code that is not recorded, two vCPUs.
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "decode/trace_writer.h"
#include "ds/bts.h"

namespace vtrace_test {

/// Where things lie. The kernel's functions are at their names' offsets in one page.
inline constexpr uint64_t boot = 0x10'0000, kernel = 0xffff'ffff'8100'0000, user = 0x40'1000, unrecorded = 0x50'0000;
inline constexpr uint64_t start_kernel = kernel, helper = kernel + 0x100, entry_syscall = kernel + 0x200,
                          sys_getpid = kernel + 0x240, page_fault = kernel + 0x300, timer = kernel + 0x340;
inline constexpr uint64_t kernel_cr3 = 0x2000000, user_cr3 = 0x3000000;

/// A page of code: NOPs, and the given bytes at the given offsets.
struct CodePage {
    std::array<uint8_t, 4096> bytes;
    CodePage() { bytes.fill(0x90); }
    CodePage& at(size_t offset, std::initializer_list<uint8_t> code) {
        std::copy(code.begin(), code.end(), bytes.begin() + static_cast<ptrdiff_t>(offset));
        return *this;
    }
};

inline std::vector<vtrace::TraceSymbol> sample_symbols() {
    return {{0x1000, 0, 'A', "cpu_number", {}},
            {start_kernel, 0, 'T', "_stext", {}},
            {start_kernel, 0, 'T', "start_kernel", {}},
            {helper, 0, 't', "helper", {}},
            {entry_syscall, 0, 'T', "entry_SYSCALL_64", {}},
            {sys_getpid, 0, 'T', "__x64_sys_getpid", {}},
            {sys_getpid, 0, 't', "__do_sys_getpid", {}},
            {page_fault, 0, 'T', "asm_exc_page_fault", {}},
            {timer, 0, 'T', "asm_sysvec_apic_timer_interrupt", {}},
            {kernel + 0x380, 0, 'T', "_etext", {}},
            {kernel + 0x1000, 0, 'D', "some_data", {}}};
}

/// The records of vCPU 0: two rounds of a user loop around a syscall, then a fault and an interrupt.
inline std::vector<vtrace::ds::BtsRecord> sample_records() {
    using vtrace::ds::BtsKind;
    using vtrace::ds::BtsFlags::make;
    std::vector<vtrace::ds::BtsRecord> records = {
        {0, 0, make(BtsKind::time)},       {kernel_cr3, 0, make(BtsKind::cr3)},
        {boot, start_kernel, 0},   // jmp *%rax
        {start_kernel, helper, 0}, // call
        {helper + 4, helper, 0},   // jne, three times
        {helper + 4, helper, 0},           {helper + 4, helper, 0},
        {helper + 6, start_kernel + 5, 0},                              // ret
        {user_cr3, 0, make(BtsKind::cr3)}, {start_kernel + 5, user, 0}, // iretq
    };
    for (int round = 0; round < 2; ++round) {
        records.push_back({user, entry_syscall, 0});           // syscall
        records.push_back({entry_syscall, sys_getpid, 0});     // call
        records.push_back({sys_getpid, entry_syscall + 5, 0}); // ret
        records.push_back({entry_syscall + 5, user + 2, 0});   // sysretq
        records.push_back({user + 2, user, 0});                // jne
    }
    for (const vtrace::ds::BtsRecord& record :
         std::initializer_list<vtrace::ds::BtsRecord>{{user, page_fault, make(BtsKind::exception, 14, 4)},
                                                      {page_fault, user, 0}, // iretq
                                                      {1'500'000, 4'000, make(BtsKind::time)},
                                                      {user + 2, timer, make(BtsKind::interrupt, 0xec)},
                                                      {timer, helper, 0},         // call *%rax
                                                      {helper + 6, timer + 2, 0}, // ret
                                                      {timer + 2, user + 2, 0},   // iretq
                                                      {unrecorded, user, 0},
                                                      {2'000'000, 5'000, make(BtsKind::time)}})
        records.push_back(record);
    return records;
}

inline constexpr uint64_t sample_branches = 24; // of vCPU 0

/// Writes the trace; `fail` is told any error.
template <class Fail>
void write_sample(const std::string& path, Fail fail) {
    vtrace::TraceWriterOptions options;
    options.vcpus = 2;
    auto writer = vtrace::TraceWriter::open(path, {{"kernel", "vmlinuz"}, {"memory", 268435456}}, options);
    if (!writer)
        return fail(writer.error().message);
    CodePage low, high, program;
    low.at(0, {0xff, 0xe0});
    high.at(0, {0xe8, 0xfb, 0, 0, 0, 0x48, 0xcf});
    high.at(0x104, {0x75, 0xfa, 0xc3});
    high.at(0x200, {0xe8, 0x3b, 0, 0, 0, 0x48, 0x0f, 0x07});
    high.at(0x240, {0xc3});
    high.at(0x300, {0x48, 0xcf});
    high.at(0x340, {0xff, 0xd0, 0x48, 0xcf});
    program.at(0, {0x0f, 0x05, 0x75, 0xfc});
    struct {
        uint64_t gva, gpa, cr3;
        const CodePage& page;
        bool global;
    } pages[] = {{boot, boot, kernel_cr3, low, false},
                 {kernel, 0x100'0000, kernel_cr3, high, true},
                 {user, 0x777'7000, user_cr3, program, false}};
    for (const auto& page : pages) {
        writer->code_page(0, 0, page.gpa, page.page.bytes);
        writer->code_mapping(0, 0, page.cr3, page.gva, page.gpa, page.global);
    }
    writer->code_mapping(1, 0, kernel_cr3, kernel, 0x100'0000, true);
    writer->console(1'000, "Linux version 6.1\r\n");
    writer->console(2'000, "\x1b[1;32mhello\x1b[0m\nlast line\n\n");
    if (auto added = writer->add_records(0, sample_records()); !added)
        return fail(added.error().message);
    const std::vector<vtrace::ds::BtsRecord> second = {{helper + 4, helper, 0}, {helper + 6, start_kernel + 5, 0}};
    if (auto added = writer->add_records(1, second); !added)
        return fail(added.error().message);
    if (auto closed = writer->close({{"outcome", "guest-exit"}, {"exit_code", 3}}, sample_symbols()); !closed)
        return fail(closed.error().message);
}

} // namespace vtrace_test
