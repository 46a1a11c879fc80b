#include "vmm/devices/rtc.h"

#include <algorithm>
#include <chrono>

namespace vtrace {
namespace {

enum Register : unsigned {
    SECONDS = 0,
    SECONDS_ALARM = 1,
    MINUTES = 2,
    MINUTES_ALARM = 3,
    HOURS = 4,
    HOURS_ALARM = 5,
    DAY_OF_WEEK = 6,
    DAY_OF_MONTH = 7,
    MONTH = 8,
    YEAR = 9,
    A = 10,
    B = 11,
    C = 12,
    D = 13,
    // Where a PC's firmware leaves the memory size.
    BASE_MEMORY = 0x15,     // KiB below 640 KiB, two bytes
    EXTENDED_MEMORY = 0x17, // KiB above 1 MiB, two bytes; again at 0x30
    EXTENDED_MEMORY_2 = 0x30,
    ABOVE_16M = 0x34, // 64 KiB units above 16 MiB, two bytes
    ABOVE_4G = 0x5b,  // 64 KiB units above 4 GiB, three bytes
};

namespace RegA {
constexpr uint8_t rs = 0x0f, dv = 0x70, dv_32768 = 0x20, uip = 1 << 7;
}
namespace RegB {
constexpr uint8_t hours_24 = 1 << 1, dm_binary = 1 << 2, uie = 1 << 4, aie = 1 << 5, pie = 1 << 6, set = 1 << 7;
}
namespace RegC {
constexpr uint8_t uf = 1 << 4, af = 1 << 5, pf = 1 << 6, irqf = 1 << 7;
}
constexpr uint8_t reg_d_vrt = 1 << 7;
constexpr uint8_t pm_bit = 1 << 7, alarm_any = 0xc0;
constexpr uint8_t index_mask = 0x7f, nmi_mask_bit = 0x80;

// UIP leads the update by 244 us and lasts through it for 1984 us more (MC146818A, table 8).
constexpr VirtualTime uip_length = (244 + 1984) * 1000;
constexpr int64_t day_seconds = 86'400;

} // namespace

Rtc::Rtc(Clock& clock, IrqLine irq8, int64_t start, uint64_t low_memory, uint64_t high_memory)
    : clock_(clock), irq8_(std::move(irq8)), event_(clock.create("RTC", [this] {
          collect_flags();
          update();
      })) {
    // Four-digit years only.
    constexpr int64_t first_year_1970 = 0, last_of_9999 = 253'402'300'799;
    state_.base = std::clamp(start, first_year_1970, last_of_9999);
    state_.bytes[A] = RegA::dv_32768 | 6; // 1024 Hz, as firmware leaves it
    state_.bytes[B] = RegB::hours_24;
    store_memory_size(low_memory, high_memory);
}

void Rtc::store_memory_size(uint64_t low_memory, uint64_t high_memory) {
    const auto store = [this](unsigned index, unsigned bytes, uint64_t value) {
        value = std::min(value, (uint64_t{1} << 8 * bytes) - 1);
        for (unsigned i = 0; i < bytes; ++i)
            state_.bytes[index + i] = static_cast<uint8_t>(value >> 8 * i);
    };
    constexpr uint64_t kib = 1024, mib = 1024 * kib, unit = 64 * kib;
    const auto above = [low_memory](uint64_t start) { return low_memory > start ? low_memory - start : 0; };
    store(BASE_MEMORY, 2, std::min<uint64_t>(low_memory / kib, 640));
    store(EXTENDED_MEMORY, 2, above(mib) / kib);
    store(EXTENDED_MEMORY_2, 2, above(mib) / kib);
    store(ABOVE_16M, 2, above(16 * mib) / unit);
    store(ABOVE_4G, 3, high_memory / unit);
}

bool Rtc::running() const {
    return !(state_.bytes[B] & RegB::set) && (state_.bytes[A] & RegA::dv) == RegA::dv_32768;
}

int64_t Rtc::date() const {
    return state_.base + static_cast<int64_t>(clock_.now() / Oscillator::ns_per_second);
}

uint8_t Rtc::encode(unsigned value) const {
    return static_cast<uint8_t>(state_.bytes[B] & RegB::dm_binary ? value : value / 10 << 4 | value % 10);
}

unsigned Rtc::decode(uint8_t value) const {
    return state_.bytes[B] & RegB::dm_binary ? value : (value >> 4) * 10u + (value & 15u);
}

uint8_t Rtc::encode_hour(unsigned hour) const {
    if (state_.bytes[B] & RegB::hours_24)
        return encode(hour);
    return static_cast<uint8_t>(encode(hour % 12 ? hour % 12 : 12) | (hour >= 12 ? pm_bit : 0));
}

unsigned Rtc::decode_hour(uint8_t value) const {
    if (state_.bytes[B] & RegB::hours_24)
        return decode(value);
    return decode(value & static_cast<uint8_t>(~pm_bit)) % 12 + (value & pm_bit ? 12 : 0);
}

// Fills the date's registers from the running date.
void Rtc::store_date() {
    using namespace std::chrono;
    const sys_seconds time{seconds{date()}};
    const auto day = floor<days>(time);
    const year_month_day ymd{day};
    const hh_mm_ss clock{time - day};
    const auto year = static_cast<unsigned>(static_cast<int>(ymd.year()));
    auto& bytes = state_.bytes;
    bytes[SECONDS] = encode(static_cast<unsigned>(clock.seconds().count()));
    bytes[MINUTES] = encode(static_cast<unsigned>(clock.minutes().count()));
    bytes[HOURS] = encode_hour(static_cast<unsigned>(clock.hours().count()));
    bytes[DAY_OF_WEEK] = encode(weekday{day}.c_encoding() + 1); // Sunday is 1
    bytes[DAY_OF_MONTH] = encode(static_cast<unsigned>(ymd.day()));
    bytes[MONTH] = encode(static_cast<unsigned>(ymd.month()));
    bytes[YEAR] = encode(year % 100);
    bytes[century_register] = encode(year / 100 % 100);
}

// Sets the running date from the registers. Values out of range are carried over into the next larger unit.
void Rtc::load_date() {
    using namespace std::chrono;
    const auto& bytes = state_.bytes;
    const unsigned month = std::clamp(decode(bytes[MONTH]), 1u, 12u);
    const int year = static_cast<int>(decode(bytes[century_register]) * 100 + decode(bytes[YEAR]));
    const sys_days first{std::chrono::year{year} / std::chrono::month{month} / 1};
    const int64_t wanted =
        sys_seconds{first}.time_since_epoch().count() + (int64_t{decode(bytes[DAY_OF_MONTH])} - 1) * day_seconds +
        int64_t{decode_hour(bytes[HOURS])} * 3600 + int64_t{decode(bytes[MINUTES])} * 60 + decode(bytes[SECONDS]);
    state_.base += wanted - date();
}

uint8_t Rtc::read_byte(unsigned offset) {
    return offset == 0 ? 0xff : read_register(state_.index); // port 0x70 is write-only
}

void Rtc::write_byte(unsigned offset, uint8_t value) {
    if (offset == 0) {
        state_.index = value & index_mask;
        state_.nmi_masked = value & nmi_mask_bit;
    } else {
        write_register(state_.index, value);
    }
}

uint8_t Rtc::read_register(unsigned index) {
    switch (index) {
    case A: {
        const VirtualTime into_second = clock_.now() % Oscillator::ns_per_second;
        const bool uip = running() && into_second >= Oscillator::ns_per_second - uip_length;
        return static_cast<uint8_t>(state_.bytes[A] | (uip ? RegA::uip : 0));
    }
    case C: {
        collect_flags();
        const uint8_t flags = state_.bytes[C];
        state_.bytes[C] = 0; // reading clears all flags
        update();
        return flags;
    }
    case D:
        return reg_d_vrt;
    case SECONDS_ALARM:
    case MINUTES_ALARM:
    case HOURS_ALARM:
        return state_.bytes[index];
    default:
        if ((index <= YEAR || index == century_register) && running())
            store_date();
        return state_.bytes[index];
    }
}

void Rtc::write_register(unsigned index, uint8_t value) {
    if (index == C || index == D)
        return;
    collect_flags();
    const bool was_running = running();
    if (index == A) {
        if (was_running)
            store_date();
        state_.bytes[A] = value & static_cast<uint8_t>(~RegA::uip);
    } else if (index == B) {
        if (was_running)
            store_date(); // under the format that was in force
        state_.bytes[B] = value & RegB::set ? value & static_cast<uint8_t>(~RegB::uie) : value;
    } else {
        const bool of_date =
            (index <= YEAR && index != SECONDS_ALARM && index != MINUTES_ALARM && index != HOURS_ALARM) ||
            index == century_register;
        if (of_date && was_running)
            store_date();
        state_.bytes[index] = value;
        if (of_date && was_running)
            load_date();
    }
    if (!was_running && running())
        load_date();
    update();
}

// Oscillator ticks between two periodic interrupts, 0 for none (MC146818A, table 5; 32.768 kHz time base).
uint64_t Rtc::periodic_divider() const {
    const unsigned rate = state_.bytes[A] & RegA::rs;
    if (rate == 0 || (state_.bytes[A] & RegA::dv) != RegA::dv_32768)
        return 0;
    return 1ull << ((rate <= 2 ? rate + 7 : rate) - 1);
}

// The first date at or after `from` that the alarm registers match, or -1 when there is none within a day.
int64_t Rtc::next_alarm(int64_t from) const {
    const auto matches = [](uint8_t alarm, unsigned decoded, int64_t value) {
        return (alarm & alarm_any) == alarm_any || decoded == value;
    };
    const uint8_t hour = state_.bytes[HOURS_ALARM], minute = state_.bytes[MINUTES_ALARM],
                  second = state_.bytes[SECONDS_ALARM];
    int64_t at = from;
    while (at <= from + day_seconds) {
        const int64_t of_day = (at % day_seconds + day_seconds) % day_seconds;
        if (!matches(hour, decode_hour(hour), of_day / 3600))
            at += 3600 - of_day % 3600;
        else if (!matches(minute, decode(minute), of_day / 60 % 60))
            at += 60 - of_day % 60;
        else if (!matches(second, decode(second), of_day % 60))
            at += 1;
        else
            return at;
    }
    return -1;
}

// Brings register C up to date with what has happened since it was last looked at.
void Rtc::collect_flags() {
    const VirtualTime from = state_.flags_as_of, now = clock_.now();
    state_.flags_as_of = now;
    uint8_t& flags = state_.bytes[C];
    if (const uint64_t divider = periodic_divider();
        divider && periodic_base.ticks_at(now) / divider != periodic_base.ticks_at(from) / divider)
        flags |= RegC::pf;
    const auto seconds_from = static_cast<int64_t>(from / Oscillator::ns_per_second);
    const auto seconds_now = static_cast<int64_t>(now / Oscillator::ns_per_second);
    if (running() && seconds_now != seconds_from) {
        flags |= RegC::uf;
        const int64_t alarm = next_alarm(state_.base + seconds_from + 1);
        if (alarm >= 0 && alarm <= state_.base + seconds_now)
            flags |= RegC::af;
    }
    if (flags & state_.bytes[B] & (RegC::uf | RegC::af | RegC::pf)) // the enables are at the flags' places
        flags |= RegC::irqf;
}

// Drives the line, and schedules the next event that would raise it.
void Rtc::update() {
    uint8_t& flags = state_.bytes[C];
    const uint8_t enables = state_.bytes[B];
    const bool request = flags & enables & (RegC::uf | RegC::af | RegC::pf);
    flags = static_cast<uint8_t>((flags & ~RegC::irqf) | (request ? RegC::irqf : 0));
    irq8_.set(request);

    VirtualTime due = never;
    if (!request) {
        const VirtualTime now = clock_.now();
        if (const uint64_t divider = periodic_divider(); divider && enables & RegB::pie)
            due = periodic_base.time_of((periodic_base.ticks_at(now) / divider + 1) * divider);
        if (const VirtualTime second = now / Oscillator::ns_per_second + 1; running()) {
            if (enables & RegB::uie)
                due = std::min(due, second * Oscillator::ns_per_second);
            if (enables & RegB::aie) {
                const int64_t alarm = next_alarm(state_.base + static_cast<int64_t>(second));
                if (alarm >= 0)
                    due = std::min(due, static_cast<VirtualTime>(alarm - state_.base) * Oscillator::ns_per_second);
            }
        }
    }
    clock_.schedule(event_, due);
}

} // namespace vtrace
