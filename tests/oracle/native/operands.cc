#include "tests/oracle/native/operands.h"

namespace vtrace::oracle {

int register_number(ZydisRegister reg) {
    switch (ZydisRegisterGetClass(reg)) {
    case ZYDIS_REGCLASS_GPR8:
        if (reg >= ZYDIS_REGISTER_AH && reg <= ZYDIS_REGISTER_BH)
            return reg - ZYDIS_REGISTER_AH;
        if (reg >= ZYDIS_REGISTER_SPL)
            return reg - ZYDIS_REGISTER_SPL + RSP;
        return reg - ZYDIS_REGISTER_AL;
    case ZYDIS_REGCLASS_GPR16:
        return reg - ZYDIS_REGISTER_AX;
    case ZYDIS_REGCLASS_GPR32:
        return reg - ZYDIS_REGISTER_EAX;
    case ZYDIS_REGCLASS_GPR64:
        return reg - ZYDIS_REGISTER_RAX;
    default:
        return -1;
    }
}

uint64_t register_value(const UserState& state, const Instruction& instruction, ZydisRegister reg) {
    if (reg == ZYDIS_REGISTER_RIP || reg == ZYDIS_REGISTER_EIP)
        return state.rip + instruction.info.length;
    int number = register_number(reg);
    if (number < 0)
        return 0;
    uint64_t value = state.gpr[static_cast<unsigned>(number)];
    switch (ZydisRegisterGetClass(reg)) {
    case ZYDIS_REGCLASS_GPR8:
        return static_cast<uint8_t>(reg >= ZYDIS_REGISTER_AH && reg <= ZYDIS_REGISTER_BH ? value >> 8 : value);
    case ZYDIS_REGCLASS_GPR16:
        return static_cast<uint16_t>(value);
    case ZYDIS_REGCLASS_GPR32:
        return static_cast<uint32_t>(value);
    default:
        return value;
    }
}

bool is_safe(uint64_t address, uint64_t size, Mode mode) {
    constexpr uint64_t never_mapped = 1 << 16; // what Linux keeps for null pointers
    auto within = [&](uint64_t low, uint64_t high) {
        return address >= low && address <= high && size <= high - address;
    };
    if (within(Arena::data - Arena::guard, Arena::data + Arena::size + Arena::guard) || within(0, never_mapped))
        return true;
    // Not canonical, for certain and all of it.
    return mode == Mode::bits64 && within(0x0000'8000'0000'0000 + Arena::guard, 0xffff'8000'0000'0000 - Arena::guard);
}

uint64_t random_flags(Random& random) {
    uint64_t flags = Rflags::reserved1 | Rflags::if_ | (random.next() & Rflags::status);
    if (random.chance(15))
        flags |= Rflags::df;
    if (random.chance(3))
        flags |= Rflags::ac;
    if (random.chance(5))
        flags |= Rflags::id;
    return flags;
}

void randomize_fpu(FpuImage& fpu, Random& random) {
    uint8_t* image = fpu.fxsave.data();
    std::memset(image, 0, 512);
    auto put16 = [&](unsigned at, unsigned value) {
        uint16_t word = static_cast<uint16_t>(value);
        std::memcpy(image + at, &word, 2);
    };
    unsigned fcw = 0x37f, exceptions = random.chance(70) ? 0 : random.below(64);
    if (random.chance(50))
        fcw = 0x7f | random.below(16) << 8;
    if (random.chance(12)) {
        fcw = (fcw & ~63u) | random.below(64);
        if (random.chance(80))
            exceptions &= fcw; // none pending
    }
    unsigned fsw = exceptions | random.below(8) << 11 | (random.below(8) << 8) | random.below(2) << 14;
    if (exceptions & 0x40)
        fsw |= 0x40;
    if (exceptions & ~fcw & 63)
        fsw |= 0x8080; // B, ES
    put16(Fxsave::fcw, fcw);
    put16(Fxsave::fsw, fsw);
    image[Fxsave::ftw] = static_cast<uint8_t>(random.chance(60) ? 0xff : random.next());
    uint32_t mxcsr = 0x1f80;
    if (random.chance(60))
        mxcsr |= (random.next() & 0xe07f);
    if (random.chance(12))
        mxcsr = (mxcsr & ~0x1f80u) | (random.next() & 0x1f80);
    std::memcpy(image + Fxsave::mxcsr, &mxcsr, 4);
    for (unsigned i = 0; i < 8; i++) {
        uint8_t* st = image + Fxsave::st + i * 16;
        if (random.chance(75)) {
            random.extended(st);
        } else {
            random.fill(st, 8);
            st[8] = st[9] = 0xff;
        }
    }
    for (unsigned i = 0; i < 16; i++)
        random.fill(image + Fxsave::xmm + i * 16, 16);
    if (random.chance(30)) // equal operands now and then
        std::memcpy(image + Fxsave::xmm + random.below(16) * 16, image + Fxsave::xmm + random.below(16) * 16, 16);
}

namespace {

class Preparer {
  public:
    Preparer(Case& c, uint64_t fs_base, Random& random)
        : c_(c), in_(c.in), i_(c.instruction), fs_base_(fs_base), r_(random) {}

    bool run() {
        for (uint64_t& value : in_.gpr)
            value = r_.integer();
        in_.rflags = random_flags(r_);
        randomize_fpu(in_.fpu, r_);
        in_.gpr[RSP] = r_.chance(80) ? data_address(8) : r_.integer();
        specials_before();
        if (!place_operands() || !patch_immediates() || !i_.decode())
            return false;
        if (i_.mode == Mode::bits32) // an exception may push ESP only
            in_.gpr[RSP] = static_cast<uint32_t>(in_.gpr[RSP]);
        if (!all_safe())
            return false;
        fill_memory();
        return specials_after();
    }

  private:
    bool is(std::initializer_list<ZydisMnemonic> mnemonics) const {
        for (ZydisMnemonic m : mnemonics)
            if (m == i_.mnemonic())
                return true;
        return false;
    }
    bool fixed(int reg) const { return fixed_ >> reg & 1; }
    void fix(int reg, uint64_t value) {
        in_.gpr[static_cast<unsigned>(reg)] = value;
        fixed_ |= 1u << reg;
    }

    /// Where an operand of `size` bytes is to lie.
    uint64_t data_address(uint64_t size) {
        // What must be aligned is, most of the time, wherever it lies.
        uint64_t mask = size >= 16 && r_.chance(70) ? 15 : 0;
        return any_address(size) & ~mask;
    }
    uint64_t any_address(uint64_t size) {
        uint64_t room = Arena::writable - (size < 4096 ? size : 4096),
                 at = Arena::data + r_.below(static_cast<uint32_t>(room + 1));
        uint64_t align = size >= 16 ? 16 : size ? std::bit_floor(size) : 1;
        switch (r_.below(20)) {
        case 0:
        case 1: // crosses the middle
            return Arena::data + 4096 - r_.below(static_cast<uint32_t>(size) + 1);
        case 2:
        case 3:
        case 4: // unaligned
            return at;
        case 5: // read-only, or into it
            return Arena::data + Arena::writable - size + r_.below(static_cast<uint32_t>(2 * size + 1));
        case 6: // over the end
            return Arena::data + Arena::size - r_.below(static_cast<uint32_t>(size) + 1);
        case 7: // over the beginning
            return r_.chance(50) ? Arena::data - r_.below(static_cast<uint32_t>(size) + 1)
                                 : Arena::data + Arena::size + r_.below(5000);
        default:
            return at & ~(align - 1);
        }
    }

    unsigned address_bytes() const { return i_.info.address_width / 8; }
    static void set_low(uint64_t& reg, uint64_t value, unsigned bytes) {
        uint64_t mask = bytes == 8 ? ~0ull : (1ull << bytes * 8) - 1;
        reg = (reg & ~mask) | (value & mask);
    }

    void specials_before() {
        if (i_.repeated()) {
            uint64_t count = r_.chance(70) ? r_.below(18) : r_.below(300);
            set_low(in_.gpr[RCX], count, address_bytes());
            fixed_ |= 1u << RCX;
            if (address_bytes() == 4 && r_.chance(50))
                in_.gpr[RCX] = static_cast<uint32_t>(count);
            if (r_.chance(40))
                in_.rflags |= Rflags::df;
        }
        if (is({ZYDIS_MNEMONIC_LOOP, ZYDIS_MNEMONIC_LOOPE, ZYDIS_MNEMONIC_LOOPNE, ZYDIS_MNEMONIC_JCXZ,
                ZYDIS_MNEMONIC_JECXZ, ZYDIS_MNEMONIC_JRCXZ}) &&
            r_.chance(60))
            set_low(in_.gpr[RCX], r_.below(3), r_.pick<unsigned>({2, 4, 8}));
        if (i_.info.meta.category == ZYDIS_CATEGORY_SHIFT || i_.info.meta.category == ZYDIS_CATEGORY_ROTATE ||
            is({ZYDIS_MNEMONIC_SHLD, ZYDIS_MNEMONIC_SHRD}))
            if (r_.chance(70))
                set_low(in_.gpr[RCX], r_.chance(50) ? r_.below(10) : r_.below(72), 1);
        if (is({ZYDIS_MNEMONIC_PCMPESTRI, ZYDIS_MNEMONIC_PCMPESTRM}) && r_.chance(80)) {
            in_.gpr[RAX] = static_cast<uint64_t>(int64_t{r_.below(40)} - 20);
            in_.gpr[RDX] = static_cast<uint64_t>(int64_t{r_.below(40)} - 20);
        }
        if (is({ZYDIS_MNEMONIC_DIV, ZYDIS_MNEMONIC_IDIV}) && r_.chance(75)) {
            bool is_signed = i_.mnemonic() == ZYDIS_MNEMONIC_IDIV;
            unsigned bytes = i_.operands[0].size / 8;
            if (bytes == 1) {
                set_low(in_.gpr[RAX],
                        is_signed ? static_cast<uint64_t>(static_cast<int8_t>(in_.gpr[RAX])) : r_.below(256), 2);
            } else {
                uint64_t sign = is_signed && (in_.gpr[RAX] >> (bytes * 8 - 1) & 1) ? ~0ull : 0;
                set_low(in_.gpr[RDX], r_.chance(70) ? sign : r_.below(50), bytes);
            }
        }
        // How alignment is checked in 16 bytes and in blocks of several fields is the processor's own (SDM vol.
        // 3, 6.15, #AC).
        const ZydisDecodedOperand* memory = i_.visible_memory();
        if ((memory && memory->size >= 128) ||
            is({ZYDIS_MNEMONIC_CMPSB, ZYDIS_MNEMONIC_CMPSW, ZYDIS_MNEMONIC_CMPSD, ZYDIS_MNEMONIC_CMPSQ}) ||
            is({ZYDIS_MNEMONIC_MASKMOVDQU, ZYDIS_MNEMONIC_MASKMOVQ}))
            in_.rflags &= ~Rflags::ac;
        if (is({ZYDIS_MNEMONIC_FNSAVE, ZYDIS_MNEMONIC_FNSTENV, ZYDIS_MNEMONIC_FRSTOR, ZYDIS_MNEMONIC_FLDENV}))
            in_.rflags &= ~Rflags::ac;
        if (is({ZYDIS_MNEMONIC_CVTPI2PS}) && memory) { // of MMX or not: of both minds, so nothing pending
            in_.fpu.fxsave[Fxsave::fsw] = 0;
            in_.fpu.fxsave[Fxsave::fsw + 1] &= 0x7f;
        }
        if (is({ZYDIS_MNEMONIC_LEAVE, ZYDIS_MNEMONIC_ENTER}))
            fix(RBP, data_address(8));
    }

    bool is_bit_string() const {
        return is({ZYDIS_MNEMONIC_BT, ZYDIS_MNEMONIC_BTS, ZYDIS_MNEMONIC_BTR, ZYDIS_MNEMONIC_BTC}) &&
               i_.operands[1].type == ZYDIS_OPERAND_TYPE_REGISTER && i_.operands[0].type == ZYDIS_OPERAND_TYPE_MEMORY;
    }
    /// Bytes from the operand's address to where BT with a register offset goes.
    int64_t bit_string_displacement() const {
        uint64_t value = register_value(in_, i_, i_.operands[1].reg.value);
        unsigned bits = i_.operands[0].size;
        int64_t offset = bits == 16   ? static_cast<int16_t>(value)
                         : bits == 32 ? static_cast<int32_t>(value)
                                      : static_cast<int64_t>(value);
        return (offset >> (bits == 16 ? 4 : bits == 32 ? 5 : 6)) * (bits / 8);
    }

    uint64_t segment_base(const ZydisDecodedOperand& op) const {
        return op.mem.segment == ZYDIS_REGISTER_FS   ? fs_base_
               : op.mem.segment == ZYDIS_REGISTER_GS ? Arena::gs_base
                                                     : 0;
    }
    bool hidden_stack(const ZydisDecodedOperand& op) const {
        return op.visibility == ZYDIS_OPERAND_VISIBILITY_HIDDEN && register_number(op.mem.base) == RSP &&
               op.mem.index == ZYDIS_REGISTER_NONE;
    }
    uint64_t operand_size(const ZydisDecodedOperand& op) const {
        if (is({ZYDIS_MNEMONIC_PUSHA, ZYDIS_MNEMONIC_PUSHAD, ZYDIS_MNEMONIC_POPA, ZYDIS_MNEMONIC_POPAD}))
            return 32;
        if (is({ZYDIS_MNEMONIC_MASKMOVDQU}))
            return 16;
        if (is({ZYDIS_MNEMONIC_MASKMOVQ}))
            return 8;
        return op.size / 8;
    }
    /// Linear address of a memory operand with the registers as they are.
    uint64_t address(const ZydisDecodedOperand& op) const {
        uint64_t offset = register_value(in_, i_, op.mem.base) + register_value(in_, i_, op.mem.index) * op.mem.scale +
                          static_cast<uint64_t>(op.mem.disp.has_displacement ? op.mem.disp.value : 0);
        if (op.mem.base == ZYDIS_REGISTER_NONE && op.mem.index == ZYDIS_REGISTER_NONE && !op.mem.disp.has_displacement)
            offset = 0;
        if (hidden_stack(op)) {
            unsigned width = i_.info.stack_width / 8;
            if (op.actions & ZYDIS_OPERAND_ACTION_MASK_WRITE)
                offset -= operand_size(op);
            return width == 4 ? static_cast<uint32_t>(offset) : offset;
        }
        if (i_.mnemonic() == ZYDIS_MNEMONIC_POP && register_number(op.mem.base) == RSP)
            offset += op.size / 8;
        unsigned bytes = address_bytes();
        if (bytes < 8)
            offset &= (1ull << bytes * 8) - 1;
        offset += segment_base(op);
        return i_.mode == Mode::bits32 ? static_cast<uint32_t>(offset) : offset;
    }

    /// Overwrites the displacement in the encoding.
    bool set_displacement(int64_t value) {
        unsigned size = i_.info.raw.disp.size;
        if (size == 0 || (size < 64 && (value << (64 - size)) >> (64 - size) != value))
            return false;
        std::memcpy(i_.bytes.data() + i_.info.raw.disp.offset, &value, size / 8);
        return i_.decode();
    }

    bool place_operands() {
        // The stack and the string registers first: a visible operand then has to live with them.
        for (bool hidden : {true, false})
            for (unsigned n = 0; n < i_.info.operand_count; n++) {
                const ZydisDecodedOperand& op = i_.operands[n];
                if (op.type != ZYDIS_OPERAND_TYPE_MEMORY || (op.mem.type == ZYDIS_MEMOP_TYPE_AGEN && r_.chance(80)) ||
                    (op.visibility == ZYDIS_OPERAND_VISIBILITY_HIDDEN) != hidden)
                    continue;
                if (!place(n))
                    return false;
            }
        return true;
    }

    bool place(unsigned n) {
        const unsigned size = static_cast<unsigned>(operand_size(i_.operands[n]));
        uint64_t target = data_address(size);
        // Which bytes of a masked store fault is the processor's own, and so is which operand of CMPS goes first.
        bool quiet = is({ZYDIS_MNEMONIC_MASKMOVDQU, ZYDIS_MNEMONIC_MASKMOVQ}) ||
                     (n == 1 && i_.info.meta.category == ZYDIS_CATEGORY_STRINGOP);
        if (quiet)
            target = Arena::data + 16 + r_.below(Arena::writable - 32);
        if (hidden_stack(i_.operands[n])) {
            if (!fixed(RSP))
                fix(RSP, target + (i_.operands[n].actions & ZYDIS_OPERAND_ACTION_MASK_WRITE ? size : 0));
            if (r_.chance(2) && i_.mode == Mode::bits64)
                in_.gpr[RSP] = 0x0001'0000'0000'0000 + (r_.next() >> 4);
            return true;
        }
        if (r_.chance(2) && i_.mode == Mode::bits64 && address_bytes() == 8 && !quiet)
            target = 0x0001'0000'0000'0000 + (r_.next() >> 4);
        if (is_bit_string() && r_.chance(80)) {
            int reg = register_number(i_.operands[1].reg.value);
            int64_t offset = int64_t{r_.below(8192)} - 4096;
            fix(reg, static_cast<uint64_t>(offset));
        }
        if (is_bit_string())
            target -= static_cast<uint64_t>(bit_string_displacement());
        int base = register_number(i_.operands[n].mem.base), index = register_number(i_.operands[n].mem.index);
        // Displacements: none to solve for without registers; otherwise small ones most of the time.
        bool rip_relative =
            i_.operands[n].mem.base == ZYDIS_REGISTER_RIP || i_.operands[n].mem.base == ZYDIS_REGISTER_EIP;
        uint64_t seg = segment_base(i_.operands[n]);
        if (rip_relative)
            return set_displacement(static_cast<int64_t>(target - seg - (in_.rip + i_.info.length)));
        if (base < 0 && index < 0)
            return address_bytes() == 2 ||
                   set_displacement(i_.info.raw.disp.size == 32 ? static_cast<int32_t>(target - seg)
                                                                : static_cast<int64_t>(target - seg)) ||
                   r_.chance(20);
        if (i_.info.raw.disp.size == 32 && r_.chance(60) && !set_displacement(int64_t{r_.below(8192)} - 4096))
            return false;
        const ZydisDecodedOperand& op = i_.operands[n];
        if (address_bytes() == 2)
            return true; // reaches only addresses that are never mapped
        uint64_t disp = static_cast<uint64_t>(op.mem.disp.has_displacement ? op.mem.disp.value : 0),
                 scale = op.mem.scale;
        uint64_t want = target - seg - disp;
        unsigned bytes = address_bytes();
        if (base == RSP && i_.mnemonic() == ZYDIS_MNEMONIC_POP)
            want -= op.size / 8;
        if (base >= 0 && base == index) {
            uint64_t factor = 1 + scale;
            while (want % factor)
                want++;
            if (!fixed(base))
                set_low(in_.gpr[static_cast<unsigned>(base)], want / factor, bytes);
        } else if (base >= 0 && !fixed(base)) {
            set_low(in_.gpr[static_cast<unsigned>(base)], want - register_value(in_, i_, op.mem.index) * scale, bytes);
        } else if (index >= 0 && !fixed(index) && op.mem.index != ZYDIS_REGISTER_AL) {
            want -= register_value(in_, i_, op.mem.base);
            set_low(
                in_.gpr[static_cast<unsigned>(index)],
                static_cast<uint64_t>(static_cast<int64_t>(bytes == 4 ? uint64_t{static_cast<uint32_t>(want)} : want) /
                                      static_cast<int64_t>(scale)),
                bytes);
        }
        if (base >= 0)
            fixed_ |= 1u << base;
        if (index >= 0)
            fixed_ |= 1u << index;
        return true;
    }

    bool patch_immediates() {
        for (unsigned n = 0; n < 2; n++) {
            const auto& raw = i_.info.raw.imm[n];
            if (raw.size == 0)
                continue;
            uint8_t* at = i_.bytes.data() + raw.offset;
            if (raw.is_relative) {
                // To the fence: around the instruction in its slot, or far away.
                uint64_t end = in_.rip + i_.info.length, target;
                if (raw.size == 8 || r_.chance(50)) {
                    uint64_t slot = in_.rip & ~uint64_t{31};
                    do
                        target = slot + r_.below(64);
                    while (target >= in_.rip && target < end);
                } else {
                    target = Arena::exits + r_.below(Arena::exits_size);
                }
                int64_t displacement = static_cast<int64_t>(target - end);
                if (raw.size == 8 && displacement != static_cast<int8_t>(displacement))
                    return false;
                std::memcpy(at, &displacement, raw.size / 8);
            }
        }
        if (is({ZYDIS_MNEMONIC_ENTER})) {
            uint16_t size = static_cast<uint16_t>(r_.below(64));
            std::memcpy(i_.bytes.data() + i_.info.raw.imm[0].offset, &size, 2);
            fix(RSP, Arena::data + 600 + r_.below(Arena::writable - 700));
            fix(RBP, Arena::data + 300 + r_.below(Arena::writable - 400));
        }
        return true;
    }

    bool indirect_branch() const {
        return (i_.info.meta.category == ZYDIS_CATEGORY_UNCOND_BR || i_.info.meta.category == ZYDIS_CATEGORY_CALL) &&
               !i_.operands[0].imm.is_relative;
    }
    uint64_t branch_target() {
        return r_.chance(95) ? Arena::exits + r_.below(Arena::exits_size) : Arena::data - 1 - r_.below(1000);
    }

    bool all_safe() const {
        if (address_bytes() == 2 && is({ZYDIS_MNEMONIC_MASKMOVDQU, ZYDIS_MNEMONIC_MASKMOVQ, ZYDIS_MNEMONIC_CMPSB,
                                        ZYDIS_MNEMONIC_CMPSW, ZYDIS_MNEMONIC_CMPSD}))
            return false; // see place()
        for (unsigned n = 0; n < i_.info.operand_count; n++) {
            const ZydisDecodedOperand& op = i_.operands[n];
            if (op.type != ZYDIS_OPERAND_TYPE_MEMORY || op.mem.type == ZYDIS_MEMOP_TYPE_AGEN)
                continue;
            uint64_t at = address(op), size = operand_size(op);
            if (size == 0)
                size = 64;
            if (is_bit_string())
                at += static_cast<uint64_t>(bit_string_displacement());
            if (i_.mode == Mode::bits32)
                at = static_cast<uint32_t>(at);
            if (i_.repeated()) {
                uint64_t count = in_.gpr[RCX];
                if (address_bytes() < 8)
                    count &= (1ull << address_bytes() * 8) - 1;
                if (count == 0)
                    continue;
                if (count > 4096)
                    return false;
                if (in_.rflags & Rflags::df)
                    at -= (count - 1) * size;
                size *= count;
                if (address_bytes() == 2)
                    continue;
            }
            if (!is_safe(at, size, i_.mode))
                return false;
        }
        if (is({ZYDIS_MNEMONIC_LEAVE}) && !is_safe(in_.gpr[RBP], 8, i_.mode))
            return false;
        return true;
    }

    void put(uint64_t linear, const void* bytes, uint64_t size) {
        const uint8_t* from = static_cast<const uint8_t*>(bytes);
        for (uint64_t n = 0; n < size; n++)
            if (linear + n >= Arena::data && linear + n < Arena::data + Arena::writable)
                c_.data[linear + n - Arena::data] = from[n];
    }
    uint64_t get(uint64_t linear, uint64_t size) const {
        uint64_t value = 0;
        for (uint64_t n = 0; n < size && n < 8; n++)
            if (linear + n >= Arena::data && linear + n < Arena::data + Arena::size)
                value |= uint64_t{c_.data[linear + n - Arena::data]} << n * 8;
        return value;
    }

    void fill_memory() {
        uint8_t bytes[512];
        for (unsigned n = 0; n < i_.info.operand_count; n++) {
            const ZydisDecodedOperand& op = i_.operands[n];
            if (op.type != ZYDIS_OPERAND_TYPE_MEMORY || op.mem.type == ZYDIS_MEMOP_TYPE_AGEN)
                continue;
            uint64_t size = operand_size(op), at = address(op);
            if (size > 128) { // FXRSTOR, FRSTOR: an image that loads, most of the time
                FpuImage image;
                randomize_fpu(image, r_);
                if (r_.chance(5))
                    r_.fill(image.fxsave.data() + Fxsave::mxcsr, 4);
                if (r_.chance(80))
                    put(at, image.fxsave.data(), size);
                continue;
            }
            r_.fill(bytes, 64);
            if (i_.repeated() && r_.chance(60)) { // runs that compare equal for a while
                uint64_t element = size ? size : 1;
                uint64_t from = at - 256;
                for (unsigned k = 0; k < 512; k++)
                    put(from + k, reinterpret_cast<const uint8_t*>(&in_.gpr[RAX]) + (k % element),
                        r_.chance(97) ? 1 : 0);
                continue;
            }
            put(at - 8, bytes, 64);
        }
    }

    bool specials_after() {
        const ZydisDecodedOperand* memory = i_.visible_memory();
        // MXCSR bit 17 exists on AMD only.
        if (memory && is({ZYDIS_MNEMONIC_LDMXCSR, ZYDIS_MNEMONIC_FXRSTOR, ZYDIS_MNEMONIC_FXRSTOR64})) {
            constexpr uint32_t misaligned_exception_mask = 1 << 17;
            uint64_t at = address(*memory) + (i_.mnemonic() == ZYDIS_MNEMONIC_LDMXCSR ? 0 : Fxsave::mxcsr);
            uint32_t mxcsr = static_cast<uint32_t>(get(at, 4)) & ~misaligned_exception_mask;
            put(at, &mxcsr, 4);
            if (get(at, 4) & misaligned_exception_mask)
                return false;
        }
        if (i_.mnemonic() == ZYDIS_MNEMONIC_LDMXCSR && memory && r_.chance(80)) {
            uint32_t mxcsr = r_.next() & 0xffff;
            put(address(*memory), &mxcsr, 4);
        }
        if (i_.mnemonic() == ZYDIS_MNEMONIC_CMPXCHG && r_.chance(50)) {
            uint64_t value =
                memory ? get(address(*memory), memory->size / 8) : register_value(in_, i_, i_.operands[0].reg.value);
            if (!fixed(RAX))
                set_low(in_.gpr[RAX], value, i_.operands[0].size / 8);
        }
        if (is({ZYDIS_MNEMONIC_CMPXCHG8B, ZYDIS_MNEMONIC_CMPXCHG16B}) && memory && r_.chance(50)) {
            unsigned half = memory->size / 16;
            put(address(*memory), &in_.gpr[RAX], half);
            put(address(*memory) + half, &in_.gpr[RDX], half);
        }
        if (is({ZYDIS_MNEMONIC_FBLD}) && memory && r_.chance(70)) { // decimal digits
            uint8_t digits[10];
            for (uint8_t& digit : digits)
                digit = static_cast<uint8_t>(r_.below(10) << 4 | r_.below(10));
            digits[9] = r_.chance(50) ? 0x80 : 0;
            put(address(*memory), digits, 10);
        }
        if (i_.mnemonic() == ZYDIS_MNEMONIC_RET) {
            uint64_t target = branch_target();
            put(in_.gpr[RSP], &target, i_.info.stack_width / 8);
            // A target that couldn't be placed must fault when it is read.
            return get(in_.gpr[RSP], i_.info.stack_width / 8) == target ||
                   !readable(in_.gpr[RSP], i_.info.stack_width / 8);
        }
        if (indirect_branch()) {
            uint64_t target = branch_target();
            if (memory) {
                put(address(*memory), &target, memory->size / 8);
                return get(address(*memory), memory->size / 8) == target ||
                       !readable(address(*memory), memory->size / 8);
            }
            if (int reg = register_number(i_.operands[0].reg.value); reg >= 0 && !(reg == RSP && fixed(RSP)))
                in_.gpr[static_cast<unsigned>(reg)] = target;
            else if (in_.gpr[RSP] - Arena::data >=
                     Arena::size) // CALL RSP: what isn't canonical faults as target or as stack
                return false;
        }
        return true;
    }
    static bool readable(uint64_t linear, uint64_t size) {
        return linear >= Arena::data && linear + size <= Arena::data + Arena::size;
    }

    Case& c_;
    UserState& in_;
    Instruction& i_;
    uint64_t fs_base_;
    Random& r_;
    uint32_t fixed_ = 0;
};

} // namespace

bool prepare(Case& c, uint64_t rip, uint64_t fs_base, const Data& background, Random& random) {
    c.data = background;
    c.in.rip = rip;
    return Preparer(c, fs_base, random).run();
}

} // namespace vtrace::oracle
