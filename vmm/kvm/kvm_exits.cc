// What a vCPU came out of KVM for (Linux, Documentation/virt/kvm/api.rst, "The kvm_run structure").
#include <algorithm>
#include <bit>
#include <cstring>

#include "vmm/kvm/kvm_vcpu.h"

namespace vtrace::kvm {
namespace {

template <typename Access> void in_parts(uint64_t address, unsigned length, Access access) {
    // What is not a power of two in size comes as several accesses, as on a bus.
    for (unsigned done = 0; done < length;) {
        const unsigned size = std::bit_floor(length - done);
        access(address + done, done, size);
        done += size;
    }
}

std::string describe_exit(uint32_t reason) {
    switch (reason) {
    case KVM_EXIT_EXCEPTION:
        return "KVM_EXIT_EXCEPTION";
    case KVM_EXIT_HYPERCALL:
        return "KVM_EXIT_HYPERCALL";
    case KVM_EXIT_SYSTEM_EVENT:
        return "KVM_EXIT_SYSTEM_EVENT";
    case KVM_EXIT_NMI:
        return "KVM_EXIT_NMI";
    default:
        return fmt::format("exit {}", reason);
    }
}

} // namespace

std::string KvmVcpu::where() const { return fmt::format("at RIP {:#x}", cpu_.registers().rip); }

void KvmVcpu::handle_io() {
    kvm_run& run = cpu_.run();
    uint8_t* data = reinterpret_cast<uint8_t*>(&run) + run.io.data_offset;
    for (uint32_t n = 0; n < run.io.count; ++n, data += run.io.size) {
        uint32_t value = 0;
        if (run.io.direction == KVM_EXIT_IO_OUT) {
            std::memcpy(&value, data, run.io.size);
            pins_.io_write(run.io.port, run.io.size, value);
        } else {
            value = pins_.io_read(run.io.port, run.io.size);
            std::memcpy(data, &value, run.io.size);
        }
    }
}

void KvmVcpu::handle_mmio() {
    auto& mmio = cpu_.run().mmio;
    in_parts(mmio.phys_addr, std::min<uint32_t>(mmio.len, sizeof mmio.data), [&](Gpa gpa, unsigned at, unsigned size) {
        uint64_t value = 0;
        if (mmio.is_write) {
            std::memcpy(&value, mmio.data + at, size);
            pins_.mmio_write(gpa, size, value);
        } else {
            value = pins_.mmio_read(gpa, size);
            std::memcpy(mmio.data + at, &value, size);
        }
    });
}

void KvmVcpu::handle_rdmsr() {
    auto& msr = cpu_.run().msr;
    const auto value = msrs().read(msr.index);
    msr.error = !value;
    msr.data = value.value_or(0);
}

void KvmVcpu::handle_wrmsr() {
    auto& msr = cpu_.run().msr;
    msr.error = !msrs().write(msr.index, msr.data);
}

/// A breakpoint of ours; all else is the guest's own #DB, which KVM gives to us while it watches for ours.
VcpuExit KvmVcpu::handle_debug() {
    const auto debug = cpu_.run().debug.arch;
    if (std::find(breakpoints_.begin(), breakpoints_.end(), debug.pc) != breakpoints_.end()) {
        kvm_regs regs = cpu_.registers();
        regs.rflags |= Rflags::rf; // once more it does not hit
        cpu_.set_registers(regs);
        return VcpuExit::breakpoint;
    }
    cpu_.raise_debug_exception(debug.dr6);
    return VcpuExit::device;
}

VcpuRun KvmVcpu::internal_error() {
    const auto& internal = cpu_.run().internal;
    std::string data;
    for (uint32_t n = 0; n < std::min<uint32_t>(internal.ndata, std::size(internal.data)); ++n)
        data += fmt::format(" {:#x}", uint64_t{internal.data[n]});
    const char* what = internal.suberror == KVM_INTERNAL_ERROR_EMULATION       ? "it could not emulate an instruction"
                       : internal.suberror == KVM_INTERNAL_ERROR_SIMUL_EX      ? "exceptions at the same time"
                       : internal.suberror == KVM_INTERNAL_ERROR_DELIVERY_EV   ? "an event could not be delivered"
                       : internal.suberror == KVM_INTERNAL_ERROR_UNEXPECTED_EXIT_REASON ? "an exit it does not know"
                                                                               : "an error of its own";
    return {VcpuExit::unsupported, 0,
            fmt::format("KVM gave up {}: {} (suberror {}{}{})", where(), what, uint32_t{internal.suberror},
                        data.empty() ? "" : ", data", data)};
}

VcpuRun KvmVcpu::handle_exit() {
    kvm_run& run = cpu_.run();
    switch (run.exit_reason) {
    case KVM_EXIT_IO:
        handle_io();
        return {VcpuExit::device, 0, {}};
    case KVM_EXIT_MMIO:
        handle_mmio();
        return {VcpuExit::device, 0, {}};
    case KVM_EXIT_X86_RDMSR:
        handle_rdmsr();
        return {VcpuExit::device, 0, {}};
    case KVM_EXIT_X86_WRMSR:
        handle_wrmsr();
        return {VcpuExit::device, 0, {}};
    case KVM_EXIT_INTR:
    case KVM_EXIT_IRQ_WINDOW_OPEN:
    case KVM_EXIT_SET_TPR: // CR8 has come with the exit
        return {VcpuExit::budget, 0, {}};
    case KVM_EXIT_HLT:
        kept_.activity = ActivityState::halted;
        return {VcpuExit::halted, 0, {}};
    case KVM_EXIT_DEBUG:
        return {handle_debug(), 0, {}};
    case KVM_EXIT_SHUTDOWN:
        kept_.activity = ActivityState::shutdown;
        return {VcpuExit::shutdown, 0, "triple fault under KVM, which does not say at what: `--accel soft` does"};
    case KVM_EXIT_FAIL_ENTRY:
        return {VcpuExit::unsupported, 0,
                fmt::format("the processor refused to enter the guest {} (hardware reason {:#x})", where(),
                            uint64_t{run.fail_entry.hardware_entry_failure_reason})};
    case KVM_EXIT_INTERNAL_ERROR:
        return internal_error();
    default:
        return {VcpuExit::unsupported, 0,
                fmt::format("KVM came out {} with {}, which vtrace does not know", where(),
                            describe_exit(run.exit_reason))};
    }
}

} // namespace vtrace::kvm
