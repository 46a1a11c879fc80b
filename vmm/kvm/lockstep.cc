#include "vmm/kvm/lockstep.h"

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstring>

#include <Zydis/Zydis.h>
#include <sys/time.h>

#include "vmm/devices/lapic.h"

namespace vtrace::kvm {
namespace {

/// Nothing goes to a trace.
class NoSink final : public TraceSink {
  public:
    void code_page(unsigned, uint64_t, Gpa, std::span<const uint8_t, page_size>) override {}
    void code_mapping(unsigned, uint64_t, uint64_t, Gva, Gpa, bool) override {}
    void console(VirtualTime, std::string_view) override {}
};

constexpr uint8_t hlt = 0xf4;
constexpr size_t longest_instruction = 15;
/// Records between two drains; less than an area holds, by far.
constexpr uint64_t collect_period = 512;
constexpr size_t ring_records = 1 << 16;

/// KVM_RUN comes out once a second: a guest that ran away is found.
void interrupt_each_second() {
    struct sigaction action {};
    action.sa_handler = [](int) {};
    sigaction(SIGALRM, &action, nullptr);
    const itimerval period{{1, 0}, {1, 0}};
    setitimer(ITIMER_REAL, &period, nullptr);
}

Gva linear(const CpuState& state, uint64_t rip) {
    const Segment& cs = state.segments[CS];
    const bool code64 = state.long_mode() && (cs.attributes & SegAttr::l);
    return code64 ? rip : static_cast<uint32_t>(cs.base + rip);
}

template <class... Args>
void note(std::string& lines, fmt::format_string<Args...> format, Args&&... args) {
    if (!lines.empty())
        lines += '\n';
    lines += fmt::format(format, std::forward<Args>(args)...);
}

constexpr const char* gpr_names[] = {"RAX", "RCX", "RDX", "RBX", "RSP", "RBP", "RSI", "RDI",
                                     "R8",  "R9",  "R10", "R11", "R12", "R13", "R14", "R15"};
constexpr const char* segment_names[] = {"ES", "CS", "SS", "DS", "FS", "GS"};

/// A segment that can't be used has no attributes worth comparing; and whether a null selector's is said to be present is
/// each processor's own choice (TCG's SS after an IRET is).
void compare_segment(std::string& lines, const char* name, const Segment& soft, const Segment& kvm) {
    if (soft.selector != kvm.selector)
        note(lines, "{}: selector {:#x}, KVM {:#x}", name, soft.selector, kvm.selector);
    if (soft.base != kvm.base)
        note(lines, "{}: base {:#x}, KVM {:#x}", name, soft.base, kvm.base);
    constexpr uint16_t rpl = 3;
    if (soft.selector == kvm.selector && (soft.selector & ~rpl) == 0)
        return;
    if ((soft.attributes ^ kvm.attributes) & SegAttr::p)
        note(lines, "{}: present {}, KVM {}", name, (soft.attributes & SegAttr::p) != 0, (kvm.attributes & SegAttr::p) != 0);
    if (!(soft.attributes & kvm.attributes & SegAttr::p))
        return;
    if (soft.limit != kvm.limit)
        note(lines, "{}: limit {:#x}, KVM {:#x}", name, soft.limit, kvm.limit);
    if (soft.attributes != kvm.attributes)
        note(lines, "{}: attributes {:#x}, KVM {:#x}", name, soft.attributes, kvm.attributes);
}

/// x87 environment pointers (FOP, FIP, FDP: bytes 6 to 23) and what lies beyond the registers are not compared.
bool fpu_equal(const FpuImage& a, const FpuImage& b) {
    constexpr size_t pointers = 6, mxcsr = 24, mask = 28, registers = 32, end = 416;
    const auto same = [&](size_t from, size_t to) { return std::equal(&a.fxsave[from], &a.fxsave[to], &b.fxsave[from]); };
    // Of each x87 register's 16 bytes six are reserved.
    for (unsigned i = 0; i < 8; ++i)
        if (!same(registers + 16 * i, registers + 16 * i + 10))
            return false;
    return same(0, pointers - 1) && same(mxcsr, mask) && same(registers + 128, end);
}

} // namespace

/// What of an instruction decides how it is followed.
struct Lockstep::Instruction {
    std::vector<uint8_t> bytes;
    unsigned length = 0;         // 0: not decodable
    uint64_t undefined_flags = 0;
    bool repeats = false;        // REP
    bool enters_kernel = false;  // SYSCALL, SYSENTER, INT n ...: TF is lost on the way
    bool sysret = false;
    bool trap_is_late = false;   // the trap may come after the next instruction
    bool pushes_flags = false;
    bool is_time = false;        // its results are its own: RDTSC, RDRAND ...
    bool reads_msr = false;
    bool own_access = false;     // the software engine asks the APIC for its ID: CPUID
};

Lockstep::Instruction Lockstep::decode(const CpuState& state) const {
    Instruction result;
    while (result.bytes.size() < longest_instruction) { // page by page
        const Gva at = linear(state, state.rip + result.bytes.size());
        const auto gpa = machine_.vcpu(0).translate(at);
        const uint64_t part = std::min<uint64_t>(longest_instruction - result.bytes.size(), page_size - (at & page_mask));
        const uint8_t* host = gpa ? machine_.memory().at(*gpa, part) : nullptr;
        if (!host)
            break;
        result.bytes.insert(result.bytes.end(), host, host + part);
    }
    const Segment& cs = state.segments[CS];
    const bool code64 = state.long_mode() && (cs.attributes & SegAttr::l);
    const bool code32 = cs.attributes & SegAttr::db;
    ZydisDecoder decoder;
    ZydisDecoderInit(&decoder,
                     code64   ? ZYDIS_MACHINE_MODE_LONG_64
                     : code32 ? ZYDIS_MACHINE_MODE_LEGACY_32
                              : ZYDIS_MACHINE_MODE_LEGACY_16,
                     code64   ? ZYDIS_STACK_WIDTH_64
                     : code32 ? ZYDIS_STACK_WIDTH_32
                              : ZYDIS_STACK_WIDTH_16);
    ZydisDecodedInstruction instruction;
    ZydisDecodedOperand operands[ZYDIS_MAX_OPERAND_COUNT];
    if (!ZYAN_SUCCESS(ZydisDecoderDecodeFull(&decoder, result.bytes.data(), result.bytes.size(), &instruction, operands)))
        return result;
    result.length = instruction.length;
    result.bytes.resize(instruction.length);
    if (instruction.cpu_flags)
        result.undefined_flags = instruction.cpu_flags->undefined;
    result.repeats = instruction.attributes & (ZYDIS_ATTRIB_HAS_REP | ZYDIS_ATTRIB_HAS_REPE | ZYDIS_ATTRIB_HAS_REPNE);
    const bool to_ss = instruction.operand_count > 0 && operands[0].type == ZYDIS_OPERAND_TYPE_REGISTER &&
                       operands[0].reg.value == ZYDIS_REGISTER_SS;
    switch (instruction.mnemonic) {
    case ZYDIS_MNEMONIC_SYSCALL:
    case ZYDIS_MNEMONIC_SYSENTER:
    case ZYDIS_MNEMONIC_INT:
    case ZYDIS_MNEMONIC_INT1:
    case ZYDIS_MNEMONIC_INT3:
    case ZYDIS_MNEMONIC_INTO:
        result.enters_kernel = true;
        break;
    case ZYDIS_MNEMONIC_SYSRET:
    case ZYDIS_MNEMONIC_SYSEXIT:
        result.sysret = result.trap_is_late = true;
        break;
    case ZYDIS_MNEMONIC_IRET:
    case ZYDIS_MNEMONIC_IRETD:
    case ZYDIS_MNEMONIC_IRETQ:
    case ZYDIS_MNEMONIC_LSS:
    case ZYDIS_MNEMONIC_STI:
    case ZYDIS_MNEMONIC_PAUSE:
        result.trap_is_late = true;
        break;
    case ZYDIS_MNEMONIC_MOV:
    case ZYDIS_MNEMONIC_POP:
        result.trap_is_late = to_ss;
        break;
    case ZYDIS_MNEMONIC_PUSHF:
    case ZYDIS_MNEMONIC_PUSHFD:
    case ZYDIS_MNEMONIC_PUSHFQ:
        result.pushes_flags = true;
        break;
    case ZYDIS_MNEMONIC_RDTSC:
    case ZYDIS_MNEMONIC_RDTSCP:
    case ZYDIS_MNEMONIC_RDRAND:
    case ZYDIS_MNEMONIC_RDSEED:
        result.is_time = true;
        break;
    case ZYDIS_MNEMONIC_TZCNT:
        // A processor that has it executes it, whatever CPUID says to the guest; on the model it is BSF, with other flags.
        if (!machine_.cpuid().has(Feature::bmi1))
            result.undefined_flags = Rflags::status;
        break;
    case ZYDIS_MNEMONIC_CPUID:
        result.own_access = true;
        break;
    case ZYDIS_MNEMONIC_RDMSR:
        result.reads_msr = true;
        break;
    default:
        break;
    }
    return result;
}

Result<std::unique_ptr<Lockstep>> Lockstep::create(const KvmHost& host, Machine& machine) {
    if (machine.vcpus() != 1)
        return fail("cannot verify {} vCPUs in lockstep: their order is not KVM's; use one", machine.vcpus());
    auto memory = GuestMemory::create(machine.memory().size());
    if (!memory)
        return Unexpected(memory.error());
    std::unique_ptr<Lockstep> lockstep(new Lockstep(machine, std::move(*memory)));
    auto vm = KvmVm::create(host, lockstep->memory_);
    if (!vm)
        return Unexpected(vm.error());
    lockstep->vm_ = std::move(*vm);
    auto cpu = KvmCpu::create(*lockstep->vm_, 0, machine.cpuid());
    if (!cpu)
        return Unexpected(cpu.error());
    lockstep->cpu_ = std::move(*cpu);
    lockstep->cpu_->set_sync(true);

    lockstep->bell_ = std::make_unique<ds::Doorbell>();
    auto ring = ds::Ring::create(ring_records, *lockstep->bell_);
    if (!ring)
        return Unexpected(ring.error());
    lockstep->ring_ = std::move(*ring);
    auto store = ds::DebugStore::create(ds::DebugStore::default_records, lockstep->ring_);
    if (!store)
        return Unexpected(store.error());
    lockstep->store_ = std::move(*store);
    VTRACE_TRY(lockstep->store_->set_debugctl(ds::DebugCtl::tr | ds::DebugCtl::bts | ds::DebugCtl::btint));
    lockstep->sink_ = std::make_unique<NoSink>();
    machine.log_accesses(&lockstep->accesses_);
    interrupt_each_second();
    return lockstep;
}

Lockstep::~Lockstep() {
    machine_.log_accesses(nullptr);
    machine_.hold_interrupts(false);
    const itimerval off{};
    setitimer(ITIMER_REAL, &off, nullptr);
}

void Lockstep::begin() {
    const auto copy = [&](Gpa gpa, uint64_t size) {
        if (size == 0)
            return;
        // Only what differs: the rest of a large guest was never touched.
        for (uint64_t page = 0; page < size; page += page_size) {
            const uint8_t* from = machine_.memory().at(gpa + page, page_size);
            uint8_t* to = memory_.at(gpa + page, page_size);
            if (std::memcmp(from, to, page_size) != 0)
                std::memcpy(to, from, page_size);
        }
    };
    copy(0, machine_.memory().low_size());
    copy(GuestMemory::high_start, machine_.memory().high_size());
    machine_.start_recording({{store_.get(), sink_.get(), 0}});
    collect_records();
    soft_branches_.clear();
    kvm_branches_.clear();
    last_ = machine_.vcpu(0).state();
    cpu_->set_state(last_, ApicBase::en | ApicBase::bsp);
}

/// Without a budget: delivers what interrupts; with one: executes, and delivers nothing.
VcpuRun Lockstep::lead(uint64_t budget) {
    machine_.hold_interrupts(budget != 0);
    VcpuRun run = machine_.vcpu(0).run(budget);
    if (run.exit == VcpuExit::shutdown || run.exit == VcpuExit::unsupported)
        ended_ = run.detail;
    return run;
}

/// The last one appended since the last drain.
std::optional<ds::BtsRecord> Lockstep::last_record() const {
    const auto area = store_->management_area();
    if (area.bts_index == area.bts_buffer_base)
        return std::nullopt;
    return *reinterpret_cast<const ds::BtsRecord*>(area.bts_index - sizeof(ds::BtsRecord));
}

void Lockstep::collect_records() {
    machine_.drain_records();
    for (auto span = ring_.acquire(); !span.empty(); span = ring_.acquire()) {
        for (const ds::BtsRecord& record : span)
            if (!ds::BtsFlags::is_event(record.flags))
                soft_branches_.push_back(record);
        ring_.release(span.size());
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// The follower

bool Lockstep::answer_byte(bool port, bool write, uint64_t address, uint8_t* value, std::string& why) {
    if (answered_ == expected_.size()) {
        why = fmt::format("KVM accesses {} {:#x}, the software engine does not", port ? "port" : "address", address);
        return false;
    }
    const DeviceByte& byte = expected_[answered_++];
    if (byte.port != port || byte.write != write || byte.address != address || (write && byte.value != *value)) {
        why = fmt::format("KVM {} {} {:#x}{}, the software engine {} {:#x}{}", write ? "writes" : "reads",
                          port ? "port" : "address", address, write ? fmt::format(" = {:#x}", *value) : "",
                          byte.write ? "writes" : "reads", byte.address,
                          byte.write ? fmt::format(" = {:#x}", byte.value) : "");
        return false;
    }
    *value = byte.value;
    return true;
}

/// The access that KVM came out for. An answer: what is wrong with it.
std::optional<std::string> Lockstep::answer_device() {
    kvm_run& run = cpu_->run();
    std::string why;
    if (run.exit_reason == KVM_EXIT_IO) {
        uint8_t* data = reinterpret_cast<uint8_t*>(&run) + run.io.data_offset;
        for (uint32_t n = 0; n < run.io.count * run.io.size; ++n)
            if (!answer_byte(true, run.io.direction == KVM_EXIT_IO_OUT, run.io.port + n % run.io.size, data + n, why))
                return why;
    } else if (run.exit_reason == KVM_EXIT_MMIO) {
        for (uint32_t n = 0; n < run.mmio.len; ++n)
            if (!answer_byte(false, run.mmio.is_write, run.mmio.phys_addr + n, &run.mmio.data[n], why))
                return why;
    } else { // an MSR that isn't KVM's: as the leader found it
        const bool faulted = [&] {
            const auto record = last_record();
            return record && ds::BtsFlags::kind(record->flags) == ds::BtsKind::exception;
        }();
        run.msr.error = faulted;
        run.msr.data = last_.gpr[RDX] << 32 | static_cast<uint32_t>(last_.gpr[RAX]);
    }
    return std::nullopt;
}

/// Runs KVM until it stands at `target`, past the instruction at `start_rip`. An answer: why it doesn't.
std::optional<std::string> Lockstep::run_to(Gva target, uint64_t start_rip, Stop stop) {
    constexpr unsigned patience_s = 3;
    unsigned interruptions = 0;
    bool completing = false;
    for (;;) {
        const int error = completing ? (cpu_->complete_exit() ? EINTR : 0) : cpu_->enter();
        if (error == EINTR || error == EAGAIN) {
            // An access is complete; the instruction may be, too.
            if (completing && stop == Stop::trap_flag && cpu_->registers().rip != start_rip)
                return std::nullopt;
            if (!std::exchange(completing, false) && ++interruptions > patience_s)
                return fmt::format("KVM does not come to {:#x}: it is at {:#x}", target, cpu_->registers().rip);
            continue;
        }
        if (error != 0)
            return fmt::format("KVM_RUN failed: {}", cpu_->failure().empty() ? errno_text(error) : cpu_->failure());
        completing = false;
        switch (cpu_->run().exit_reason) {
        case KVM_EXIT_DEBUG:
            if (cpu_->registers().rip == start_rip && last_.rip != start_rip)
                continue; // REP: a trap for each iteration
            return std::nullopt;
        case KVM_EXIT_HLT:
            return std::nullopt;
        case KVM_EXIT_IO:
        case KVM_EXIT_MMIO:
        case KVM_EXIT_X86_RDMSR:
        case KVM_EXIT_X86_WRMSR:
            if (auto why = answer_device())
                return why;
            completing = stop == Stop::trap_flag;
            continue;
        case KVM_EXIT_IRQ_WINDOW_OPEN:
        case KVM_EXIT_INTR:
        case KVM_EXIT_SET_TPR:
            continue;
        case KVM_EXIT_SHUTDOWN:
            return "KVM's guest shuts down: a triple fault";
        case KVM_EXIT_INTERNAL_ERROR:
            return fmt::format("KVM gives up with an internal error (suberror {})", uint32_t{cpu_->run().internal.suberror});
        default:
            return fmt::format("KVM comes out with exit {}", uint32_t{cpu_->run().exit_reason});
        }
    }
}

/// Lets KVM do what led from `before` to `after`.
std::optional<std::string> Lockstep::follow(const CpuState& before, const CpuState& after, Stop stop) {
    answered_ = 0;
    expected_.clear();
    for (const DeviceAccess& access : accesses_)
        for (unsigned n = 0; n < access.size; ++n)
            expected_.push_back({access.port, access.write, access.address + n, static_cast<uint8_t>(access.value >> 8 * n)});
    cpu_->run().cr8 = before.cr8;
    const Gva target = linear(after, after.rip);
    if (stop == Stop::trap_flag) {
        cpu_->set_guest_debug(KVM_GUESTDBG_ENABLE | KVM_GUESTDBG_SINGLESTEP);
        auto why = run_to(target, before.rip, stop);
        return why;
    }
    const auto gpa = machine_.vcpu(0).translate(target);
    uint8_t* byte = gpa ? memory_.at(*gpa) : nullptr;
    if (!byte)
        return fmt::format("the software engine goes to {:#x}, where there is no memory", target);
    const uint8_t saved = std::exchange(*byte, hlt);
    cpu_->set_guest_debug(0);
    auto why = run_to(target, before.rip, stop);
    *byte = saved;
    if (why)
        return why;
    if (cpu_->run().exit_reason == KVM_EXIT_HLT) { // RIP is behind our HLT
        kvm_regs regs = cpu_->registers();
        regs.rip -= 1;
        cpu_->set_registers(regs);
    }
    return std::nullopt;
}

// ---------------------------------------------------------------------------------------------------------------------
// Comparing

std::optional<std::string> Lockstep::compare(const CpuState& soft, uint64_t undefined_flags) {
    std::string lines;
    const kvm_regs& regs = cpu_->registers();
    const uint64_t gprs[] = {regs.rax, regs.rcx, regs.rdx, regs.rbx, regs.rsp, regs.rbp, regs.rsi, regs.rdi,
                             regs.r8,  regs.r9,  regs.r10, regs.r11, regs.r12, regs.r13, regs.r14, regs.r15};
    if (regs.rip != soft.rip)
        note(lines, "RIP: {:#x}, KVM {:#x}", soft.rip, uint64_t{regs.rip});
    for (unsigned i = 0; i < 16; ++i)
        if (gprs[i] != soft.gpr[i])
            note(lines, "{}: {:#x}, KVM {:#x}", gpr_names[i], soft.gpr[i], gprs[i]);
    // RF is of one instruction; TF may be ours.
    const uint64_t flags = ~(undefined_flags | Rflags::rf | Rflags::tf);
    if ((regs.rflags ^ soft.rflags) & flags)
        note(lines, "RFLAGS: {:#x}, KVM {:#x} (compared: {:#x})", soft.rflags, uint64_t{regs.rflags}, flags & 0x3fffff);
    const kvm_sregs& sregs = cpu_->special_registers();
    const auto check = [&](const char* name, uint64_t ours, uint64_t theirs) {
        if (ours != theirs)
            note(lines, "{}: {:#x}, KVM {:#x}", name, ours, theirs);
    };
    check("CR0", soft.cr0, sregs.cr0);
    check("CR2", soft.cr2, sregs.cr2);
    check("CR3", soft.cr3, sregs.cr3);
    check("CR4", soft.cr4, sregs.cr4);
    check("CR8", soft.cr8, cpu_->run().cr8);
    check("EFER", soft.efer, sregs.efer);
    check("GDTR.base", soft.gdtr.base, sregs.gdt.base);
    check("GDTR.limit", soft.gdtr.limit, sregs.gdt.limit);
    check("IDTR.base", soft.idtr.base, sregs.idt.base);
    check("IDTR.limit", soft.idtr.limit, sregs.idt.limit);
    const std::array<Segment, 6> kvm = segments_of(sregs);
    for (unsigned i = 0; i < 6; ++i)
        compare_segment(lines, segment_names[i], soft.segments[i], kvm[i]);
    if (answered_ != expected_.size())
        note(lines, "devices: the software engine makes {} bytes of accesses, KVM {}", expected_.size(), answered_);
    return lines.empty() ? std::nullopt : std::optional(lines);
}

std::string Lockstep::compare_memory() {
    std::string lines;
    const auto scan = [&](Gpa gpa, uint64_t size) {
        constexpr unsigned most = 8;
        unsigned found = 0;
        for (uint64_t page = 0; page < size && found < most; page += page_size) {
            const uint8_t* ours = machine_.memory().at(gpa + page, page_size);
            const uint8_t* theirs = memory_.at(gpa + page, page_size);
            if (std::memcmp(ours, theirs, page_size) == 0)
                continue;
            const auto at = static_cast<uint64_t>(std::mismatch(ours, ours + page_size, theirs).first - ours);
            uint64_t ours8 = 0, theirs8 = 0;
            const uint64_t start = std::min(at & ~uint64_t{7}, page_size - 8);
            std::memcpy(&ours8, ours + start, 8);
            std::memcpy(&theirs8, theirs + start, 8);
            note(lines, "memory at GPA {:#x}: {:#018x}, KVM {:#018x}", gpa + page + start, ours8, theirs8);
            ++found;
        }
    };
    scan(0, memory_.low_size());
    scan(GuestMemory::high_start, memory_.high_size());
    return lines;
}

Difference Lockstep::difference(std::string what, const CpuState& before) {
    Difference result;
    result.what = std::move(what);
    result.before = before;
    result.soft = machine_.vcpu(0).state();
    result.kvm = result.soft;
    cpu_->get_state(result.kvm);
    result.code = decode(before).bytes;
    result.instruction = counts_.instructions;
    return result;
}

/// A fault pushes RFLAGS with RF set (SDM vol. 3, 17.3.1.1), in 64-bit mode below the stack pointer that it saves. QEMU's TCG
/// does not: under a KVM in it that is counted, and the difference is taken out.
void Lockstep::check_resume_flag(uint8_t vector) {
    constexpr uint32_t with_error_code = 1u << Vector::df | 1u << Vector::ts | 1u << Vector::np | 1u << Vector::ss |
                                         1u << Vector::gp | 1u << Vector::pf | 1u << Vector::ac;
    constexpr unsigned slot = 8, above_rip_and_cs = 2 * slot;
    if (!last_.long_mode() || vector >= 32)
        return;
    const Gva at = last_.gpr[RSP] + above_rip_and_cs + (with_error_code >> vector & 1 ? slot : 0);
    const auto gpa = machine_.vcpu(0).translate(at);
    const uint8_t* ours = gpa ? machine_.memory().at(*gpa, slot) : nullptr;
    if (!ours)
        return;
    uint8_t* theirs = memory_.at(*gpa, slot);
    uint64_t pushed = 0, pushed_by_kvm = 0;
    std::memcpy(&pushed, ours, slot);
    std::memcpy(&pushed_by_kvm, theirs, slot);
    if ((pushed ^ pushed_by_kvm) != Rflags::rf)
        return;
    std::memcpy(theirs, ours, slot);
    ++counts_.resume_flags;
}

/// Where the two may differ rightly (undefined flags, time), KVM goes on with what the software engine has.
void Lockstep::align(const CpuState& soft) {
    kvm_regs regs = cpu_->registers();
    regs.rax = soft.gpr[RAX];
    regs.rcx = soft.gpr[RCX];
    regs.rdx = soft.gpr[RDX];
    regs.rflags = soft.rflags;
    cpu_->set_registers(regs);
}

Result<std::optional<Difference>> Lockstep::step() {
    if (counts_.instructions % collect_period == 0)
        collect_records();
    accesses_.clear();
    Vcpu& vcpu = machine_.vcpu(0);
    const CpuState before = last_;
    const uint64_t position = store_->position();

    // An interrupt alone first.
    if (lead(0); !ended_.empty())
        return std::nullopt;
    const auto record = last_record();
    if (store_->position() != position && record && ds::BtsFlags::kind(record->flags) == ds::BtsKind::interrupt) {
        last_ = vcpu.state();
        ++counts_.interrupts;
        if (const uint8_t vector = ds::BtsFlags::vector(record->flags); vector == Vector::nmi)
            cpu_->inject_nmi();
        else
            cpu_->inject_interrupt(vector);
        kvm_branches_.push_back({linear(before, before.rip), linear(last_, last_.rip), record->flags});
        auto why = follow(before, last_, Stop::halt);
        if (!why)
            why = compare(last_, 0);
        return why ? std::optional(difference("at the delivery of an interrupt:\n" + *why, before)) : std::nullopt;
    }

    const Instruction instruction = decode(before);
    if (lead(1); !ended_.empty())
        return std::nullopt;
    last_ = vcpu.state();
    if (instruction.own_access)
        accesses_.clear();
    const auto event = last_record();
    const bool branched = store_->position() != position && event && !ds::BtsFlags::is_event(event->flags);
    // The software engine breaks off long repetitions; KVM must not stop in the midst of one.
    if (instruction.repeats && !branched && last_.rip == before.rip)
        return follow_long_repeat(before);
    const bool faulted = branched && ds::BtsFlags::kind(event->flags) == ds::BtsKind::exception;
    ++counts_.instructions;
    counts_.user += before.cpl() == 3;
    counts_.exceptions += faulted;
    counts_.system_calls += instruction.enters_kernel && !faulted;
    counts_.string_repeats += instruction.repeats;
    counts_.device_accesses += accesses_.size();

    const bool may_halt = last_.cpl() == 0 && last_.rip != before.rip;
    const bool wants_halt = faulted || instruction.enters_kernel || instruction.repeats || instruction.pushes_flags;
    if ((faulted || instruction.enters_kernel) && !may_halt) // a handler that isn't the kernel's, or its own fault
        return begin(), std::nullopt;
    if (instruction.sysret) { // it loads the flags by which it is trapped
        kvm_regs regs = cpu_->registers();
        regs.r11 |= Rflags::tf;
        cpu_->set_registers(regs);
    }
    const CpuState first = last_; // after the one, if it becomes two
    auto why = follow(before, last_, wants_halt && may_halt ? Stop::halt : Stop::trap_flag);
    if (!why && instruction.sysret) {
        kvm_regs regs = cpu_->registers();
        regs.r11 &= ~uint64_t{Rflags::tf};
        regs.rflags &= ~uint64_t{Rflags::tf};
        cpu_->set_registers(regs);
    }
    if (!why && faulted)
        check_resume_flag(ds::BtsFlags::vector(event->flags));
    uint64_t undefined = instruction.undefined_flags;
    bool second = false;
    if (!why && instruction.trap_is_late && cpu_->registers().rip != last_.rip) {
        undefined |= decode(first).undefined_flags;
        const uint64_t between = store_->position();
        if (lead(1); !ended_.empty())
            return std::nullopt;
        last_ = vcpu.state();
        ++counts_.instructions;
        // Of two instructions that KVM executed at once, its RIP shows only where both led: whether the second is a branch
        // is taken from the leader.
        second = store_->position() != between;
    }
    const bool own_results = instruction.is_time || instruction.reads_msr;
    if (!why && own_results)
        align(last_);
    if (!why && instruction.pushes_flags && !(wants_halt && may_halt)) { // the trap flag went onto the stack
        const auto gpa = vcpu.translate(last_.segments[SS].base + last_.gpr[RSP]);
        if (uint8_t* pushed = gpa ? memory_.at(*gpa, 2) : nullptr)
            pushed[1] &= static_cast<uint8_t>(~(Rflags::tf >> 8));
    }
    if (!why)
        why = compare(last_, undefined);
    if (why)
        return difference(std::move(*why), before);
    if (undefined && (cpu_->registers().rflags ^ last_.rflags) & undefined)
        align(last_);

    // The branches that KVM's RIP shows.
    const Gva from = linear(before, before.rip), to = linear(first, first.rip);
    const bool to_next = to == from + instruction.length || (instruction.repeats && to == from);
    if (faulted || !to_next || (branched && event->to == to)) // a branch to the next instruction looks like none
        kvm_branches_.push_back({from, to, 0});
    if (second)
        kvm_branches_.push_back({to, linear(last_, last_.rip), 0});
    return std::nullopt;
}

/// A repeated string instruction that the leader has not yet come to the end of.
Result<std::optional<Difference>> Lockstep::follow_long_repeat(const CpuState& before) {
    const uint64_t position = store_->position();
    while (last_.rip == before.rip) {
        if (lead(1); !ended_.empty())
            return std::nullopt;
        last_ = machine_.vcpu(0).state();
        if (store_->position() != position) // a fault in the midst of it: KVM would meet it at another time
            return begin(), std::nullopt;
    }
    ++counts_.instructions;
    ++counts_.string_repeats;
    auto why = follow(before, last_, Stop::halt);
    if (!why)
        why = compare(last_, 0);
    return why ? std::optional(difference(std::move(*why), before)) : std::nullopt;
}

Result<std::optional<Difference>> Lockstep::compare_all() {
    collect_records();
    std::string lines = compare_memory();
    CpuState kvm = last_;
    cpu_->get_state(kvm);
    if (!cpu_->failure().empty())
        return fail("KVM refused a request: {}", cpu_->failure());
    const CpuState& soft = last_;
    if (!fpu_equal(soft.fpu, kvm.fpu))
        note(lines, "the FPU's, MMX or SSE registers differ");
    const auto check = [&](const char* name, uint64_t ours, uint64_t theirs) {
        if (ours != theirs)
            note(lines, "{}: {:#x}, KVM {:#x}", name, ours, theirs);
    };
    for (unsigned i = 0; i < 4; ++i)
        check("DR0-3", soft.dr[i], kvm.dr[i]);
    check("DR7", soft.dr7, kvm.dr7);
    check("STAR", soft.star, kvm.star);
    check("LSTAR", soft.lstar, kvm.lstar);
    check("CSTAR", soft.cstar, kvm.cstar);
    check("SFMASK", soft.sfmask, kvm.sfmask);
    check("KERNEL_GS_BASE", soft.kernel_gs_base, kvm.kernel_gs_base);
    check("SYSENTER_CS", soft.sysenter_cs, kvm.sysenter_cs);
    check("SYSENTER_ESP", soft.sysenter_esp, kvm.sysenter_esp);
    check("SYSENTER_EIP", soft.sysenter_eip, kvm.sysenter_eip);
    check("PAT", soft.pat, kvm.pat);
    check("XCR0", soft.xcr0, kvm.xcr0);
    compare_segment(lines, "LDTR", soft.ldtr, kvm.ldtr);
    compare_segment(lines, "TR", soft.tr, kvm.tr);
    const auto same_place = [](const ds::BtsRecord& a, const ds::BtsRecord& b) { return a.from == b.from && a.to == b.to; };
    const auto parted = std::mismatch(soft_branches_.begin(), soft_branches_.end(), kvm_branches_.begin(),
                                      kvm_branches_.end(), same_place);
    if (parted.first != soft_branches_.end() || parted.second != kvm_branches_.end()) {
        const auto text = [](auto at, auto end) {
            return at == end ? std::string("none") : fmt::format("{:#x} -> {:#x}", at->from, at->to);
        };
        note(lines, "branch {} of this place: {}, by KVM's RIP {}", parted.first - soft_branches_.begin(),
             text(parted.first, soft_branches_.end()), text(parted.second, kvm_branches_.end()));
    }
    counts_.branches += soft_branches_.size();
    if (lines.empty())
        return std::nullopt;
    return difference(std::move(lines), soft);
}

} // namespace vtrace::kvm
