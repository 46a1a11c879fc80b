#include "ds/pebs.h"

#include <algorithm>
#include <cstring>

#include "ds/msr.h"

namespace vtrace::ds {
namespace {

class Writer {
  public:
    explicit Writer(PebsBytes& bytes) : bytes_(bytes) {}
    void field(uint64_t value) {
        std::memcpy(bytes_.data() + size_, &value, sizeof value);
        size_ += sizeof value;
    }
    void raw(std::span<const uint8_t> data) {
        std::memcpy(bytes_.data() + size_, data.data(), data.size());
        size_ += data.size();
    }
    void set(size_t at, uint64_t value) { std::memcpy(bytes_.data() + at, &value, sizeof value); }
    size_t size() const { return size_; }

  private:
    PebsBytes& bytes_;
    size_t size_ = 0;
};

// Registers by number, in the records' orders.
constexpr unsigned rax = 0, rcx = 1, rdx = 2, rbx = 3, rsp = 4, rbp = 5, rsi = 6, rdi = 7, r8 = 8;
constexpr unsigned core_order[] = {rax, rbx, rcx, rdx, rsi, rdi, rbp, rsp};
constexpr unsigned adaptive_order[] = {rax, rcx, rdx, rbx, rsp, rbp, rsi, rdi};

void write_registers(Writer& out, const PebsState& state, std::span<const unsigned, 8> order) {
    out.field(state.rflags);
    out.field(state.rip);
    for (unsigned number : order)
        out.field(state.gpr[number]);
    for (unsigned number = r8; number < 16; ++number)
        out.field(state.gpr[number]);
}

/// SDM vol. 3, 18.9.2.2: groups follow each other in this order, those that aren't asked for leave no gap.
void write_adaptive(Writer& out, const PebsState& state, uint64_t counters, uint64_t data_cfg, const LbrStack& lbr) {
    namespace D = msr::PebsData;
    constexpr unsigned size_shift = 48;
    out.field(0); // format and size, below
    out.field(state.eventing_ip);
    out.field(counters);
    out.field(state.tsc);
    if (data_cfg & D::memory_info) {
        out.field(state.data_address);
        out.field(state.data_source);
        out.field(state.latency);
        out.field(0); // TSX
    }
    if (data_cfg & D::gprs)
        write_registers(out, state, adaptive_order);
    if (data_cfg & D::xmms)
        out.raw(state.xmm);
    if (data_cfg & D::lbrs) {
        const unsigned entries = static_cast<unsigned>((data_cfg & D::lbr_entries) >> D::lbr_entries_shift) + 1;
        for (unsigned age = 0; age < std::min(entries, LbrStack::max_depth); ++age) {
            const LbrStack::Entry entry = age < lbr.depth() ? lbr.entry(age) : LbrStack::Entry{};
            out.field(entry.from);
            out.field(entry.to);
            out.field(entry.info);
        }
    }
    out.set(0, data_cfg | uint64_t{out.size()} << size_shift);
}

} // namespace

size_t encode_pebs(const CpuModel& model, const PebsState& state, uint64_t counters, uint64_t global_status,
                   uint64_t data_cfg, const LbrStack& lbr, PebsBytes& bytes) {
    Writer out(bytes);
    if (model.pebs == PebsFormat::adaptive) {
        write_adaptive(out, state, counters, data_cfg, lbr);
        return out.size();
    }
    write_registers(out, state, core_order);
    if (model.pebs == PebsFormat::core)
        return out.size();
    out.field(model.pebs == PebsFormat::skylake ? counters : global_status);
    out.field(state.data_address);
    out.field(state.data_source);
    out.field(state.latency);
    if (model.pebs == PebsFormat::nehalem)
        return out.size();
    out.field(state.eventing_ip);
    out.field(0); // TSX
    if (model.pebs == PebsFormat::skylake)
        out.field(state.tsc);
    return out.size();
}

} // namespace vtrace::ds
