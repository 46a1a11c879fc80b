#!/usr/bin/env python3
"""The reading side of the command on the sample trace: goldens, ranges, JSON, exit statuses, pipes, bad input.

  cli_test.py VTRACE SAMPLE_TRACE [--update]      --update writes the goldens anew: look at the difference
"""

import json
import pathlib
import signal
import struct
import subprocess
import sys
import tempfile
import unittest

GOLDEN = pathlib.Path(__file__).resolve().parent / "golden"
UPDATE = "--update" in sys.argv
VTRACE, MAKE_SAMPLE = [pathlib.Path(argument).resolve() for argument in sys.argv[1:3]]
BRANCHES = 24  # of vCPU 0


class Cli(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        cls.work = pathlib.Path(cls.folder.name)
        subprocess.run([MAKE_SAMPLE, cls.work / "sample.vtr"], check=True)

    @classmethod
    def tearDownClass(cls):
        cls.folder.cleanup()

    def run_vtrace(self, *arguments, status=0):
        done = subprocess.run([VTRACE, *arguments], cwd=self.work, capture_output=True, timeout=60)
        self.assertEqual(done.returncode, status, done.stderr.decode())
        return done

    def text(self, *arguments):
        done = self.run_vtrace(*arguments)
        self.assertEqual(done.stderr, b"")
        return done.stdout.decode()

    def error(self, *arguments, status=1):
        """The one line that a failing command prints."""
        done = self.run_vtrace(*arguments, status=status)
        lines = done.stderr.decode().splitlines()
        self.assertEqual(len(lines), 1, lines)
        self.assertTrue(lines[0].startswith("vtrace: "), lines)
        return lines[0]

    def golden(self, name, *arguments):
        text = self.text(*arguments)
        path = GOLDEN / name
        if UPDATE:
            path.write_text(text)
        self.maxDiff = None
        self.assertEqual(text, path.read_text())

    def test_report(self):
        self.golden("report.txt", "report", "sample.vtr")
        self.golden("report.json", "report", "--json", "sample.vtr")

    def test_report_part(self):
        self.golden("report-user.txt", "report", "--user-only", "--top", "3", "sample.vtr")
        part = json.loads(self.text("report", "--json", "--cpu", "0", "--from", "2", "--to", "5", "sample.vtr"))
        self.assertEqual((part["branches"], part["edges_taken"]), (3, 1))

    def test_dump(self):
        self.golden("dump.txt", "dump", "sample.vtr")
        self.golden("dump-events.txt", "dump", "--events", "--cpu", "0", "--from", "14", "sample.vtr")
        self.golden("dump.json", "dump", "--format=json", "--events", "--cpu", "0", "sample.vtr")

    def test_dump_parts_are_parts_of_the_whole(self):
        whole = self.text("dump", "--cpu", "0", "sample.vtr").splitlines()
        self.assertEqual(len(whole), BRANCHES)
        for first, last in [(0, 1), (5, 9), (23, 24), (20, 1000), (24, 30), (7, 7)]:
            part = self.text("dump", "--cpu", "0", "--from", str(first), "--to", str(last), "sample.vtr")
            self.assertEqual(part.splitlines(), whole[first:last])
        self.assertEqual(self.text("dump", "--cpu", "0", "--last", "4", "sample.vtr").splitlines(), whole[-4:])
        self.assertEqual(self.text("dump", "--cpu", "0", "-n", "3", "--from", "6", "sample.vtr").splitlines(), whole[6:9])
        kernel = self.text("dump", "--cpu", "0", "--kernel-only", "sample.vtr").splitlines()
        user = self.text("dump", "--cpu", "0", "--user-only", "sample.vtr").splitlines()
        self.assertEqual(sorted(kernel + user), sorted(whole))
        self.assertEqual(len(user), 7)
        # Where the range begins within user code, what came before decides.
        self.assertEqual(self.text("dump", "--cpu", "0", "--user-only", "--from", "11", "--to", "12", "sample.vtr"),
                         whole[11] + "\n")
        self.assertEqual(self.text("dump", "--cpu", "0", "--user-only", "-n", "2", "sample.vtr").splitlines(), user[:2])
        getpid = self.text("dump", "--symbol", "__x64_sys_getpid", "sample.vtr").splitlines()
        self.assertEqual(len(getpid), 4)
        self.assertTrue(all("__x64_sys_getpid" in line for line in getpid))

    def test_dump_raw(self):
        raw = self.run_vtrace("dump", "--format=raw", "--cpu", "0", "sample.vtr").stdout
        records = list(struct.iter_unpack("<QQQ", raw))
        self.assertEqual(len(records), BRANCHES)
        self.assertEqual(records[0], (0x100000, 0xffffffff81000000, 0))
        self.assertEqual(records[17], (0x401000, 0xffffffff81000300, 2 << 8 | 14 << 16 | 4 << 32))
        self.run_vtrace("dump", "--format=raw", "--cpu", "0", "-o", "raw.bin", "sample.vtr")
        self.assertEqual((self.work / "raw.bin").read_bytes(), raw)

    def test_info(self):
        # Sizes depend on the version of zstd: the JSON is looked at instead of a golden.
        info = json.loads(self.text("info", "--json", "--verify", "sample.vtr"))
        self.assertEqual((info["branches"], info["symbols"], info["complete"]), (BRANCHES + 2, 11, True))
        self.assertEqual((info["damage"], info["missing"], info["warnings"]), ([], [], []))
        self.assertEqual(info["outcome"], {"outcome": "guest-exit", "exit_code": 3})
        self.assertEqual(info["config"]["memory"], 268435456)
        self.assertEqual(info["vcpus"][0]["last_time_ns"], 2000000)
        text = self.text("info", "--verify", "sample.vtr")
        for part in ["Branches: 26", "Outcome: guest-exit 3", "Symbols: 11", "memory = 268435456", "all checksums"]:
            self.assertIn(part, text)

    def test_files_of_earlier_versions_are_read(self):
        # The sample as the first version of the format had it.
        old = str(GOLDEN / "version-1.vtr")
        self.assertEqual(json.loads(self.text("info", "--verify", "--json", old))["version"], 1)
        for command in (["dump", "--events"], ["dump", "--format=json", "--events"]):
            self.assertEqual(self.text(*command, old), self.text(*command, "sample.vtr"))
        reports = [json.loads(self.text("report", "--json", path)) for path in (old, "sample.vtr")]
        for report in reports:
            del report["file"]
        self.assertEqual(*reports)

    def test_damage_is_told(self):
        data = bytearray((self.work / "sample.vtr").read_bytes())
        cut = self.work / "cut.vtr"
        cut.write_bytes(data[:len(data) * 2 // 3])
        self.run_vtrace("info", "cut.vtr")
        done = self.run_vtrace("info", "--verify", "cut.vtr", status=3)
        self.assertIn(b"not complete", done.stdout)
        self.run_vtrace("report", "cut.vtr")
        # Every byte of the file, turned over: never a crash, never a hang. Each fourth, for time.
        (self.work / "flip.vtr").write_bytes(data)
        for at in range(0, len(data), max(1, len(data) // 60)):
            flipped = bytearray(data)
            flipped[at] ^= 0xff
            (self.work / "flip.vtr").write_bytes(flipped)
            for command in [["info", "--verify"], ["dump"]]:
                done = subprocess.run([VTRACE, *command, "flip.vtr"], cwd=self.work, capture_output=True, timeout=60)
                self.assertIn(done.returncode, (0, 1, 3), (at, done.stderr))

    def test_bad_input(self):
        (self.work / "empty.vtr").write_bytes(b"")
        (self.work / "text.vtr").write_bytes(b"this is no trace\n" * 100)
        for command in ["report", "dump", "info"]:
            self.assertIn("no.vtr", self.error(command, "no.vtr"))
            self.assertIn("empty.vtr", self.error(command, "empty.vtr"))
            self.assertIn("text.vtr", self.error(command, "text.vtr"))
            self.error(command, ".")
            self.error(command, status=2)
            self.error(command, "--no-such-option", "sample.vtr", status=2)
        self.assertIn("no vCPU 2", self.error("dump", "--cpu", "2", "sample.vtr"))
        self.assertIn("no function 'nothing'", self.error("dump", "--symbol", "nothing", "sample.vtr"))
        self.assertIn("--from 5 is above --to 3", self.error("report", "--from", "5", "--to", "3", "sample.vtr"))
        self.error("dump", "--kernel-only", "--user-only", "sample.vtr", status=2)
        self.error("dump", "--cpu", "-1", "sample.vtr", status=2)
        self.error("dump", "--format=xml", "sample.vtr", status=2)
        self.assertIn("no/such", self.error("dump", "-o", "no/such/file", "sample.vtr"))
        self.error(status=2)
        self.error("frobnicate", status=2)

    def test_help_and_version(self):
        self.assertRegex(self.text("--version"), r"^vtrace \d+\.\d+")
        for command in ["report", "dump", "info"]:
            self.assertIn(command, self.text("--help"))
            self.assertIn("FILE", self.text(command, "--help"))

    def test_closed_pipe_is_no_error(self):
        for disposition in (signal.SIG_DFL, signal.SIG_IGN):
            dump = subprocess.Popen([VTRACE, "dump", "sample.vtr"], cwd=self.work, stdout=subprocess.PIPE,
                                    stderr=subprocess.PIPE, preexec_fn=lambda: signal.signal(signal.SIGPIPE, disposition))
            dump.stdout.close()
            self.assertEqual(dump.stderr.read(), b"")
            self.assertEqual(dump.wait(timeout=60), 0)
            dump.stderr.close()

    def test_full_disk(self):
        if not pathlib.Path("/dev/full").exists():
            self.skipTest("no /dev/full here")
        for command in [["report"], ["dump"], ["dump", "--format=raw"], ["info"]]:
            with open("/dev/full", "wb") as full:
                done = subprocess.run([VTRACE, *command, "sample.vtr"], cwd=self.work, stdout=full,
                                      stderr=subprocess.PIPE, timeout=60)
            self.assertEqual(done.returncode, 1)
            self.assertIn(b"No space left on device", done.stderr)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1], verbosity=1)
