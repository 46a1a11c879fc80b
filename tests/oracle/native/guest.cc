#include "tests/oracle/native/guest.h"

#include "tests/oracle/native/scope.h"
#include "tests/soft/no_pins.h"
#include "vmm/soft/cpuid.h"
#include "vmm/soft/soft_vcpu.h"

namespace vtrace::oracle {

namespace {

// Guest physical layout.
constexpr Gpa pml4 = 0x1000, pdpt_low = 0x2000, pd_low = 0x3000, pdpt_high = 0x4000, pd_high = 0x5000,
              code_tables = 0x6000, exit_table = 0xe000, data_table = 0xf000, gdt = 0x10000, idt = 0x11000,
              tss = 0x12000, handlers = 0x13000, stack_top = 0x20000, exits = 0x100000, data_pages = 0x200000,
              code_pages = 0x1000000, ram = 0x2000000;
constexpr unsigned handler_stride = 16, vectors = 32;
constexpr uint64_t supervisor_base = 0xffff'8000'0000'0000; // all of RAM, for the supervisor
constexpr uint16_t kernel_cs = 0x10, tss_selector = 0x40;
constexpr uint64_t present = 1, write = 2, user = 4, accessed = 1 << 5, dirty = 1 << 6, large = 1 << 7,
                   no_execute = 1ull << 63;

bool has_error_code(unsigned vector) {
    return vector == Vector::df || (vector >= Vector::ts && vector <= Vector::pf) || vector == Vector::ac;
}

} // namespace

struct Guest::Parts {
    Parts(GuestMemory m, CpuidModel c) : memory(std::move(m)), cpuid(std::move(c)), vcpu(memory, pins, clock, cpuid) {}

    GuestMemory memory;
    CpuidModel cpuid;
    NoPins pins;
    Clock clock;
    soft::SoftVcpu vcpu;

    uint64_t* table(Gpa gpa) { return reinterpret_cast<uint64_t*>(memory.at(gpa, page_size)); }
};

Guest::Guest(std::unique_ptr<Parts> parts) : parts_(std::move(parts)) {}
Guest::~Guest() = default;

Result<std::unique_ptr<Guest>> Guest::create(uint64_t fs_base, uint64_t gs_base) {
    auto memory = GuestMemory::create(ram);
    if (!memory)
        return Unexpected(memory.error());
    auto cpuid = CpuidModel::by_name(guest_model);
    if (!cpuid)
        return Unexpected(cpuid.error());
    std::unique_ptr<Guest> guest(new Guest(std::make_unique<Parts>(std::move(*memory), std::move(*cpuid))));
    guest->build_tables();
    guest->initial_.segments[FS].base = fs_base;
    guest->initial_.segments[GS].base = gs_base;
    return guest;
}

void Guest::build_tables() {
    Parts& p = *parts_;
    p.table(pml4)[0] = pdpt_low | present | write | user | accessed;
    p.table(pml4)[256] = pdpt_high | present | write | accessed;
    p.table(pdpt_low)[0] = pd_low | present | write | user | accessed;
    p.table(pdpt_high)[0] = pd_high | present | write | accessed;
    for (uint64_t i = 0; i < ram >> 21; i++)
        p.table(pd_high)[i] = i << 21 | present | write | accessed | dirty | large;
    auto map = [&](uint64_t linear, Gpa gpa, uint64_t size, Gpa tables, uint64_t flags) {
        for (uint64_t at = 0; at < size; at += page_size) {
            Gpa table = tables + (at >> 21) * page_size;
            p.table(pd_low)[(linear + at) >> 21] = table | present | write | user | accessed;
            p.table(table)[(linear + at) >> 12 & 511] = (gpa + at) | flags | present | user | accessed | dirty;
        }
    };
    map(Arena::code, code_pages, Arena::code_size, code_tables, 0);
    map(Arena::exits, exits, Arena::exits_size, exit_table, 0);
    map(Arena::data, data_pages, Arena::writable, data_table, write | no_execute);
    map(Arena::data + Arena::writable, data_pages + Arena::writable, Arena::size - Arena::writable, data_table,
        no_execute);
    std::memset(p.memory.at(code_pages, Arena::code_size), 0xcc, Arena::code_size);
    std::memset(p.memory.at(exits, Arena::exits_size), 0xcc, Arena::exits_size);

    p.table(gdt)[kernel_cs >> 3] = 0x00af9b000000ffff;
    for (unsigned vector = 0; vector < vectors; vector++) {
        uint64_t target = supervisor_base + handlers + vector * handler_stride;
        constexpr uint64_t interrupt_gate = 0xee00ull << 32; // present, DPL 3
        p.table(idt)[2 * vector] =
            (target & 0xffff) | uint64_t{kernel_cs} << 16 | interrupt_gate | (target >> 16 & 0xffff) << 48;
        p.table(idt)[2 * vector + 1] = target >> 32;
        *p.memory.at(handlers + vector * handler_stride) = 0xf4; // HLT
    }
    uint64_t rsp0 = supervisor_base + stack_top;
    std::memcpy(p.memory.at(tss + 4), &rsp0, sizeof rsp0);
    uint16_t no_io_bitmap = 0xffff;
    std::memcpy(p.memory.at(tss + 0x66), &no_io_bitmap, sizeof no_io_bitmap);

    CpuState& s = initial_;
    s.cr0 = Cr0::pe | Cr0::mp | Cr0::et | Cr0::ne | Cr0::wp | Cr0::am | Cr0::pg;
    s.cr3 = pml4;
    s.cr4 = Cr4::pae | Cr4::pge | Cr4::osfxsr | Cr4::osxmmexcpt;
    s.efer = Efer::sce | Efer::lme | Efer::lma | Efer::nxe;
    s.gdtr = {supervisor_base + gdt, 0x7f};
    s.idtr = {supervisor_base + idt, vectors * 16 - 1};
    s.tr = {supervisor_base + tss, 0x67, tss_selector, 0x8b};
    for (Segment& segment : s.segments)
        segment = Segment{0, 0, 0, 0};
    s.segments[SS] = Segment{0, 0xffffffff, user_ds, 0xc0f3};
}

uint8_t* Guest::code() {
    return parts_->memory.at(code_pages, Arena::code_size);
}
uint8_t* Guest::data() {
    return parts_->memory.at(data_pages, Arena::size);
}

Result<> Guest::run(const UserState& in, Mode mode, uint64_t budget, Answer& out, uint64_t slice) {
    CpuState s = initial_;
    s.gpr = in.gpr;
    s.rip = in.rip;
    s.rflags = in.rflags;
    s.fpu = in.fpu;
    if (mode == Mode::bits64) {
        s.segments[CS] = Segment{0, 0xffffffff, user_cs64, 0xa0fb};
    } else {
        s.segments[CS] = Segment{0, 0xffffffff, user_cs32, 0xc0fb};
        s.segments[DS] = s.segments[ES] = s.segments[SS];
        s.segments[FS].base = s.segments[GS].base = 0;
    }
    s.tsc = parts_->clock.now();
    parts_->vcpu.set_state(s);
    VcpuRun run;
    for (uint64_t left = budget; left > 0; left -= run.retired) {
        run = parts_->vcpu.run(slice && slice < left ? slice : left);
        if (run.exit != VcpuExit::budget && run.exit != VcpuExit::device)
            break;
        if ((run.retired == 0 && run.exit == VcpuExit::budget) || run.retired > left)
            return fail("the engine says that it retired {} of {} instructions", run.retired, left);
    }
    if (run.exit != VcpuExit::budget && run.exit != VcpuExit::halted && run.exit != VcpuExit::device)
        return fail("the engine came back with exit {}: {}", static_cast<int>(run.exit), run.detail);
    s = parts_->vcpu.state();
    out.vector = completed;
    out.state.gpr = s.gpr;
    out.state.rip = s.rip;
    out.state.rflags = s.rflags;
    out.state.fpu = s.fpu;
    if (s.cpl() != 3) {
        out.vector = static_cast<int>((s.rip - supervisor_base - handlers) / handler_stride);
        uint64_t frame[6] = {};
        uint64_t rsp = s.gpr[RSP] - supervisor_base;
        if (out.vector >= static_cast<int>(vectors) || rsp < stack_top - 0x1000 || rsp >= stack_top)
            return fail("the engine is at RIP {:#x}, RSP {:#x} in the supervisor", s.rip, s.gpr[RSP]);
        unsigned skip = has_error_code(static_cast<unsigned>(out.vector)) ? 0 : 1;
        std::memcpy(frame + skip, parts_->memory.at(rsp), sizeof frame - skip * 8);
        out.error_code = static_cast<uint32_t>(frame[0]);
        out.cr2 = s.cr2;
        out.state.rip = frame[1];
        out.state.rflags = frame[3];
        out.state.gpr[RSP] = frame[4];
        if (out.vector == Vector::bp) {
            out.vector = completed;
            out.state.rip--;
        }
    }
    return {};
}

} // namespace vtrace::oracle
