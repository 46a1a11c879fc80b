// The options that say which guest runs, on what machine, under which engine: those of `vtrace run` and `vtrace record`.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "vmm/kvm/host.h"
#include "vmm/machine.h"

namespace vtrace::cli {

enum class Accel : uint8_t { automatic, kvm, soft };

struct GuestOptions {
    BootOptions boot;
    std::string flat_mode; // empty, "16", "32" or "64"
    uint64_t flat_load_address = 0, flat_entry = 0;
    bool flat_load_given = false, flat_entry_given = false;
    std::string protocol = "auto";
    uint64_t memory = 512ull << 20;
    unsigned vcpus = 1;
    std::string cpu = "atom";
    std::string console = "-";
    std::string input;
    std::string input_after;
    Accel accel = Accel::automatic;
    std::string device = kvm::KvmHost::default_device;
    RunLimits limits;
    bool quiet = false;
};

void add_guest_options(CLI::App& app, GuestOptions& options);
/// Once the command line is parsed: which of them were given.
void note_given_options(const CLI::App& app, GuestOptions& options);

/// The machine that the options describe, without KVM. Errors: an unknown CPU model or number that makes no sense.
Result<MachineConfig> machine_config(const GuestOptions& options);

/// What of it goes into a trace: "machine" and "boot". Nothing in it depends on the host, on the time or on the folder
/// that the files are in.
nlohmann::json guest_json(const GuestOptions& options, const Machine& machine);

/// The engine for the guest's native execution, and why it is taken.
struct Engine {
    std::unique_ptr<kvm::KvmHost> kvm; // null: there is none, the software engine does all
    std::string reason;
};
/// `native`: there is something to run natively. Error: KVM was asked for and can't be used; it says why, and what to do.
Result<Engine> choose_engine(const GuestOptions& options, bool native);

} // namespace vtrace::cli
