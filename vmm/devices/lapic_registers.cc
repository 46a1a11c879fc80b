// The local APIC's registers as the processor reads and writes them: by its page, by MSRs, and IA32_APIC_BASE.
#include "vmm/devices/apic_bus.h"
#include "vmm/devices/lapic.h"
#include "vmm/devices/lapic_bits.h"

namespace vtrace {

using namespace apic;

namespace {

constexpr uint32_t version_number = 0x14, version_max_lvt_shift = 16;
constexpr unsigned register_stride = 16, bitmap_length = 0x80;
constexpr uint32_t ldr_writable = 0xff00'0000, dfr_fixed_ones = 0x0fff'ffff;
constexpr uint32_t divide_valid = 0b1011;

bool within(unsigned offset, unsigned start) {
    return offset >= start && offset < start + bitmap_length;
}

} // namespace

uint64_t Lapic::page_base_mask() const {
    return ((1ull << wiring_.physical_address_bits) - 1) & ~page_mask;
}

std::optional<uint64_t> Lapic::read_msr(uint32_t msr) {
    if (msr == ApicMsr::apic_base)
        return state_.apic_base;
    if (msr == ApicMsr::tsc_deadline)
        return timer_mode() == TimerMode::tsc_deadline ? state_.tsc_deadline : 0;
    if (msr >= ApicMsr::x2apic_first && msr <= ApicMsr::x2apic_last && x2apic_mode())
        return read_x2apic(msr);
    return std::nullopt;
}

bool Lapic::write_msr(uint32_t msr, uint64_t value) {
    if (msr == ApicMsr::apic_base)
        return set_apic_base(value);
    if (msr == ApicMsr::tsc_deadline) {
        write_tsc_deadline(value);
        return true;
    }
    return msr >= ApicMsr::x2apic_first && msr <= ApicMsr::x2apic_last && x2apic_mode() && write_x2apic(msr, value);
}

// Table 10-5 and figure 10-27: which changes of mode there are.
bool Lapic::set_apic_base(uint64_t value) {
    if (value & ~(page_base_mask() | ApicBase::bsp | ApicBase::extd | ApicBase::en))
        return false;
    const bool enable = value & ApicBase::en, extended = value & ApicBase::extd;
    if (extended && !enable)
        return false;
    if (x2apic_mode() && enable && !extended)
        return false;
    if (!enabled() && extended)
        return false;
    const bool was_enabled = enabled(), was_x2apic = x2apic_mode();
    state_.apic_base = value;
    if (was_enabled != enable) {
        clear_registers();
    } else if (!was_x2apic && x2apic_mode()) { // 10.12.5.1: the rest keeps its state
        state_.ldr = (state_.id >> 4) << 16 | 1u << (state_.id & 15);
        state_.icr &= 0xffff'ffff;
    }
    update_pending();
    return true;
}

std::optional<Lapic::Lvt> Lapic::lvt_at(unsigned offset) {
    switch (offset) {
    case ApicReg::lvt_timer:
        return timer;
    case ApicReg::lvt_thermal:
        return thermal;
    case ApicReg::lvt_pc:
        return pc;
    case ApicReg::lvt_lint0:
        return lint0;
    case ApicReg::lvt_lint1:
        return lint1;
    case ApicReg::lvt_error:
        return error;
    default:
        return std::nullopt;
    }
}

// The bits that software may set; delivery status and remote IRR are read-only.
uint32_t Lapic::lvt_valid(Lvt entry) {
    switch (entry) {
    case timer:
        return LvtBit::vector | LvtBit::mask | LvtBit::timer_mode;
    case lint0:
    case lint1:
        return LvtBit::vector | LvtBit::delivery_mode | LvtBit::polarity | LvtBit::level | LvtBit::mask;
    case error:
        return LvtBit::vector | LvtBit::mask;
    default:
        return LvtBit::vector | LvtBit::delivery_mode | LvtBit::mask;
    }
}

// Registers that both modes have in the same form. nullopt: there is no such register to read.
std::optional<uint32_t> Lapic::read_register(unsigned offset) {
    if (within(offset, ApicReg::isr))
        return state_.isr[(offset - ApicReg::isr) / register_stride];
    if (within(offset, ApicReg::tmr))
        return state_.tmr[(offset - ApicReg::tmr) / register_stride];
    if (within(offset, ApicReg::irr))
        return state_.irr[(offset - ApicReg::irr) / register_stride];
    if (const auto entry = lvt_at(offset))
        return state_.lvt[*entry];
    switch (offset) {
    case ApicReg::version:
        return version_number | (lvt_count - 1) << version_max_lvt_shift;
    case ApicReg::tpr:
        return state_.tpr;
    case ApicReg::ppr:
        return processor_priority();
    case ApicReg::ldr:
        return state_.ldr;
    case ApicReg::svr:
        return state_.svr;
    case ApicReg::esr:
        return state_.esr;
    case ApicReg::initial_count:
        return state_.initial_count;
    case ApicReg::current_count:
        return current_count();
    case ApicReg::divide:
        return state_.divide_configuration;
    default:
        return std::nullopt;
    }
}

bool Lapic::write_register(unsigned offset, uint32_t value) {
    if (const auto entry = lvt_at(offset)) {
        write_lvt(*entry, value);
        return true;
    }
    switch (offset) {
    case ApicReg::tpr:
        set_tpr(static_cast<uint8_t>(value));
        return true;
    case ApicReg::eoi:
        end_of_interrupt();
        return true;
    case ApicReg::svr:
        write_svr(value);
        return true;
    case ApicReg::esr: // a write latches what was collected (10.5.3)
        state_.esr = state_.errors;
        state_.errors = 0;
        return true;
    case ApicReg::initial_count:
        write_initial_count(value);
        return true;
    case ApicReg::divide:
        write_divide(value);
        return true;
    default:
        return false;
    }
}

void Lapic::write_svr(uint32_t value) {
    state_.svr = value & (SvrBit::vector | SvrBit::enable | SvrBit::focus);
    if (!software_enabled()) { // 10.4.7.2: all local vectors are masked, and can't be unmasked
        for (uint32_t& entry : state_.lvt)
            entry |= LvtBit::mask;
        arm_timer();
    }
    update_pending();
}

void Lapic::write_lvt(Lvt entry, uint32_t value) {
    const uint32_t before = state_.lvt[entry];
    value &= lvt_valid(entry);
    if (!software_enabled())
        value |= LvtBit::mask;
    if (entry == lint0 && value & LvtBit::level)
        value |= before & LvtBit::remote_irr;
    state_.lvt[entry] = value;
    if (entry == timer)
        timer_lvt_changed(before);
    else if (entry == lint0)
        sample_lint0();
    update_pending(); // LINT0 may let the PIC through
}

uint64_t Lapic::mmio_read(Gpa gpa, unsigned size) {
    const auto offset = static_cast<unsigned>(gpa & page_mask);
    const unsigned aligned = offset & ~(register_stride - 1), within_register = offset % register_stride;
    std::optional<uint32_t> value;
    switch (aligned) {
    case ApicReg::id:
        value = state_.id << 24;
        break;
    case ApicReg::dfr:
        value = state_.dfr;
        break;
    case ApicReg::icr_low:
        value = static_cast<uint32_t>(state_.icr);
        break;
    case ApicReg::icr_high:
        value = static_cast<uint32_t>(state_.icr >> 32);
        break;
    case ApicReg::eoi: // write-only; reads as zero
        value = 0;
        break;
    default:
        value = read_register(aligned);
    }
    if (!value) {
        report_error(EsrBit::illegal_register);
        return 0;
    }
    // Only the first four of a register's sixteen bytes are there; other accesses are undefined (10.4.1): zeros here.
    if (within_register >= 4)
        return 0;
    const uint64_t bytes = uint64_t{*value} >> 8 * within_register;
    return size >= 8 ? bytes : bytes & ((1ull << 8 * size) - 1);
}

void Lapic::mmio_write(Gpa gpa, unsigned size, uint64_t wide) {
    const auto offset = static_cast<unsigned>(gpa & page_mask);
    if (offset % register_stride != 0 || size < 4)
        return; // undefined (10.4.1): ignored here
    const auto value = static_cast<uint32_t>(wide);
    switch (offset) {
    case ApicReg::id: // read-only in processors that have x2APIC
    case ApicReg::version:
    case ApicReg::ppr:
    case ApicReg::current_count:
        return;
    case ApicReg::ldr:
        state_.ldr = value & ldr_writable;
        return;
    case ApicReg::dfr:
        state_.dfr = value | dfr_fixed_ones;
        return;
    case ApicReg::icr_low:
        state_.icr = (state_.icr & ~0xffff'ffffull) | (value & IcrBit::low_writable);
        send_ipi(state_.icr);
        return;
    case ApicReg::icr_high:
        state_.icr = (state_.icr & 0xffff'ffff) | uint64_t{value & 0xff00'0000} << 32;
        return;
    default:
        if (within(offset, ApicReg::isr) || within(offset, ApicReg::tmr) || within(offset, ApicReg::irr))
            return;
        if (!write_register(offset, value))
            report_error(EsrBit::illegal_register);
    }
}

std::optional<uint64_t> Lapic::read_x2apic(uint32_t msr) {
    const unsigned offset = (msr - ApicMsr::x2apic_first) * register_stride;
    if (offset == ApicReg::id)
        return state_.id;
    if (offset == ApicReg::icr_low)
        return state_.icr;
    return read_register(offset); // EOI, SELF IPI, DFR and the ICR's upper half aren't there to read
}

bool Lapic::write_x2apic(uint32_t msr, uint64_t value) {
    const unsigned offset = (msr - ApicMsr::x2apic_first) * register_stride;
    if (offset == ApicReg::icr_low) {
        if (value & IcrBit::low_reserved_x2apic)
            return false;
        state_.icr = value & ~IcrBit::delivery_status; // processors ignore that bit
        send_ipi(state_.icr);
        return true;
    }
    if (value >> 32)
        return false;
    // What may be set in each register; a bit outside of it is #GP.
    uint32_t valid = 0;
    if (const auto entry = lvt_at(offset)) {
        valid = lvt_valid(*entry) | LvtBit::delivery_status;
        if (*entry == lint0 || *entry == lint1)
            valid |= LvtBit::remote_irr;
    } else {
        switch (offset) {
        case ApicReg::tpr:
        case ApicReg::self_ipi:
            valid = 0xff;
            break;
        case ApicReg::eoi:
        case ApicReg::esr: // zero only
            break;
        case ApicReg::svr:
            valid = SvrBit::vector | SvrBit::enable;
            break;
        case ApicReg::initial_count:
            valid = ~0u;
            break;
        case ApicReg::divide:
            valid = divide_valid;
            break;
        default:
            return false;
        }
    }
    if (value & ~uint64_t{valid})
        return false;
    if (offset == ApicReg::self_ipi) {
        send_ipi(value | static_cast<uint64_t>(Shorthand::self) << IcrBit::shorthand_shift);
        return true;
    }
    return write_register(offset, static_cast<uint32_t>(value));
}

} // namespace vtrace
