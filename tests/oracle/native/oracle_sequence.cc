#include "tests/oracle/native/oracle.h"
#include "tests/oracle/native/sequence.h"

namespace vtrace::oracle {

Result<> Oracle::sequences() {
    VTRACE_TRY(fresh_guest());
    FormsByMnemonic forms[2];
    for (const std::vector<const Form*>& same : by_mnemonic_)
        for (Mode mode : {Mode::bits32, Mode::bits64}) {
            std::vector<const Form*> of_mode;
            for (const Form* form : same)
                if (form->mode == mode)
                    of_mode.push_back(form);
            if (!of_mode.empty())
                forms[static_cast<unsigned>(mode)].push_back(std::move(of_mode));
        }
    uint64_t first = options_.first_sequence;
    for (uint64_t number = first; number < first + options_.sequences && !enough_failures(); number++) {
        Mode mode = number % 4 == 3 && !options_.skip32 ? Mode::bits32 : Mode::bits64;
        const FormsByMnemonic& of_mode = forms[static_cast<unsigned>(mode)];
        if (!of_mode.empty())
            VTRACE_TRY(sequence(number, of_mode, mode));
    }
    return {};
}

Result<> Oracle::sequence(uint64_t number, const FormsByMnemonic& forms, Mode mode) {
    if (number % sequence_slots == 0)
        VTRACE_TRY(fresh_guest());
    Random random(options_.seed, number * 2 + (uint64_t{1} << 60));
    uint64_t offset = number % sequence_slots * sequence_size + sequence_size / 2 + random.below(16);
    Sequence s = make_sequence(forms, mode, Arena::code + offset, background_, random, options_.verbose);
    std::memcpy(Native::code() + offset, s.code.data(), s.code.size());
    std::memcpy(guest_->code() + offset, s.code.data(), s.code.size());
    std::memcpy(Native::data(), s.data.data(), Arena::writable);
    Answer host = Native::run(s.in, mode);
    Data host_data;
    std::memcpy(host_data.data(), Native::data(), Arena::size);
    std::memset(Native::code() + offset, 0xcc, s.code.size());
    sequences_++;
    sequences_completed_ += host.vector == completed;

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

} // namespace vtrace::oracle
