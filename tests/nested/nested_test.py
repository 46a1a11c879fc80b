#!/usr/bin/env python3
"""The KVM engine, on real KVM: this machine's if 'vtrace check' finds it of use, else in a host made in software (host.py).

  nested_test.py KIND VTRACE VTRACE_MARK BARE_GUEST... [-- unittest arguments]       KIND: amd or intel

All cases run in one boot of the host, in the order of their names; the tests then look at what each printed. In the amd host
a guest now and then dies with RFLAGS bits set that no processor has; whose fault that is, is not known yet: a case that ends so
is run once more, and that is said.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import unittest

import host

sys.path.insert(0, host.GUESTS)
import initrd  # noqa: E402

BOOT = '-a "console=ttyS0 quiet panic=-1"'
MARKED = "--from marker:1 --to marker:2"
TRIPLE_FAULT = 11
# What is done of each kind: Bochs takes a minute for what TCG does in a second.
PLACES = {"amd": "--places 12 --length 1000 --native-spacing 500ms", "intel": "--places 4 --length 500 --native-spacing 100ms"}
USER_PLACES = {"amd": "--places 3 --length 4000 --native-spacing 20ms", "intel": "--places 1 --length 2000"}


def cases(kind, bare):
    run = "vtrace run --accel kvm -q"
    record = "vtrace record --accel kvm -k /g/6.1-cloud"
    verify = f"vtrace verify -k /g/6.1-cloud -i /g/boot.gz -m 128M {BOOT}"
    some = [
        host.Case("check", "vtrace check --json"),
        host.Case("boot-6.1", f"{run} -k /g/6.1-cloud -i /g/boot.gz {BOOT}", 300),
        host.Case("windows", f"{record} -i /g/marks.gz {BOOT} {MARKED} --times 10 --console none -o w.vtr 2>&1;"
                             "echo status $?; vtrace info --json w.vtr; vtrace report w.vtr | head -n 30", 300),
        host.Case("symbol", f"{record} -i /g/boot.gz {BOOT} --from symbol:do_sys_openat2 --to instructions:20000 --console none "
                            "-o w.vtr 2>&1; echo status $?; vtrace dump -n 20 w.vtr", 300),
        host.Case("triple-fault", f"{run} -k /g/triple --flat 64 -m 16M"),
        host.Case("verify", f"{verify} {PLACES[kind]}", 600),
        host.Case("verify-user", f"{verify} {USER_PLACES[kind]} --from console:vtrace-guest", 600),
    ]
    if kind == "amd":
        some += [
            host.Case("boot-6.12", f"{run} -k /g/6.12-cloud -i /g/boot.gz {BOOT}", 300),
            host.Case("two-cpus", f"{run} -k /g/6.1-cloud -i /g/boot.gz --cpus 2 {BOOT}", 300),
            host.Case("interrupted", f"(sleep 3; killall -INT vtrace) & {run} -k /g/6.1-cloud -i /g/boot.gz {BOOT}"),
            host.Case("killed", f"(while ! [ -s w.vtr ]; do sleep 0.2; done; sleep 2; killall -KILL vtrace) & {record} -i /g/boot.gz {BOOT} "
                                "--from time:1s --console none -o w.vtr; echo status $?; vtrace info w.vtr", 60),
            host.Case("permission", "vtrace run --accel kvm --kvm-device /nowhere/kvm -k /g/triple --flat 64"),
            host.Case("no-window", "vtrace record --accel kvm -k /g/triple --flat 64"),
        ]
        some += [host.Case("bare-" + name, f"{run} -m 64M -k /g/{name}") for name in bare]
    return some


def died_of_tcg(result):
    """Flags that no processor has (bits 22 and up, but for TCG never) in what the guest or vtrace printed when it died."""
    flags = [int(value, 16) for value in re.findall(r"(?:EFLAGS:|RFLAGS) +([0-9a-f]+)", result.output)]
    return any(value >> 22 for value in flags)


class Setup:
    """The files that the cases need, made or fetched."""

    def __init__(self, folder, vtrace, mark, bare):
        self.files = [host.File(vtrace, "/bin/vtrace")]
        kernels = ["6.1-cloud", "6.12-cloud"]
        *folders, boot, box = host.fetch(*kernels, "initrd-boot", "busybox")
        self.files += [host.File(os.path.join(path, "vmlinuz"), "/g/" + name) for name, path in zip(kernels, folders)]
        self.files.append(host.File(os.path.join(boot, "initrd.gz"), "/g/boot.gz"))
        self.files += [host.File(guest, "/g/" + os.path.basename(guest).removesuffix(".elf")) for guest in bare]
        marks = os.path.join(folder, "marks.gz")
        with open(os.path.join(box, "busybox"), "rb") as program, open(os.path.join(host.GUESTS, "init", "marks.sh"), "rb") as init, \
                open(mark, "rb") as tool:
            initrd.write(marks, program.read(), init.read(), {"bin/vtrace-mark": tool.read()})
        self.files.append(host.File(marks, "/g/marks.gz"))
        triple = os.path.join(folder, "triple")
        with open(triple, "wb") as code:
            code.write(bytes.fromhex("0f011c2500000000" "0f0b"))  # lidt [0]; ud2
        self.files.append(host.File(triple, "/g/triple"))


class Nested(unittest.TestCase):
    """Each test is of one case, or of two that belong together."""

    kind = results = None

    def case(self, name):
        if name not in self.results:
            self.skipTest(f"not done on the {self.kind} host: it would take too long")
        return self.results[name]

    def passed(self, name):
        result = self.case(name)
        self.assertEqual(result.status, 0, result.output)
        return result.output

    def test_kvm_is_found_usable(self):
        facts = json.loads(self.passed("check"))
        self.assertTrue(facts["usable"])
        self.assertEqual(facts["accel"], "kvm")
        self.assertTrue(facts["trial"]["passed"])

    def check_boot(self, name):
        output = self.passed(name)
        self.assertIn("vtrace-guest: start", output)
        self.assertIn("vtrace-guest: done", output)
        self.assertIn("reboot: Power down", output)

    def test_stock_6_1_boots_natively(self):
        self.check_boot("boot-6.1")

    def test_stock_6_12_boots_natively(self):
        self.check_boot("boot-6.12")

    def test_two_processors_boot_natively(self):
        self.check_boot("two-cpus")

    def test_ten_windows_from_marker_to_marker(self):
        output = self.case("windows").output
        self.assertIn("status 0", output)
        self.assertIn("vtrace: 10 windows; a hand-over took", output)
        info = json.loads(output[output.index("\n{") + 1:output.index("\n}") + 2])
        self.assertEqual([window["number"] for window in info["windows"]], list(range(1, 11)))
        for window, after in zip(info["windows"], info["windows"][1:]):
            self.assertGreater(window["last"], window["first"] + 10_000)  # a process was forked, executed and waited for
            self.assertLess(window["begin_ns"], window["end_ns"])
            self.assertLess(window["end_ns"], after["begin_ns"])
            self.assertEqual(window["last"], after["first"])
        self.assertEqual({window["begin"] for window in info["windows"]}, {info["windows"][0]["begin"]})  # behind the OUT
        share = re.search(r"([\d.]+) % kernel, ([\d.]+) % user", output)
        self.assertTrue(share and float(share[1]) > 50 and float(share[2]) > 0.5, output)

    def test_window_from_a_symbol(self):
        output = self.case("symbol").output
        if self.kind == "amd":
            # Hardware breakpoints never fire in a guest of TCG's SVM: the window does not come, and that is said.
            if "0 windows of 1" in output:
                self.skipTest("hardware breakpoints do not fire in a nested guest of QEMU's TCG")
        self.assertIn("status 0", output)
        self.assertRegex(output, r"window 1 begins at [0-9a-f]{16} do_sys_openat2\n")

    def test_verify_finds_no_difference(self):
        self.assertRegex(self.passed("verify"), r"\d+ instructions at \d+ places without a difference")

    def test_verify_in_user_space(self):
        output = self.passed("verify-user")
        numbers = re.search(r"without a difference: (\d+) of user mode, (\d+) interrupts, (\d+) exceptions, (\d+) system", output)
        self.assertTrue(numbers and int(numbers[1]) > 0, output)

    def test_triple_fault(self):
        result = self.case("triple-fault")
        self.assertEqual(result.status, TRIPLE_FAULT, result.output)

    def test_interrupted(self):
        self.assertEqual(self.case("interrupted").status, 14, self.case("interrupted").output)

    def test_killed_in_a_window(self):
        output = self.case("killed").output
        self.assertIn("status 137", output)
        self.assertIn("not complete", output)
        self.assertRegex(output, r"Window 1, cpu 0: |Branches: ")

    def test_no_device(self):
        result = self.case("permission")
        self.assertEqual(result.status, 1)
        self.assertRegex(result.output, "^vtrace: cannot run the guest under KVM: .*/nowhere/kvm")

    def test_kvm_traces_nothing_itself(self):
        result = self.case("no-window")
        self.assertEqual(result.status, 1)
        self.assertIn("say where a window begins", result.output)


def add_bare_tests(bare):
    for name in bare:
        def test(self, name=name):
            result = self.case("bare-" + name)
            self.assertEqual(result.status, 64, result.output)
            self.assertNotRegex(result.output, "(?m)^ *FAIL ")
            self.assertRegex(result.output, "(?m)^PASS ")
        setattr(Nested, "test_bare_guest_" + name, test)


def usable_here(vtrace):
    return subprocess.run([vtrace, "check"], stdout=subprocess.DEVNULL, check=False).returncode == 0


def main():
    arguments = sys.argv[1:]
    rest = arguments[arguments.index("--") + 1:] if "--" in arguments else []
    kind, vtrace, mark, *bare = arguments[:arguments.index("--")] if "--" in arguments else arguments
    names = [os.path.basename(guest).removesuffix(".elf") for guest in bare]
    add_bare_tests(names)
    if why := host.missing(kind):
        print(f"SKIPPED: cannot make the {kind} host: {why}")
        return 77
    with tempfile.TemporaryDirectory() as folder:
        try:
            setup = Setup(folder, vtrace, mark, bare)
            wanted = cases(kind, names)
            limit = sum(case.timeout for case in wanted)
            results = host.run(kind, wanted, setup.files, timeout=limit)
            again = [case for case in wanted if results[case.name].status != 0 and died_of_tcg(results[case.name])]
            if again and kind == "amd":
                print("again, for flags that no processor has:", ", ".join(case.name for case in again))
                results.update(host.run(kind, again, setup.files, timeout=limit))
        except host.HostError as error:
            print(f"FAILED: {error}")
            return 1
    Nested.kind, Nested.results = kind, results
    for name, result in results.items():
        print(f"== {name}: status {result.status}\n{result.output}", file=sys.stderr) if os.environ.get("VERBOSE") else None
    return 0 if unittest.main(argv=[sys.argv[0], *rest], exit=False).result.wasSuccessful() else 1


if __name__ == "__main__":
    sys.exit(main())
