#!/usr/bin/env python3
"""vtrace check: what it says here, and of devices that aren't KVM; and vtrace-mark outside of a vtrace machine.

  check_test.py VTRACE VTRACE_MARK
"""

import grp
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
import unittest

VTRACE, MARK = [pathlib.Path(argument).resolve() for argument in sys.argv[1:3]]


class Check(unittest.TestCase):
    def check(self, *arguments, **more):
        done = subprocess.run([VTRACE, "check", *arguments], capture_output=True, text=True, timeout=60, **more)
        self.assertEqual(done.stderr, "")
        return done

    def facts(self, *arguments, **more):
        done = self.check("--json", *arguments, **more)
        facts = json.loads(done.stdout)
        self.assertEqual(done.returncode, 0 if facts["usable"] else 1)
        self.assertEqual(facts["accel"], "kvm" if facts["usable"] else "soft")
        self.assertEqual(bool(facts["to_do"]), not facts["usable"], "what is missing comes with what to do")
        return facts

    def test_keys_and_their_agreement(self):
        facts = self.facts()
        self.assertEqual(list(facts), ["usable", "accel", "processor", "device", "capabilities", "trial",
                                       "memlock_bytes", "cap_ipc_lock", "to_do"])
        flags = next(line for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags"))
        flags = flags.split()
        self.assertIn("vendor_id\t: " + facts["processor"]["vendor"], pathlib.Path("/proc/cpuinfo").read_text())
        self.assertEqual(facts["processor"]["hypervisor"] is not None, "hypervisor" in flags)
        self.assertEqual(facts["processor"]["module"],
                         "kvm-amd" if "svm" in flags else "kvm-intel" if "vmx" in flags else None)
        self.assertEqual(facts["device"]["open"], os.access("/dev/kvm", os.R_OK | os.W_OK))
        missing = [c for c in facts["capabilities"] if c["required"] and c["value"] == 0]
        self.assertEqual(facts["usable"], facts["trial"]["passed"] and not missing)
        self.assertEqual(facts["trial"]["passed"], facts["trial"]["instructions_per_second"] is not None)

    def test_text_says_the_same(self):
        facts, text = self.facts(), self.check()
        self.assertIn(f"--accel auto will use {facts['accel']}", text.stdout)
        for capability in facts["capabilities"]:
            self.assertIn(capability["name"], text.stdout)
        self.assertEqual(text.stdout.count("\nTo do "), len(facts["to_do"]))

    def test_devices_that_are_not_kvm(self):
        with tempfile.NamedTemporaryFile() as file:
            for device, said in [("/dev/null", "does not answer as KVM does"), (file.name, "does not answer"),
                                 ("/no/such/kvm", "cannot open '/no/such/kvm': No such file or directory")]:
                facts = self.facts("--device", device)
                self.assertFalse(facts["usable"])
                self.assertFalse(facts["trial"]["done"])
                self.assertEqual(facts["capabilities"], [])
                self.assertIn(said, facts["device"]["error"])
                self.assertIn(facts["device"]["error"], facts["to_do"])

    @unittest.skipUnless(os.getuid() == 0, "needs root to become somebody else")
    def test_without_permission(self):
        with tempfile.TemporaryDirectory() as folder:
            os.chmod(folder, 0o755)
            device = pathlib.Path(folder, "kvm")
            device.touch(0o600)
            os.chown(device, 0, 0)
            become = {"user": 65534, "group": 65534, "extra_groups": []}
            copy = pathlib.Path(folder, "vtrace")  # the build's folder may be closed to others
            copy.write_bytes(VTRACE.read_bytes())
            copy.chmod(0o755)

            def error():
                done = subprocess.run([copy, "check", "--json", "--device", device], capture_output=True, text=True,
                                      timeout=60, **become)
                self.assertEqual(done.returncode, 1)
                return json.loads(done.stdout)["device"]["error"]

            self.assertRegex(error(), "Permission denied.*chmod 660")
            device.chmod(0o660)
            self.assertRegex(error(), "Permission denied.*chmod 660", "nobody should have to join group root")
            group = next(group for group in grp.getgrall() if group.gr_gid not in (0, 65534))
            os.chown(device, 0, group.gr_gid)
            self.assertRegex(error(), f"Permission denied.*usermod -aG {group.gr_name} ")

    def test_is_quick(self):
        start = time.monotonic()
        self.check()
        self.assertLess(time.monotonic() - start, 5)  # the trial itself ends after a tenth of a second


class Mark(unittest.TestCase):
    def mark(self, *arguments):
        return subprocess.run([MARK, *arguments], capture_output=True, text=True, timeout=60)

    def test_usage(self):
        for arguments in [[], ["x"], ["-1"], [""], ["0x"], ["0x100000000"], ["4294967296"], ["1", "2"], ["--chek"],
                          ["9" * 1000]]:
            done = self.mark(*arguments)
            self.assertEqual(done.returncode, 2, arguments)
            self.assertIn("usage: vtrace-mark VALUE", done.stderr)

    def test_not_in_a_vtrace_machine(self):
        if self.mark("--check").returncode == 0:
            self.skipTest("this is a vtrace machine")
        for arguments in [["--check"], ["7"], ["0xffffffff"]]:
            done = self.mark(*arguments)
            self.assertEqual(done.returncode, 1)
            self.assertRegex(done.stderr, "^vtrace-mark: (this is not a vtrace machine|no way to the marker register)")

    def test_needs_no_library_and_is_small(self):
        image = MARK.read_bytes()
        self.assertNotIn(b"ld-linux", image)
        self.assertLess(len(image), 10_000)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1], verbosity=1)
