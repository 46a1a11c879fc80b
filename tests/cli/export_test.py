#!/usr/bin/env python3
"""vtrace export: each format through the tool that it is for, and the same counts in all of them.

  export_test.py VTRACE SAMPLE_TRACE [unittest arguments]

Traces: the sample trace (a page of made-up code), a program with known calls, and a recorded boot where the cache has a
kernel.
"""

import collections
import csv
import json
import os
import pathlib
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import unittest

HERE = pathlib.Path(__file__).resolve().parent
VTRACE, MAKE_SAMPLE = [pathlib.Path(argument).resolve() for argument in sys.argv[1:3]]
CACHE = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "vtrace"
SAMPLE_BRANCHES = 26
MEMORY_LIMIT = 500 << 20  # bytes: an export stays below, whatever the trace
TIMEOUT_S = 300

GUEST_START = """
.code32
.globl _start
_start: jmp main
.align 4
.long 0x1badb002, 0, -0x1badb002
main: mov $stack, %esp
call guest_main
mov $5, %al
out %al, $0xf4
9: jmp 9b
.lcomm stack_bottom, 16384
.set stack, stack_bottom + 16384
.section .note.GNU-stack,"",@progbits
"""


def need(tool):
    if shutil.which(tool) is None:
        raise unittest.SkipTest(f"{tool} is not installed")
    return tool


class ExportCase(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.temporary = tempfile.TemporaryDirectory()
        cls.addClassCleanup(cls.temporary.cleanup)
        cls.work = pathlib.Path(cls.temporary.name)

    def run_vtrace(self, *arguments, status=0):
        done = subprocess.run([VTRACE, *arguments], cwd=self.work, capture_output=True, timeout=TIMEOUT_S, text=True)
        self.assertEqual(done.returncode, status, done.stderr)
        return done

    def export(self, form, *arguments):
        """What goes to standard output."""
        return self.run_vtrace("export", form, *arguments).stdout

    def dump(self, *arguments):
        """The branches as `dump` tells them."""
        return [json.loads(line) for line in self.run_vtrace("dump", "--format=json", *arguments).stdout.splitlines()]

    def folded(self, *arguments):
        """Stack (a tuple of names) -> weight. Two static functions of one name are two lines."""
        stacks = collections.Counter()
        for line in self.export("folded", *arguments).splitlines():
            names, _, weight = line.rpartition(" ")
            stacks[tuple(names.split(";"))] += int(weight)
        return stacks

    def callgrind(self, *arguments):
        """(self branches by function, calls by pair of functions) out of callgrind's format."""
        names, own, calls = {}, collections.Counter(), collections.Counter()

        def name(text):
            number, _, rest = text.partition(" ")
            if rest:
                names[number] = rest
            return names[number]

        function = callee = None
        for line in self.export("callgrind", *arguments).splitlines():
            key, _, value = line.partition("=")
            if key == "fn":
                function = name(value)
            elif key == "cfn":
                callee = name(value)
            elif key == "calls":
                calls[function, callee] += int(value.split()[0])
            elif re.fullmatch(r"0 \d+ \d+", line):
                if callee is None:
                    own[function] += int(line.split()[1])
                callee = None
        return own, calls

    def columns(self, *arguments):
        """Rows of the columnar form."""
        need("zstd")
        self.run_vtrace("export", "columns", "-o", "branches.csv.zst", *arguments)
        text = subprocess.run(["zstd", "-dc", "branches.csv.zst"], cwd=self.work, check=True, stdout=subprocess.PIPE,
                              timeout=TIMEOUT_S, text=True).stdout
        return list(csv.DictReader(text.splitlines(), strict=True))

    def drcov(self, *arguments):
        """(modules, blocks): what a reader of drcov version 2 finds."""
        self.run_vtrace("export", "drcov", "-o", "coverage.drcov", *arguments)
        data = (self.work / "coverage.drcov").read_bytes()
        head = re.match(rb"DRCOV VERSION: 2\nDRCOV FLAVOR: \S+\nModule Table: version 2, count (\d+)\n"
                        rb"Columns: id, base, end, entry, path\n((?:.*\n)*?)BB Table: (\d+) bbs\n", data)
        modules = []
        for number, line in enumerate(head[2].decode().splitlines()):
            index, base, end, entry, path = line.split(",", 4)
            self.assertEqual(int(index), number)
            modules.append((path.strip(), int(base, 16), int(end, 16)))
        self.assertEqual(len(modules), int(head[1]))
        table = data[head.end():]
        self.assertEqual(len(table), int(head[3]) * 8)
        blocks = []
        for offset, size, module in struct.iter_unpack("<IHH", table):
            path, base, end = modules[module]
            self.assertLessEqual(base + offset + size, end)
            blocks.append((path, base + offset, size))
        self.assertEqual(len(blocks), len(set(blocks)))
        return modules, blocks

    def chrome(self, *arguments):
        """The events, once they are found sound: slices nest, and time does not run backwards."""
        events = json.loads(self.export("chrome", *arguments))["traceEvents"]
        stacks, times = collections.defaultdict(list), collections.defaultdict(float)
        for event in events:
            if event["ph"] in "BE":
                thread = event["tid"]
                self.assertGreaterEqual(event["ts"], times[thread])
                times[thread] = event["ts"]
                if event["ph"] == "B":
                    stacks[thread].append(event["name"])
                else:
                    stacks[thread].pop()
        self.assertFalse(any(stacks.values()))
        return events

    def check_callgrind_annotate(self, trace, branches, *arguments):
        """callgrind_annotate takes the file, says nothing against it, and finds as many branches."""
        need("callgrind_annotate")
        self.export("callgrind", trace, "-o", "callgrind.out", *arguments)
        done = subprocess.run(["callgrind_annotate", "--threshold=100", "callgrind.out"], cwd=self.work,
                              capture_output=True, timeout=TIMEOUT_S, text=True)
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        total = re.search(r"^\s*([\d,]+)\s.*PROGRAM TOTALS", done.stdout, re.M)
        self.assertEqual(int(total[1].replace(",", "")), branches)
        return done.stdout


    def check_perf(self, trace, *arguments):
        """perf script prints the same branches as dump: addresses, symbols, and kinds as its flags tell them."""
        need("perf")
        self.run_vtrace("export", "perf", trace, "-o", "perf.data", *arguments)
        done = subprocess.run(["perf", "script", "-i", "perf.data", "-k", "perf.data.vmlinux", "--itrace=b", "-F",
                               "hw:ip,addr,sym,symoff,flags"], cwd=self.work, capture_output=True, timeout=TIMEOUT_S,
                              text=True)
        self.assertEqual(done.returncode, 0, done.stderr)
        lines = [line for line in done.stdout.splitlines() if line.strip()]
        dumped = self.dump(trace, *arguments)
        self.assertEqual(len(lines), len(dumped))
        self.assertGreater(len(lines), 0)
        kinds = collections.Counter()
        for line, branch in zip(lines, dumped):
            found = re.fullmatch(r" *(\S.*?|) +([0-9a-f]+) (\S+) => +([0-9a-f]+) (\S+)", line)
            self.assertTrue(found, line)
            flags, start, start_name, end, end_name = found.groups()
            self.assertEqual((int(start, 16), int(end, 16)), (int(branch["from"], 16), int(branch["to"], 16)))
            for name, key in [(start_name, "from_symbol"), (end_name, "to_symbol")]:
                self.assertEqual(re.sub(r"\+0x0$", "", name), branch.get(key, "[unknown]"), branch)
            kind = branch["kind"]
            kinds[kind] += 1
            if kind in PERF_FLAGS:
                self.assertEqual(flags, PERF_FLAGS[kind], branch)
            elif kind in ("interrupt", "exception") and not branch["from"].startswith("0xffff"):
                # perf sees that user code goes to the kernel; where a system call was to come next, it takes it for that.
                self.assertIn(flags, ("hw int", "syscall"))
        return kinds


# What perf calls the kinds. Interrupts and exceptions out of the kernel it can't tell: an intel_bts record does not.
PERF_FLAGS = {"conditional": "jcc", "jump": "jmp", "indirect jump": "jmp", "call": "call", "indirect call": "call",
              "return": "return", "syscall": "syscall", "sysret": "sysret", "iret": "iret"}


class SampleTest(ExportCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        subprocess.run([MAKE_SAMPLE, cls.work / "sample.vtr"], check=True)

    def test_jsonl_says_what_dump_says(self):
        lines = [json.loads(line) for line in self.export("jsonl", "sample.vtr").splitlines()]
        dumped = self.dump("sample.vtr")
        self.assertEqual(len(lines), SAMPLE_BRANCHES)
        for mine, theirs in zip(lines, dumped, strict=True):
            for key, value in theirs.items():
                self.assertEqual(mine[key], value, mine)
        self.assertEqual(sum(line["privilege"] == "user" for line in lines), 7)

    def test_jsonl_keeps_to_its_schema(self):
        try:
            import jsonschema
        except ImportError:
            self.skipTest("python3-jsonschema is not installed")
        schema = json.loads((HERE.parents[1] / "docs" / "branch.schema.json").read_text())
        jsonschema.Draft202012Validator.check_schema(schema)
        validator = jsonschema.Draft202012Validator(schema)
        good = self.export("jsonl", "sample.vtr").splitlines()
        for line in good:
            validator.validate(json.loads(line))
        # The schema says no, too.
        branch = json.loads(good[0])
        for wrong in [{"from": 5}, {"kind": "leap"}, {"extra": 1}, {"kind": "interrupt"}]:
            self.assertFalse(validator.is_valid(branch | wrong), wrong)

    def test_ranges_add_up(self):
        whole = self.export("jsonl", "sample.vtr", "--cpu", "0").splitlines()
        parts = []
        for first in range(0, 24, 5):
            parts += self.export("jsonl", "sample.vtr", "--cpu", "0", "--from", str(first), "--to",
                                 str(first + 5)).splitlines()
        strip = [{k: v for k, v in json.loads(line).items() if k != "instructions"} for line in whole]
        self.assertEqual([{k: v for k, v in json.loads(line).items() if k != "instructions"} for line in parts], strip)
        for first, last in [(0, 7), (7, 24)]:
            part = self.folded("sample.vtr", "--cpu", "0", "--from", str(first), "--to", str(last))
            self.assertEqual(sum(part.values()), last - first)

    def test_folded(self):
        self.assertEqual(self.folded("sample.vtr", "--cpu", "0"), {
            ("[boot]",): 1, ("[boot]", "start_kernel"): 2, ("[boot]", "start_kernel", "helper"): 4,
            ("[user]",): 7, ("[user]", "entry_SYSCALL_64"): 4,
            ("[user]", "entry_SYSCALL_64", "__x64_sys_getpid"): 2, ("[user]", "asm_exc_page_fault"): 1,
            ("[user]", "asm_sysvec_apic_timer_interrupt"): 2, ("[user]", "asm_sysvec_apic_timer_interrupt", "helper"): 1,
        })
        instructions = self.folded("sample.vtr", "--cpu", "0", "--weight", "instructions")
        # call, then 4 NOPs and a JNE three times, once more without the JNE being taken, and RET.
        self.assertEqual(instructions["[boot]", "start_kernel", "helper"], 3 * 5 + 6)

    def test_callgrind(self):
        own, calls = self.callgrind("sample.vtr")
        self.assertEqual(sum(own.values()), SAMPLE_BRANCHES)
        self.assertEqual(calls["start_kernel", "helper"], 1)
        self.assertEqual(calls["[user]", "entry_SYSCALL_64"], 2)
        text = self.check_callgrind_annotate("sample.vtr", SAMPLE_BRANCHES)
        self.assertRegex(text, r"helper \[vmlinux\]")

    def test_columns_say_what_dump_says(self):
        rows = self.columns("sample.vtr")
        self.assertEqual(len(rows), SAMPLE_BRANCHES)
        for row, branch in zip(rows, self.dump("sample.vtr"), strict=True):
            self.assertEqual((int(row["cpu"]), int(row["number"])), (branch["cpu"], branch["number"]))
            self.assertEqual((hex(int(row["from"])), hex(int(row["to"]))), (branch["from"], branch["to"]))
            self.assertEqual(row["kind"], branch["kind"])
            for end in ["from", "to"]:
                name, offset = row[end + "_symbol"], row[end + "_offset"]
                name += f"+{int(offset):#x}" if name and offset != "0" else ""
                self.assertEqual(name, branch.get(end + "_symbol", ""))
            for key in ["vector", "error_code"]:
                self.assertEqual(row[key], str(branch.get(key, "")))

    def test_drcov(self):
        modules, blocks = self.drcov("sample.vtr")
        self.assertEqual([module[0] for module in modules], ["[kernel]", "[user 0x3000000]", "vmlinux"])
        kernel = 0xffffffff81000000
        # The first block of each vCPU is the branch alone: what led there is not in the trace.
        self.assertEqual({block for block in blocks if block[0] == "vmlinux"}, {("vmlinux", kernel + offset, size)
                         for offset, size in [(0, 5), (5, 2), (0x100, 6), (0x100, 7), (0x104, 2), (0x200, 5), (0x205, 3),
                                              (0x240, 1), (0x300, 2), (0x340, 2), (0x342, 2)]})
        self.assertEqual({block[1:] for block in blocks if block[0] == "[user 0x3000000]"},
                         {(0x401000, 2), (0x401002, 2), (0x500000, 1)})

    def test_chrome(self):
        events = self.chrome("sample.vtr")
        begun = collections.Counter(event["name"] for event in events if event["ph"] == "B" and event["tid"] == 0)
        self.assertEqual(begun["helper"], 2)
        self.assertEqual(begun["__x64_sys_getpid"], 2)
        vectors = {event["args"]["vector"]: event["ts"] for event in events if "vector" in event.get("args", {})}
        self.assertEqual(set(vectors), {14, 0xec})
        self.assertAlmostEqual(vectors[0xec], 1500.001)
        self.assertEqual([event["name"] for event in events if event["ph"] == "i"],
                         ["Linux version 6.1", "?[1;32mhello?[0m", "last line"])

    def test_perf(self):
        # Boot code below the kernel is user code to perf: what leaves it is an interrupt.
        kinds = self.check_perf("sample.vtr", "--from", "1")
        self.assertEqual(sum(kinds.values()), SAMPLE_BRANCHES - 2)

    def test_bad_input(self):
        for arguments, status in [(["folded", "no.vtr"], 1), (["nothing", "sample.vtr"], 2), ([], 2),
                                  (["folded", "--symbols", "no.elf", "sample.vtr"], 1),
                                  (["folded", "--symbols", "sample.vtr", "sample.vtr"], 1),
                                  (["perf", "sample.vtr"], 1), (["lcov", "sample.vtr"], 1),
                                  (["lcov", "--symbols", "no.elf", "sample.vtr"], 1),
                                  (["lcov", "--symbols", "sample.vtr", "sample.vtr"], 1),
                                  (["perf", "-o", "no/such/file", "sample.vtr"], 1),
                                  (["jsonl", "-o", "no/such/file", "sample.vtr"], 1)]:
            done = self.run_vtrace("export", *arguments, status=status)
            self.assertRegex(done.stderr, r"^vtrace: .*\n$")
            self.assertEqual(done.stdout, "")

    def test_empty_ranges_and_damage(self):
        nothing = ["--from", "20000", "--to", "20001"]
        self.assertEqual(self.export("jsonl", "sample.vtr", *nothing), "")
        self.assertEqual(self.folded("sample.vtr", *nothing), {})
        self.assertEqual(self.columns("sample.vtr", *nothing), [])
        self.assertEqual(self.drcov("sample.vtr", *nothing), ([], []))
        self.chrome("sample.vtr", *nothing)
        self.run_vtrace("export", "perf", "sample.vtr", *nothing, "-o", "empty.data")
        data = (self.work / "sample.vtr").read_bytes()
        for at in range(0, len(data), max(1, len(data) // 40)):
            flipped = bytearray(data)
            flipped[at] ^= 0xff
            (self.work / "flip.vtr").write_bytes(flipped)
            for form in ["jsonl", "folded", "drcov", "chrome"]:
                done = subprocess.run([VTRACE, "export", form, "flip.vtr"], cwd=self.work, capture_output=True,
                                      timeout=TIMEOUT_S)
                self.assertIn(done.returncode, (0, 1, 3), (form, at, done.stderr))

    def test_full_disk(self):
        with open("/dev/full", "wb") as full:
            for form in ["jsonl", "folded", "callgrind", "chrome", "drcov", "columns"]:
                done = subprocess.run([VTRACE, "export", form, "sample.vtr"], cwd=self.work, stdout=full,
                                      stderr=subprocess.PIPE, timeout=TIMEOUT_S)
                self.assertEqual(done.returncode, 1)
                self.assertIn(b"No space left on device", done.stderr)


class KnownTree:
    """The calls of export_guest.c, made again."""

    def __init__(self):
        self.stacks = collections.Counter()  # calls by stack
        self.path = ["_start"]
        self.call(self.guest_main)

    def call(self, function, *arguments):
        self.path.append(function.__name__)
        self.stacks[tuple(self.path)] += 1
        try:
            function(*arguments)
        finally:
            self.path.pop()

    def leaf(self): pass
    def set_jump(self): pass
    def long_jump(self): raise InterruptedError
    def caught(self): self.call(self.leaf)
    def last(self): self.call(self.leaf)
    def tail(self): self.call(self.last)

    def fibonacci(self, n):
        if n >= 2:
            self.call(self.fibonacci, n - 1)
            self.call(self.fibonacci, n - 2)

    def deep(self, n):
        if n == 0:
            self.call(self.long_jump)
        self.call(self.deep, n - 1)
        self.call(self.leaf)

    def guarded(self, n):
        self.call(self.set_jump)
        try:
            self.call(self.deep, n)
        except InterruptedError:
            self.call(self.caught)

    def guest_main(self):
        self.call(self.fibonacci, 8)
        self.call(self.guarded, 3)
        self.call(self.guarded, 1)
        self.call(self.tail)
        self.call(self.leaf)


class KnownTreeTest(ExportCase):
    """Recursion, setjmp and longjmp, a tail call: the tree that comes out is the program's own."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        start, program = cls.work / "start.s", cls.work / "guest.elf"
        start.write_text(GUEST_START)
        subprocess.run(["gcc", "-m32", "-g", "-O1", "-ffreestanding", "-fno-pic", "-fno-stack-protector",
                        "-nostdlib", "-static", "-fcf-protection=none", "-Wl,-N", "-Wl,--build-id=none",
                        "-Wl,--no-warn-rwx-segments", "-Wl,-Ttext=0x100000", "-o", program, start,
                        HERE / "export_guest.c"], check=True)
        subprocess.run([VTRACE, "record", "--kernel", program, "--output", cls.work / "guest.vtr"],
                       stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=TIMEOUT_S)

    def test_stacks(self):
        known = KnownTree()
        stacks = self.folded("guest.vtr")
        strip = lambda stack: tuple(name for name in stack if name not in ("main", "_start"))
        # Every function here ends with a branch, so that every stack of the program has a weight.
        self.assertTrue({strip(stack) for stack in stacks} - {()} == {strip(stack) for stack in known.stacks})
        # leaf() is one branch, its return; fibonacci() of 0 or 1 is two at most.
        leaves = collections.Counter({strip(stack): weight for stack, weight in stacks.items() if stack[-1] == "leaf"})
        self.assertEqual(leaves, {strip(stack): count for stack, count in known.stacks.items() if stack[-1] == "leaf"})
        self.assertEqual(sum(stacks.values()), len(self.dump("guest.vtr")))

    def test_calls(self):
        known = collections.Counter()
        for stack, count in KnownTree().stacks.items():
            known[stack[-2:]] += count
        _, calls = self.callgrind("guest.vtr")
        for pair, count in known.items():
            if pair[0] != "_start":
                self.assertEqual(calls[pair], count, pair)

    def lines(self, text):
        """(count by line, count by function) of export_guest.c out of an lcov tracefile."""
        for record in text.split("end_of_record\n"):
            if re.search(r"^SF:.*export_guest\.c$", record, re.M):
                return ({int(line): int(count) for line, count in re.findall(r"^DA:(\d+),(\d+)$", record, re.M)},
                        {name: int(count) for count, name in re.findall(r"^FNDA:(\d+),(\S+)$", record, re.M)})
        self.fail("no record of export_guest.c")

    def test_lcov(self):
        lines, functions = self.lines(self.export("lcov", "--symbols", "guest.elf", "guest.vtr"))
        known = collections.Counter()
        for stack, count in KnownTree().stacks.items():
            known[stack[-1]] += count
        for name in ["fibonacci", "leaf", "caught", "deep", "guarded", "last", "tail", "guest_main"]:
            self.assertEqual(functions[name], known[name], name)
        source = (HERE / "export_guest.c").read_text().splitlines()
        for text, count in [("void leaf(void)", known["leaf"]), ("if (n < 2)", 67), ("caught();", 2),
                            ("return fibonacci(n - 1)", 33), ("deep(n - 1);", 4), ("long_jump(buffer);", 2)]:
            number = next(i for i, line in enumerate(source, 1) if text in line and "__asm__" not in line and (
                "deep(n - 1);" not in text or line.strip() == text) and (text != "caught();" or line.strip() == text))
            self.assertEqual(lines[number], count, source[number - 1])
        # Behind a longjmp: the rest of deep() never runs.
        never = next(i for i, line in enumerate(source, 1) if line.strip() == "deep(n - 1);") + 1
        self.assertEqual(lines[never], 0)

    def test_genhtml_takes_it(self):
        need("genhtml")
        self.export("lcov", "--symbols", "guest.elf", "-o", "guest.info", "guest.vtr")
        done = subprocess.run(["genhtml", "--quiet", "-o", "html", "guest.info"], cwd=self.work, capture_output=True,
                              timeout=TIMEOUT_S, text=True)
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        pages = list((self.work / "html").rglob("export_guest.c.gcov.html"))
        self.assertEqual(len(pages), 1)
        self.assertIn("return fibonacci(n - 1)", pages[0].read_text())

    def test_slices_are_the_calls(self):
        begun = collections.Counter(event["name"] for event in self.chrome("guest.vtr") if event["ph"] == "B")
        for name in ["fibonacci", "leaf", "caught", "deep", "guarded", "last", "tail", "long_jump", "set_jump"]:
            self.assertEqual(begun[name], sum(count for stack, count in KnownTree().stacks.items() if stack[-1] == name))

    def test_counts_agree(self):
        count = len(self.dump("guest.vtr"))
        self.assertEqual(len(self.export("jsonl", "guest.vtr").splitlines()), count)
        self.assertEqual(sum(self.folded("guest.vtr").values()), count)
        self.assertEqual(sum(self.callgrind("guest.vtr")[0].values()), count)
        self.assertEqual(len(self.columns("guest.vtr")), count)
        self.check_callgrind_annotate("guest.vtr", count)

    def test_instructions_are_those_that_retired(self):
        total = sum(self.folded("guest.vtr", "--weight", "instructions").values())
        info = json.loads(self.run_vtrace("info", "--json", "guest.vtr").stdout)
        retired = info["vcpus"][0]["retired"]
        # The last instructions, after the last branch, are in no block.
        self.assertLessEqual(total, retired)
        self.assertLess(retired - total, 10)


class UserProgramTest(ExportCase):
    """The same for a program of a Linux guest: libc's longjmp, a signal handler, page faults and interrupts in between."""

    def test_stacks(self):
        kernel, busybox = CACHE / "kernels/6.1-cloud/vmlinuz", CACHE / "initrds/boot/initrd.gz"
        if not (kernel.exists() and busybox.exists()):
            self.skipTest("no guest in the cache: run tests/guests/fetch 6.1-cloud initrd-boot")
        subprocess.run(["gcc", "-O1", "-static", "-no-pie", "-fcf-protection=none", "-o", "init", HERE / "export_user.c"],
                       cwd=self.work, check=True)
        (self.work / "empty").write_bytes(b"")  # no busybox is needed
        subprocess.run([sys.executable, HERE.parents[0] / "guests" / "initrd.py", "--busybox", "empty",
                        "--init", "init", "--output", "initrd.gz"], cwd=self.work, check=True)
        self.run_vtrace("record", "--kernel", kernel, "--initrd", "initrd.gz", "--append", "console=ttyS0 quiet panic=-1",
                        "--output", "user.vtr")
        stacks = self.folded("--symbols", "init", "user.vtr")
        own = {"main", "leaf", "caught", "fibonacci", "deep", "guarded", "handler", "raiser"}
        # The kernel has no function of these names; what is not the program's own is left out.
        seen = {tuple(name for name in stack if name in own) for stack in stacks if "main" in stack}
        deep, fibonacci = ["deep"] * 4, ["fibonacci"] * 6
        known = {("main", *path) for path in [
            (), *[fibonacci[:n] for n in range(1, 7)], ("guarded",), *[("guarded", *deep[:n]) for n in range(1, 5)],
            ("guarded", "caught"), ("guarded", "caught", "leaf"), ("raiser",), ("raiser", "handler"),
            ("raiser", "handler", "leaf"), ("leaf",)]}
        self.assertEqual(seen, known)
        # Back from the signal handler and its sigreturn, the rest of main is not below them.
        self.assertIn(("main", "leaf"), {stack[-2:] for stack in stacks})


class BootTest(ExportCase):
    """A recorded boot: 100 million branches."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        kernel, initrd = CACHE / "kernels/6.1-cloud/vmlinuz", CACHE / "initrds/boot/initrd.gz"
        if not (kernel.exists() and initrd.exists()):
            raise unittest.SkipTest("no guest in the cache: run tests/guests/fetch 6.1-cloud initrd-boot")
        subprocess.run([VTRACE, "record", "--kernel", kernel, "--initrd", initrd, "--append",
                        "console=ttyS0 quiet panic=-1", "--output", cls.work / "boot.vtr"], check=True,
                       stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=TIMEOUT_S)
        info = json.loads(subprocess.run([VTRACE, "info", "--json", cls.work / "boot.vtr"], check=True,
                                         stdout=subprocess.PIPE).stdout)
        cls.branches = info["branches"]
        cls.retired = info["vcpus"][0]["retired"]

    def test_stacks_of_a_whole_boot(self):
        stacks = self.folded("boot.vtr")
        self.assertEqual(sum(stacks.values()), self.branches)
        # Whatever interrupts, switches and signals there were: each stack begins where a task can begin.
        self.assertEqual({stack[0] for stack in stacks}, {"[boot]", "x86_64_start_kernel", "ret_from_fork", "[user]"})

    def test_memory_is_bounded(self):
        for form in ["folded", "drcov"]:
            process = subprocess.Popen([VTRACE, "export", form, "-o", "out", "boot.vtr"], cwd=self.work)
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
            self.assertEqual(process.returncode, 0)
            self.assertLess(usage.ru_maxrss << 10, MEMORY_LIMIT, form)

    def test_instructions_of_a_whole_boot(self):
        total = sum(self.folded("boot.vtr", "--weight", "instructions").values())
        # The processor's own count, as of the last time event.
        self.assertLess(abs(total - self.retired), self.retired // 10000)

    def test_perf_of_kernel_and_user_code(self):
        kinds = self.check_perf("boot.vtr", "--from", str(self.branches - 600000), "--to", str(self.branches - 500000))
        for kind in ["conditional", "jump", "call", "return", "indirect call", "indirect jump", "syscall", "sysret",
                     "iret", "exception"]:
            self.assertGreater(kinds[kind], 0, kind)

    def test_other_formats_of_a_part(self):
        part = ["--from", "80000000", "--to", "80300000"]
        rows = self.columns("boot.vtr", *part)
        self.assertEqual(len(rows), 300000)
        _, blocks = self.drcov("boot.vtr", *part)
        ends = {int(row["from"]) for row in rows if row["kind"] not in ("interrupt", "exception")}
        self.assertEqual(ends - {end for _, start, size in blocks for end in range(start, start + size)}, set())
        events = self.chrome("boot.vtr", *part)
        self.assertGreater(len(events), 10000)

    def test_callgrind_of_a_part(self):
        part = ["--from", "40000000", "--to", "41000000"]
        self.check_callgrind_annotate("boot.vtr", 1000000, *part)
        # Entries by call: as many as there are call records to the function.
        _, calls = self.callgrind("boot.vtr", *part)
        entries = collections.Counter()
        for line in self.run_vtrace("dump", "--from", "40000000", "--to", "41000000", "boot.vtr").stdout.splitlines():
            found = re.search(r" (?:indirect-)?call +\S+ -> (\S+)$", line)
            if found and "+" not in found[1]:
                entries[found[1]] += 1
        by_callee = collections.Counter()
        for (_, callee), count in calls.items():
            by_callee[callee.split("@")[0]] += count
        self.assertGreater(len(entries), 100)
        short = {name: (count, by_callee[name]) for name, count in entries.items() if by_callee[name] < count}
        self.assertEqual(short, {})


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], *sys.argv[3:]], verbosity=1)
