#include "vmm/soft/fp_environment.h"

namespace vtrace::soft {
namespace {

enum Tag : unsigned { tag_valid, tag_zero, tag_special, tag_empty };
constexpr unsigned tag_bits = 2;
constexpr uint16_t fop_mask = 0x7ff;

Tag tag_of(const uint8_t* st) {
    uint64_t significand;
    uint16_t exponent;
    std::memcpy(&significand, st, sizeof significand);
    std::memcpy(&exponent, st + sizeof significand, sizeof exponent);
    constexpr uint16_t exponent_mask = 0x7fff;
    exponent &= exponent_mask;
    if (exponent == 0 && significand == 0)
        return tag_zero;
    bool integer_bit = significand >> 63;
    return exponent == 0 || exponent == exponent_mask || !integer_bit ? tag_special : tag_valid;
}

/// Fields of 16 or 32 bits in memory; of a wide control, status or tag word the upper half is stored as ones.
class Fields {
  public:
    Fields(uint8_t* bytes, bool wide) : bytes_(bytes), width_(wide ? 4 : 2) {}
    void put(unsigned index, uint32_t value) { std::memcpy(bytes_ + index * width_, &value, width_); }
    void put_word(unsigned index, uint16_t value) { put(index, 0xffff0000u | value); }

  private:
    uint8_t* bytes_;
    unsigned width_;
};

uint32_t get_field(const uint8_t* bytes, bool wide, unsigned index) {
    unsigned width = wide ? 4 : 2;
    uint32_t value = 0;
    std::memcpy(&value, bytes + index * width, width);
    return value;
}

enum Field : unsigned { field_fcw, field_fsw, field_ftw, field_ip, field_cs_op, field_dp, field_ds };

} // namespace

uint16_t full_tag_word(const FpuImage& image) {
    unsigned top = fx_top(image);
    auto abridged = fx_get<uint8_t>(image, Fx::ftw);
    unsigned tags = 0;
    for (unsigned i = 0; i < 8; i++) {
        const uint8_t* st = image.fxsave.data() + Fx::st + ((i - top) & 7) * Fx::slot_size;
        tags |= (abridged >> i & 1 ? tag_of(st) : tag_empty) << i * tag_bits;
    }
    return static_cast<uint16_t>(tags);
}

void store_environment(const FpuImage& image, EnvironmentLayout layout, uint8_t* out) {
    Fields fields(out, layout.wide);
    auto ip = fx_get<uint32_t>(image, Fx::fip), dp = fx_get<uint32_t>(image, Fx::fdp);
    uint32_t op = fx_get<uint16_t>(image, Fx::fop) & fop_mask;
    fields.put_word(field_fcw, fx_get<uint16_t>(image, Fx::fcw));
    fields.put_word(field_fsw, fx_get<uint16_t>(image, Fx::fsw));
    fields.put_word(field_ftw, full_tag_word(image));
    if (layout.protected_) { // selectors are always 0; 16-bit operand size has no place for FOP
        fields.put(field_ip, ip);
        fields.put(field_cs_op, layout.wide ? op << 16 : 0);
        fields.put(field_dp, dp);
        layout.wide ? fields.put_word(field_ds, 0) : fields.put(field_ds, 0);
    } else if (layout.wide) { // linear addresses in two parts
        fields.put_word(field_ip, static_cast<uint16_t>(ip));
        fields.put(field_cs_op, ip >> 16 << 12 | op);
        fields.put_word(field_dp, static_cast<uint16_t>(dp));
        fields.put(field_ds, dp >> 16 << 12);
    } else { // 20-bit linear addresses
        fields.put(field_ip, ip);
        fields.put(field_cs_op, (ip >> 16 & 0xf) << 12 | op);
        fields.put(field_dp, dp);
        fields.put(field_ds, (dp >> 16 & 0xf) << 12);
    }
}

void load_environment(FpuImage& image, EnvironmentLayout layout, const uint8_t* in) {
    auto field = [&](Field index) { return get_field(in, layout.wide, index); };
    auto fsw = static_cast<uint16_t>(field(field_fsw));
    fx_set_top(image, fsw >> Fsw::top_shift & 7);
    fx_set(image, Fx::fsw, fsw);
    uint32_t tags = field(field_ftw);
    unsigned abridged = 0;
    for (unsigned i = 0; i < 8; i++)
        abridged |= ((tags >> i * tag_bits & 3) != tag_empty) << i;
    fx_set<uint16_t>(image, Fx::ftw, static_cast<uint16_t>(abridged));
    uint32_t ip = field(field_ip), op = field(field_cs_op), dp = field(field_dp);
    if (layout.protected_) {
        op = layout.wide ? op >> 16 : 0;
    } else {
        uint32_t high_mask = layout.wide ? 0xffff : 0xf;
        ip = (ip & 0xffff) | (op >> 12 & high_mask) << 16;
        dp = (dp & 0xffff) | (field(field_ds) >> 12 & high_mask) << 16;
    }
    fx_set<uint64_t>(image, Fx::fip, ip);
    fx_set<uint64_t>(image, Fx::fdp, dp);
    fx_set<uint16_t>(image, Fx::fop, op & fop_mask);
    fx_set_fcw(image, static_cast<uint16_t>(field(field_fcw)));
}

} // namespace vtrace::soft
