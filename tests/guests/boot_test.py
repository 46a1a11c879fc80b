#!/usr/bin/env python3
"""Records the boot of a stock kernel, and checks outcome, console, report and determinism.

Exit status: 0 as expected; 1 not; 77 the guest is not in the cache and cannot be fetched.
"""

import argparse
import filecmp
import json
import os
import re
import subprocess
import sys
import tempfile

SKIPPED = 77
HERE = os.path.dirname(os.path.abspath(__file__))
ALWAYS_CALLED = ("start_kernel", "schedule")  # in every kernel's boot


class Failed(Exception):
    pass


def expect(condition, message):
    if not condition:
        raise Failed(message)


def fetch(name):
    done = subprocess.run([os.path.join(HERE, "fetch"), name], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                          stdin=subprocess.DEVNULL, check=False)
    if done.returncode != 0:
        print(f"SKIPPED: no guest {name}: {done.stderr.strip().splitlines()[-1:]}")
        sys.exit(SKIPPED)
    return done.stdout.strip()


def vtrace(options, *arguments):
    done = subprocess.run([options.vtrace, *arguments], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, text=True, errors="replace", timeout=options.timeout, check=False)
    return done


def record(options, kernel, initrd, output):
    arguments = ["--kernel", kernel, "--initrd", initrd, "--append", options.append, "--output", output,
                 "--console", "-"]
    if options.as_shipped:
        arguments.append("--as-shipped")
    done = vtrace(options, "record", *arguments)
    expect(done.returncode == options.status,
           f"vtrace record ended with {done.returncode}, not {options.status}:\n{done.stdout[-1500:]}{done.stderr[-1500:]}")
    for text in options.console:
        expect(re.search(text, done.stdout), f"the console does not say '{text}':\n{done.stdout[-1500:]}")


def check_report(options, trace):
    done = vtrace(options, "report", "--json", "--top", "100000", trace)
    expect(done.returncode == 0, f"vtrace report ended with {done.returncode}: {done.stderr}")
    report = json.loads(done.stdout)
    names = {function["name"] for function in report["functions_by_entries"]}
    for name in ALWAYS_CALLED:
        expect(name in names, f"the report has no function {name}: are the symbols right? It has {sorted(names)[:20]}")


def check_file(options, trace):
    done = vtrace(options, "info", "--verify", "--json", trace)
    expect(done.returncode == 0, f"vtrace info --verify ended with {done.returncode}: {done.stdout}{done.stderr}")
    info = json.loads(done.stdout)
    expect(info["complete"], "the trace is not complete")
    expect(info["branches"] > options.branches, f"only {info['branches']} branches, not above {options.branches}")
    print(f"{info['branches']} branches, {info['bytes']} bytes, {info['bytes_a_branch']:.4f} bytes a branch")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vtrace", required=True)
    parser.add_argument("--kernel", required=True, help="a name that tests/guests/fetch knows")
    parser.add_argument("--initrd", default="initrd-boot")
    parser.add_argument("--append", default="console=ttyS0 quiet panic=-1")
    parser.add_argument("--as-shipped", action="store_true")
    parser.add_argument("--status", type=int, default=0, help="expected exit status of vtrace record")
    parser.add_argument("--console", action="append", default=[], metavar="REGEX", help="must be on the console")
    parser.add_argument("--branches", type=int, default=10_000_000, help="at least so many")
    parser.add_argument("--twice", action="store_true", help="record twice: the files must be equal")
    parser.add_argument("--timeout", type=int, default=240)
    options = parser.parse_args()
    kernel, initrd = os.path.join(fetch(options.kernel), "vmlinuz"), os.path.join(fetch(options.initrd), "initrd.gz")
    try:
        with tempfile.TemporaryDirectory() as scratch:
            trace = os.path.join(scratch, "boot.vtr")
            record(options, kernel, initrd, trace)
            check_file(options, trace)
            check_report(options, trace)
            if options.twice:
                again = os.path.join(scratch, "again.vtr")
                record(options, kernel, initrd, again)
                expect(filecmp.cmp(trace, again, shallow=False), "two recordings of one boot differ")
    except (Failed, subprocess.TimeoutExpired) as error:
        print(f"FAIL: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
