#!/usr/bin/env python3
"""Runs a bare guest without interrupts by vtrace and by QEMU's TCG, and compares their taken branches record by record.

Both give records of 24 bytes (from, to, flags). Of TCG's the part before the guest's entry point (firmware) is left out.
Where TCG's blocks tell less than a Branch Trace Store, the comparison makes up for it, and says how often:

- A branch to the instruction that follows it looks like a block's end: records that go 1..15 bytes ahead are left out on
  both sides. The guest's own short branches go 20 bytes or more.
- TCG makes each REP iteration a branch to itself: records of a string instruction to itself are left out on its side; on
  vtrace's side there must be none. `loop` to itself counts on both.
- An exception leaves a TCG block in its middle: for what vtrace marks as an exception, TCG's `from` is the block's last
  instruction, so only `to` is compared.
- A store into the block that runs ends TCG's block in its middle, and it goes on from there: a record that goes back by less
  than a block and that vtrace lacks is passed over ("resumed"). At most one for each store that a guest makes into its
  own block, so their number is limited by --resumed.

Exit status: 0 equal; 1 not; 77 QEMU or its plugin is not here.
"""

import argparse
import array
import os
import shutil
import struct
import subprocess
import sys
import tempfile

SKIPPED = 77
QEMU = "qemu-system-x86_64"
TIMEOUT_S = 120
VTRACE_GUEST_EXIT = 64  # vtrace record: the guest left by the exit port with 0
RECORD = struct.Struct("<QQQ")
FALL_THROUGH = 15  # the longest instruction
BLOCK_BYTES = 4096  # TCG's blocks stay on a page, but for the last instruction
KIND_SHIFT, KIND_MASK, KIND_EXCEPTION, FIRST_EVENT = 8, 0xFF, 2, 0x10
STRING_OPCODES = {*range(0x6C, 0x70), *range(0xA4, 0xA8), *range(0xAA, 0xB0)}
PREFIXES = {0x26, 0x2E, 0x36, 0x3E, *range(0x40, 0x50), 0x64, 0x65, 0x66, 0x67, 0xF2, 0xF3}


class Image:
    """The loaded bytes of a 32-bit ELF file, by address."""

    def __init__(self, path):
        with open(path, "rb") as file:
            data = file.read()
        self.entry, header_offset = struct.unpack_from("<II", data, 24)
        size, count = struct.unpack_from("<HH", data, 42)
        self.segments = []
        for index in range(count):
            kind, offset, _, physical, in_file, _ = struct.unpack_from("<6I", data, header_offset + index * size)
            if kind == 1:  # PT_LOAD
                self.segments.append((physical, data[offset:offset + in_file]))

    def at(self, address, length):
        for start, data in self.segments:
            if start <= address < start + len(data):
                return data[address - start:address - start + length]
        return b""


def is_string_instruction(code):
    repeated = False
    for byte in code:
        if byte not in PREFIXES:
            return repeated and byte in STRING_OPCODES
        repeated |= byte in (0xF2, 0xF3)
    return False


def records(path):
    raw = array.array("Q")
    with open(path, "rb") as file:
        raw.frombytes(file.read())
    return list(zip(raw[0::3], raw[1::3], raw[2::3]))


def falls_through(from_, to):
    return 0 < to - from_ <= FALL_THROUGH


def clean_qemu(path, image):
    stream = records(path)
    for index, (_, to, _) in enumerate(stream):
        if to == image.entry:
            stream = stream[index + 1:]
            break
    else:
        sys.exit(f"FAIL: QEMU never came to the guest's entry point {image.entry:#x}")
    strings = {}
    kept = []
    for from_, to, _ in stream:
        if falls_through(from_, to):
            continue
        if from_ == to:
            if from_ not in strings:
                strings[from_] = is_string_instruction(image.at(from_, 15))
            if strings[from_]:
                continue
        kept.append((from_, to))
    return kept


def clean_vtrace(path):
    kept = []
    for from_, to, flags in records(path):
        kind = flags >> KIND_SHIFT & KIND_MASK
        if kind >= FIRST_EVENT:
            continue
        if kind == KIND_EXCEPTION or not falls_through(from_, to):
            kept.append((from_, to, kind == KIND_EXCEPTION))
    return kept


def difference(ours, theirs, ours_at, theirs_at, counts):
    print(f"FAIL: the records differ at vtrace's {ours_at} and QEMU's {theirs_at} ({counts})")
    for index in range(-6, 4):
        left = ours[ours_at + index] if 0 <= ours_at + index < len(ours) else None
        right = theirs[theirs_at + index] if 0 <= theirs_at + index < len(theirs) else None
        mark = ">" if index == 0 else " "
        ours_text = f"{left[0]:#x} -> {left[1]:#x}{' exception' if left[2] else ''}" if left else "-"
        theirs_text = f"{right[0]:#x} -> {right[1]:#x}" if right else "-"
        print(f"{mark} vtrace {ours_text:50} QEMU {theirs_text}")
    return 1


def compare(ours, theirs, resumed_limit):
    counts = {"equal": 0, "exceptions": 0, "resumed": 0}
    ours_at = theirs_at = 0
    while ours_at < len(ours) and theirs_at < len(theirs):
        from_, to, exception = ours[ours_at]
        their_from, their_to = theirs[theirs_at]
        if to == their_to and (exception or from_ == their_from):
            counts["exceptions" if exception else "equal"] += 1
            ours_at += 1
            theirs_at += 1
        elif 0 <= their_from - their_to < BLOCK_BYTES and counts["resumed"] < resumed_limit:
            counts["resumed"] += 1
            theirs_at += 1
        else:
            return difference(ours, theirs, ours_at, theirs_at, counts)
    if ours_at != len(ours) or theirs_at != len(theirs):
        return difference(ours, theirs, ours_at, theirs_at, counts)
    print(f"equal: {counts['equal']} branches and {counts['exceptions']} exceptions; "
          f"{counts['resumed']} times TCG resumed inside a block that had changed")
    return 0


def run(command):
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          timeout=TIMEOUT_S, check=False)
    return done.returncode, done.stdout.decode(errors="replace")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vtrace", help="the vtrace command")
    parser.add_argument("--plugin", required=True, help="the branches plugin")
    parser.add_argument("--guest", required=True)
    parser.add_argument("--resumed", type=int, default=0, help="how often TCG may resume inside a block")
    parser.add_argument("--records", help="compare with this raw file instead of running vtrace")
    options = parser.parse_args()
    if not shutil.which(QEMU):
        print(f"SKIPPED: no {QEMU}: apt-get install qemu-system-x86")
        return SKIPPED
    image = Image(options.guest)
    with tempfile.TemporaryDirectory() as scratch:
        theirs_path = os.path.join(scratch, "qemu.bts")
        status, output = run([QEMU, "-accel", "tcg,thread=single", "-cpu", "max,vendor=GenuineIntel", "-machine", "pc",
                              "-m", "64", "-nodefaults", "-display", "none", "-serial", "none", "-no-reboot", "-device",
                              "isa-debug-exit,iobase=0xf4,iosize=1", "-kernel", options.guest, "-plugin",
                              f"{options.plugin},out={theirs_path}"])
        if status != 1:
            print(f"FAIL: under QEMU the guest ended with {status}, not 1\n{output}")
            return 1
        ours_path = options.records
        if not ours_path:
            trace, ours_path = os.path.join(scratch, "guest.vtr"), os.path.join(scratch, "vtrace.bts")
            status, output = run([options.vtrace, "record", "--kernel", options.guest, "--memory", "64M", "--cpu", "x86-64-v2",
                                  "--output", trace])
            if status != VTRACE_GUEST_EXIT:
                print(f"FAIL: vtrace record ended with {status}\n{output}")
                return 1
            status, output = run([options.vtrace, "dump", "--format=raw", "-o", ours_path, trace])
            if status != 0:
                print(f"FAIL: vtrace dump ended with {status}\n{output}")
                return 1
        return compare(clean_vtrace(ours_path), clean_qemu(theirs_path, image), options.resumed)


if __name__ == "__main__":
    sys.exit(main())
