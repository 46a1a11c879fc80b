// The real-time clock and CMOS memory: a Motorola MC146818A with a century byte, at ports 0x70 and 0x71.
//
// Its time is a start date plus virtual time, so that two runs see the same. Calendar seconds turn at whole virtual
// seconds, whenever the guest sets the clock. Daylight saving (DSE) isn't done.
#pragma once

#include <array>
#include <cstdint>

#include "vmm/clock.h"
#include "vmm/devices/byte_device.h"
#include "vmm/devices/irq_line.h"
#include "vmm/devices/ticks.h"

namespace vtrace {

/// 2024-01-01 00:00:00 UTC, the date at power-on unless the configuration says another.
inline constexpr int64_t default_rtc_start = 1'704'067'200;

class Rtc final : public ByteDevice {
  public:
    static constexpr unsigned ports = 2;
    static constexpr unsigned century_register = 0x32; // the FADT tells it

    /// `start` is the date at virtual time 0, in seconds since 1970-01-01 UTC. `memory_size` in bytes goes into the
    /// CMOS bytes where firmware leaves it.
    Rtc(Clock& clock, IrqLine irq8, int64_t start, uint64_t low_memory, uint64_t high_memory);

    /// Bit 7 of port 0x70: keeps the NMI line from the processors.
    bool nmi_masked() const { return state_.nmi_masked; }

  protected:
    uint8_t read_byte(unsigned offset) override;
    void write_byte(unsigned offset, uint8_t value) override;

  private:
    static constexpr Oscillator periodic_base{32'768};
    struct State {
        std::array<uint8_t, 128> bytes{}; // registers and RAM; the date's are valid only while the clock stands (SET)
        uint8_t index = 0;
        bool nmi_masked = false;
        int64_t base = 0;            // date at virtual time 0 according to the guest's last setting
        VirtualTime flags_as_of = 0; // events up to here are in register C
    };

    void store_memory_size(uint64_t low_memory, uint64_t high_memory);
    bool running() const;
    int64_t date() const;
    void store_date();
    void load_date();
    uint8_t encode(unsigned value) const;
    unsigned decode(uint8_t value) const;
    uint8_t encode_hour(unsigned hour) const;
    unsigned decode_hour(uint8_t value) const;
    uint8_t read_register(unsigned index);
    void write_register(unsigned index, uint8_t value);
    uint64_t periodic_divider() const;
    int64_t next_alarm(int64_t from) const;
    void collect_flags();
    void update();

    Clock& clock_;
    IrqLine irq8_;
    Clock::Handle event_;
    State state_;
};

} // namespace vtrace
