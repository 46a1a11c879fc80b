// Page walks, TLB fills and the slow path of every data access. SDM vol. 3, chapter 4.
#include <algorithm>

#include "vmm/soft/block_cache.h"
#include "vmm/soft/cpu.h"
#include "vmm/soft/system.h"

namespace vtrace::soft {
namespace {

// Paging-structure entries (SDM vol. 3, tables 4-14 to 4-19).
namespace Pte {
constexpr uint64_t p = 1 << 0, w = 1 << 1, u = 1 << 2, a = 1 << 5, d = 1 << 6, ps = 1 << 7, g = 1 << 8;
constexpr uint64_t xd = 1ull << 63;
constexpr uint64_t address = 0x000f'ffff'ffff'f000;
} // namespace Pte

struct Level {
    Gpa entry_gpa;
    uint64_t entry;
};

/// The walk itself: entries from the top to the leaf.
struct Walk {
    Level levels[4];
    unsigned count = 0;
    unsigned entry_size = 8;
    Gpa page = 0; // physical address of the byte
    uint8_t page_shift = 12;
    bool user = true, writable = true, execute_disable = false, global = false;
    enum class Result : uint8_t { ok, not_present, reserved } result = Result::ok;
};

uint64_t read_entry(const Cpu& cpu, Gpa gpa, unsigned size) {
    uint64_t entry = 0;
    if (const uint8_t* host = cpu.memory.at(gpa, size))
        std::memcpy(&entry, host, size);
    else
        entry = ~0ull; // nobody answers on the bus: all ones, which is an entry with reserved bits set
    return entry;
}

/// PAE and 4-level paging: 64-bit entries. `level_shift`: of the top level's index.
void walk_64(const Cpu& cpu, uint64_t address, unsigned top_shift, Walk& walk) {
    const uint64_t above_physical = Pte::address & ~((1ull << cpu.cpuid.physical_address_bits()) - 1);
    const uint64_t always_reserved = above_physical | (cpu.efer & Efer::nxe ? 0 : Pte::xd);
    Gpa table = top_shift == 39 ? cpu.cr3 & Pte::address : cpu.cr3 & 0xffff'ffe0;
    for (unsigned shift = top_shift;; shift -= 9) {
        const bool pae_top = shift == 30 && top_shift == 30;
        Gpa entry_gpa = table + (address >> shift & (pae_top ? 3 : 511)) * 8;
        uint64_t entry = read_entry(cpu, entry_gpa, 8);
        walk.levels[walk.count++] = {entry_gpa, entry};
        if (!(entry & Pte::p)) {
            walk.result = Walk::Result::not_present;
            return;
        }
        const bool large = (entry & Pte::ps) && shift > 12 && !pae_top;
        uint64_t reserved = always_reserved;
        if (pae_top)
            reserved = above_physical | 0x1e6 | Pte::xd; // a PDPTE has no R/W, U/S, A, D, PS bits (table 4-8)
        else if (shift == 39 || (shift == 30 && !cpu.cpuid.has(Feature::gbpages)))
            reserved |= Pte::ps;
        if (large)
            reserved |= ((1ull << shift) - 1) & ~uint64_t{0x1fff}; // bit 12 is PAT
        if (top_shift == 30)
            reserved |= 0x7ff0'0000'0000'0000; // PAE: bits 62:52 are reserved, not ignored
        if (entry & reserved) {
            walk.result = Walk::Result::reserved;
            return;
        }
        if (!pae_top) {
            walk.user &= bool(entry & Pte::u);
            walk.writable &= bool(entry & Pte::w);
            walk.execute_disable |= bool(entry & Pte::xd);
        }
        if (large || shift == 12) {
            walk.page_shift = static_cast<uint8_t>(shift);
            uint64_t offset_mask = (1ull << shift) - 1;
            walk.page = (entry & Pte::address & ~offset_mask) | (address & offset_mask);
            walk.global = (entry & Pte::g) && (cpu.cr4 & Cr4::pge);
            return;
        }
        table = entry & Pte::address;
    }
}

/// 32-bit paging: two levels, 4 MiB pages with PSE (and PSE-36).
void walk_32(const Cpu& cpu, uint64_t address, Walk& walk) {
    walk.entry_size = 4;
    Gpa table = cpu.cr3 & 0xffff'f000;
    for (unsigned shift = 22;; shift -= 10) {
        Gpa entry_gpa = table + (address >> shift & 1023) * 4;
        uint64_t entry = static_cast<uint32_t>(read_entry(cpu, entry_gpa, 4));
        walk.levels[walk.count++] = {entry_gpa, entry};
        if (!(entry & Pte::p)) {
            walk.result = Walk::Result::not_present;
            return;
        }
        walk.user &= bool(entry & Pte::u);
        walk.writable &= bool(entry & Pte::w);
        const bool large = shift == 22 && (entry & Pte::ps) && (cpu.cr4 & Cr4::pse);
        if (large) {
            if (entry & 1 << 21) {
                walk.result = Walk::Result::reserved;
                return;
            }
            walk.page_shift = 22;
            walk.page = (entry & 0xffc0'0000) | (entry >> 13 & 0xff) << 32 | (address & 0x3f'ffff);
        } else if (shift == 12) {
            walk.page = (entry & 0xffff'f000) | (address & page_mask);
        } else {
            table = entry & 0xffff'f000;
            continue;
        }
        walk.global = (entry & Pte::g) && (cpu.cr4 & Cr4::pge);
        return;
    }
}

Walk walk_tables(const Cpu& cpu, uint64_t address) {
    Walk walk;
    if (cpu.long_mode())
        walk_64(cpu, address, 39, walk);
    else if (cpu.cr4 & Cr4::pae)
        walk_64(cpu, address, 30, walk);
    else
        walk_32(cpu, address, walk);
    return walk;
}

/// Sets A on the way and, for a write, D in the leaf. Not atomic: one thread runs the machine.
void set_accessed(Cpu& cpu, const Walk& walk, bool dirty) {
    for (unsigned i = 0; i < walk.count; ++i) {
        const Level& level = walk.levels[i];
        const bool pae_top = walk.count > 1 && i == 0 && !cpu.long_mode() && walk.entry_size == 8;
        if (pae_top)
            continue;
        uint64_t entry = level.entry | Pte::a | (dirty && i + 1 == walk.count ? Pte::d : 0);
        if (entry == level.entry)
            continue;
        if (uint8_t* host = cpu.memory.at(level.entry_gpa, walk.entry_size)) {
            std::memcpy(host, &entry, walk.entry_size);
            cpu.memory_written(level.entry_gpa, walk.entry_size);
        }
    }
}

bool allowed(const Cpu& cpu, const Walk& walk, Access access, MmuContext context) {
    if (context == MmuContext::user) {
        if (!walk.user)
            return false;
        return access == Access::read || (access == Access::write ? walk.writable : !walk.execute_disable);
    }
    if (access == Access::fetch)
        return !walk.execute_disable && !(walk.user && (cpu.cr4 & Cr4::smep));
    if (walk.user && (cpu.cr4 & Cr4::smap) && context != MmuContext::supervisor_ac)
        return false;
    return access == Access::read || walk.writable || !(cpu.cr0 & Cr0::wp);
}

} // namespace

bool Cpu::translate(uint64_t address, Access access, MmuContext context, Translation& result) {
    if (!(cr0 & Cr0::pg)) {
        result = {address & 0xffff'ffff, true, false, true, 12};
        return true;
    }
    if (long_mode() && !is_canonical(address)) {
        fault = Fault{Vector::gp, true, 0, 0};
        return false;
    }
    Walk walk = walk_tables(*this, address);
    if (walk.result != Walk::Result::ok || !allowed(*this, walk, access, context)) {
        uint32_t error = walk.result != Walk::Result::not_present ? PfError::p : 0;
        error |= access == Access::write ? PfError::w : 0;
        error |= context == MmuContext::user ? PfError::u : 0;
        error |= walk.result == Walk::Result::reserved ? PfError::rsvd : 0;
        bool reports_fetch = ((efer & Efer::nxe) && (cr4 & Cr4::pae)) || (cr4 & Cr4::smep);
        error |= access == Access::fetch && reports_fetch ? PfError::i : 0;
        fault = Fault{Vector::pf, true, error, address};
        return false;
    }
    set_accessed(*this, walk, access == Access::write);
    bool dirty = access == Access::write || (walk.levels[walk.count - 1].entry & Pte::d);
    result = {walk.page, walk.user, walk.global, dirty && allowed(*this, walk, Access::write, context), walk.page_shift};
    return true;
}

std::optional<Gpa> Cpu::peek(uint64_t address) const {
    if (!(cr0 & Cr0::pg))
        return address & 0xffff'ffff;
    if (long_mode() && !is_canonical(address))
        return std::nullopt;
    Walk walk = walk_tables(*this, address);
    if (walk.result != Walk::Result::ok)
        return std::nullopt;
    return walk.page;
}

namespace {

/// One access as at most two pieces, each within a page.
struct Pieces {
    struct Piece {
        uint64_t address;
        unsigned size;
        Translation where;
        uint8_t* host; // null: MMIO
    } piece[2];
    unsigned count;
};

bool split_and_translate(Cpu& cpu, uint64_t address, unsigned size, Access access, MmuContext context, Pieces& pieces) {
    unsigned first = std::min<uint64_t>(size, page_size - (address & page_mask));
    uint64_t second = address + first;
    pieces.count = first < size ? 2 : 1;
    pieces.piece[0] = {address, first, {}, nullptr};
    pieces.piece[1] = {cpu.long_mode() ? second : uint32_t(second), size - first, {}, nullptr};
    for (unsigned i = 0; i < pieces.count; ++i) {
        auto& piece = pieces.piece[i];
        if (!cpu.translate(piece.address, access, context, piece.where))
            return false;
        piece.host = cpu.memory.at(piece.where.gpa, piece.size);
    }
    return true;
}

/// Splits a device access into sizes that a bus knows.
template <class Function>
void for_each_bus_access(Gpa gpa, unsigned size, Function function) {
    for (unsigned done = 0; done < size;) {
        unsigned step = 8;
        while (step > size - done || (gpa + done) % step)
            step /= 2;
        function(gpa + done, done, step);
        done += step;
    }
}

void read_piece(Cpu& cpu, const Pieces::Piece& piece, uint8_t* bytes) {
    if (piece.host) {
        std::memcpy(bytes, piece.host, piece.size);
        return;
    }
    for_each_bus_access(piece.where.gpa, piece.size, [&](Gpa gpa, unsigned offset, unsigned step) {
        uint64_t value = cpu.pins.mmio_read(gpa, step);
        std::memcpy(bytes + offset, &value, step);
    });
}

void write_piece(Cpu& cpu, const Pieces::Piece& piece, const uint8_t* bytes) {
    if (piece.host) {
        std::memcpy(piece.host, bytes, piece.size);
        cpu.memory_written(piece.where.gpa, piece.size);
        return;
    }
    for_each_bus_access(piece.where.gpa, piece.size, [&](Gpa gpa, unsigned offset, unsigned step) {
        uint64_t value = 0;
        std::memcpy(&value, bytes + offset, step);
        cpu.pins.mmio_write(gpa, step, value);
    });
}

void fill_tlb(Cpu& cpu, const Pieces::Piece& piece, MmuContext context) {
    if (!piece.host || (cpu.dr7 & 0xff && page_watched(cpu, piece.address)))
        return;
    uint64_t page = piece.address & ~page_mask;
    Gpa gpa = piece.where.gpa & ~page_mask;
    bool writable = piece.where.writable_now && !(cpu.blocks && cpu.blocks->page_has_code(gpa));
    cpu.tlbs[static_cast<unsigned>(context)][page >> 12 & (tlb_entries - 1)] = {
        page, writable ? page : tlb_no_tag, reinterpret_cast<uintptr_t>(piece.host) - piece.address,
        gpa | TlbMark::make(piece.where.global, piece.where.page_shift)};
    if (piece.where.page_shift > 12)
        cpu.note_large_page(page, piece.where.page_shift);
}

} // namespace

void Cpu::remember_translation(uint64_t address, const Translation& where, MmuContext context) {
    fill_tlb(*this, {address, 1, where, memory.at(where.gpa, 1)}, context);
}

namespace {

/// The fault of a data access by an instruction: a non-canonical stack address is #SS, not #GP (SDM vol. 1, 3.3.7.1).
bool data_fault(Cpu& cpu, const Op* op) {
    if (cpu.fault.vector == Vector::gp && op->seg == SS)
        cpu.fault.vector = Vector::ss;
    cpu.leave_before(op, Leave::fault);
    return false;
}

/// Does an access of this size break the rules of SDM vol. 3, table 6-7? An 80-bit floating-point value wants 8 bytes.
bool misaligned(uint64_t address, unsigned size) {
    constexpr unsigned extended = 10;
    if (size == extended)
        size = 8;
    return std::has_single_bit(size) && size <= 8 && address % size;
}

/// Translates an instruction's data access; false if it faulted or must be executed alone first.
bool prepare(Cpu& cpu, const Op* op, uint64_t address, unsigned size, Access access, Pieces& pieces) {
    MmuContext context = cpu.data_context();
    if (VTRACE_UNLIKELY(cpu.alignment_checked()) && misaligned(address, size) && cpu.is_canonical(address) &&
        cpu.is_canonical(address + size - 1)) {
        cpu.raise(op, Vector::ac, 0);
        return false;
    }
    if (!split_and_translate(cpu, address, size, access, context, pieces))
        return data_fault(cpu, op);
    for (unsigned i = 0; i < pieces.count; ++i) {
        const auto& piece = pieces.piece[i];
        bool alone = !piece.host || (access == Access::write && cpu.blocks && cpu.blocks->page_has_code(piece.where.gpa) &&
                                     cpu.blocks->is_code(piece.where.gpa, piece.size));
        if (alone && !cpu.single) {
            cpu.leave_before(op, Leave::restart_single);
            return false;
        }
        if (!piece.host)
            cpu.sync_clock(op);
    }
    if (VTRACE_UNLIKELY(cpu.dr7 & 0xff))
        cpu.pending_db |= data_breakpoints(cpu, address, size, access == Access::write);
    return true;
}

} // namespace

/// A load whose access is checked as `access`: a write where one will follow.
bool Cpu::load_as(const Op* op, uint64_t address, void* value, unsigned size, Access access) {
    if (!code64())
        address = uint32_t(address);
    Pieces pieces;
    if (!prepare(*this, op, address, size, access, pieces))
        return false;
    auto* bytes = static_cast<uint8_t*>(value);
    for (unsigned i = 0; i < pieces.count; ++i) {
        read_piece(*this, pieces.piece[i], bytes);
        bytes += pieces.piece[i].size;
        fill_tlb(*this, pieces.piece[i], data_context());
    }
    return true;
}

bool Cpu::store_slow(const Op* op, uint64_t address, const void* value, unsigned size) {
    if (!code64())
        address = uint32_t(address);
    Pieces pieces;
    if (!prepare(*this, op, address, size, Access::write, pieces))
        return false;
    const auto* bytes = static_cast<const uint8_t*>(value);
    for (unsigned i = 0; i < pieces.count; ++i) {
        write_piece(*this, pieces.piece[i], bytes);
        bytes += pieces.piece[i].size;
        fill_tlb(*this, pieces.piece[i], data_context());
    }
    return true;
}

Cpu::Loaded Cpu::load_slow_value(const Op* op, uint64_t address, unsigned size) {
    Loaded loaded{0, false};
    loaded.ok = load_as(op, address, size <= 8 ? static_cast<void*>(&loaded.value) : scratch, size, Access::read);
    return loaded;
}

Cpu::Loaded Cpu::load_for_write_slow_value(const Op* op, uint64_t address, unsigned size) {
    Loaded loaded{0, false};
    loaded.ok = load_as(op, address, size <= 8 ? static_cast<void*>(&loaded.value) : scratch, size, Access::write);
    return loaded;
}

bool Cpu::store_slow_value(const Op* op, uint64_t address, uint64_t value, unsigned size) {
    return store_slow(op, address, &value, size);
}

bool Cpu::system_read(uint64_t address, void* bytes, unsigned size, MmuContext context) {
    Pieces pieces;
    if (!split_and_translate(*this, address, size, Access::read, context, pieces))
        return false;
    auto* out = static_cast<uint8_t*>(bytes);
    for (unsigned i = 0; i < pieces.count; ++i) {
        read_piece(*this, pieces.piece[i], out);
        out += pieces.piece[i].size;
    }
    return true;
}

bool Cpu::system_write(uint64_t address, const void* bytes, unsigned size, MmuContext context) {
    Pieces pieces;
    if (!split_and_translate(*this, address, size, Access::write, context, pieces))
        return false;
    const auto* in = static_cast<const uint8_t*>(bytes);
    for (unsigned i = 0; i < pieces.count; ++i) {
        write_piece(*this, pieces.piece[i], in);
        in += pieces.piece[i].size;
    }
    return true;
}

} // namespace vtrace::soft
