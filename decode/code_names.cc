#include "decode/code_names.h"

#include <fmt/format.h>

namespace vtrace {
namespace {
constexpr size_t max_entries = 1u << 20;
} // namespace

CodeRange CodeNames::at(uint64_t address, Privilege privilege) const {
    const SymbolTable& table = privilege == Privilege::user ? user_ : kernel_;
    if (auto index = table.find(address)) {
        const Function& found = table[*index];
        const FunctionId first = privilege == Privilege::user ? first_user() : FunctionId{nameless_count};
        return {first + *index, found.address, found.address + found.size};
    }
    if (privilege == Privilege::user)
        return {nameless_user};
    return {upper_half(address) ? nameless_kernel : nameless_boot};
}

CodeRange CodeNames::entered_at(uint64_t address, Privilege privilege) {
    CodeRange range = at(address, privilege);
    if (range.named())
        return range;
    if (auto known = entry_ids_.find(address); known != entry_ids_.end())
        return {known->second};
    if (entries_.size() == max_entries)
        return range;
    const FunctionId id = first_entry() + static_cast<FunctionId>(entries_.size());
    entries_.push_back({address, privilege});
    entry_ids_.emplace(address, id);
    return {id};
}

std::vector<FunctionId> CodeNames::find_all(std::string_view name) const {
    std::vector<FunctionId> ids;
    for (SymbolTable::Index index : kernel_.find_all(name))
        ids.push_back(nameless_count + index);
    return ids;
}

const Function* CodeNames::function(FunctionId id) const {
    if (id < nameless_count || id >= first_entry())
        return nullptr;
    return id < first_user() ? &kernel_[id - nameless_count] : &user_[id - first_user()];
}

std::string CodeNames::name(FunctionId id) const {
    if (const Function* known = function(id))
        return known->module.empty() ? known->name : known->name + " [" + known->module + "]";
    if (id >= first_entry())
        return fmt::format("{:#x}", entries_[id - first_entry()].address);
    return id == nameless_user ? "[user]" : id == nameless_boot ? "[boot]" : "[kernel]";
}

std::string CodeNames::module(FunctionId id) const {
    if (const Function* known = function(id))
        return id >= first_user() ? "[program]" : known->module.empty() ? "vmlinux" : known->module;
    const bool user =
        id >= first_entry() ? entries_[id - first_entry()].privilege == Privilege::user : id == nameless_user;
    return user ? "[user]" : "[kernel]";
}

uint64_t CodeNames::address(FunctionId id) const {
    if (const Function* known = function(id))
        return known->address;
    return id >= first_entry() ? entries_[id - first_entry()].address : 0;
}

} // namespace vtrace
