#!/usr/bin/env python3
"""The recording side of the command: outcomes, bad input, full disks, kills, determinism, filters, exact records.

  record_test.py VTRACE [unittest arguments]

Guests are a few instructions each, made here by as and ld; a stock kernel is used where the cache has one.
"""

import gzip
import itertools
import json
import os
import pathlib
import pty
import re
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
import unittest

VTRACE = pathlib.Path(sys.argv[1]).resolve()
CACHE = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "vtrace"
TIMEOUT_S = 120

OK, FAILURE, USAGE = 0, 1, 2
PANIC, TRIPLE_FAULT, HANG, LIMIT, INTERRUPTED, RESET, UNSUPPORTED, GUEST_EXIT = 10, 11, 12, 13, 14, 15, 16, 64

POWER_OFF = "mov $0x3400, %eax; mov $0x604, %edx; out %ax, %dx; 9: jmp 9b"  # SLP_EN, SLP_TYP 5 to PM1a_CNT
EXIT = "mov $5, %al; out %al, $0xf4; 9: jmp 9b"
PVPANIC = "mov $1, %al; mov $0x505, %edx; out %al, %dx;"
PANIC_TEXT = "[    1.0] Kernel panic - not syncing: for a test"


def say(text):
    """Prints it on COM1."""
    return "mov $0x3f8, %edx;" + "".join(f"mov ${ord(c)}, %al; out %al, %dx;" for c in text)


class Guests:
    """Assembles guests into a folder."""

    def __init__(self, folder):
        self.folder = folder
        self.numbers = itertools.count()

    def link(self, source, bits, origin, elf32=False):
        stem = self.folder / f"guest{next(self.numbers)}"
        stem.with_suffix(".s").write_text(f".code{bits}\n.globl _start\n_start:\n{source}\n")
        subprocess.run(["as", "--32" if elf32 else "--64", "-o", stem.with_suffix(".o"), stem.with_suffix(".s")],
                       check=True)
        subprocess.run(["ld", "-m", "elf_i386" if elf32 else "elf_x86_64", "-N", "--no-warn-rwx-segments", "-Ttext", hex(origin), "-o",
                        stem.with_suffix(".elf"), stem.with_suffix(".o")], check=True)
        return stem

    def flat(self, source, bits=64, origin=None):
        """A flat binary, and its symbols."""
        if origin is None:
            origin = 0x7c00 if bits == 16 else 0x100000
        stem = self.link(source, bits, origin)
        subprocess.run(["objcopy", "-O", "binary", "-j", ".text", stem.with_suffix(".elf"), stem.with_suffix(".bin")],
                       check=True)
        listing = subprocess.run(["nm", stem.with_suffix(".elf")], check=True, stdout=subprocess.PIPE, text=True).stdout
        symbols = {line.split()[2]: int(line.split()[0], 16) for line in listing.splitlines()}
        return stem.with_suffix(".bin"), symbols

    def multiboot(self, source):
        header = ".long 0x1badb002, 0, -0x1badb002\n"
        return self.link(f"jmp main\n.align 4\n{header}\nmain: mov $stack, %esp\n{source}\n.lcomm stack_bottom, 4096\n"
                         ".set stack, stack_bottom + 4096\n", 32, 0x100000, elf32=True).with_suffix(".elf")


class RecordCase(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.temporary = tempfile.TemporaryDirectory()
        cls.work = pathlib.Path(cls.temporary.name)
        cls.guests = Guests(cls.work)

    @classmethod
    def tearDownClass(cls):
        cls.temporary.cleanup()

    def vtrace(self, *arguments, status=OK, **more):
        done = subprocess.run([VTRACE, *map(str, arguments)], cwd=self.work, stdin=subprocess.DEVNULL, capture_output=True,
                              timeout=TIMEOUT_S, check=False, **more)
        self.assertEqual(done.returncode, status, (arguments, done.stdout[-500:], done.stderr.decode()[-2000:]))
        done.stdout, done.stderr = done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace")
        return done

    def record(self, kernel, *arguments, status=OK, output="out.vtr", **more):
        return self.vtrace("record", "-k", kernel, "-o", output, *arguments, status=status, **more)

    def record_flat(self, source, *arguments, status=OK, bits=64, origin=None, **more):
        kernel, symbols = self.guests.flat(source, bits, origin)
        if origin is not None:
            arguments += ("--flat-load", hex(origin))
        done = self.record(kernel, "--flat", bits, "-m", "16M", *arguments, status=status, **more)
        done.symbols = symbols
        return done

    def info(self, path="out.vtr"):
        return json.loads(self.vtrace("info", "--json", path).stdout)

    def outcome(self, path="out.vtr"):
        outcome = self.info(path)["outcome"]
        self.assertEqual(json.loads(self.vtrace("report", "--json", path).stdout)["outcome"]["outcome"],
                         outcome["outcome"])
        return outcome

    def branches(self, *arguments, path="out.vtr"):
        """(from, to, kind and what belongs to it) of each branch."""
        result = []
        for line in self.vtrace("dump", "--format=json", *arguments, path).stdout.splitlines():
            branch = json.loads(line)
            if "event" in branch:
                continue
            detail = tuple(branch[key] for key in ("vector", "error_code") if key in branch)
            result.append((int(branch["from"], 16), int(branch["to"], 16), branch["kind"], *detail))
        return result

    def error(self, *arguments, status=FAILURE, **more):
        """The one line of a failing command."""
        done = self.vtrace(*arguments, status=status, **more)
        lines = done.stderr.splitlines()
        self.assertEqual(len(lines), 1, lines)
        self.assertTrue(lines[0].startswith("vtrace: "), lines)
        return lines[0]

    def cached(self, kind, name, file):
        path = CACHE / kind / name / file
        if not path.exists():
            self.skipTest(f"no {path}: tests/guests/fetch puts it there")
        return path

    def stock_kernel(self):
        return self.cached("kernels", "6.1-cloud", "vmlinuz")

    def stock_initrd(self):
        return self.cached("initrds", "boot", "initrd.gz")


class Outcomes(RecordCase):
    def check(self, source, status, name, detail="", *arguments, **more):
        done = self.record_flat(source, *arguments, status=status, **more)
        outcome = self.outcome()
        self.assertEqual(outcome["outcome"], name)
        self.assertIn(detail, outcome.get("detail", ""))
        self.assertIn(name, done.stderr)
        self.assertTrue(self.info()["complete"])
        return done

    def test_power_off(self):
        self.check(POWER_OFF, OK, "power-off")

    def test_reset(self):
        self.check("mov $0xfe, %al; out %al, $0x64; 1: jmp 1b", RESET, "reset")
        self.check("mov $0xcf9, %edx; mov $6, %al; out %al, %dx; 1: jmp 1b", RESET, "reset")
        self.check("mov $1, %al; out %al, $0x92; 1: jmp 1b", RESET, "reset")

    def test_guest_exit(self):
        for code, status in [(0, 64), (3, 67), (62, 126), (63, 127), (64, 127), (255, 127)]:
            self.check(f"mov ${code}, %al; out %al, $0xf4; 1: jmp 1b", status, "guest-exit")
            self.assertEqual(self.outcome()["exit_code"], code)

    def test_panic_by_device(self):
        halt, spin, reset = "cli; hlt", "cli; 1: jmp 1b", "mov $0xfe, %al; out %al, $0x64; 1: jmp 1b"
        for end in [halt, spin, reset, POWER_OFF]:
            self.check(PVPANIC + end, PANIC, "panic", "pvpanic")

    def test_panic_by_console(self):
        for end in ["cli; hlt", "1: jmp 1b", "mov $0xfe, %al; out %al, $0x64; 1: jmp 1b"]:
            for line_end in ["", "\n"]:
                self.check(say(PANIC_TEXT + line_end) + end, PANIC, "panic", "not syncing: for a test", bits=32)
        # What an earlier line holds is no matter, nor how long this one is; other text is no panic.
        self.check(say("x" * 2000 + PANIC_TEXT) + "cli; hlt", PANIC, "panic", "for a test", bits=32)
        self.check(say("Kernel panic\n - not syncing") + POWER_OFF, OK, "power-off", bits=32)

    def test_triple_fault(self):
        done = self.check("mov $0x1234, %ecx; jmp 1f; nop; 1: ud2", TRIPLE_FAULT, "triple-fault", "#UD")
        for part in ["RCX 0000000000001234", "RIP 0000000000100008", "Code at RIP: 0f 0b", "The last 1 branches:",
                     "0000000000100005 -> 0000000000100008"]:
            self.assertIn(part, done.stderr)
        done = self.check("mov $100, %ecx; 1: loop 1b; ud2", TRIPLE_FAULT, "triple-fault")
        self.assertEqual(len(re.findall(r"^ +0 +\d+  [0-9a-f]{16} -> ", done.stderr, re.M)), 32)
        self.assertIn("The last 32 branches:", done.stderr)

    def test_instruction_that_the_cpu_lacks(self):
        guest = self.guests.multiboot("vzeroupper")
        done = self.record(guest, status=TRIPLE_FAULT)
        self.assertIn("the CPU 'atom' has no such instruction: c5 f8 77", done.stderr)
        self.assertIn("no such instruction: c5 f8 77", self.outcome()["detail"])
        self.check("popcnt %rax, %rax; " + EXIT, TRIPLE_FAULT, "triple-fault", "no such instruction: f3 48 0f b8 c0")
        self.check("popcnt %rax, %rax; " + EXIT, GUEST_EXIT + 5, "guest-exit", "", "--cpu", "x86-64-v2")

    def test_halted_for_ever(self):
        self.check("cli; hlt", HANG, "hang", "interrupts off")
        self.check("sti; hlt", HANG, "hang", "no timer will wake them")
        pit_masked = ("mov $0xff, %al; out %al, $0x21; out %al, $0xa1; mov $0x34, %al; out %al, $0x43;"
                      "mov $0, %al; out %al, $0x40; out %al, $0x40; 1: sti; hlt; jmp 1b")
        done = self.check(pit_masked, HANG, "hang", "timers that still run do not wake them")
        self.assertIn("Code at RIP: eb fc", done.stderr)

    @unittest.skipUnless(os.environ.get("VTRACE_SLOW_TESTS"), "takes 2 s of guest time: set VTRACE_SLOW_TESTS")
    def test_spin_with_interrupts_off(self):
        self.check("cli; 1: jmp 1b", HANG, "hang", "goes nowhere")

    def test_limits_are_exact(self):
        loop = "1: nop; nop; jmp 1b"
        for limit, expected in [("0", 0), ("1", 1), ("1000", 1000), ("1001", 1001), ("7k", 7000), ("3M", 3_000_000)]:
            self.check(loop, LIMIT, "limit", f"{expected} instructions", "--limit", limit)
            self.assertEqual(self.outcome()["instructions"], expected)
            self.assertEqual(self.info()["branches"], expected // 3)
        for limit, expected in [("5us", 5000), ("3ms", 3_000_000), ("77", 77), ("78ns", 78)]:
            self.check(loop, LIMIT, "limit", f"{expected} ns of guest time", "--limit-time", limit)
            self.assertEqual(self.outcome()["time_ns"], expected)
        # A limit between two timer ticks of a halted guest.
        self.check("sti; hlt", HANG, "hang", "", "--limit-time", "1s")

    def test_signals(self):
        kernel, _ = self.guests.flat("1: sti; jmp 1b")
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            run = subprocess.Popen([VTRACE, "record", "-k", kernel, "--flat", "64", "-o", "out.vtr", "-m", "16M"],
                                   cwd=self.work, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
            self.wait_for_bytes(self.work / "out.vtr", run)
            run.send_signal(number)
            _, errors = run.communicate(timeout=TIMEOUT_S)
            self.assertEqual(run.returncode, INTERRUPTED, errors)
            self.assertEqual(self.outcome()["outcome"], "interrupted")
            info = json.loads(self.vtrace("info", "--json", "--verify", "out.vtr").stdout)
            self.assertTrue(info["complete"])
            # Each second instruction is a jump; the last one counted may be in the middle.
            self.assertEqual(info["branches"], info["outcome"]["instructions"] // 2)
            (self.work / "out.vtr").unlink()

    def wait_for_bytes(self, path, run, size=2000):
        end = time.monotonic() + TIMEOUT_S
        while not path.exists() or path.stat().st_size < size:
            self.assertIsNone(run.poll(), "it ended too early")
            self.assertLess(time.monotonic(), end)
            time.sleep(0.05)

    def test_unsupported(self):
        done = self.check("pushl $0; pushl $0; pushl $0; pushl $0; pushl $0; pushl $0x1000; pushl $0x20002; pushl $0;"
                          "pushl $0; iretl", UNSUPPORTED, "unsupported", "virtual-8086", bits=32)
        self.assertIn("RIP 00000000", done.stderr)


class BadInput(RecordCase):
    def refused(self, *arguments, status=FAILURE, says=""):
        old = self.work / "old.vtr"
        old.write_text("precious")
        line = self.error("record", *arguments, *(() if "-o" in arguments else ("-o", "old.vtr")), status=status)
        self.assertIn(says, line)
        self.assertEqual(old.read_text(), "precious")

    def file(self, name, content):
        (self.work / name).write_bytes(content)
        return self.work / name

    def test_kernels(self):
        arm64 = bytearray(4096)
        arm64[0:2], arm64[0x38:0x3c] = b"MZ", b"ARM\x64"
        elf = self.guests.link("hlt", 64, 0x100000).with_suffix(".elf")
        elf_arm = bytearray(elf.read_bytes())
        elf_arm[18] = 183  # e_machine EM_AARCH64
        elf32 = self.guests.link("hlt", 32, 0x100000, elf32=True).with_suffix(".elf")
        (self.work / "folder").mkdir(exist_ok=True)
        for name, content, says in [
                ("empty", b"", "the file is empty"), ("text", b"hello world\n" * 100, "it is text"),
                ("text.gz", gzip.compress(b"hello world\n" * 100), "inside is text"),
                ("arm64", bytes(arm64), "ARM64 Linux Image"), ("elf-arm64", bytes(elf_arm), "ELF file for ARM64"),
                ("elf32", elf32.read_bytes(), "neither a Multiboot header nor a PVH entry"),
                ("elf-cut", elf.read_bytes()[:100], "")]:
            self.file(name, content)
            self.refused("-k", name, says=says)
            self.refused("-k", name, says=f"'{name}'")
        self.refused("-k", "missing", says="No such file")
        self.refused("-k", "folder", says="it is a directory")
        self.refused("-k", "/dev/zero", says="not a file")
        self.refused("-k", "", says="no kernel is given")
        self.refused(status=USAGE, says="--kernel is required")

    def test_stock_kernel(self):
        kernel = self.stock_kernel()
        for size in (100, 512, 100_000):
            self.file("cut", kernel.read_bytes()[:size])
            self.refused("-k", "cut", says="'cut'")
        (self.work / "folder").mkdir(exist_ok=True)
        self.file("empty", b"")
        with open(self.work / "huge", "wb") as huge:
            huge.truncate(600 << 20)
        for initrd, says in [("missing", "No such file"), ("empty", "the file is empty"), ("folder", "a directory"),
                             ("huge", "larger than the guest's memory (512 MiB)")]:
            self.refused("-k", kernel, "-i", initrd, says=says)
        self.refused("-k", kernel, "-m", "8M", says="has 8 MiB of memory: give it more than")
        self.refused("-k", kernel, "-a", "x" * 5000, says="the command line has 5000 bytes")
        self.refused("-k", kernel, "--protocol", "multiboot", says="not a Multiboot kernel")
        self.refused("-k", kernel, "--module", "empty", says="")

    def test_memory(self):
        guest, _ = self.guests.flat(EXIT)
        flat = ["-k", guest, "--flat", "64"]
        self.refused(*flat, "-m", "1K", says="at least 1 MiB")
        self.refused(*flat, "-m", "100000G", says="Cannot allocate memory")
        self.refused(*flat, "-m", "1000001", says="multiple of 4 KiB")
        for size in ("garbage", "", "-1", "1.5G", "G", "12X"):
            self.refused(*flat, "-m", size, status=USAGE, says="--memory")
        self.refused(*flat, "-m", "99999999999G", status=USAGE, says="too large")

    def test_outputs(self):
        guest, _ = self.guests.flat(EXIT)
        flat = ["-k", guest, "--flat", "64", "-m", "16M"]
        (self.work / "folder").mkdir(exist_ok=True)
        self.refused(*flat, "-o", "no/such/file", says="cannot create the trace file 'no/such/file'")
        self.refused(*flat, "-o", "folder", says="Is a directory")
        self.refused(*flat, "-o", "", says="")
        if os.path.exists("/dev/full"):
            self.refused(*flat, "-o", "/dev/full", says="No space left on device")
        self.refused(*flat, "--console", "no/such/file", says="cannot create 'no/such/file'")
        self.refused(*flat, "--console", "folder", says="Is a directory")
        self.refused(*flat, "--console", "old.vtr", says="both the console and the trace")
        before = guest.read_bytes()
        self.refused(*flat, "-o", guest, says="it is the kernel")
        self.refused(*flat, "--console", guest, says="it is the kernel")
        self.assertEqual(guest.read_bytes(), before)
        if os.geteuid() != 0:
            (self.work / "closed").mkdir(mode=0o500, exist_ok=True)
            self.refused(*flat, "-o", "closed/x", says="Permission denied")

    def test_options(self):
        guest, _ = self.guests.flat(EXIT)
        flat = ["-k", guest, "--flat", "64"]
        for options in [["--cpu", "nonsense"], ["--cpus", "0"], ["--cpus", "1000"], ["--cpus", "x"], ["--nonsense"],
                        ["more"], ["--kernel-only", "--user-only"], ["--limit", "x"], ["--limit", "-5"],
                        ["--limit", "1.5k"], ["--limit-time", "5h"], ["--flat-load", "zzz"], ["--flat-load", "-1"],
                        ["--input-after", "x"], ["--protocol", "x"], ["--input", "x", "--input-after", "a\nb"],
                        ["--input", "x", "--input-after", "x" * 600], ["--limit"]]:
            self.refused(*flat, *options, status=USAGE, says="(see 'vtrace record --help')")
        self.refused("-k", guest, "--flat", "7", status=USAGE, says="--flat")
        self.refused("-k", guest, "--flat-load", "0", status=USAGE, says="requires --flat")
        self.refused(*flat, "--flat-load", "0xffffffffff", says="outside of guest memory")
        self.refused(*flat, "--flat-entry", "0x200000", says="outside of the flat binary")
        (self.work / "folder").mkdir(exist_ok=True)
        self.refused(*flat, "--input", "missing", says="No such file")
        self.refused(*flat, "--input", "folder", says="Is a directory")
        self.refused("-k", guest, "--flat", "64", "-a", "text", says="takes no")

    def test_full_console_is_told_and_the_trace_is_whole(self):
        if not os.path.exists("/dev/full"):
            self.skipTest("no /dev/full here")
        done = self.record_flat(say("hello\n") + POWER_OFF, "--console", "/dev/full", status=FAILURE)
        self.assertIn("No space left", done.stderr)
        self.assertTrue(self.info()["complete"])


# Branches that no predictor foresees, so that the file grows; ends after about 12 million of them.
NOISE = """
    mov $0x123456789abcdef, %rax
    mov $8000000, %ecx
1:  mov %rax, %rdx
    shl $13, %rdx
    xor %rdx, %rax
    mov %rax, %rdx
    shr $7, %rdx
    xor %rdx, %rax
    mov %rax, %rdx
    shl $17, %rdx
    xor %rdx, %rax
    test $1, %al
    jz 2f
    nop
2:  dec %ecx
    jnz 1b
""" + POWER_OFF


def mark(value):
    """Sets a marker."""
    return f"mov ${value}, %eax; mov $0x5654, %edx; out %eax, %dx;"


class Parts(RecordCase):
    """Windows, and the last branches."""

    WINDOWS = (f"jmp 1f; 1: {mark(1)} first: mov $5, %ecx; in_first: loop in_first; {mark(2)} mov $50, %ecx; 1: loop 1b;"
               f"{mark(1)} second: mov $8, %ecx; in_second: loop in_second; {mark(2)} 1: jmp 2f; 2:" + EXIT)

    def test_windows(self):
        done = self.record_flat(self.WINDOWS, "--accel", "soft", "--from", "marker:1", "--to", "marker:2", "--times", "2",
                                status=GUEST_EXIT + 5)
        info = self.info()
        self.assertTrue(info["complete"])
        self.assertEqual([(w["number"], w["first"], w["last"]) for w in info["windows"]], [(1, 0, 4), (2, 4, 11)])
        for window, name in zip(info["windows"], ["first", "second"]):
            self.assertEqual(int(window["begin"], 16), done.symbols[name])
            self.assertGreater(int(window["end"], 16), done.symbols["in_" + name])
            self.assertLess(window["begin_ns"], window["end_ns"])
        loops = [(done.symbols["in_" + name],) * 2 for name in ["first"] * 4 + ["second"] * 7]

        def dump(*arguments):
            lines = self.vtrace("dump", "--format=json", *arguments, "out.vtr").stdout.splitlines()
            records = [json.loads(line) for line in lines]
            return [(r["event"], r["window"], r["at"]) if "event" in r else (int(r["from"], 16), int(r["to"], 16))
                    for r in records]

        first, second = [[("window_begin", w["number"], w["begin"]), *loops[w["first"]:w["last"]],
                          ("window_end", w["number"], w["end"])] for w in info["windows"]]
        self.assertEqual(dump(), first + second)
        self.assertEqual(dump("--window", "1"), first)
        self.assertEqual(dump("--window", "2"), second)
        self.assertEqual(dump("--window", "1", "-n", "2"), first[:3])
        self.assertEqual(dump("--window", "2", "--from", "10"), second[7:])
        for arguments, branches in [((), 11), (("--window", "1"), 4), (("--window", "2"), 7),
                                    (("--window", "2", "--from", "9"), 2)]:
            report = json.loads(self.vtrace("report", "--json", *arguments, "out.vtr").stdout)
            self.assertEqual((report["branches"], report["windows"]), (branches, 2))
            self.assertEqual(list(report["kinds"]), ["conditional"])
        self.assertIn("Recorded in 2 windows", self.vtrace("report", "out.vtr").stdout)
        self.assertRegex(self.vtrace("info", "out.vtr").stdout, r"(?m)^Window 2, cpu 0: 7 branches from number 4 on, ")
        self.assertIn("has no window 3: it has 1 to 2", self.error("report", "--window", "3", "out.vtr"))
        self.record_flat(self.WINDOWS, status=GUEST_EXIT + 5)
        self.assertEqual((self.info()["windows"], self.info()["version"]), ([], 1))
        self.assertIn("all of the run was recorded", self.error("dump", "--window", "1", "out.vtr"))

    def test_code_that_changed_between_windows(self):
        # The same place holds a call, then a jump; the second is written while nobody records.
        source = (f"mov $place, %rbx; {mark(1)} place: call 1f; 1: {mark(2)}"
                  f"cmpb $0xe9, (%rbx); je 2f; movb $0xe9, (%rbx); push $place; sub $0, %rax; {mark(1)} jmp place; 2:" + EXIT)
        self.record_flat("mov $0x80000, %rsp;" + source, "--accel", "soft", "--from", "marker:1", "--to", "marker:2",
                         "--times", "2", status=GUEST_EXIT + 5)
        kinds = [branch[2] for branch in self.branches()]
        self.assertEqual(kinds, ["call", "jump", "jump"])

    KEPT, MOST = 300_000, 300_000 + 128 * 1024

    def kept(self, path="last.vtr", whole="whole.vtr"):
        """Of a recording with --keep-last: how many branches were dropped. They are those of the whole one."""
        info = json.loads(self.vtrace("info", "--json", "--verify", path).stdout)
        self.assertTrue(info["complete"])
        cpu = info["vcpus"][0]
        self.assertEqual(cpu["dropped"] + cpu["branches"], cpu["end_number"])
        self.assertTrue(self.KEPT <= cpu["branches"] < self.MOST, cpu)
        for first in (cpu["dropped"], cpu["end_number"] - 1000):
            part = ["--from", str(first), "--to", str(first + 1000)]
            self.assertEqual(self.branches(*part, path=path), self.branches(*part, path=whole))
        report = json.loads(self.vtrace("report", "--json", path).stdout)
        self.assertEqual((report["branches"], report["dropped"]), (cpu["branches"], cpu["dropped"]))
        self.assertNotIn("unknown", report["kinds"])
        return cpu["dropped"]

    def test_last_branches(self):
        kernel, _ = self.guests.flat(NOISE)
        flat = ["--flat", "64", "-m", "16M"]
        self.record(kernel, *flat, output="whole.vtr")
        self.record(kernel, *flat, "--keep-last", "300k", output="last.vtr")
        whole, last = self.info("whole.vtr"), self.info("last.vtr")
        self.assertEqual(last["vcpus"][0]["end_number"], whole["branches"])
        self.assertEqual(self.kept(), whole["branches"] - last["branches"])
        self.assertLess(last["bytes"], whole["bytes"] / 5)
        self.assertIn(f"the first one has number {last['vcpus'][0]['dropped']}", self.vtrace("info", "last.vtr").stdout)
        first = (self.work / "last.vtr").read_bytes()
        self.record(kernel, *flat, "--keep-last", "300k", output="last.vtr")
        self.assertEqual((self.work / "last.vtr").read_bytes(), first)
        # More than there is: all of it.
        self.record(kernel, *flat, "--keep-last", "1G", output="all.vtr")
        self.assertEqual((self.info("all.vtr")["branches"], self.info("all.vtr")["vcpus"][0]["dropped"]),
                         (whole["branches"], 0))

    def test_last_branches_before_a_crash(self):
        kernel, symbols = self.guests.flat("mov $3000000, %ecx; 1: loop 1b; jmp crash; nop; crash: ud2")
        done = self.record(kernel, "--flat", "64", "-m", "16M", "--keep-last", "1000", status=TRIPLE_FAULT)
        self.assertIn("The last 32 branches:", done.stderr)
        self.assertRegex(done.stderr, rf"(?m)^ +0 +2999999  [0-9a-f]+ -> {symbols['crash']:016x}  jump ")
        self.assertGreater(self.info()["vcpus"][0]["dropped"], 2_000_000)

    def test_last_branches_of_a_run_without_end(self):
        kernel, _ = self.guests.flat(NOISE.replace("jnz 1b", "jmp 1b"))
        arguments = [VTRACE, "record", "-k", kernel, "--flat", "64", "-m", "16M", "--keep-last", "300k", "-o", "endless.vtr"]
        for number in (signal.SIGINT, signal.SIGKILL):
            run = subprocess.Popen(arguments, cwd=self.work, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                   stderr=subprocess.PIPE)
            end = time.monotonic() + TIMEOUT_S
            path = self.work / "endless.vtr"
            dropped = 0
            while not dropped:
                self.assertIsNone(run.poll(), "it ended too early")
                self.assertLess(time.monotonic(), end)
                time.sleep(0.05)
                if path.exists() and path.stat().st_size > 32:
                    dropped = self.info("endless.vtr")["vcpus"][0]["dropped"]
            run.send_signal(number)
            run.communicate(timeout=TIMEOUT_S)
            info = self.info("endless.vtr")
            self.assertGreaterEqual(info["branches"], self.KEPT)
            self.assertEqual(info["complete"], number == signal.SIGINT)
            if number == signal.SIGINT:
                self.assertLess(info["branches"], self.MOST)
                self.assertEqual(list(self.work.glob("endless.vtr.*")), [])
            branches = self.branches("--last", "1000", path="endless.vtr")
            self.assertEqual(len(branches), 1000)
            self.assertEqual({branch[2] for branch in branches}, {"conditional", "jump"})
            path.unlink()

    def test_last_branches_need_a_file(self):
        kernel, _ = self.guests.flat(EXIT)
        flat = ["record", "-k", kernel, "--flat", "64", "-m", "16M", "-o"]
        self.assertIn("'/dev/null': it is not a regular file", self.error(*flat, "/dev/null", "--keep-last", "5"))
        for count in ("0", "-1", "x", "5Q"):
            self.error(*flat, "out.vtr", "--keep-last", count, status=USAGE)


class Damage(RecordCase):
    def readable_part(self, path, whole):
        """What is left of a recording is the beginning of the whole one."""
        info = self.info(path)
        self.assertFalse(info["complete"])
        self.assertTrue(info["missing"] or info["warnings"], info)
        text = self.vtrace("info", path).stdout
        self.assertIn("not complete", text)
        self.assertRegex(text, r"(?m)^(Missing|Warning): ")
        branches = info["branches"]
        self.assertGreater(branches, 0)
        first = self.branches("-n", "1000", path=path)
        self.assertEqual(first, self.branches("-n", "1000", path=whole))
        last = self.branches("--from", max(0, branches - 100), "--to", branches, path=path)
        self.assertEqual(last, self.branches("--from", max(0, branches - 100), "--to", branches, path=whole))
        return branches

    def test_full_disk(self):
        kernel, _ = self.guests.flat(NOISE)
        flat = ["--flat", "64", "-m", "16M"]
        self.record(kernel, *flat, output="whole.vtr")
        whole = self.info("whole.vtr")
        size = 1_000_000
        self.assertGreater(whole["bytes"], size)
        run = subprocess.Popen([VTRACE, "record", "-k", kernel, *flat, "-o", "cut.vtr"], cwd=self.work,
                               stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                               preexec_fn=lambda: signal.signal(signal.SIGXFSZ, signal.SIG_IGN))
        # Once it runs: the emulator's own memory is a file, too.
        while not (self.work / "cut.vtr").exists():
            self.assertIsNone(run.poll())
            time.sleep(0.01)
        resource.prlimit(run.pid, resource.RLIMIT_FSIZE, (size, size))
        _, errors = run.communicate(timeout=TIMEOUT_S)
        self.assertEqual((run.returncode, len(errors.splitlines())), (FAILURE, 1), errors)
        self.assertIn("File too large", errors)
        self.assertIn("what was recorded until then is readable", errors)
        self.assertLess(self.readable_part("cut.vtr", "whole.vtr"), whole["branches"])

    def test_full_file_system(self):
        folder = self.work / "small"
        folder.mkdir()
        mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1200k", "tmpfs", folder], capture_output=True,
                                 check=False)
        if mounted.returncode != 0:
            self.skipTest("cannot mount a small file system here")
        try:
            kernel, _ = self.guests.flat(NOISE)
            self.record(kernel, "--flat", "64", "-m", "16M", output="whole.vtr")
            done = self.record(kernel, "--flat", "64", "-m", "16M", status=FAILURE, output="small/cut.vtr")
            self.assertIn("No space left on device", done.stderr)
            self.readable_part("small/cut.vtr", "whole.vtr")
        finally:
            subprocess.run(["umount", folder], check=True)

    def test_killed(self):
        kernel, _ = self.guests.flat(NOISE.replace("$8000000", "$800000000"))
        command = ["record", "-k", str(kernel), "--flat", "64", "-m", "16M"]
        run = subprocess.Popen([VTRACE, *command, "-o", "killed.vtr"], cwd=self.work, stdin=subprocess.DEVNULL,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        path = self.work / "killed.vtr"
        end = time.monotonic() + TIMEOUT_S
        # The file's size doesn't tell: the first chunk of branches may be half written.
        while not path.exists() or path.stat().st_size < 400_000 or not self.info("killed.vtr")["branches"]:
            self.assertIsNone(run.poll(), "it ended too early")
            self.assertLess(time.monotonic(), end)
            time.sleep(0.02)
        run.kill()
        run.communicate()
        self.assertEqual(run.returncode, -signal.SIGKILL)
        branches = self.info("killed.vtr")["branches"]
        self.vtrace(*command, "-o", "whole.vtr", "--limit", 20 * branches, status=LIMIT)
        self.readable_part("killed.vtr", "whole.vtr")
        self.assertIsNone(self.info("killed.vtr")["outcome"])


# IDT entry 0x20 and on by the PIT; counts 40 ticks, spinning, then halting.
TICKS = """
    lidt idtr
    mov $0x11, %al; out %al, $0x20; mov $0x20, %al; out %al, $0x21; mov $4, %al; out %al, $0x21
    mov $1, %al; out %al, $0x21; mov $0xfe, %al; out %al, $0x21
    mov $0x34, %al; out %al, $0x43; mov $0xa9, %al; out %al, $0x40; mov $4, %al; out %al, $0x40
    xor %ebx, %ebx
    sti
1:  cmp $20, %ebx
    jb 1b
2:  hlt
    cmp $40, %ebx
    jb 2b
""" + POWER_OFF + """
tick: inc %ebx; mov $0x20, %al; out %al, $0x20; iretq
    .align 16
idt: .fill 0x20 * 2, 8, 0
    .word tick, 0x10, 0x8e00, 0, 0, 0, 0, 0
idtr: .word . - idt - 1
    .quad idt
"""


class Determinism(RecordCase):
    def test_timer_interrupts(self):
        kernel, _ = self.guests.flat(TICKS, origin=0x8000)
        flat = ["--flat", "64", "--flat-load", "0x8000", "-m", "16M"]
        self.record(kernel, *flat, output="one.vtr")
        load = subprocess.Popen([sys.executable, "-c", "while True: pass"])
        try:
            self.record(kernel, *flat, output="two.vtr",
                        preexec_fn=lambda: os.sched_setaffinity(0, [min(os.sched_getaffinity(0))]))
        finally:
            load.kill()
            load.wait()
        self.assertEqual((self.work / "one.vtr").read_bytes(), (self.work / "two.vtr").read_bytes())
        report = json.loads(self.vtrace("report", "--json", "one.vtr").stdout)
        self.assertEqual([(line["vector"], line["kernel"]) for line in report["interrupts"]], [(0x20, 40)])

    def test_boot(self):
        kernel, initrd = self.stock_kernel(), self.stock_initrd()
        arguments = ["-i", initrd, "-a", "console=ttyS0", "--limit", "60M"]
        self.record(kernel, *arguments, status=LIMIT, output="one.vtr")
        one = (self.work / "one.vtr").read_bytes()
        # Through a pipe that is read slowly.
        os.mkfifo(self.work / "fifo")
        two = []

        def read_slowly():
            with open(self.work / "fifo", "rb", buffering=0) as fifo:
                while piece := fifo.read(1 << 15):
                    two.append(piece)
                    time.sleep(0.005)

        reader = threading.Thread(target=read_slowly, daemon=True)
        reader.start()
        self.record(kernel, *arguments, status=LIMIT, output="fifo")
        reader.join(TIMEOUT_S)
        self.assertEqual(b"".join(two), one)


class Diff(RecordCase):
    def diff(self, *arguments, status):
        return json.loads(self.vtrace("diff", "--json", *arguments, status=status).stdout)

    def record_loop(self, body, output):
        """20 rounds, then `body`, then 300 rounds."""
        source = f"""mov $20, %ecx; 1: dec %ecx; jnz 1b; mov ${{}}, %eax; test %eax, %eax; fork: jz even
            odd: jmp join; .balign 16; even: jmp join; .balign 16; join: mov $300, %ecx; 2: dec %ecx; jnz 2b; {POWER_OFF}"""
        done = self.record_flat(source.format(body), output=output)
        return done.symbols

    def test_same(self):
        self.record_loop(0, "a.vtr")
        self.record_loop(0, "b.vtr")
        diff = self.diff("a.vtr", "b.vtr", status=0)
        self.assertTrue(diff["same"])
        self.assertEqual(diff["vcpus"][0]["common"], len(self.branches(path="a.vtr")))

    def test_one_changed_branch_is_named(self):
        symbols = self.record_loop(0, "a.vtr")
        self.record_loop(1, "b.vtr")
        diff = self.diff("a.vtr", "b.vtr", status=1)
        a, b = self.branches(path="a.vtr"), self.branches(path="b.vtr")
        vcpu, parting = diff["vcpus"][0], diff["vcpus"][0]["parting"]
        # 19 jumps back are in common; then A jumps to `even` and from there on, and B from `odd` only.
        self.assertEqual(vcpu["listed"], [{"first_a": 19, "branches_a": 2, "first_b": 19, "branches_b": 1}])
        self.assertEqual((int(parting["a"]["from"], 16), int(parting["a"]["to"], 16)), (symbols["fork"], symbols["even"]))
        self.assertEqual((int(parting["b"]["from"], 16), int(parting["b"]["to"], 16)), (symbols["odd"], symbols["join"]))
        self.assertEqual(len(parting["before"]), 8)
        self.assertEqual(vcpu["common"], len(a) - 2)
        self.assertEqual((a[:19], a[21:]), (b[:19], b[20:]))
        self.assertTrue(vcpu["aligned"])

    def test_errors_are_not_differences(self):
        self.record_loop(0, "a.vtr")
        self.assertIn("no.vtr", self.error("diff", "a.vtr", "no.vtr", status=2))
        self.assertIn("vCPU 3", self.error("diff", "--cpu", "3", "a.vtr", "a.vtr", status=2))
        self.error("diff", "a.vtr", status=2)


# Rings 0 and 3, with all that changes between them. Below 64 KiB, so that 16-bit offsets do in descriptors.
RINGS = """
    lgdt gdtr
    lidt idtr
    mov %cr3, %rax                      # user mode may use the first page tables
    orl $4, (%rax)
    mov (%rax), %rbx; and $-4096, %rbx; orl $4, (%rbx)
    mov (%rbx), %rcx; and $-4096, %rcx; orl $4, (%rcx)
    mov %rax, %cr3
    push $8
    push $reloaded
reload: lretq
reloaded: mov $0x10, %eax; mov %eax, %ss
    mov $0x30, %eax; ltr %ax
    mov $0xc0000080, %ecx; rdmsr; or $1, %eax; wrmsr            # EFER.SCE
    mov $0xc0000081, %ecx; xor %eax, %eax; mov $0x180008, %edx; wrmsr   # STAR
    mov $0xc0000082, %ecx; mov $entry, %eax; xor %edx, %edx; wrmsr      # LSTAR
    mov $0xc0000084, %ecx; mov $0x200, %eax; xor %edx, %edx; wrmsr      # FMASK
jmp_next: jmp next
next: xor %eax, %eax
    jnz never
jz_taken: jz zero
never: ud2
zero: mov $3, %ecx
loop_here: loop loop_here
    mov $4, %ecx; mov $buffer, %edi; rep stosb
call_f: call f
after_call: mov $indirect, %eax
jmp_indirect: jmp *%rax
indirect: push $f
    pop %rax
call_indirect: call *%rax
after_indirect:
int_n: int $0x30
after_int:
breakpoint: int3
after_breakpoint:
undefined: ud2
after_undefined:
    mov $0x180000000, %rax
page_fault: movb $0, (%rax)
after_page_fault:
    push $8
    push $far_target
far_return: lretq
far_target:
far_jump: ljmpl *far_pointer
far_landed:
    mov $0xfee00000, %eax               # the local APIC, software enabled; an interrupt to itself
    movl $0x1ff, 0xf0(%rax)
    movl $0x40040, 0x300(%rax)
    sti
    nop
interrupted: cli
    mov $user, %ecx; mov $0x202, %r11d
sysret: sysretq
user: nop
user_jump: jmp user_next
user_next:
user_syscall: syscall
after_syscall:
user_int: int $0x31
after_user_int:
user_fault: hlt
entry: mov $user_again, %ecx
sysret_again: sysretq
user_again:
user_jump_back: jmp after_syscall
f:  ret
h_int: nop
iret_int: iretq
h_breakpoint: nop
iret_breakpoint: iretq
h_undefined: addq $2, (%rsp)
iret_undefined: iretq
h_page_fault: add $8, %rsp; addq $after_page_fault - page_fault, (%rsp)
iret_page_fault: iretq
h_interrupt: mov $0xfee00000, %eax; movl $0, 0xb0(%rax)
iret_interrupt: iretq
h_protection:
""" + EXIT + """
    .align 16
far_pointer: .long far_landed; .word 8
    .align 16
gdt: .quad 0, 0x00af9b000000ffff, 0x00cf93000000ffff, 0x00cffb000000ffff, 0x00cff3000000ffff, 0x00affb000000ffff
    .word 103, tss, 0x8900, 0; .quad 0
gdtr: .word . - gdt - 1
    .quad gdt
    .macro gate handler, type=0x8e00
    .word \\handler, 8, \\type, 0, 0, 0, 0, 0
    .endm
idt: .fill 3 * 2, 8, 0
    gate h_breakpoint
    .fill 2 * 2, 8, 0
    gate h_undefined
    .fill 6 * 2, 8, 0
    gate h_protection
    gate h_page_fault
    .fill (0x30 - 15) * 2, 8, 0
    gate h_int
    gate h_int, 0xee00
    .fill 14 * 2, 8, 0
    gate h_interrupt
idtr: .word . - idt - 1
    .quad idt
tss: .long 0
    .quad 0x7000, 0x7000, 0x7000
    .fill 19, 4, 0
buffer: .quad 0
"""

# Labels, kind, and vector and error code where there are some.
RINGS_BRANCHES = """
reload reloaded far-return
jmp_next next jump
jz_taken zero conditional
loop_here loop_here conditional
loop_here loop_here conditional
call_f f call
f after_call return
jmp_indirect indirect indirect-jump
call_indirect f indirect-call
f after_indirect return
int_n h_int int 48
iret_int after_int iret
breakpoint h_breakpoint int 3
iret_breakpoint after_breakpoint iret
undefined h_undefined exception 6 0
iret_undefined after_undefined iret
page_fault h_page_fault exception 14 2
iret_page_fault after_page_fault iret
far_return far_target far-return
far_jump far_landed far-jump
interrupted h_interrupt interrupt 64
iret_interrupt interrupted iret
sysret user sysret
user_jump user_next jump
user_syscall entry syscall
sysret_again user_again sysret
user_jump_back after_syscall jump
user_int h_int int 49
iret_int after_user_int iret
user_fault h_protection exception 13 0
"""


class Records(RecordCase):
    def rings(self, *arguments, output="out.vtr"):
        done = self.record_flat(RINGS, *arguments, origin=0x8000, status=GUEST_EXIT + 5, output=output)
        expected = []
        for line in RINGS_BRANCHES.split("\n"):
            if line:
                source, target, kind, *numbers = line.split()
                expected.append((done.symbols[source], done.symbols[target], kind, *map(int, numbers)))
        return expected

    def named(self, path="out.vtr"):
        return [(branch[0], branch[1], branch[2].replace(" ", "-"), *branch[3:]) for branch in self.branches(path=path)]

    def test_exact_records(self):
        expected = self.rings()
        self.maxDiff = None
        self.assertEqual([tuple(map(str, branch)) for branch in self.named()],
                         [tuple(map(str, branch)) for branch in expected])

    def test_filters(self):
        expected = self.rings()
        in_user = False
        kernel, user = [], []
        for branch in expected:
            in_user = branch[2] == "sysret" or branch == expected[-2] or (in_user and branch[2] == "jump")
            (user if in_user else kernel).append(branch)
        self.assertEqual(len(user), 5)
        self.rings("--kernel-only", output="kernel.vtr")
        self.rings("--user-only", output="user.vtr")
        self.assertEqual([b[:2] for b in self.named("kernel.vtr")], [b[:2] for b in kernel])
        self.assertEqual([b[:2] for b in self.named("user.vtr")], [b[:2] for b in user])
        self.assertEqual(self.info("kernel.vtr")["config"]["filter"], "kernel")

    def test_flat_modes(self):
        for bits, exit_code in [(16, "mov $2, %al; out %al, $0xf4"), (32, "mov $4, %al; out %al, $0xf4"),
                                (64, "mov $8, %al; out %al, $0xf4")]:
            done = self.record_flat(f"jmp 1f; nop; 1: {exit_code}; 2: jmp 2b", bits=bits, status=GUEST_EXIT + bits // 8)
            start = done.symbols["_start"]
            self.assertEqual(self.branches(), [(start, start + 3, "jump")])
        done = self.record_flat("ud2; entry: jmp 1f; 1: " + EXIT, "--flat-entry", "0x8002", bits=16, origin=0x8000,
                                status=GUEST_EXIT + 5)
        self.assertEqual(self.branches(), [(0x8002, 0x8004, "jump")])


ECHO = """
    xor %ebx, %ebx
1:  mov $0x3fd, %edx; in %dx, %al; test $1, %al; jz 1b
    mov $0x3f8, %edx; in %dx, %al
    cmp $'q', %al; je 2f
    out %al, %dx; jmp 1b
2:
"""


class Engines(RecordCase):
    """What is said of engines without KVM; tests/nested has what is done with it."""

    NOWHERE = ("--kvm-device", "/nowhere/kvm")

    def test_run_records_nothing(self):
        kernel, _ = self.guests.flat(say("hello") + EXIT)
        done = self.vtrace("run", "-k", str(kernel), "--flat", "64", "-m", "16M", *self.NOWHERE, status=GUEST_EXIT + 5)
        self.assertEqual(done.stdout, "hello")
        self.assertIn("vtrace: engine: soft (no KVM: cannot open '/nowhere/kvm'", done.stderr)
        self.assertEqual(list(self.work.glob("*.vtr")), [])

    def test_kvm_is_not_replaced(self):
        kernel, _ = self.guests.flat(EXIT)
        guest = ["-k", str(kernel), "--flat", "64", "-m", "16M"]
        for arguments, words in [(["run", *guest, "--accel", "kvm", *self.NOWHERE], "cannot run the guest under KVM: .*nowhere"),
                                 (["record", *guest, "--accel", "kvm"], "say where a window begins"),
                                 (["record", *guest, "--accel", "kvm", "--from", "time:1s", *self.NOWHERE], "cannot run .* under KVM"),
                                 (["verify", *guest, *self.NOWHERE], "cannot verify without KVM: .*nowhere")]:
            self.assertRegex(self.error(*arguments), words)

    def test_windows_that_cannot_be(self):
        kernel, _ = self.guests.flat(EXIT)
        guest = ["record", "-k", str(kernel), "--flat", "64", "-m", "16M", "--accel", "soft"]
        for arguments, words in [(["--from", "sometime"], "must begin with one of"),
                                 (["--from", "end"], "can't begin at the end"),
                                 (["--times", "3", "--to", "time:1s"], "say where the later ones begin"),
                                 (["--times", "3", "--from", "time:1s"], "has no end"),
                                 (["--from", "symbol:nothing"], "cannot look up 'nothing'")]:
            self.assertRegex(self.error(*guest, *arguments), words)

    def test_window_that_never_comes(self):
        done = self.record_flat(EXIT, "--accel", "soft", "--from", "marker:7", status=GUEST_EXIT + 5)
        self.assertIn("0 windows of 1: 'marker:7' did not come at all", done.stderr)
        self.assertEqual(self.info()["branches"], 0)


class Machine(RecordCase):
    def test_input(self):
        (self.work / "typed").write_bytes(b"hello, guest\n" * 50 + b"q")
        done = self.record_flat(ECHO + POWER_OFF, "--input", "typed")
        self.assertEqual(done.stdout, "hello, guest\n" * 50)
        done = self.record_flat(say("login: ") + ECHO + POWER_OFF, "--input", "typed", "--input-after", "ogin:")
        self.assertEqual(done.stdout, "login: " + "hello, guest\n" * 50)
        done = self.record_flat(say("login: ") + POWER_OFF, "--input", "typed", "--input-after", "Password:")
        self.assertIn("nothing was typed: the console never showed 'Password:'", done.stderr)

    def test_console(self):
        done = self.record_flat(say("one\ntwo") + POWER_OFF, "--console", "console.txt")
        self.assertEqual((done.stdout, (self.work / "console.txt").read_text()), ("", "one\ntwo"))
        done = self.record_flat(say("one\ntwo") + POWER_OFF, "--console", "none")
        self.assertEqual(done.stdout, "")
        self.assertIn("one", json.dumps(json.loads(self.vtrace("report", "--json", "out.vtr").stdout)["console"]))
        done = self.record_flat(say("one\n") + POWER_OFF, "--quiet")
        self.assertEqual((done.stdout, done.stderr), ("one\n", ""))

    def test_multiboot_modules_and_command_line(self):
        source = """
            mov 16(%ebx), %esi              # multiboot_info.cmdline
            call print
            mov 20(%ebx), %ecx              # mods_count
            mov 24(%ebx), %edi              # mods_addr
        1:  mov 8(%edi), %esi; call print   # its string
            mov (%edi), %esi; call print    # its bytes; memory after a module is zero
            add $16, %edi
            loop 1b
        """ + POWER_OFF + """
        print: mov $0x3f8, %edx
        2:  lodsb; test %al, %al; jz 3f; out %al, %dx; jmp 2b
        3:  mov $'|', %al; out %al, %dx; ret
        """
        (self.work / "first").write_text("FIRST")
        (self.work / "second").write_text("SECOND")
        guest = self.guests.multiboot(source)
        done = self.record(guest, "-m", "16M", "-a", "a=1 b", "--module", "first", "--module", "second with arguments")
        parts = done.stdout.split("|")
        self.assertEqual([part.split("/")[-1] for part in parts],
                         [f"{guest.name} a=1 b", "first", "FIRST", "second with arguments", "SECOND", ""])

    def test_memory_above_4_gib(self):
        # Through a page table entry of its own: the first 4 GiB are mapped at the start.
        source = """
            mov %cr3, %rax; mov (%rax), %rbx; and $-4096, %rbx
            mov $0x100000083, %rdx; mov %rdx, 32(%rbx)  # 1 GiB page at 4 GiB
            mov %rax, %cr3
            mov $0x13ffffff8, %rax; movq $0x5a5a, (%rax); mov (%rax), %rcx
            cmp $0x5a5a, %rcx; jne 1f
        """ + POWER_OFF + "\n1: " + EXIT
        kernel, _ = self.guests.flat(source)
        self.record(kernel, "--flat", "64", "-m", "5G", "--cpu", "x86-64-v2")
        self.record(kernel, "--flat", "64", "-m", "1G", "--cpu", "x86-64-v2", status=GUEST_EXIT + 5)

    def test_progress_on_a_terminal(self):
        kernel, _ = self.guests.flat("1: sti; jmp 1b")
        main, child = pty.openpty()
        run = subprocess.Popen([VTRACE, "record", "-k", kernel, "--flat", "64", "-o", "out.vtr", "--limit", "60M"],
                               cwd=self.work, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=child)
        os.close(child)
        text = b""
        try:
            while piece := os.read(main, 65536):
                text += piece
        except OSError:  # the other side is closed
            pass
        os.close(main)
        run.communicate(timeout=TIMEOUT_S)
        self.assertEqual(run.returncode, LIMIT)
        self.assertRegex(text.decode(), r"\r\x1b\[K[\d.]+ [kM]? ?branches +\d+ MIPS +[\d.]+ k?B trace +[\d.]+ s guest time")
        self.assertRegex(text.decode(), r"\r\x1b\[Kvtrace: limit: 60000000 instructions; 60.0 M instructions in .* in out.vtr")

    def test_help(self):
        text = self.vtrace("record", "--help").stdout
        for option in ["--kernel", "--initrd", "--append", "--memory", "--output", "--console", "--limit", "--kernel-only",
                       "--user-only", "--input-after", "Exit status: 0 power-off"]:
            self.assertIn(option, text)
        self.assertTrue(all(len(line) <= 120 for line in text.splitlines()))


class Linux(RecordCase):
    """Beginnings of stock boots; tests/guests has whole ones."""

    def test_filters_add_up(self):
        arguments = ["-i", self.stock_initrd(), "-a", "console=ttyS0 quiet", "--limit", "80M"]
        counts = {}
        for name, options in [("all", []), ("kernel", ["--kernel-only"]), ("user", ["--user-only"])]:
            self.record(self.stock_kernel(), *arguments, *options, status=LIMIT, output=f"{name}.vtr")
            counts[name] = self.info(f"{name}.vtr")["branches"]
        self.assertEqual(counts["kernel"] + counts["user"], counts["all"])

    def test_two_processors(self):
        done = self.record(self.stock_kernel(), "-i", self.stock_initrd(), "-a", "console=ttyS0", "--cpus", "2", "--limit",
                           "250M", status=LIMIT)
        self.assertRegex(done.stdout, r"smp: Brought up 1 node, 2 CPUs")
        self.assertTrue(all(vcpu["branches"] > 0 for vcpu in self.info()["vcpus"]))

    def test_pvh(self):
        done = self.record(self.stock_kernel(), "-i", self.stock_initrd(), "-a", "console=ttyS0 earlyprintk=serial",
                           "--protocol", "pvh", "--limit", "100M", status=LIMIT)
        self.assertIn("Linux version", done.stdout)
        report = json.loads(self.vtrace("report", "--json", "--top", "100000", "out.vtr").stdout)
        self.assertIn("start_kernel", {function["name"] for function in report["functions_by_entries"]})
        lines = self.vtrace("dump", "--symbol", "start_kernel", "-n", "5", "out.vtr").stdout.splitlines()
        self.assertEqual(len(lines), 5)
        self.assertTrue(all("start_kernel" in line for line in lines))

    def test_much_memory(self):
        done = self.record(self.stock_kernel(), "-i", self.stock_initrd(), "-a", "console=ttyS0 earlyprintk=serial", "-m", "6G",
                           "--limit", "250M", status=LIMIT)
        memory = re.search(r"Memory: \d+K/(\d+)K available", done.stdout)
        self.assertIsNotNone(memory, done.stdout[-1000:])
        self.assertGreater(int(memory[1]), 6_200_000)


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], *sys.argv[2:]], verbosity=1)
