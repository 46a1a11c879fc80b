#include "tests/soft/fp_native.h"

#include <csetjmp>
#include <csignal>
#include <cstring>
#include <stdexcept>
#include <vector>

#include <sys/mman.h>
#include <ucontext.h>
#include <xmmintrin.h>

namespace vtrace::soft {
namespace {

/// The code page is followed by the data it addresses relative to RIP.
struct alignas(64) Data {
    FpuImage in, out;
    uint64_t gpr[16];
    uint64_t gpr_out[16];
    uint64_t flags, flags_out;
    uint64_t rsp;
};
constexpr size_t code_size = 4096;

sigjmp_buf escape;
FpuImage at_signal;

void on_signal(int signal, siginfo_t*, void* context) {
    auto* fpregs = static_cast<ucontext_t*>(context)->uc_mcontext.fpregs;
    std::memcpy(at_signal.fxsave.data(), fpregs, at_signal.fxsave.size());
    siglongjmp(escape, signal);
}

class Assembler {
  public:
    explicit Assembler(uint8_t* code) : code_(code) {}
    void put(std::initializer_list<int> bytes) {
        for (int byte : bytes)
            code_[size_++] = static_cast<uint8_t>(byte);
    }
    void put(std::span<const uint8_t> bytes) {
        std::memcpy(code_ + size_, bytes.data(), bytes.size());
        size_ += bytes.size();
    }
    /// An instruction with a RIP-relative operand in Data; `reg` is modrm.reg.
    void data(std::initializer_list<int> opcode, int reg, size_t offset) {
        put(opcode);
        put({reg << 3 | 5});
        auto disp = static_cast<uint32_t>(code_size + offset - (size_ + 4));
        put({int(disp & 0xff), int(disp >> 8 & 0xff), int(disp >> 16 & 0xff), int(disp >> 24)});
    }
    void gpr(bool store, unsigned reg, size_t array) {
        data({reg >= 8 ? 0x4c : 0x48, store ? 0x89 : 0x8b}, reg & 7, array + reg * 8);
    }

  private:
    uint8_t* code_;
    size_t size_ = 0;
};

uint8_t* code_page() {
    static uint8_t* page = [] {
        void* memory = mmap(nullptr, code_size + sizeof(Data), PROT_READ | PROT_WRITE | PROT_EXEC,
                            MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (memory == MAP_FAILED)
            throw std::runtime_error("the test can't map executable memory");
        return static_cast<uint8_t*>(memory);
    }();
    return page;
}

} // namespace

int run_native(NativeState& state, std::span<const uint8_t> bytes) {
    uint8_t* page = code_page();
    auto* data = reinterpret_cast<Data*>(page + code_size);
    data->in = state.fpu;
    std::memcpy(data->gpr, state.gpr.data(), sizeof data->gpr);
    data->flags = (state.rflags & Rflags::status) | Rflags::reserved1 | Rflags::if_;

    Assembler a(page);
    a.put({0x53, 0x55, 0x41, 0x54, 0x41, 0x55, 0x41, 0x56, 0x41, 0x57}); // PUSH RBX RBP R12..R15
    a.data({0x48, 0x89}, RSP, offsetof(Data, rsp));
    a.data({0x48, 0x0f, 0xae}, 1, offsetof(Data, in)); // FXRSTOR64
    a.data({0xff}, 6, offsetof(Data, flags));          // PUSH
    a.put({0x9d});                                     // POPFQ
    for (unsigned i = 0; i < 16; i++)
        if (i != RSP)
            a.gpr(false, i, offsetof(Data, gpr));
    a.put(bytes);
    for (unsigned i = 0; i < 16; i++)
        if (i != RSP)
            a.gpr(true, i, offsetof(Data, gpr_out));
    a.put({0x9c});                                      // PUSHFQ
    a.data({0x8f}, 0, offsetof(Data, flags_out));       // POP
    a.data({0x48, 0x0f, 0xae}, 0, offsetof(Data, out)); // FXSAVE64
    a.put({0xdb, 0xe3});                                // FNINIT
    a.put({0x41, 0x5f, 0x41, 0x5e, 0x41, 0x5d, 0x41, 0x5c, 0x5d, 0x5b, 0xc3});

    struct sigaction action {
    }, old[3];
    action.sa_sigaction = on_signal;
    action.sa_flags = SA_SIGINFO;
    constexpr int signals[] = {SIGFPE, SIGSEGV, SIGILL};
    for (int i = 0; i < 3; i++)
        sigaction(signals[i], &action, &old[i]);
    const unsigned host_mxcsr = _mm_getcsr();
    int signal = sigsetjmp(escape, 1);
    if (signal == 0)
        reinterpret_cast<void (*)()>(page)();
    _mm_setcsr(host_mxcsr);
    asm volatile("fninit");
    for (int i = 0; i < 3; i++)
        sigaction(signals[i], &old[i], nullptr);
    if (signal) {
        state.fpu = at_signal;
        return signal;
    }
    state.fpu = data->out;
    uint64_t rsp = state.gpr[RSP];
    std::memcpy(state.gpr.data(), data->gpr_out, sizeof data->gpr_out);
    state.gpr[RSP] = rsp;
    state.rflags = data->flags_out & Rflags::status;
    return 0;
}

} // namespace vtrace::soft
