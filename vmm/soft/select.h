// Picks a handler out of a family of templates by operand width and address shape.
#pragma once

#include <cstdint>

#include "vmm/soft/decode.h"

namespace vtrace::soft {

/// Calls `make.template operator()<T>()` with the unsigned type of `bits` (8, 16, 32, 64) and returns its handler.
template <class Make>
Handler by_width(unsigned bits, Make make) {
    switch (bits) {
    case 8:
        return make.template operator()<uint8_t>();
    case 16:
        return make.template operator()<uint16_t>();
    case 32:
        return make.template operator()<uint32_t>();
    case 64:
        return make.template operator()<uint64_t>();
    default:
        return nullptr;
    }
}

/// As by_width, for instructions without an 8-bit form.
template <class Make>
Handler by_wide_width(unsigned bits, Make make) {
    switch (bits) {
    case 16:
        return make.template operator()<uint16_t>();
    case 32:
        return make.template operator()<uint32_t>();
    case 64:
        return make.template operator()<uint64_t>();
    default:
        return nullptr;
    }
}

/// Calls `make.template operator()<Ea>()` with the address class of a memory operand.
template <class Make>
Handler by_shape(EaShape shape, Make make) {
    switch (shape) {
    case EaShape::base:
        return make.template operator()<EaBase>();
    case EaShape::index:
        return make.template operator()<EaIndex>();
    case EaShape::any:
        return make.template operator()<EaAny>();
    case EaShape::none:
        break;
    }
    return nullptr;
}

/// Calls `make.template operator()<Code>()` for a condition code 0..15.
template <class Make>
Handler by_condition(unsigned code, Make make) {
    switch (code) {
#define VTRACE_CONDITION(n)                                                                                            \
    case n:                                                                                                            \
        return make.template operator()<n>();
        VTRACE_CONDITION(0)
        VTRACE_CONDITION(1)
        VTRACE_CONDITION(2)
        VTRACE_CONDITION(3)
        VTRACE_CONDITION(4)
        VTRACE_CONDITION(5)
        VTRACE_CONDITION(6)
        VTRACE_CONDITION(7)
        VTRACE_CONDITION(8)
        VTRACE_CONDITION(9)
        VTRACE_CONDITION(10)
        VTRACE_CONDITION(11)
        VTRACE_CONDITION(12)
        VTRACE_CONDITION(13)
        VTRACE_CONDITION(14)
        VTRACE_CONDITION(15)
#undef VTRACE_CONDITION
    default:
        return nullptr;
    }
}

/// Do operands of this address class have a fast path? (Others may fault before the access.)
template <class Ea>
inline constexpr bool has_fast_path = !std::is_same_v<Ea, EaAny>;

inline bool is_register(const ZydisDecodedOperand& operand) { return operand.type == ZYDIS_OPERAND_TYPE_REGISTER; }
inline bool is_memory(const ZydisDecodedOperand& operand) { return operand.type == ZYDIS_OPERAND_TYPE_MEMORY; }
inline bool is_immediate(const ZydisDecodedOperand& operand) { return operand.type == ZYDIS_OPERAND_TYPE_IMMEDIATE; }
inline bool is_gpr(const ZydisDecodedOperand& operand) {
    if (!is_register(operand))
        return false;
    ZydisRegisterClass cls = ZydisRegisterGetClass(operand.reg.value);
    return cls == ZYDIS_REGCLASS_GPR8 || cls == ZYDIS_REGCLASS_GPR16 || cls == ZYDIS_REGCLASS_GPR32 ||
           cls == ZYDIS_REGCLASS_GPR64;
}

} // namespace vtrace::soft
