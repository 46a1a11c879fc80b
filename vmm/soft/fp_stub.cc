#include "vmm/soft/fp_stub.h"

#include <cerrno>
#include <cstddef>
#include <initializer_list>
#include <map>
#include <mutex>

#include <sys/mman.h>
#include <unistd.h>

namespace vtrace::soft {
namespace {

/// Machine code of one stub, in the making. Instructions address the frame by [RDI + disp32].
class StubCode {
  public:
    static constexpr unsigned capacity = 256;

    void put(std::initializer_list<unsigned> bytes) {
        for (unsigned byte : bytes)
            bytes_[size_++] = static_cast<uint8_t>(byte);
    }
    /// `opcode` with a memory operand at frame offset `offset`; `reg` is modrm.reg.
    void frame(std::initializer_list<unsigned> opcode, unsigned reg, size_t offset) {
        constexpr unsigned mod_disp32 = 2 << 6, rm_rdi = 7;
        put(opcode);
        auto disp = static_cast<unsigned>(offset);
        put({mod_disp32 | reg << 3 | rm_rdi, disp & 0xff, disp >> 8, 0, 0});
    }
    void instruction(const HostEncoding& encoding) {
        if (encoding.prefix)
            put({encoding.prefix});
        if (encoding.rex_w)
            put({0x48});
        for (uint8_t escape : encoding.escape)
            if (escape)
                put({escape});
        put({encoding.opcode, encoding.modrm});
        if (encoding.has_imm)
            put({encoding.imm});
    }
    const uint8_t* data() const { return bytes_; }
    unsigned size() const { return size_; }

  private:
    uint8_t bytes_[capacity];
    unsigned size_ = 0;
};

// Opcodes that move between the frame and the fixed registers.
constexpr std::initializer_list<unsigned> movaps_load = {0x0f, 0x28}, movaps_store = {0x0f, 0x29},
                                          movq_load = {0x0f, 0x6f}, movq_store = {0x0f, 0x7f}, mov_load = {0x48, 0x8b},
                                          mov_store = {0x48, 0x89}, lea = {0x48, 0x8d}, group15 = {0x0f, 0xae},
                                          group15_w = {0x48, 0x0f, 0xae}, push = {0xff}, pop = {0x8f},
                                          group_d9 = {0xd9};
constexpr unsigned fxsave_digit = 0, fxrstor_digit = 1, ldmxcsr_digit = 2, stmxcsr_digit = 3, push_digit = 6,
                   pop_digit = 0, fldcw_digit = 5, fnstcw_digit = 7;
constexpr unsigned rax = 0, rcx = 1, rdx = 2, rsi = 6;

bool writes_gpr(const SimdForm& form) {
    return (form.reg == FpOperand::gpr && form.reg_written) || (form.rm == FpOperand::gpr && form.rm_written);
}

void emit_vectors(StubCode& code, const SimdForm& form, bool store) {
    auto vector = [&](FpOperand kind, unsigned number, size_t offset) {
        if (kind == FpOperand::xmm)
            code.frame(store ? movaps_store : movaps_load, number, offset);
        else if (kind == FpOperand::mmx)
            code.frame(store ? movq_store : movq_load, number, offset);
    };
    if (!store || form.reg_written)
        vector(form.reg, stub_reg, offsetof(SimdFrame, reg));
    if (!store || form.rm_written)
        vector(form.rm, stub_rm, offsetof(SimdFrame, rm));
    if (store ? form.xmm0_written : form.xmm0_read)
        vector(FpOperand::xmm, 0, offsetof(SimdFrame, xmm0));
}

StubCode simd_code(const SimdForm& form) {
    StubCode code;
    emit_vectors(code, form, false);
    if (form.reg == FpOperand::gpr || form.rm == FpOperand::gpr || form.string_lengths)
        code.frame(mov_load, rax, offsetof(SimdFrame, rax));
    if (form.string_lengths)
        code.frame(mov_load, rdx, offsetof(SimdFrame, rdx));
    if (form.memory_size)
        code.frame(lea, rsi, offsetof(SimdFrame, memory));
    if (form.arithmetic) {
        code.frame(group15, stmxcsr_digit, offsetof(SimdFrame, host_mxcsr));
        code.frame(group15, ldmxcsr_digit, offsetof(SimdFrame, mxcsr));
    }
    code.instruction(form.encoding);
    if (form.arithmetic) {
        code.frame(group15, stmxcsr_digit, offsetof(SimdFrame, mxcsr_after));
        code.frame(group15, ldmxcsr_digit, offsetof(SimdFrame, host_mxcsr));
    }
    if (form.flags_written) {
        code.put({0x9c}); // PUSHFQ
        code.frame(pop, pop_digit, offsetof(SimdFrame, rflags));
    }
    emit_vectors(code, form, true);
    if (writes_gpr(form))
        code.frame(mov_store, rax, offsetof(SimdFrame, rax));
    if (form.rcx_written)
        code.frame(mov_store, rcx, offsetof(SimdFrame, rcx));
    if (form.reg == FpOperand::mmx || form.rm == FpOperand::mmx)
        code.put({0x0f, 0x77}); // EMMS
    code.put({0xc3});           // RET
    return code;
}

bool is_direct(const SimdForm& form) {
    bool memory_source = form.memory_size && !form.memory_written;
    return form.reg == FpOperand::xmm && form.reg_written && !form.rm_written &&
           (form.rm == FpOperand::xmm || memory_source) && !form.arithmetic && !form.mmx && !form.flags_written &&
           !form.xmm0_read && !form.xmm0_written && !form.rcx_written;
}

StubCode direct_code(const SimdForm& form) {
    StubCode code;
    code.put({0x0f, 0x28, 0x0f}); // MOVAPS xmm1, [rdi]
    if (form.rm == FpOperand::xmm)
        code.put({0x0f, 0x28, 0x16}); // MOVAPS xmm2, [rsi]
    code.instruction(form.encoding);
    code.put({0x0f, 0x29, 0x0f, 0xc3}); // MOVAPS [rdi], xmm1; RET
    return code;
}

StubCode x87_code(const X87Form& form) {
    StubCode code;
    code.frame(group_d9, fnstcw_digit, offsetof(X87Frame, host_fcw));
    code.frame(group15, stmxcsr_digit, offsetof(X87Frame, host_mxcsr));
    code.frame(group15_w, fxrstor_digit, offsetof(X87Frame, image));
    if (form.memory_size)
        code.frame(lea, rsi, offsetof(X87Frame, memory));
    if (form.flags_read || form.flags_written) {
        code.frame(push, push_digit, offsetof(X87Frame, rflags));
        code.put({0x9d}); // POPFQ
    }
    code.instruction(form.encoding);
    if (form.flags_written) {
        code.put({0x9c}); // PUSHFQ
        code.frame(pop, pop_digit, offsetof(X87Frame, rflags));
    }
    code.frame(group15_w, fxsave_digit, offsetof(X87Frame, image));
    code.put({0xdb, 0xe3}); // FNINIT: nothing of the guest's stays pending
    code.frame(group_d9, fldcw_digit, offsetof(X87Frame, host_fcw));
    code.frame(group15, ldmxcsr_digit, offsetof(X87Frame, host_mxcsr));
    code.put({0xc3});
    return code;
}

/// Executable memory: one file in memory mapped twice, so that no page is ever writable and executable.
class StubArena {
  public:
    static constexpr size_t size = 16 << 20; // more than all encodings need; pages exist once they are used

    StubArena() {
        int file = memfd_create("vtrace-stubs", MFD_CLOEXEC);
        if (file < 0 || ftruncate(file, size) != 0) {
            error_ = errno;
        } else {
            void* write = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
            void* execute = mmap(nullptr, size, PROT_READ | PROT_EXEC, MAP_SHARED, file, 0);
            if (write == MAP_FAILED || execute == MAP_FAILED) {
                error_ = errno;
            } else {
                write_ = static_cast<uint8_t*>(write);
                execute_ = static_cast<uint8_t*>(execute);
            }
        }
        if (file >= 0)
            close(file);
    }

    template <class Function>
    bool add(const StubCode& code, Function*& function) {
        constexpr size_t alignment = 16;
        if (!write_ || used_ + code.size() > size)
            return false;
        std::memcpy(write_ + used_, code.data(), code.size());
        function = reinterpret_cast<Function*>(execute_ + used_);
        used_ += (code.size() + alignment - 1) & ~(alignment - 1);
        return true;
    }
    int error() const { return error_; }

  private:
    uint8_t *write_ = nullptr, *execute_ = nullptr;
    size_t used_ = 0;
    int error_ = 0;
};

struct StubCache {
    std::mutex mutex; // guards all below; held while an instruction is translated, never while one executes
    StubArena arena;
    std::map<HostEncoding, SimdForm> simd;
    std::map<HostEncoding, X87Form> x87;
};

StubCache& cache() {
    static StubCache* forever = new StubCache; // stubs may run until the process ends
    return *forever;
}

} // namespace

const SimdForm* find_simd_form(const SimdForm& wanted) {
    StubCache& all = cache();
    std::lock_guard lock(all.mutex);
    if (auto found = all.simd.find(wanted.encoding); found != all.simd.end())
        return &found->second;
    SimdForm form = wanted;
    if (!all.arena.add(simd_code(form), form.stub))
        return nullptr;
    if (is_direct(form) && !all.arena.add(direct_code(form), form.direct))
        return nullptr;
    return &all.simd.emplace(form.encoding, form).first->second;
}

const X87Form* find_x87_form(const X87Form& wanted) {
    StubCache& all = cache();
    std::lock_guard lock(all.mutex);
    if (auto found = all.x87.find(wanted.encoding); found != all.x87.end())
        return &found->second;
    X87Form form = wanted;
    if (!all.arena.add(x87_code(form), form.stub))
        return nullptr;
    return &all.x87.emplace(form.encoding, form).first->second;
}

Result<void> fp_stub_memory() {
    StubCache& all = cache();
    std::lock_guard lock(all.mutex);
    if (int error = all.arena.error())
        return fail(
            "cannot map {} MiB of executable memory for floating-point instructions: {}; the process must be allowed "
            "memfd_create and executable shared mappings",
            StubArena::size >> 20, errno_text(error));
    return {};
}

} // namespace vtrace::soft
