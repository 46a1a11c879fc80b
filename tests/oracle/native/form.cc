#include "tests/oracle/native/form.h"

namespace vtrace::oracle {

namespace {

/// Opcodes whose register form has an instruction in each rm.
bool rm_is_opcode(Map map, uint8_t opcode) {
    return (map == Map::one_byte && opcode >= 0xd8 && opcode <= 0xdf) ||
           (map == Map::escape_0f && (opcode == 0x01 || opcode == 0xae || opcode == 0x1e));
}

struct Writer {
    Instruction& out;
    unsigned length = 0;
    void put(uint8_t byte) { out.bytes[length++] = byte; }
    void opcode(const Form& form) {
        if (form.map != Map::one_byte)
            put(0x0f);
        if (form.map == Map::escape_0f38)
            put(0x38);
        if (form.map == Map::escape_0f3a)
            put(0x3a);
        put(form.opcode);
    }
};

/// The plainest instruction of a form; false if there is none in scope.
bool sample(const Form& form, Instruction& out) {
    out.mode = form.mode;
    out.bytes.fill(0x11);
    Writer writer{out};
    if (form.prefix)
        writer.put(form.prefix);
    if (form.rex_w)
        writer.put(0x48);
    writer.opcode(form);
    writer.put(static_cast<uint8_t>((form.memory ? 0 : 0xc0) | form.reg << 3 | form.rm));
    return out.decode() && in_scope(out);
}

bool is_prefix(Mode mode, uint8_t opcode) {
    switch (opcode) {
    case 0x26:
    case 0x2e:
    case 0x36:
    case 0x3e:
    case 0x64:
    case 0x65:
    case 0x66:
    case 0x67:
    case 0xf0:
    case 0xf2:
    case 0xf3: // clang-format off
    case 0x0f: // clang-format on
        return true;
    default:
        return mode == Mode::bits64 && opcode >= 0x40 && opcode <= 0x4f;
    }
}

} // namespace

std::vector<Form> all_forms(Mode mode) {
    std::vector<Form> forms;
    Instruction instruction;
    for (Map map : {Map::one_byte, Map::escape_0f, Map::escape_0f38, Map::escape_0f3a})
        for (unsigned opcode = 0; opcode < 256; opcode++) {
            if ((map == Map::one_byte && is_prefix(mode, static_cast<uint8_t>(opcode))) ||
                (map == Map::escape_0f && (opcode == 0x38 || opcode == 0x3a)))
                continue;
            for (uint8_t prefix : {0x00, 0x66, 0xf2, 0xf3})
                for (unsigned w = 0; w < (mode == Mode::bits64 ? 2 : 1); w++)
                    for (unsigned modrm = 0; modrm < 128; modrm++) {
                        bool memory = modrm >= 64,
                             fixed_rm = !memory && rm_is_opcode(map, static_cast<uint8_t>(opcode));
                        uint8_t reg = modrm >> 3 & 7, rm = modrm & 7;
                        if (rm != 0 && !fixed_rm)
                            continue;
                        Form form{mode, map, static_cast<uint8_t>(opcode), prefix, w != 0, true, memory, fixed_rm,
                                  reg,  rm,  ZYDIS_MNEMONIC_INVALID};
                        if (!sample(form, instruction))
                            continue;
                        form.modrm = instruction.has(ZYDIS_ATTRIB_HAS_MODRM);
                        if (!form.modrm && (modrm & 63 || memory))
                            break;
                        form.mnemonic = instruction.mnemonic();
                        forms.push_back(form);
                    }
        }
    return forms;
}

namespace {

void random_bytes(Random& random, Instruction& out) {
    for (uint8_t& byte : out.bytes)
        byte = static_cast<uint8_t>(random.chance(15) ? random.pick<int>({0, 1, 0x7f, 0x80, 0xff, 2, 31, 32})
                                                      : random.next());
}

} // namespace

bool build(const Form& form, Random& random, Instruction& out) {
    bool bits64 = form.mode == Mode::bits64;
    out.mode = form.mode;
    random_bytes(random, out);
    Writer writer{out};
    if (random.chance(4))
        writer.put(bits64 ? random.pick<uint8_t>({0x64, 0x65, 0x26, 0x2e, 0x36, 0x3e})
                          : random.pick<uint8_t>({0x26, 0x36, 0x3e}));
    if (random.chance(5))
        writer.put(0x67);
    if (form.memory && form.map != Map::escape_0f38 && random.chance(8))
        writer.put(0xf0); // LOCK, where allowed; #UD elsewhere is tried too, where the decoder accepts it
    if (form.prefix)
        writer.put(form.prefix);
    if (bits64) {
        uint8_t rex = static_cast<uint8_t>((form.rex_w ? 8 : 0) | (random.chance(50) ? random.below(8) : 0));
        if (form.fixed_rm)
            rex &= 8;
        if (rex || random.chance(10))
            writer.put(0x40 | rex);
    }
    writer.opcode(form);
    if (form.modrm) {
        unsigned rm = form.fixed_rm ? form.rm : form.memory && random.chance(25) ? 4 : random.below(8);
        unsigned mod = form.memory ? random.below(3) : 3;
        writer.put(static_cast<uint8_t>(mod << 6 | form.reg << 3 | rm));
    }
    return out.decode() && out.mnemonic() == form.mnemonic && in_scope(out);
}

bool build_at(const Form& form, Gpr pointer, int32_t displacement, Random& random, Instruction& out) {
    out.mode = form.mode;
    random_bytes(random, out);
    Writer writer{out};
    if (form.memory && form.map != Map::escape_0f38 && random.chance(8))
        writer.put(0xf0);
    if (form.prefix)
        writer.put(form.prefix);
    if (form.mode == Mode::bits64) {
        uint8_t rex = static_cast<uint8_t>(form.rex_w ? 8 : 0);
        if (form.memory)
            rex |= static_cast<uint8_t>((random.chance(50) ? 4 : 0) | pointer >> 3);
        else if (!form.fixed_rm && random.chance(50))
            rex |= static_cast<uint8_t>(random.below(8));
        if (rex)
            writer.put(0x40 | rex);
    }
    writer.opcode(form);
    if (form.memory) {
        writer.put(static_cast<uint8_t>(0x80 | form.reg << 3 | (pointer & 7)));
        if ((pointer & 7) == RSP)
            writer.put(0x24);
        std::memcpy(out.bytes.data() + writer.length, &displacement, sizeof displacement);
    } else if (form.modrm) {
        writer.put(static_cast<uint8_t>(0xc0 | form.reg << 3 | (form.fixed_rm ? form.rm : random.below(8))));
    }
    return out.decode() && out.mnemonic() == form.mnemonic && in_scope(out);
}

} // namespace vtrace::oracle
