// CodeNames: one small number for each function of a guest, kernel and user programs alike, and its name.
#pragma once

#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include "decode/privilege.h"
#include "decode/symbols.h"

namespace vtrace {

/// Of one CodeNames.
using FunctionId = uint32_t;

/// A function, and the addresses that are known to be its own: [start, end), empty for code without a symbol.
struct CodeRange {
    FunctionId id = 0;
    uint64_t start = 0, end = 0;
    bool named() const { return end != 0; }
};

/// Not thread-safe. The tables must outlive it.
class CodeNames {
  public:
    /// Code without a symbol, as the report names it.
    enum Nameless : FunctionId { nameless_kernel, nameless_user, nameless_boot, nameless_count };

    /// `kernel`: the trace's own symbols. `user`: of a user program, may be empty: they answer for user code alone.
    CodeNames(const SymbolTable& kernel, const SymbolTable& user) : kernel_(kernel), user_(user) {}

    /// The function that covers an address.
    CodeRange at(uint64_t address, Privilege privilege) const;
    /// The function entered at an address by a call: where it has no symbol, one named by this address. Past 2^20 of
    /// those, nameless ones.
    CodeRange entered_at(uint64_t address, Privilege privilege);
    /// The kernel's functions of that name.
    std::vector<FunctionId> find_all(std::string_view name) const;

    /// "memcpy", "ext4_iget [ext4]", "0x401136", "[user]".
    std::string name(FunctionId id) const;
    /// Where it lies: "vmlinux", "ext4", "[user]"; for user symbols "[program]".
    std::string module(FunctionId id) const;
    /// Address of its first instruction; 0 for nameless code.
    uint64_t address(FunctionId id) const;

  private:
    const Function* function(FunctionId id) const;
    FunctionId first_user() const { return nameless_count + static_cast<FunctionId>(kernel_.functions().size()); }
    FunctionId first_entry() const { return first_user() + static_cast<FunctionId>(user_.functions().size()); }

    const SymbolTable& kernel_;
    const SymbolTable& user_;
    struct Entry {
        uint64_t address;
        Privilege privilege;
    };
    std::vector<Entry> entries_;
    std::unordered_map<uint64_t, FunctionId> entry_ids_; // by address
};

} // namespace vtrace
