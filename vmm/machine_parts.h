// What Machine is made of: one header for its source files, not for others.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "vmm/kvm/alarm.h"
#include "vmm/kvm/kvm_vcpu.h"
#include "vmm/machine.h"
#include "vmm/soft/soft_vcpu.h"
#include "vmm/stall_watch.h"

namespace vtrace {

/// A processor's view of the machine.
class Machine::Pins final : public CpuPins {
  public:
    Pins(Machine& machine, unsigned index) : machine_(machine), lapic_(machine.chipset_->lapic(index)) {}
    void connect(const soft::SoftVcpu& vcpu) { vcpu_ = &vcpu; }

    void log_accesses(std::vector<DeviceAccess>* log) { log_ = log; }

    uint32_t io_read(uint16_t port, unsigned size) override {
        const auto value = static_cast<uint32_t>(machine_.ports_.read(port, size));
        note({true, false, port, size, value});
        return value;
    }
    void io_write(uint16_t port, unsigned size, uint32_t value) override {
        note({true, true, port, size, value});
        machine_.ports_.write(port, size, value);
    }
    uint64_t mmio_read(Gpa gpa, unsigned size) override {
        const uint64_t value = lapic_.owns(gpa) ? lapic_.mmio_read(gpa, size) : machine_.mmio_.read(gpa, size);
        note({false, false, gpa, size, value});
        return value;
    }
    void mmio_write(Gpa gpa, unsigned size, uint64_t value) override {
        note({false, true, gpa, size, value});
        lapic_.owns(gpa) ? lapic_.mmio_write(gpa, size, value) : machine_.mmio_.write(gpa, size, value);
    }
    bool interrupt_pending() const override { return lapic_.interrupt_pending(); }
    uint8_t acknowledge_interrupt() override { return lapic_.acknowledge_interrupt(); }
    bool nmi_pending() const override { return lapic_.nmi_pending(); }
    void acknowledge_nmi() override { lapic_.acknowledge_nmi(); }
    void raise_pmi() override { lapic_.deliver_pmi(); }
    uint8_t read_cr8() const override { return lapic_.read_cr8(); }
    void write_cr8(uint8_t priority) override { lapic_.write_cr8(priority); }
    std::optional<uint64_t> read_apic_msr(uint32_t msr) override { return lapic_.read_msr(msr); }
    bool write_apic_msr(uint32_t msr, uint64_t value) override {
        // Only for TSC deadlines, which a machine with KVM doesn't offer.
        if (vcpu_)
            lapic_.set_tsc_offset(vcpu_->tsc_offset());
        return lapic_.write_msr(msr, value);
    }

  private:
    void note(const DeviceAccess& access) {
        if (log_)
            log_->push_back(access);
    }

    Machine& machine_;
    Lapic& lapic_;
    const soft::SoftVcpu* vcpu_ = nullptr;
    std::vector<DeviceAccess>* log_ = nullptr;
};

struct Machine::Processor {
    std::unique_ptr<Pins> pins;
    std::unique_ptr<soft::SoftVcpu> vcpu;
    bool halted = false;
    StallWatch stall;
    bool stalled = false; // what `stall` last said

    // Under KVM only.
    std::unique_ptr<kvm::KvmCpu> kvm_cpu;
    std::unique_ptr<kvm::KvmVcpu> native;
    std::condition_variable wake; // a halted one may have something to do
    // What other processors have sent; this one's own thread looks after it.
    bool init_requested = false;
    std::optional<uint8_t> startup_requested;
    bool requested() const { return init_requested || startup_requested; }
    bool look_for_stall = false;
};

/// What runs the guest natively.
struct Machine::Native {
    Native(std::unique_ptr<kvm::KvmVm> vm_, kvm::Alarm alarm_) : vm(std::move(vm_)), alarm(std::move(alarm_)) {}

    std::unique_ptr<kvm::KvmVm> vm;
    kvm::Alarm alarm;
    std::mutex lock; // of all of the machine, while processors run natively
};

} // namespace vtrace
