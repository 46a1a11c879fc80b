#include "vmm/devices/i8042.h"

namespace vtrace {
namespace {

namespace Status {
constexpr uint8_t output_full = 1 << 0, system_flag = 1 << 2, command = 1 << 3, not_locked = 1 << 4, timeout = 1 << 6;
}
namespace CommandByte {
constexpr uint8_t keyboard_interrupt = 1 << 0, system_flag = 1 << 2, keyboard_disabled = 1 << 4,
                  auxiliary_disabled = 1 << 5;
}
enum Command : uint8_t {
    read_command_byte = 0x20, // 0x20..0x3f read the controller's RAM, of which byte 0 is the command byte
    write_command_byte = 0x60,
    disable_auxiliary = 0xa7,
    enable_auxiliary = 0xa8,
    test_auxiliary = 0xa9,
    self_test = 0xaa,
    test_keyboard = 0xab,
    disable_keyboard = 0xad,
    enable_keyboard = 0xae,
    read_input_port = 0xc0,
    read_output_port = 0xd0,
    write_output_port_command = 0xd1,
    write_keyboard_output = 0xd2,
    write_auxiliary_output = 0xd3,
    write_auxiliary = 0xd4,
    pulse_output_first = 0xf0, // 0xf0..0xff pulse output bits that are 0 in the low nibble; bit 0 is reset
};
constexpr uint8_t ram_mask = 0x1f, ram_command_mask = 0xe0;
constexpr uint8_t self_test_passed = 0x55, interface_passed = 0x00, clock_stuck_low = 0x01, resend = 0xfe;
constexpr uint8_t input_port_idle = 0x80; // keyboard not inhibited
constexpr uint8_t reset_bit = 1 << 0;     // of the output port and of the pulse commands: active low
constexpr uint8_t control_a_reset = 1 << 0, control_a_a20 = 1 << 1;

} // namespace

I8042::I8042(IrqLine irq1, MachineEventHandler event)
    : irq1_(std::move(irq1)), event_(std::move(event)), data_(*this), command_(*this), system_control_a_(*this) {}

void I8042::respond(uint8_t value, uint8_t flags) {
    state_.output = value;
    state_.status = static_cast<uint8_t>((state_.status & ~Status::timeout) | Status::output_full | flags);
    irq1_.set(state_.command_byte & CommandByte::keyboard_interrupt);
}

uint8_t I8042::read_data() {
    state_.status &= static_cast<uint8_t>(~(Status::output_full | Status::timeout));
    irq1_.set(false);
    return state_.output;
}

uint8_t I8042::read_status() {
    const uint8_t system = state_.command_byte & CommandByte::system_flag ? Status::system_flag : 0;
    return static_cast<uint8_t>(state_.status | system | Status::not_locked);
}

void I8042::write_data(uint8_t value) {
    state_.status &= static_cast<uint8_t>(~Status::command);
    const uint8_t command = state_.pending_command;
    state_.pending_command = 0;
    if (command == 0) { // for the keyboard, which isn't there
        respond(resend, Status::timeout);
    } else if ((command & ram_command_mask) == write_command_byte) {
        if (command == write_command_byte)
            state_.command_byte = value;
        else
            state_.ram[command & ram_mask] = value;
    } else if (command == write_output_port_command) {
        write_output_port(value);
    } else if (command == write_auxiliary) {
        respond(resend, Status::timeout);
    } else { // 0xd2, and 0xd3 that without an auxiliary interface does the same
        respond(value);
    }
}

void I8042::write_output_port(uint8_t value) {
    state_.output_port = value;
    if (!(value & reset_bit))
        event_({MachineEvent::Kind::reset});
}

void I8042::write_command(uint8_t value) {
    state_.status |= Status::command;
    state_.pending_command = 0;
    if ((value & ram_command_mask) == read_command_byte) {
        respond(value == read_command_byte ? state_.command_byte : state_.ram[value & ram_mask]);
        return;
    }
    if ((value & ram_command_mask) == write_command_byte) {
        state_.pending_command = value;
        return;
    }
    if (value >= pulse_output_first) {
        if (!(value & reset_bit))
            event_({MachineEvent::Kind::reset});
        return;
    }
    switch (value) {
    case disable_auxiliary:
        state_.command_byte |= CommandByte::auxiliary_disabled;
        break;
    case enable_auxiliary:
        state_.command_byte &= static_cast<uint8_t>(~CommandByte::auxiliary_disabled);
        break;
    case test_auxiliary:
        respond(clock_stuck_low);
        break;
    case self_test:
        state_.command_byte |= CommandByte::system_flag;
        respond(self_test_passed);
        break;
    case test_keyboard:
        respond(interface_passed);
        break;
    case disable_keyboard:
        state_.command_byte |= CommandByte::keyboard_disabled;
        break;
    case enable_keyboard:
        state_.command_byte &= static_cast<uint8_t>(~CommandByte::keyboard_disabled);
        break;
    case read_input_port:
        respond(input_port_idle);
        break;
    case read_output_port:
        respond(state_.output_port);
        break;
    case write_output_port_command:
    case write_keyboard_output:
    case write_auxiliary_output:
    case write_auxiliary:
        state_.pending_command = value;
        break;
    default: // unknown to the controller
        break;
    }
}

uint8_t I8042::read_control_a() {
    return state_.control_a;
}

void I8042::write_control_a(uint8_t value) {
    const bool resets = value & control_a_reset && !(state_.control_a & control_a_reset);
    state_.control_a = value & (control_a_reset | control_a_a20);
    if (resets)
        event_({MachineEvent::Kind::reset});
}

} // namespace vtrace
