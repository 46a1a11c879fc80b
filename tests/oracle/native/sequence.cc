#include "tests/oracle/native/sequence.h"

#include <fmt/format.h>

namespace vtrace::oracle {

namespace {

bool suits(const Instruction& i) {
    switch (i.info.meta.category) {
    case ZYDIS_CATEGORY_STRINGOP:
    case ZYDIS_CATEGORY_COND_BR:
    case ZYDIS_CATEGORY_UNCOND_BR:
    case ZYDIS_CATEGORY_CALL:
    case ZYDIS_CATEGORY_RET:
    case ZYDIS_CATEGORY_SYSTEM:
    case ZYDIS_CATEGORY_IO:
        return false;
    default:
        break;
    }
    if (i.has(ZYDIS_ATTRIB_IS_PRIVILEGED) || is_approximate(i.mnemonic()))
        return false;
    if (i.mnemonic() == ZYDIS_MNEMONIC_CVTPI2PS && i.visible_memory())
        return false; // switches to MMX or not, by processor
    switch (i.mnemonic()) {
    // Addresses of their own, or faults for certain.
    case ZYDIS_MNEMONIC_XLAT:
    case ZYDIS_MNEMONIC_ENTER:
    case ZYDIS_MNEMONIC_LEAVE:
    case ZYDIS_MNEMONIC_MASKMOVQ:
    case ZYDIS_MNEMONIC_MASKMOVDQU:
    case ZYDIS_MNEMONIC_UD0:
    case ZYDIS_MNEMONIC_UD1:
    case ZYDIS_MNEMONIC_UD2:
    case ZYDIS_MNEMONIC_CLI:
    case ZYDIS_MNEMONIC_STI:
    case ZYDIS_MNEMONIC_HLT:
    case ZYDIS_MNEMONIC_BOUND:
    // Trap flag, alignment checks.
    case ZYDIS_MNEMONIC_POPF:
    case ZYDIS_MNEMONIC_POPFD:
    case ZYDIS_MNEMONIC_POPFQ:
    // Unmask exceptions, or store pointers that are left undefined.
    case ZYDIS_MNEMONIC_FLDCW:
    case ZYDIS_MNEMONIC_FLDENV:
    case ZYDIS_MNEMONIC_FRSTOR:
    case ZYDIS_MNEMONIC_FXRSTOR:
    case ZYDIS_MNEMONIC_FXRSTOR64:
    case ZYDIS_MNEMONIC_LDMXCSR:
    case ZYDIS_MNEMONIC_FNSTENV:
    case ZYDIS_MNEMONIC_FNSAVE:
    case ZYDIS_MNEMONIC_FXSAVE:
    case ZYDIS_MNEMONIC_FXSAVE64:
    case ZYDIS_MNEMONIC_FNSTSW:
        return false;
    case ZYDIS_MNEMONIC_BT:
    case ZYDIS_MNEMONIC_BTS:
    case ZYDIS_MNEMONIC_BTR:
    case ZYDIS_MNEMONIC_BTC:
        return !i.visible_memory();
    case ZYDIS_MNEMONIC_SHLD:
    case ZYDIS_MNEMONIC_SHRD: // undefined results
        return i.operands[0].size != 16;
    default:
        return true;
    }
}

class Maker {
  public:
    Maker(const std::vector<std::vector<const Form*>>& forms, Sequence& out, Random& random, bool text)
        : forms_(forms), out_(out), r_(random), text_(text), registers_(out.mode == Mode::bits64 ? 16 : 8) {}

    void run(uint64_t rip, const Data& background) {
        out_.data = background;
        UserState& in = out_.in;
        for (uint64_t& value : in.gpr)
            value = r_.integer();
        in.rip = rip;
        in.rflags = random_flags(r_) & ~Rflags::ac;
        randomize_fpu(in.fpu, r_);
        in.fpu.fxsave[Fxsave::fcw] |= 0x3f; // all masked, so nothing pending
        in.fpu.fxsave[Fxsave::fsw] &= 0x7f;
        in.fpu.fxsave[Fxsave::fsw + 1] &= 0x7f;
        in.fpu.fxsave[Fxsave::mxcsr] |= 0x80;
        in.fpu.fxsave[Fxsave::mxcsr + 1] |= 0x1f;
        pointer_ = any_register();
        counter_ = any_register();
        in.gpr[pointer_] = Arena::data + 4096 + r_.below(16);
        in.gpr[RSP] = Arena::data + 4096 + 8 * r_.below(64);
        bool loop = r_.chance(40) && counter_ != pointer_;
        in.gpr[counter_] = loop ? 1 + r_.below(3) : in.gpr[counter_];
        if (counter_ == pointer_)
            in.gpr[pointer_] = Arena::data + 4096;
        taint_ = loop ? Rflags::status : 0;

        for (unsigned left = 5 + r_.below(16); left > 0 && out_.code.size() < max_sequence_bytes - 60; left--) {
            begin_instruction();
            if (r_.chance(20))
                branch();
            else
                ordinary();
        }
        while (!pending_.empty())
            begin_instruction();
        if (loop)
            close_loop();
        out_.undefined_flags = taint_;
    }

  private:
    struct Pending {
        size_t field; // where the displacement stands
        bool wide;
        unsigned skip; // instructions still to jump over
        uint64_t taint;
    };

    Gpr any_register() {
        Gpr reg;
        do
            reg = static_cast<Gpr>(r_.below(registers_));
        while (reg == RSP);
        return reg;
    }
    void put(std::initializer_list<int> bytes) {
        for (int byte : bytes)
            out_.code.push_back(static_cast<uint8_t>(byte));
    }
    void list(std::string text) {
        if (text_)
            out_.listing.push_back(fmt::format("{:x}: {}", out_.in.rip + out_.code.size(), text));
    }

    /// Branches that end here get their displacement; what they leave undefined joins.
    void begin_instruction() {
        std::erase_if(pending_, [&](Pending& p) {
            if (p.skip-- > 0)
                return false;
            uint32_t displacement = static_cast<uint32_t>(out_.code.size() - p.field - (p.wide ? 4 : 1));
            std::memcpy(out_.code.data() + p.field, &displacement, p.wide ? 4 : 1);
            taint_ |= p.taint;
            return true;
        });
    }

    void branch() {
        static constexpr uint64_t tested[8] = {Rflags::of,
                                               Rflags::cf,
                                               Rflags::zf,
                                               Rflags::cf | Rflags::zf,
                                               Rflags::sf,
                                               Rflags::pf,
                                               Rflags::sf | Rflags::of,
                                               Rflags::zf | Rflags::sf | Rflags::of};
        unsigned code = r_.below(16);
        bool always = r_.chance(15), call = r_.chance(10), wide = call || r_.chance(40);
        if (!always && !call && (tested[code >> 1] & taint_))
            return;
        list(call ? "call" : always ? "jmp" : fmt::format("jcc {:x}", code));
        if (call)
            put({0xe8});
        else if (always)
            put({wide ? 0xe9 : 0xeb});
        else if (wide)
            put({0x0f, static_cast<int>(0x80 | code)});
        else
            put({static_cast<int>(0x70 | code)});
        pending_.push_back({out_.code.size(), wide, r_.below(4), taint_});
        out_.code.resize(out_.code.size() + (wide ? 4 : 1));
    }

    /// Writes none of the registers that the sequence itself needs.
    bool spares_registers(const Instruction& i) const {
        for (unsigned n = 0; n < i.info.operand_count; n++) {
            const ZydisDecodedOperand& op = i.operands[n];
            if (op.type != ZYDIS_OPERAND_TYPE_REGISTER || !(op.actions & ZYDIS_OPERAND_ACTION_MASK_WRITE))
                continue;
            int reg = register_number(op.reg.value);
            bool stack = reg == RSP && op.visibility == ZYDIS_OPERAND_VISIBILITY_HIDDEN;
            if (reg == pointer_ || reg == counter_ || (reg == RSP && !stack))
                return false;
        }
        return true;
    }

    void ordinary() {
        for (unsigned attempt = 0; attempt < 50; attempt++) {
            const std::vector<const Form*>& same = forms_[r_.below(static_cast<uint32_t>(forms_.size()))];
            const Form& form = *same[r_.below(static_cast<uint32_t>(same.size()))];
            int32_t displacement = static_cast<int32_t>(r_.below(7000)) - 3500;
            if (r_.chance(85))
                displacement -=
                    static_cast<int32_t>((out_.in.gpr[pointer_] + static_cast<uint64_t>(displacement)) & 15);
            Instruction i;
            if (!build_at(form, pointer_, displacement, r_, i) || !suits(i) || !spares_registers(i))
                continue;
            bool divides = i.mnemonic() == ZYDIS_MNEMONIC_DIV || i.mnemonic() == ZYDIS_MNEMONIC_IDIV;
            if (divides && !r_.chance(10))
                continue;
            // Only what has been placed may be reached: [pointer + displacement] and the stack.
            bool reachable = true;
            for (unsigned n = 0; n < i.info.operand_count; n++) {
                const ZydisDecodedOperand& op = i.operands[n];
                if (op.type == ZYDIS_OPERAND_TYPE_MEMORY && op.mem.type != ZYDIS_MEMOP_TYPE_AGEN)
                    reachable &=
                        op.mem.index == ZYDIS_REGISTER_NONE && op.mem.segment != ZYDIS_REGISTER_FS &&
                        op.mem.segment != ZYDIS_REGISTER_GS &&
                        ((register_number(op.mem.base) == pointer_ &&
                          i.info.address_width == (out_.mode == Mode::bits64 ? 64 : 32)) ||
                         (register_number(op.mem.base) == RSP && op.visibility == ZYDIS_OPERAND_VISIBILITY_HIDDEN));
            }
            if (!reachable || !flow_flags(i))
                continue;
            list(text_ ? i.text() : std::string());
            out_.code.insert(out_.code.end(), i.bytes.begin(), i.bytes.begin() + i.info.length);
            return;
        }
    }

    /// False if the instruction's answer would depend on flags that are undefined before it.
    bool flow_flags(const Instruction& i) {
        if (i.info.fpu_flags)
            out_.undefined_fsw |= undefined_fsw(i);
        const ZydisAccessedFlags* flags = i.info.cpu_flags;
        if (!flags)
            return true;
        if (flags->tested & taint_)
            return false;
        bool shift = i.info.meta.category == ZYDIS_CATEGORY_SHIFT || i.info.meta.category == ZYDIS_CATEGORY_ROTATE ||
                     i.mnemonic() == ZYDIS_MNEMONIC_SHLD || i.mnemonic() == ZYDIS_MNEMONIC_SHRD;
        uint64_t undefined = flags->undefined;
        if (shift) // by 0: all as before
            undefined |= taint_ | Rflags::of | (i.operands[0].size < 32 ? Rflags::cf : 0);
        uint64_t defined = (flags->modified | flags->set_0 | flags->set_1) & ~undefined;
        taint_ = ((taint_ & ~defined) | undefined) & Rflags::status;
        return true;
    }
    static uint16_t undefined_fsw(const Instruction& i) {
        uint32_t c = i.info.fpu_flags->undefined;
        return static_cast<uint16_t>((c & 7) << 8 | (c & 8) << 11);
    }

    void close_loop() {
        bool high = counter_ >= R8;
        list("dec counter; jnz start");
        if (out_.mode == Mode::bits64)
            put({0x48 | high});
        put({0xff, 0xc8 | (counter_ & 7)}); // DEC counter
        size_t end = out_.code.size() + 6;
        uint32_t displacement = static_cast<uint32_t>(-static_cast<int64_t>(end));
        put({0x0f, 0x85}); // JNZ start
        out_.code.resize(end);
        std::memcpy(out_.code.data() + end - 4, &displacement, 4);
        taint_ &= Rflags::cf;
    }

    const std::vector<std::vector<const Form*>>& forms_;
    Sequence& out_;
    Random& r_;
    bool text_;
    unsigned registers_;
    Gpr pointer_ = RAX, counter_ = RAX;
    uint64_t taint_ = 0;
    std::vector<Pending> pending_;
};

} // namespace

Sequence make_sequence(const std::vector<std::vector<const Form*>>& forms, Mode mode, uint64_t rip,
                       const Data& background, Random& random, bool text) {
    Sequence out;
    out.mode = mode;
    Maker(forms, out, random, text).run(rip, background);
    return out;
}

} // namespace vtrace::oracle
