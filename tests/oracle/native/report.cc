#include "tests/oracle/native/oracle.h"

namespace vtrace::oracle {

namespace {

/// Always fault in user mode: being executed means having faulted.
bool must_fault(ZydisMnemonic m, const Form& form) {
    switch (m) {
    case ZYDIS_MNEMONIC_UD0:
    case ZYDIS_MNEMONIC_UD1:
    case ZYDIS_MNEMONIC_UD2:
    case ZYDIS_MNEMONIC_HLT:
    case ZYDIS_MNEMONIC_CLI:
    case ZYDIS_MNEMONIC_STI:
    case ZYDIS_MNEMONIC_IN:
    case ZYDIS_MNEMONIC_OUT:
    case ZYDIS_MNEMONIC_CLTS:
    case ZYDIS_MNEMONIC_LGDT:
    case ZYDIS_MNEMONIC_LIDT:
    case ZYDIS_MNEMONIC_LLDT:
    case ZYDIS_MNEMONIC_LTR:
    case ZYDIS_MNEMONIC_LMSW:
    case ZYDIS_MNEMONIC_INVLPG:
    case ZYDIS_MNEMONIC_INVD:
    case ZYDIS_MNEMONIC_WBINVD:
    case ZYDIS_MNEMONIC_RDMSR:
    case ZYDIS_MNEMONIC_WRMSR:
    case ZYDIS_MNEMONIC_SWAPGS:
        return true;
    default:
        return form.map == Map::escape_0f && form.opcode >= 0x20 && form.opcode <= 0x23; // MOV CR, DR
    }
}

} // namespace

void Oracle::report(uint64_t number, const Case& c, const std::string& what) {
    failures_++;
    if (++reported_[c.instruction.mnemonic()] > options_.per_mnemonic)
        return;
    std::string bytes;
    for (unsigned n = 0; n < c.instruction.info.length; n++)
        bytes += fmt::format("{:02x} ", c.instruction.bytes[n]);
    std::string again =
        fmt::format("--seed {} --first {} --cases 1 --sequences 0 --rounds {}", options_.seed, number, options_.rounds);
    if (!options_.only.empty())
        again += " --only " + options_.only;
    fmt::print("FAIL {}-bit  {} {}\n{}", c.instruction.mode == Mode::bits64 ? 64 : 32, bytes, c.instruction.text(),
               what);
    if (options_.verbose) {
        for (unsigned n = 0; n < 16; n++)
            fmt::print("    gpr{:<2} {:016x}{}", n, c.in.gpr[n], n % 4 == 3 ? "\n" : "");
        fmt::print("    rflags {:x} rip {:x}\n", c.in.rflags, c.in.rip);
    }
    fmt::print("    again: native_oracle {}\n", again);
    std::fflush(stdout);
}

bool Oracle::summary() const {
    bool complete = true;
    uint64_t forms_done = 0;
    for (bool done : executed_)
        forms_done += done;
    std::map<ZydisMnemonic, bool> faulting;
    for (const Form& form : forms_)
        faulting[form.mnemonic] |= must_fault(form.mnemonic, form);
    for (const auto& [mnemonic, count] : counts_) {
        bool executed = count.completed || (faulting.at(mnemonic) && count.faulted);
        if ((options_.verbose && total_ > 1) || count.failed || (!executed && whole_run()))
            fmt::print("  {:<12} forms {:<5} completed {:<8} faulted {:<8} failed {}{}\n",
                       ZydisMnemonicGetString(mnemonic), count.forms, count.completed, count.faulted, count.failed,
                       executed ? "" : "   NEVER EXECUTED");
        complete &= executed;
    }
    fmt::print("coverage: {} of {} forms executed, {} mnemonics\n", forms_done, forms_.size(), counts_.size());
    if (!whole_run())
        return failures_ == 0;
    // A filter gone wrong would lose whole groups: this many there are at least.
    constexpr size_t least_mnemonics = 515, least_forms = 30'000;
    if (counts_.size() < least_mnemonics || forms_.size() < (options_.skip32 ? least_forms : 45'000)) {
        fmt::print("fewer instructions in scope than there should be\n");
        complete = false;
    }
    return failures_ == 0 && complete;
}

} // namespace vtrace::oracle
