// CpuState in and out of KVM.
#include <array>
#include <cstring>

#include "vmm/kvm/kvm_cpu.h"
#include "vmm/msr_index.h"

namespace vtrace::kvm {
namespace {

namespace M = Msr;

Segment from_kvm(const kvm_segment& s) {
    Segment segment;
    segment.base = s.base;
    segment.limit = s.limit;
    segment.selector = s.selector;
    segment.attributes = static_cast<uint16_t>(
        (s.type & SegAttr::type) | (s.s ? SegAttr::s : 0) | (s.dpl & 3u) << SegAttr::dpl_shift |
        (s.present && !s.unusable ? SegAttr::p : 0) | (s.avl ? SegAttr::avl : 0) | (s.l ? SegAttr::l : 0) |
        (s.db ? SegAttr::db : 0) | (s.g ? SegAttr::g : 0));
    return segment;
}

kvm_segment to_kvm(const Segment& segment) {
    const auto bit = [&](uint16_t attribute) { return static_cast<uint8_t>((segment.attributes & attribute) != 0); };
    kvm_segment s{};
    s.base = segment.base;
    s.limit = segment.limit;
    s.selector = segment.selector;
    s.type = segment.attributes & SegAttr::type;
    s.s = bit(SegAttr::s);
    s.dpl = segment.attributes >> SegAttr::dpl_shift & 3;
    s.present = bit(SegAttr::p);
    s.unusable = !s.present;
    s.avl = bit(SegAttr::avl);
    s.l = bit(SegAttr::l);
    s.db = bit(SegAttr::db);
    s.g = bit(SegAttr::g);
    return s;
}

DescriptorTable from_kvm(const kvm_dtable& table) { return {table.base, table.limit}; }
kvm_dtable to_kvm(const DescriptorTable& table) {
    kvm_dtable result{};
    result.base = table.base;
    result.limit = table.limit;
    return result;
}

// The order of Gpr.
constexpr __u64 kvm_regs::*gprs[] = {&kvm_regs::rax, &kvm_regs::rcx, &kvm_regs::rdx, &kvm_regs::rbx,
                                     &kvm_regs::rsp, &kvm_regs::rbp, &kvm_regs::rsi, &kvm_regs::rdi,
                                     &kvm_regs::r8,  &kvm_regs::r9,  &kvm_regs::r10, &kvm_regs::r11,
                                     &kvm_regs::r12, &kvm_regs::r13, &kvm_regs::r14, &kvm_regs::r15};
// The order of Seg.
constexpr kvm_segment kvm_sregs::*segments[] = {&kvm_sregs::es, &kvm_sregs::cs, &kvm_sregs::ss,
                                                &kvm_sregs::ds, &kvm_sregs::fs, &kvm_sregs::gs};

/// MSRs of CpuState that the guest accesses without us, and that are not in kvm_sregs.
struct StateMsr {
    uint32_t index;
    uint64_t CpuState::*field;
};
constexpr StateMsr state_msrs[] = {
    {M::sysenter_cs, &CpuState::sysenter_cs},
    {M::sysenter_esp, &CpuState::sysenter_esp},
    {M::sysenter_eip, &CpuState::sysenter_eip},
    {M::pat, &CpuState::pat},
    {M::star, &CpuState::star},
    {M::lstar, &CpuState::lstar},
    {M::cstar, &CpuState::cstar},
    {M::sfmask, &CpuState::sfmask},
    {M::kernel_gs_base, &CpuState::kernel_gs_base},
};

/// KVM_GET_MSRS and KVM_SET_MSRS with room for all that we have.
struct MsrList {
    kvm_msrs header{};
    std::array<kvm_msr_entry, std::size(state_msrs) + 2> entries{};

    void add(uint32_t index, uint64_t value = 0) {
        entries[header.nmsrs] = {};
        entries[header.nmsrs].index = index;
        entries[header.nmsrs++].data = value;
    }
};

constexpr uint32_t interrupt_shadow(InterruptShadow shadow) {
    return shadow == InterruptShadow::sti ? KVM_X86_SHADOW_INT_STI : shadow == InterruptShadow::mov_ss ? KVM_X86_SHADOW_INT_MOV_SS : 0;
}

/// Of a TSS segment's type. SVM leaves it out of what it saves, and KVM adds it for who asks; but a software SVM looks at
/// it when it is loaded, and then takes the I/O permission bitmap of a busy TSS for unusable.
constexpr uint8_t tss_busy = 2;

constexpr size_t xstate_bv_offset = 512; // XSAVE header (SDM vol. 1, 13.4.2)
constexpr uint64_t xstate_x87_sse = 3;

} // namespace

std::array<Segment, 6> segments_of(const kvm_sregs& sregs) {
    std::array<Segment, 6> result;
    for (unsigned seg = 0; seg < result.size(); ++seg)
        result[seg] = from_kvm(sregs.*segments[seg]);
    return result;
}

void KvmCpu::get_state(CpuState& state) const {
    const kvm_regs& regs = registers();
    for (unsigned reg = 0; reg < state.gpr.size(); ++reg)
        state.gpr[reg] = regs.*gprs[reg];
    state.rip = regs.rip;
    state.rflags = regs.rflags;

    const kvm_sregs& sregs = special_registers();
    state.segments = segments_of(sregs);
    state.ldtr = from_kvm(sregs.ldt);
    state.tr = from_kvm(sregs.tr);
    state.gdtr = from_kvm(sregs.gdt);
    state.idtr = from_kvm(sregs.idt);
    state.cr0 = sregs.cr0;
    state.cr2 = sregs.cr2;
    state.cr3 = sregs.cr3;
    state.cr4 = sregs.cr4;
    state.cr8 = sregs.cr8;
    state.efer = sregs.efer;

    kvm_debugregs debug{};
    call(KVM_GET_DEBUGREGS, &debug, "KVM_GET_DEBUGREGS");
    std::copy(std::begin(debug.db), std::end(debug.db), state.dr.begin());
    state.dr6 = debug.dr6;
    state.dr7 = debug.dr7;

    kvm_vcpu_events events{};
    call(KVM_GET_VCPU_EVENTS, &events, "KVM_GET_VCPU_EVENTS");
    state.shadow = events.interrupt.shadow & KVM_X86_SHADOW_INT_MOV_SS ? InterruptShadow::mov_ss
                   : events.interrupt.shadow                           ? InterruptShadow::sti
                                                                       : InterruptShadow::none;
    state.nmi_blocked = events.nmi.masked;
    state.event = {};
    if (events.exception.injected)
        state.event = {PendingEvent::Kind::exception, events.exception.nr, events.exception.has_error_code != 0,
                       events.exception.error_code};
    else if (events.nmi.injected || events.nmi.pending)
        state.event = {PendingEvent::Kind::nmi, Vector::nmi};
    else if (events.interrupt.injected)
        state.event = {events.interrupt.soft ? PendingEvent::Kind::software_interrupt
                                             : PendingEvent::Kind::external_interrupt,
                       events.interrupt.nr};
    get_fpu(state);
    get_msrs(state);
}

void KvmCpu::set_state(const CpuState& state, uint64_t apic_base) {
    completed_ = true; // what an exit left to do was the old state's
    fresh_ = dirty_ = special_known_ = registers_known_ = false;

    kvm_sregs sregs{};
    for (unsigned seg = 0; seg < state.segments.size(); ++seg)
        sregs.*segments[seg] = to_kvm(state.segments[seg]);
    sregs.ldt = to_kvm(state.ldtr);
    sregs.tr = to_kvm(state.tr);
    if (svm_)
        sregs.tr.type &= ~tss_busy;
    sregs.gdt = to_kvm(state.gdtr);
    sregs.idt = to_kvm(state.idtr);
    sregs.cr0 = state.cr0;
    sregs.cr2 = state.cr2;
    sregs.cr3 = state.cr3;
    sregs.cr4 = state.cr4;
    sregs.cr8 = state.cr8;
    sregs.efer = state.efer;
    sregs.apic_base = apic_base;
    call(KVM_SET_SREGS, &sregs, "KVM_SET_SREGS");

    kvm_regs regs{};
    for (unsigned reg = 0; reg < state.gpr.size(); ++reg)
        regs.*gprs[reg] = state.gpr[reg];
    regs.rip = state.rip;
    regs.rflags = state.rflags;
    call(KVM_SET_REGS, &regs, "KVM_SET_REGS");

    set_fpu(state);
    set_msrs(state);

    kvm_debugregs debug{};
    std::copy(state.dr.begin(), state.dr.end(), std::begin(debug.db));
    debug.dr6 = state.dr6;
    debug.dr7 = state.dr7;
    call(KVM_SET_DEBUGREGS, &debug, "KVM_SET_DEBUGREGS");

    // Last: setting registers clears what is pending.
    kvm_vcpu_events events{};
    events.flags = KVM_VCPUEVENT_VALID_NMI_PENDING | KVM_VCPUEVENT_VALID_SHADOW;
    events.interrupt.shadow = static_cast<uint8_t>(interrupt_shadow(state.shadow));
    events.nmi.masked = state.nmi_blocked;
    switch (state.event.kind) {
    case PendingEvent::Kind::none:
        break;
    case PendingEvent::Kind::exception:
        events.exception.injected = 1;
        events.exception.nr = state.event.vector;
        events.exception.has_error_code = state.event.has_error_code;
        events.exception.error_code = state.event.error_code;
        break;
    case PendingEvent::Kind::nmi:
        events.nmi.pending = 1;
        break;
    case PendingEvent::Kind::external_interrupt:
    case PendingEvent::Kind::software_interrupt:
        events.interrupt.injected = 1;
        events.interrupt.nr = state.event.vector;
        events.interrupt.soft = state.event.kind == PendingEvent::Kind::software_interrupt;
        break;
    }
    call(KVM_SET_VCPU_EVENTS, &events, "KVM_SET_VCPU_EVENTS");
}

// ---------------------------------------------------------------------------------------------------------------------

FpuImage KvmCpu::fpu() const {
    kvm_xsave area{};
    call(KVM_GET_XSAVE, &area, "KVM_GET_XSAVE");
    FpuImage image;
    std::memcpy(image.fxsave.data(), area.region, image.fxsave.size());
    return image;
}

void KvmCpu::get_fpu(CpuState& state) const {
    state.fpu = fpu();
    kvm_xcrs xcrs{};
    if (vm_.host().check(KVM_CAP_XCRS) && call(KVM_GET_XCRS, &xcrs, "KVM_GET_XCRS") == 0 && xcrs.nr_xcrs > 0)
        state.xcr0 = xcrs.xcrs[0].value;
}

void KvmCpu::set_fpu(const CpuState& state) {
    kvm_xcrs xcrs{};
    xcrs.nr_xcrs = 1;
    xcrs.xcrs[0].value = state.xcr0;
    if (vm_.host().check(KVM_CAP_XCRS))
        call(KVM_SET_XCRS, &xcrs, "KVM_SET_XCRS");

    kvm_xsave area{};
    call(KVM_GET_XSAVE, &area, "KVM_GET_XSAVE"); // what is beyond x87 and SSE stays
    std::memcpy(area.region, state.fpu.fxsave.data(), state.fpu.fxsave.size());
    uint64_t xstate_bv;
    uint8_t* header = reinterpret_cast<uint8_t*>(area.region) + xstate_bv_offset;
    std::memcpy(&xstate_bv, header, sizeof xstate_bv);
    xstate_bv |= xstate_x87_sse;
    std::memcpy(header, &xstate_bv, sizeof xstate_bv);
    call(KVM_SET_XSAVE, &area, "KVM_SET_XSAVE");
}

void KvmCpu::get_msrs(CpuState& state) const {
    MsrList list;
    for (const StateMsr& msr : state_msrs)
        list.add(msr.index);
    if (cpuid_.has(Feature::rdtscp))
        list.add(M::tsc_aux);
    if (cpuid_.has(Feature::tsc_adjust))
        list.add(M::tsc_adjust);
    const int count = call(KVM_GET_MSRS, &list.header, "KVM_GET_MSRS");
    if (count >= 0 && static_cast<uint32_t>(count) != list.header.nmsrs && failure_.empty())
        failure_ = fmt::format("KVM_GET_MSRS for vCPU {}: refused MSR {:#x}", id_, list.entries[count].index);
    unsigned n = 0;
    for (const StateMsr& msr : state_msrs)
        state.*msr.field = list.entries[n++].data;
    if (cpuid_.has(Feature::rdtscp))
        state.tsc_aux = list.entries[n++].data;
    if (cpuid_.has(Feature::tsc_adjust))
        state.msrs.tsc_adjust = list.entries[n++].data;
}

void KvmCpu::set_msrs(const CpuState& state) {
    MsrList list;
    for (const StateMsr& msr : state_msrs)
        list.add(msr.index, state.*msr.field);
    if (cpuid_.has(Feature::rdtscp))
        list.add(M::tsc_aux, state.tsc_aux);
    if (cpuid_.has(Feature::tsc_adjust))
        list.add(M::tsc_adjust, state.msrs.tsc_adjust);
    const int count = call(KVM_SET_MSRS, &list.header, "KVM_SET_MSRS");
    if (count >= 0 && static_cast<uint32_t>(count) != list.header.nmsrs && failure_.empty())
        failure_ = fmt::format("KVM_SET_MSRS for vCPU {}: refused MSR {:#x} = {:#x}", id_, list.entries[count].index,
                               list.entries[count].data);
}

// ---------------------------------------------------------------------------------------------------------------------

uint64_t KvmCpu::read_tsc() const {
    MsrList list;
    list.add(M::tsc);
    call(KVM_GET_MSRS, &list.header, "KVM_GET_MSRS");
    return list.entries[0].data;
}

uint64_t KvmCpu::tsc_offset() const {
    uint64_t offset = 0;
    kvm_device_attr attribute{};
    attribute.group = KVM_VCPU_TSC_CTRL;
    attribute.attr = KVM_VCPU_TSC_OFFSET;
    attribute.addr = reinterpret_cast<uintptr_t>(&offset);
    call(KVM_GET_DEVICE_ATTR, &attribute, "KVM_GET_DEVICE_ATTR(KVM_VCPU_TSC_OFFSET)");
    return offset;
}

uint64_t KvmCpu::tsc_base() const { return can_set_tsc_offset_ ? read_tsc() - tsc_offset() : 0; }

uint64_t KvmCpu::tsc_at(uint64_t base) const { return can_set_tsc_offset_ ? base + tsc_offset() : read_tsc(); }

void KvmCpu::set_tsc(uint64_t value, uint64_t base) {
    if (can_set_tsc_offset_) {
        uint64_t offset = value - base;
        kvm_device_attr attribute{};
        attribute.group = KVM_VCPU_TSC_CTRL;
        attribute.attr = KVM_VCPU_TSC_OFFSET;
        attribute.addr = reinterpret_cast<uintptr_t>(&offset);
        call(KVM_SET_DEVICE_ATTR, &attribute, "KVM_SET_DEVICE_ATTR(KVM_VCPU_TSC_OFFSET)");
        return;
    }
    // Older kernels take a value close to what they expect for an attempt to bring vCPUs in step, and make it so: the
    // counter may then jump forward, never back.
    MsrList list;
    list.add(M::tsc, value);
    call(KVM_SET_MSRS, &list.header, "KVM_SET_MSRS(TSC)");
}

} // namespace vtrace::kvm
