#include "tests/oracle/native/oracle.h"

#include <chrono>

namespace vtrace::oracle {

Result<> Oracle::fresh_guest() {
    auto guest = Guest::create(Native::fs_base(), Arena::gs_base);
    if (!guest)
        return Unexpected(guest.error());
    guest_ = std::move(*guest);
    std::memcpy(guest_->data(), background_.data(), Arena::size);
    return {};
}

void Oracle::find_forms() {
    forms_ = all_forms(Mode::bits64);
    if (!options_.skip32)
        for (const Form& form : all_forms(Mode::bits32))
            forms_.push_back(form);
    if (!options_.only.empty())
        std::erase_if(forms_, [&](const Form& f) { return ZydisMnemonicGetString(f.mnemonic) != options_.only; });
    executed_.resize(forms_.size());
    std::map<ZydisMnemonic, std::vector<const Form*>> by_mnemonic;
    for (const Form& form : forms_) {
        counts_[form.mnemonic].forms++;
        by_mnemonic[form.mnemonic].push_back(&form);
    }
    for (auto& [mnemonic, same] : by_mnemonic)
        by_mnemonic_.push_back(std::move(same));
}

Result<bool> Oracle::run() {
    VTRACE_TRY(Native::start());
    Random random(options_.seed, ~0ull);
    for (unsigned at = 0; at < Arena::size; at += 32)
        random.fill(background_.data() + at, 32);
    Native::set_read_only_page(background_.data() + Arena::writable);
    VTRACE_TRY(fresh_guest());

    find_forms();
    if (forms_.empty())
        return fail("there is no mnemonic '{}' in scope", options_.only);
    fmt::print("seed {}: {} forms of {} mnemonics\n", options_.seed, forms_.size(), counts_.size());

    auto start = std::chrono::steady_clock::now();
    VTRACE_TRY(singles());
    VTRACE_TRY(sequences());
    if (whole_run())
        VTRACE_TRY(illegal());
    double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    fmt::print(
        "{} cases ({} without safe inputs), {} sequences ({} to their end), {} illegal encodings in {:.1f} s: {} "
        "failed\n",
        total_, unbuildable_, sequences_, sequences_completed_, illegal_, seconds, failures_);
    return summary();
}

Result<> Oracle::singles() {
    // First each form in turn; then every mnemonic as often as any other, and every form as often as any other.
    uint64_t systematic = options_.rounds * forms_.size(), end = systematic + options_.cases;
    if (options_.first) // again
        end = options_.first + options_.cases;
    for (uint64_t number = options_.first; number < end && !enough_failures(); number++) {
        const Form* form = &forms_[number % forms_.size()];
        if (number >= systematic) {
            Random random(options_.seed, number);
            const std::vector<const Form*>& same =
                by_mnemonic_[random.below(static_cast<uint32_t>(by_mnemonic_.size()))];
            form = random.chance(50) ? same[random.below(static_cast<uint32_t>(same.size()))]
                                     : &forms_[random.below(static_cast<uint32_t>(forms_.size()))];
        }
        VTRACE_TRY(one(number, *form));
    }
    return {};
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
    if (number % slots == 0)
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

    if (options_.sabotage && i.mnemonic() == ZYDIS_MNEMONIC_ADC && got.state.gpr[RAX] % 64 == 7)
        got.state.rflags ^= Rflags::of;
    Undefined undefined = undefined_by(i, c.in, host);
    accept_approximation(i, host, got);
    std::string what = differences(undefined, c.in, host, got);
    if (std::memcmp(host_data.data(), guest_->data(), Arena::size) != 0 && !undefined.destination) {
        blank_undefined_memory(c, Native::fs_base(), host_data.data());
        blank_undefined_memory(c, Native::fs_base(), guest_->data());
        what += memory_differences(c.data.data(), host_data.data(), guest_->data());
    }
    if (!what.empty()) {
        count.failed++;
        report(number, c, what);
    }
    return {};
}

} // namespace vtrace::oracle
