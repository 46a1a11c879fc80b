#include "tests/oracle/native/oracle.h"

namespace vtrace::oracle {

namespace {

constexpr uint8_t lock = 0xf0, escape = 0x0f;

/// Opcodes that no processor of the class defines, or not in this mode.
std::vector<std::vector<uint8_t>> undefined_opcodes(Mode mode) {
    std::vector<std::vector<uint8_t>> codes;
    for (uint8_t second : {0x04, 0x0a, 0x0c, 0x24, 0x25, 0x26, 0x27, 0x36, 0x39, 0x3b, 0x3c, 0x3d, 0x3e, 0x3f})
        codes.push_back({escape, second, 0xc0, 0, 0, 0});
    if (mode == Mode::bits64)
        for (uint8_t opcode : {0x06, 0x07, 0x0e, 0x16, 0x17, 0x1e, 0x1f, 0x27, 0x2f, 0x37,
                               0x3f, 0x60, 0x61, 0x82, 0x9a, 0xce, 0xd4, 0xd5, 0xd6, 0xea})
            codes.push_back({opcode, 0, 0, 0, 0, 0, 0});
    for (unsigned prefixes : {13, 14, 15, 16}) { // NOP of 14 to 17 bytes
        std::vector<uint8_t> code(prefixes, 0x66);
        code.push_back(0x90);
        codes.push_back(code);
    }
    return codes;
}

} // namespace

Result<> Oracle::illegal() {
    VTRACE_TRY(fresh_guest());
    Random random(options_.seed, uint64_t{1} << 61);
    Case c;
    for (const Form& form : forms_) {
        // LOCK before MOV from CR0 means CR8 on AMD.
        if (enough_failures() || form.mnemonic == ZYDIS_MNEMONIC_MOV)
            continue;
        uint64_t rip = Arena::code + illegal_ % slots * slot_size + 32;
        if (!build(form, random, c.instruction) || !prepare(c, rip, Native::fs_base(), background_, random) ||
            c.instruction.info.length > 14)
            continue;
        Instruction locked = c.instruction;
        locked.bytes[0] = lock;
        std::copy_n(c.instruction.bytes.begin(), 14, locked.bytes.begin() + 1);
        if (locked.decode())
            continue; // it may stand there
        std::vector<uint8_t> code(locked.bytes.begin(), locked.bytes.begin() + c.instruction.info.length + 1);
        VTRACE_TRY(illegal_code(code, c.in, form.mode));
    }
    for (Mode mode : {Mode::bits64, Mode::bits32})
        for (const std::vector<uint8_t>& code : undefined_opcodes(mode)) {
            if (mode == Mode::bits32 && options_.skip32)
                continue;
            UserState in;
            in.rip = Arena::code + illegal_ % slots * slot_size + 32;
            in.rflags = random_flags(random);
            randomize_fpu(in.fpu, random);
            for (uint64_t& value : in.gpr)
                value = Arena::data + 1024 + random.below(2048);
            VTRACE_TRY(illegal_code(code, in, mode));
        }
    return {};
}

Result<> Oracle::illegal_code(const std::vector<uint8_t>& code, const UserState& in, Mode mode) {
    if (++illegal_ % slots == 0)
        VTRACE_TRY(fresh_guest());
    uint64_t offset = in.rip - Arena::code;
    std::memcpy(Native::code() + offset, code.data(), code.size());
    std::memcpy(guest_->code() + offset, code.data(), code.size());
    Answer host = Native::run(in, mode), got;
    std::memset(Native::code() + offset, 0xcc, code.size());
    VTRACE_TRY(guest_->run(in, mode, 2, got));
    Undefined undefined;
    std::string what = differences(undefined, in, host, got);
    if (!what.empty()) {
        failures_++;
        if (++failed_illegal_ <= options_.max_sequences) {
            fmt::print("FAIL {}-bit illegal ", mode == Mode::bits64 ? 64 : 32);
            for (uint8_t byte : code)
                fmt::print(" {:02x}", byte);
            fmt::print("\n{}", what);
        }
    }
    return {};
}

} // namespace vtrace::oracle
