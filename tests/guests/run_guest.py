#!/usr/bin/env python3
"""Runs a self-checking bare guest on one engine and judges its lines.

Engines: vtrace (--vtrace PATH), tcg and kvm (QEMU's). The guest prints "PASS name", "FAIL name: ..." or "SKIP name: ...";
a name that begins with spaces belongs to the title or check before it. A failure that the --known file lists for this
engine, with its reason, is not counted; a listed one that passes is an error, so that the list stays true.

Exit status: 0 all checks pass; 1 a check failed, or the guest did not end; 77 the engine is not here (a line says why).
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile

SKIPPED = 77
TIMEOUT_S = 40
PROBE_TIMEOUT_S = 5
VTRACE_GUEST_EXIT = 64  # vtrace's exit status for a guest's exit code 0; QEMU's is 2 * code + 1
KVM_CPU = "host,-arch-capabilities"  # QEMU 7.2 fails to set that MSR on some hosts
QEMU = "qemu-system-x86_64"
CHECK_LINE = re.compile(r"PASS (?P<PASS>.+)|FAIL (?P<FAIL>.+)|SKIP (?P<SKIP>.+)")


def qemu(accelerator, cpu, guest):
    return [QEMU, "-accel", accelerator, "-cpu", cpu, "-machine", "pc", "-m", "64", "-nodefaults", "-display", "none",
            "-serial", "stdio", "-no-reboot", "-device", "isa-debug-exit,iobase=0xf4,iosize=1", "-kernel", guest]


def run(command, timeout=TIMEOUT_S):
    """Runs it with a time limit; gives its output and exit status (None: did not end)."""
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        output, _ = process.communicate(timeout=timeout)
        status = process.returncode
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
        status = None
    return output.decode(errors="replace"), status


def checks(output):
    """Yields (verdict, full name, detail) for each check line."""
    title = ""
    for line in output.splitlines():
        if line.startswith("# "):
            title = line[2:]
            continue
        match = CHECK_LINE.match(line)
        if not match:
            continue
        verdict = match.lastgroup
        indent, name, detail = re.match(r"(\s*)(.*?)(?:: (got 0x\w+ want 0x\w+))?$", match[verdict]).groups()
        if verdict == "SKIP":
            name, _, detail = name.partition(": ")
        if indent:
            name = f"{title} / {name}"
        else:
            title = name
        yield verdict, name, detail or ""


def known_failures(path, engine, guest):
    """The known file's lines are ENGINE | GUEST | CHECK | REASON."""
    known = {}
    with open(path, encoding="utf-8") as lines:
        for line in lines:
            if line.strip() and not line.startswith("#"):
                listed_engine, listed_guest, check, reason = (field.strip() for field in line.split("|", 3))
                if (listed_engine, listed_guest) == (engine, guest):
                    known[check] = reason
    return known


def skip(reason):
    print(f"SKIPPED: {reason}")
    sys.exit(SKIPPED)


def require_kvm(probe):
    """KVM that has no hardware under it may open, and yet not run a guest: the probe guest finds out."""
    try:
        os.close(os.open("/dev/kvm", os.O_RDWR))
    except OSError as error:
        skip(f"/dev/kvm: {error.strerror}")
    output, status = run(qemu("kvm", KVM_CPU, probe), PROBE_TIMEOUT_S)
    if status != 1:
        last = output.strip().splitlines()[-1:] or ["no output"]
        skip(f"KVM here does not run even the probe guest (status {status}): {last[0]}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine", required=True, choices=["vtrace", "tcg", "kvm"])
    parser.add_argument("--vtrace")
    parser.add_argument("--cpu", default="x86-64-v2", help="vtrace: the model; guests need NX")
    parser.add_argument("--probe", help="kvm: a guest that runs wherever KVM really works")
    parser.add_argument("--known", required=True)
    parser.add_argument("guest")
    options = parser.parse_args()
    name = os.path.basename(options.guest).removesuffix(".elf")

    if options.engine != "vtrace" and not shutil.which(QEMU):
        skip(f"no {QEMU}: apt-get install qemu-system-x86")
    with tempfile.TemporaryDirectory() as scratch:
        if options.engine == "vtrace":
            command = [options.vtrace, "record", "--kernel", options.guest, "--memory", "64M", "--cpu", options.cpu, "--console", "-",
                       "--output", os.path.join(scratch, "guest.vtr")]
        elif options.engine == "tcg":
            command = qemu("tcg", "max,vendor=GenuineIntel", options.guest)
        else:
            require_kvm(options.probe)
            command = qemu("kvm", KVM_CPU, options.guest)
        output, status = run(command)

    known = known_failures(options.known, options.engine, name)
    counts = {"PASS": 0, "FAIL": 0, "SKIP": 0}
    wrong = 0
    seen = set()
    for verdict, check, detail in checks(output):
        counts[verdict] += 1
        if verdict == "FAIL" and check in known:
            print(f"known: {check}: {detail} ({known[check]})")
            seen.add(check)
        elif verdict == "FAIL":
            print(f"FAIL: {check}: {detail}")
            wrong += 1
        elif verdict == "SKIP":
            print(f"skip: {check}: {detail}")
    for check in known.keys() - seen:
        print(f"FAIL: {check}: listed as a known failure of {options.engine}, but did not fail")
        wrong += 1
    ended = status in ((VTRACE_GUEST_EXIT, VTRACE_GUEST_EXIT + 1) if options.engine == "vtrace" else (1, 3))
    if not ended or not counts["PASS"]:
        print(f"FAIL: the guest did not end by itself (status {status}); its last lines:")
        print("\n".join(output.splitlines()[-12:]))
        wrong += 1
    print(f"checks: {counts['PASS']} passed, {counts['FAIL']} failed, {counts['SKIP']} skipped")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
