#include "vmm/devices/acpi_pm.h"

namespace vtrace {
namespace {

enum Offset : unsigned { PM1_STS = 0, PM1_EN = 2, PM1_CNT = 4, PM_TMR = 8 };

namespace Pm1Sts {
constexpr uint16_t tmr = 1 << 0, pwrbtn = 1 << 8;
}
constexpr uint16_t enable_valid = 1 << 0 | 1 << 5 | 1 << 8 | 1 << 9 | 1 << 10; // TMR, GBL, PWRBTN, SLPBTN, RTC
namespace Pm1Cnt {
constexpr uint16_t sci_en = 1 << 0, writable = 0x1c06, slp_en = 1 << 13; // BM_RLD, GBL_RLS, SLP_TYP are kept
constexpr unsigned slp_typ_shift = 10;
constexpr uint16_t slp_typ_mask = 7;
} // namespace Pm1Cnt
constexpr unsigned timer_carry_shift = 31; // TMR_STS is set whenever the most significant bit changes

} // namespace

AcpiPm::AcpiPm(Clock& clock, IrqLine sci, MachineEventHandler event)
    : clock_(clock), sci_(std::move(sci)), event_(std::move(event)), carry_(clock.create("ACPI timer carry", [this] {
          collect_carry();
          update();
      })) {}

void AcpiPm::press_power_button() {
    state_.status |= Pm1Sts::pwrbtn;
    update();
}

void AcpiPm::collect_carry() {
    const VirtualTime now = clock_.now();
    if (timer.ticks_at(now) >> timer_carry_shift != timer.ticks_at(state_.carry_as_of) >> timer_carry_shift)
        state_.status |= Pm1Sts::tmr;
    state_.carry_as_of = now;
}

void AcpiPm::update() {
    sci_.set(state_.status & state_.enable);
    VirtualTime due = never;
    if (state_.enable & Pm1Sts::tmr && !(state_.status & Pm1Sts::tmr))
        due = timer.time_of(((timer.ticks_at(clock_.now()) >> timer_carry_shift) + 1) << timer_carry_shift);
    clock_.schedule(carry_, due);
}

uint8_t AcpiPm::read_byte(unsigned offset) {
    const unsigned shift = offset % 2 * 8;
    switch (offset & ~1u) {
    case PM1_STS:
        collect_carry();
        update();
        return static_cast<uint8_t>(state_.status >> shift);
    case PM1_EN:
        return static_cast<uint8_t>(state_.enable >> shift);
    case PM1_CNT:
        return static_cast<uint8_t>((state_.control | Pm1Cnt::sci_en) >> shift);
    case PM_TMR:
    case PM_TMR + 2:
        return static_cast<uint8_t>(timer.ticks_at(clock_.now()) >> 8 * (offset - PM_TMR));
    default:
        return 0;
    }
}

void AcpiPm::write_byte(unsigned offset, uint8_t value) {
    collect_carry();
    const unsigned shift = offset % 2 * 8;
    const auto placed = static_cast<uint16_t>(value << shift);
    const auto lane = static_cast<uint16_t>(0xff << shift);
    switch (offset & ~1u) {
    case PM1_STS: // writing a one clears
        state_.status &= static_cast<uint16_t>(~placed);
        break;
    case PM1_EN:
        state_.enable = static_cast<uint16_t>((state_.enable & ~lane) | (placed & enable_valid));
        break;
    case PM1_CNT:
        state_.control = static_cast<uint16_t>((state_.control & ~lane) | (placed & Pm1Cnt::writable));
        // SLP_EN is write-only. Sleep states that \_Sx doesn't offer do nothing.
        if (placed & Pm1Cnt::slp_en &&
            (state_.control >> Pm1Cnt::slp_typ_shift & Pm1Cnt::slp_typ_mask) == sleep_type_s5)
            event_({MachineEvent::Kind::power_off});
        break;
    default:
        break;
    }
    update();
}

} // namespace vtrace
