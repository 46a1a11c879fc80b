// The comparison itself: forms in turn, forms at random, sequences, and what is no instruction at all.
//
// Every case follows from the seed and its number alone, so that each can be run again by itself.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "tests/oracle/native/compare.h"
#include "tests/oracle/native/form.h"
#include "tests/oracle/native/guest.h"
#include "tests/oracle/native/native.h"

namespace vtrace::oracle {

struct Options {
    uint64_t seed = 1;
    uint64_t cases = 300'000, sequences = 20'000;
    uint64_t first = 0, first_sequence = 0;
    unsigned max_sequences = 5; // printed
    unsigned rounds = 2;        // systematic passes
    unsigned max_failures = 200, per_mnemonic = 2;
    std::string only; // mnemonic
    bool self = false, sabotage = false;
    bool verbose = false;
    bool skip32 = false;
};

class Oracle {
  public:
    explicit Oracle(Options options) : options_(std::move(options)) {}

    /// True if all agreed and, in a whole run, every mnemonic in scope was executed. Fails when it can't run at all.
    Result<bool> run();

  private:
    struct Count {
        uint64_t completed = 0, faulted = 0, failed = 0, forms = 0;
    };
    using FormsByMnemonic = std::vector<std::vector<const Form*>>;

    // Places for code: each is used once in the life of a guest, whose blocks nobody tells of our writes.
    static constexpr uint64_t slot_size = 64, slots = Arena::code_size / slot_size - 1;
    static constexpr uint64_t sequence_size = 512, sequence_slots = Arena::code_size / sequence_size - 1;

    Result<> fresh_guest();
    void find_forms();
    bool enough_failures() const { return failures_ >= options_.max_failures; }
    bool whole_run() const { return !options_.first && options_.rounds && options_.only.empty(); }

    Result<> singles();
    Result<> one(uint64_t number, const Form& form);
    Result<> judge(uint64_t number, const Form& form, const Case& c);

    Result<> sequences();
    Result<> sequence(uint64_t number, const FormsByMnemonic& forms, Mode mode);

    /// Encodings that must raise #UD or #GP: LOCK where it may not stand, undefined opcodes, more than 15 bytes.
    Result<> illegal();
    Result<> illegal_code(const std::vector<uint8_t>& code, const UserState& in, Mode mode);

    void report(uint64_t number, const Case& c, const std::string& what);
    bool summary() const;

    Options options_;
    std::vector<Form> forms_;
    FormsByMnemonic by_mnemonic_;
    std::vector<bool> executed_; // forms
    std::map<ZydisMnemonic, Count> counts_;
    std::map<ZydisMnemonic, unsigned> reported_;
    std::unique_ptr<Guest> guest_;
    Data background_; // data memory before a case adds its own
    uint64_t failures_ = 0, failed_sequences_ = 0, failed_illegal_ = 0, total_ = 0, sequences_ = 0,
             sequences_completed_ = 0, illegal_ = 0, unbuildable_ = 0;
};

} // namespace vtrace::oracle
