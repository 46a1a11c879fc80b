// SystemMachine: a software CPU with hand-built descriptor tables, for the tests of the privileged side.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string_view>
#include <vector>

#include "vmm/clock.h"
#include "vmm/soft/cpu.h"
#include "vmm/soft/system.h"

namespace vtrace::soft {

enum class TestMode { real, protected32, long64 };

/// Selectors in the machine's GDT, without RPL.
namespace Sel {
inline constexpr uint16_t code = 0x08, data = 0x10, code32 = 0x18, user_code32 = 0x20, user_data = 0x28,
                          user_code = 0x30, absent_data = 0x38, tss = 0x40, conforming = 0x50, call_gate = 0x58,
                          unused = 0x80, outside = 0x100;
}

class SystemMachine {
  public:
    static constexpr uint64_t gdt = 0x8000, idt = 0x9000, tss = 0xa000, code_at = 0x10000, stack_top = 0x18000,
                              inner_stack = 0x20000, ist1_stack = 0x22000, handlers = 0x30000, absent_page = 0x1f0000;
    static constexpr unsigned handler_stride = 16;

    /// Paging is on in long mode only: identity, everything writable for user and supervisor but absent_page.
    explicit SystemMachine(TestMode mode, std::string_view model = "x86-64-v2");
    ~SystemMachine();

    Cpu& cpu() { return *cpu_; }
    /// CPL 0 or 3, with flat segments of that level and the stack at stack_top.
    void set_level(unsigned level);
    /// Level 3 in compatibility mode.
    void set_user32();

    /// Executes one instruction, whose bytes go to code_at; true if it retired. Else cpu().leave says why.
    bool step(std::initializer_list<int> bytes);
    /// step() that must end in this fault.
    bool faults(std::initializer_list<int> bytes, uint8_t vector);
    bool faults(std::initializer_list<int> bytes, uint8_t vector, uint32_t error_code);

    template <class T>
    T read(uint64_t address) const {
        T value;
        std::memcpy(&value, memory_.at(address, sizeof value), sizeof value);
        return value;
    }
    template <class T>
    void write(uint64_t address, T value) {
        std::memcpy(memory_.at(address, sizeof value), &value, sizeof value);
    }
    void set_descriptor(uint16_t selector, uint64_t low) { write(gdt + selector, low); }
    /// `type` as in the descriptor; the handler of `vector` is at handlers + vector * handler_stride.
    void set_gate(unsigned vector, unsigned type, unsigned dpl, unsigned ist = 0, uint16_t selector = Sel::code);
    uint64_t handler(unsigned vector) const { return handlers + vector * handler_stride; }
    /// The pages behind [address, +4 KiB) become not present (long mode).
    void unmap(uint64_t address);

    std::vector<ds::BtsRecord> records() const;

    struct Pins;
    Pins& pins() { return *pins_; }

  private:
    void build_long_mode();
    void build_protected_mode();
    void build_real_mode();

    TestMode mode_;
    GuestMemory memory_;
    std::unique_ptr<Pins> pins_;
    Clock clock_;
    CpuidModel model_;
    std::unique_ptr<Cpu> cpu_;
    std::vector<uint64_t> block_;
    std::vector<ds::BtsRecord> area_;
    ds::BtsCursor cursor_{};
};

struct SystemMachine::Pins final : CpuPins {
    std::map<uint16_t, uint32_t> ports;
    uint8_t cr8 = 0;
    unsigned pmis = 0;
    uint64_t apic_base = 0xfee0'0900;

    uint32_t io_read(uint16_t port, unsigned) override { return ports[port]; }
    void io_write(uint16_t port, unsigned, uint32_t value) override { ports[port] = value; }
    uint64_t mmio_read(Gpa, unsigned) override { return 0; }
    void mmio_write(Gpa, unsigned, uint64_t) override {}
    bool interrupt_pending() const override { return false; }
    uint8_t acknowledge_interrupt() override { return 0; }
    bool nmi_pending() const override { return false; }
    void acknowledge_nmi() override {}
    void raise_pmi() override { ++pmis; }
    uint8_t read_cr8() const override { return cr8; }
    void write_cr8(uint8_t priority) override { cr8 = priority; }
    std::optional<uint64_t> read_apic_msr(uint32_t msr) override {
        return msr == 0x1b ? std::optional(apic_base) : std::nullopt;
    }
    bool write_apic_msr(uint32_t msr, uint64_t value) override {
        if (msr == 0x1b)
            apic_base = value;
        return msr == 0x1b;
    }
};

} // namespace vtrace::soft
