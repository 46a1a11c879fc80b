// Judges vtrace's processor by the host's: the same instruction with the same inputs on both must give the same answer.
//
// Every case follows from its seed and number alone, so that each can be run again by itself.

#include <CLI/CLI.hpp>
#include <chrono>
#include <map>
#include <sys/personality.h>
#include <unistd.h>

#include "tests/oracle/native/compare.h"
#include "tests/oracle/native/form.h"
#include "tests/oracle/native/guest.h"
#include "tests/oracle/native/native.h"
#include "tests/oracle/native/sequence.h"

namespace vtrace::oracle {

namespace {

struct Options {
    uint64_t seed = 1;
    uint64_t cases = 300'000, sequences = 20'000;
    uint64_t first = 0, first_sequence = 0;
    unsigned max_sequences = 5; // printed
    unsigned rounds = 2;        // systematic passes
    unsigned max_failures = 200, per_mnemonic = 2;
    std::string only; // mnemonic
    bool self = false;
    bool verbose = false;
    bool skip32 = false;
};

struct Count {
    uint64_t completed = 0, faulted = 0, failed = 0, forms = 0;
};

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

class Oracle {
  public:
    explicit Oracle(Options options) : options_(std::move(options)) {}

    Result<bool> run();

  private:
    static constexpr uint64_t sequence_slot = 512;
    static constexpr uint64_t slot_size = 64, slots = Arena::code_size / slot_size - 1;

    Result<> fresh_guest();
    Result<> one(uint64_t number, const Form& form);
    Result<> sequences();
    Result<> sequence(uint64_t number, const std::vector<std::vector<const Form*>>& forms, Mode mode);
    Result<> judge(uint64_t number, const Form& form, const Case& c);
    void report(uint64_t number, const Case& c, const std::string& what);
    bool summary() const;

    Options options_;
    std::vector<Form> forms_;
    std::vector<std::vector<size_t>> by_mnemonic_; // indices of forms
    std::vector<bool> executed_;
    std::map<ZydisMnemonic, Count> counts_;
    std::unique_ptr<Guest> guest_;
    std::map<ZydisMnemonic, unsigned> reported_;
    Data background_;
    uint64_t guest_cases_ = 0, failures_ = 0, failed_sequences_ = 0, total_ = 0, sequences_ = 0, unbuildable_ = 0;
};

Result<> Oracle::fresh_guest() {
    auto guest = Guest::create(Native::fs_base(), Arena::gs_base);
    if (!guest)
        return Unexpected(guest.error());
    guest_ = std::move(*guest);
    std::memcpy(guest_->data(), background_.data(), Arena::size);
    guest_cases_ = 0;
    return {};
}

Result<bool> Oracle::run() {
    VTRACE_TRY(Native::start());
    Random random(options_.seed, ~0ull);
    for (unsigned at = 0; at < Arena::size; at += 32)
        random.fill(background_.data() + at, 32);
    Native::set_read_only_page(background_.data() + Arena::writable);
    VTRACE_TRY(fresh_guest());

    forms_ = all_forms(Mode::bits64);
    if (!options_.skip32)
        for (const Form& form : all_forms(Mode::bits32))
            forms_.push_back(form);
    if (!options_.only.empty())
        std::erase_if(forms_, [&](const Form& f) { return ZydisMnemonicGetString(f.mnemonic) != options_.only; });
    if (forms_.empty())
        return fail("there is no mnemonic '{}' in scope", options_.only);
    executed_.resize(forms_.size());
    std::map<ZydisMnemonic, std::vector<size_t>> by_mnemonic;
    for (size_t n = 0; n < forms_.size(); n++) {
        counts_[forms_[n].mnemonic].forms++;
        by_mnemonic[forms_[n].mnemonic].push_back(n);
    }
    for (auto& [mnemonic, same] : by_mnemonic)
        by_mnemonic_.push_back(std::move(same));
    fmt::print("seed {}: {} forms of {} mnemonics\n", options_.seed, forms_.size(), counts_.size());

    // First each form in turn, then forms at random.
    uint64_t systematic = options_.rounds * forms_.size(), end = systematic + options_.cases;
    if (options_.first) // again
        end = options_.first + options_.cases;
    auto start = std::chrono::steady_clock::now();
    for (uint64_t number = options_.first; number < end && failures_ < options_.max_failures; number++) {
        Random chooser(options_.seed, number);
        uint64_t form =
            number < systematic ? number % forms_.size() : chooser.below(static_cast<uint32_t>(forms_.size()));
        VTRACE_TRY(one(number, forms_[form]));
    }
    VTRACE_TRY(sequences());
    double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    fmt::print("{} cases and {} sequences in {:.1f} s ({:.0f}/s), {} failed, {} without safe inputs\n", total_,
               sequences_, seconds, static_cast<double>(total_) / seconds, failures_, unbuildable_);
    return summary();
}

Result<> Oracle::one(uint64_t number, const Form& form) {
    Random random(options_.seed, number * 2 + 1);
    uint64_t slot = number % slots;
    uint64_t rip = Arena::code + slot * slot_size + 32 + random.below(16);
    Case c;
    for (unsigned attempt = 0; attempt < 60; attempt++)
        if (build(form, random, c.instruction) && prepare(c, rip, Native::fs_base(), background_, random))
            return judge(number, form, c);
    unbuildable_++;
    return {};
}

Result<> Oracle::judge(uint64_t number, const Form& form, const Case& c) {
    const Instruction& i = c.instruction;
    if (++guest_cases_ > slots)
        VTRACE_TRY(fresh_guest());
    uint64_t offset = c.in.rip - Arena::code;
    std::memcpy(Native::code() + offset, i.bytes.data(), i.info.length);
    std::memcpy(guest_->code() + offset, i.bytes.data(), i.info.length);
    std::memcpy(Native::data(), c.data.data(), Arena::writable);

    Answer host = Native::run(c.in, i.mode), got;
    Data host_data;
    std::memcpy(host_data.data(), Native::data(), Arena::size);
    if (options_.self) {
        std::memcpy(Native::data(), c.data.data(), Arena::writable);
        got = Native::run(c.in, i.mode);
        std::memcpy(guest_->data(), Native::data(), Arena::size);
    } else {
        std::memcpy(guest_->data(), c.data.data(), Arena::writable);
        // After a branch the fence's INT3 too, since a target may not be there.
        bool branch = i.info.meta.branch_type != ZYDIS_BRANCH_TYPE_NONE;
        if (auto run = guest_->run(c.in, i.mode, branch ? 2 : 1, got); !run) {
            report(number, c, "    " + run.error().message + "\n");
            counts_[i.mnemonic()].failed++;
            return fresh_guest();
        }
    }
    std::memset(Native::code() + offset, 0xcc, i.info.length);

    Count& count = counts_[form.mnemonic];
    total_++;
    (host.vector == completed ? count.completed : count.faulted)++;
    executed_[static_cast<size_t>(&form - forms_.data())] = true;

    Undefined undefined = undefined_by(i, c.in, host);
    accept_approximation(i, host, got);
    std::string what = differences(undefined, c.in, host, got);
    if (std::memcmp(host_data.data(), guest_->data(), Arena::size) != 0 && !undefined.destination) {
        blank_undefined_memory(c, host_data.data());
        blank_undefined_memory(c, guest_->data());
        what += memory_differences(c.data.data(), host_data.data(), guest_->data());
    }
    if (!what.empty()) {
        count.failed++;
        report(number, c, what);
    }
    return {};
}

Result<> Oracle::sequences() {
    VTRACE_TRY(fresh_guest());
    std::vector<std::vector<const Form*>> forms[2];
    for (const std::vector<size_t>& same : by_mnemonic_)
        for (Mode mode : {Mode::bits32, Mode::bits64}) {
            std::vector<const Form*> of_mode;
            for (size_t n : same)
                if (forms_[n].mode == mode)
                    of_mode.push_back(&forms_[n]);
            if (!of_mode.empty())
                forms[static_cast<unsigned>(mode)].push_back(std::move(of_mode));
        }
    uint64_t first = options_.first_sequence;
    for (uint64_t number = first; number < first + options_.sequences && failures_ < options_.max_failures; number++) {
        Mode mode = number % 4 == 3 && !options_.skip32 ? Mode::bits32 : Mode::bits64;
        VTRACE_TRY(sequence(number, forms[static_cast<unsigned>(mode)], mode));
    }
    return {};
}

Result<> Oracle::sequence(uint64_t number, const std::vector<std::vector<const Form*>>& forms, Mode mode) {
    constexpr uint64_t places = Arena::code_size / sequence_slot - 1;
    if (++guest_cases_ > places)
        VTRACE_TRY(fresh_guest());
    Random random(options_.seed, number * 2 + (uint64_t{1} << 60));
    uint64_t offset = number % places * sequence_slot + sequence_slot / 2 + random.below(16);
    Sequence s = make_sequence(forms, mode, Arena::code + offset, background_, random, options_.verbose);
    std::memcpy(Native::code() + offset, s.code.data(), s.code.size());
    std::memcpy(guest_->code() + offset, s.code.data(), s.code.size());
    std::memcpy(Native::data(), s.data.data(), Arena::writable);
    Answer host = Native::run(s.in, mode);
    Data host_data;
    std::memcpy(host_data.data(), Native::data(), Arena::size);
    std::memset(Native::code() + offset, 0xcc, s.code.size());
    sequences_++;

    Undefined undefined;
    undefined.rflags |= host.vector == completed ? s.undefined_flags : Rflags::status;
    undefined.fsw = s.undefined_fsw;
    // Translated afresh; from the cache; and in slices that end anywhere.
    for (uint64_t slice : {uint64_t{0}, uint64_t{0}, uint64_t{1 + random.below(9)}}) {
        constexpr uint64_t enough = 10'000;
        std::memcpy(guest_->data(), s.data.data(), Arena::writable);
        Answer got;
        std::string what;
        auto run = guest_->run(s.in, mode, enough, got, slice);
        if (run) {
            what = differences(undefined, s.in, host, got);
            what += memory_differences(s.data.data(), host_data.data(), guest_->data());
        } else {
            what = "    " + run.error().message + "\n";
        }
        if (what.empty())
            continue;
        failures_++;
        if (++failed_sequences_ <= options_.max_sequences) {
            fmt::print("FAIL {}-bit sequence{}\n", mode == Mode::bits64 ? 64 : 32,
                       slice ? fmt::format(", slices of {}", slice) : "");
            for (const std::string& line : s.listing)
                fmt::print("        {}\n", line);
            fmt::print("{}    again: native_oracle --seed {} --rounds 0 --cases 0 --first-sequence {} --sequences 1 "
                       "--verbose\n",
                       what, options_.seed, number);
        }
        if (!run)
            return fresh_guest();
        break;
    }
    return {};
}

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
        if ((options_.verbose && total_ > 1) || count.failed || (!executed && !options_.first && options_.rounds))
            fmt::print("  {:<12} forms {:<5} completed {:<8} faulted {:<8} failed {}{}\n",
                       ZydisMnemonicGetString(mnemonic), count.forms, count.completed, count.faulted, count.failed,
                       executed ? "" : "   NEVER EXECUTED");
        complete &= executed;
    }
    fmt::print("coverage: {} of {} forms executed, {} mnemonics\n", forms_done, forms_.size(), counts_.size());
    if (options_.first || !options_.rounds)
        return failures_ == 0;
    return failures_ == 0 && complete;
}

} // namespace

} // namespace vtrace::oracle

int main(int argc, char** argv) {
    using namespace vtrace::oracle;
    // The same addresses in each run: the base of FS is an input.
    if (int now = personality(0xffffffff); now != -1 && !(now & ADDR_NO_RANDOMIZE)) {
        personality(static_cast<unsigned long>(now) | ADDR_NO_RANDOMIZE);
        execv("/proc/self/exe", argv);
    }
    Options options;
    CLI::App app{"Executes random instructions on vtrace's processor and on the host's, and compares"};
    app.add_option("--seed", options.seed, "Seed of everything")->capture_default_str();
    app.add_option("--cases", options.cases, "Random cases after the systematic ones")->capture_default_str();
    app.add_option("--sequences", options.sequences, "Random sequences")->capture_default_str();
    app.add_option("--first-sequence", options.first_sequence, "Number of the first sequence");
    app.add_option("--first", options.first, "Number of the first case");
    app.add_option("--rounds", options.rounds, "Systematic passes over all forms")->capture_default_str();
    app.add_option("--max-failures", options.max_failures, "Stop after so many")->capture_default_str();
    app.add_option("--per-mnemonic", options.per_mnemonic, "Print so many failures of each mnemonic")
        ->capture_default_str();
    app.add_option("--only", options.only, "One mnemonic only");
    app.add_flag("--self", options.self, "Judge the host by itself: tests the test");
    app.add_flag("--skip-32", options.skip32, "No compatibility mode");
    app.add_flag("--verbose", options.verbose, "Count of every mnemonic, inputs of failures");
    CLI11_PARSE(app, argc, argv);
    auto result = Oracle(options).run();
    if (!result) {
        fmt::print(stderr, "native_oracle: {}\n", result.error().message);
        return 2;
    }
    return *result ? 0 : 1;
}
