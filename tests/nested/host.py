"""A Linux host with KVM, made in software: for tests of what needs /dev/kvm on machines that have none.

Two kinds: "amd", QEMU's TCG with kvm-amd (3 s to start, guests at some hundred MIPS), and "intel", Bochs with kvm-intel
(a minute to start, guests at some ten MIPS). Both run the stock Debian cloud kernel with its own KVM modules, and an
initramfs of busybox, the programs and files asked for, and a script of cases. A third kind, "direct", is this machine.

    results = run("amd", [Case("check", "vtrace check --json")], [File(path), ...])
    results["check"].status, results["check"].output

The host's second serial port carries what the cases print; the first is its console, which is shown if it dies.
"""

import dataclasses
import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
GUESTS = os.path.join(os.path.dirname(HERE), "guests")
sys.path.insert(0, GUESTS)
import initrd  # noqa: E402  (tests/guests/initrd.py)

APPLETS = ["insmod", "stty", "timeout", "mkdir", "rm", "kill", "grep", "tail", "head", "chmod", "cut", "wc", "cmp", "killall"]
MODULES = {"amd": ["irqbypass", "kvm", "kvm-amd"], "intel": ["irqbypass", "kvm", "kvm-intel"]}
MARK = "@@vtrace-case"
COMMAND_LINE = "console=ttyS0 quiet panic=-1 mitigations=off nokaslr"


class HostError(Exception):
    """The host did not come to its cases, or not through them."""


@dataclasses.dataclass
class Case:
    name: str
    command: str  # for sh; in a folder of its own
    timeout: int = 120


@dataclasses.dataclass
class File:
    source: str
    target: str = ""  # default: the same path

    def __post_init__(self):
        self.source = os.path.abspath(self.source)
        self.target = self.target or self.source


@dataclasses.dataclass
class Result:
    status: int
    output: str


def missing(kind):
    """Why this kind can't be had here, or None."""
    programs = {"amd": ["qemu-system-x86_64"], "intel": ["bochs-bin", "grub-mkrescue", "xorriso", "mformat"], "direct": []}
    absent = [program for program in programs[kind] if not shutil.which(program)]
    return f"no {', '.join(absent)}" if absent else None


def fetch(*names):
    """Folders of guests (tests/guests/fetch). Raises HostError."""
    done = subprocess.run([os.path.join(GUESTS, "fetch"), *names], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                          check=False)
    if done.returncode != 0:
        raise HostError(done.stderr.strip())
    return done.stdout.split()


def libraries(program):
    """The shared libraries and the loader of a program; none for what isn't dynamic."""
    done = subprocess.run(["ldd", program], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=False)
    return re.findall(r"(/\S+) \(0x", done.stdout) if done.returncode == 0 else []


def script(cases):
    """The init script's part that runs the cases."""
    lines = []
    for case in cases:
        lines += [f"echo '{MARK} begin {case.name}'",
                  f"mkdir -p /case/{case.name}; cd /case/{case.name}",
                  # Through a pipe: the serial port is a terminal, and on those there are progress lines.
                  f"{{ timeout {case.timeout} sh -c {quoted(case.command)} </dev/null 2>&1; echo $? >/tmp/status; }} | cat",
                  f"echo; echo '{MARK} end {case.name}' $(cat /tmp/status)",
                  "cd /"]
    return "\n".join(lines) + "\n"


def quoted(text):
    return "'" + text.replace("'", "'\\''") + "'"


def init(kind, cases):
    modules = "".join(f"insmod /modules/{module}.ko\n" for module in MODULES[kind])
    return ("#!/bin/sh\n"
            "mount -t proc proc /proc; mount -t sysfs sys /sys; mount -t devtmpfs dev /dev; mount -t tmpfs tmp /tmp\n"
            f"{modules}"
            "stty -F /dev/ttyS1 raw -echo 115200\n"
            "exec >/dev/ttyS1\n"
            "export PATH=/usr/local/bin:/usr/bin:/bin HOME=/tmp\n"
            + script(cases) +
            f"echo '{MARK} done'\n"
            "sleep 1\npoweroff -f\n").encode()


def initramfs(kind, cases, files, kernel, busybox):
    folders, members = set(), []

    def add(name, mode, data, device=(0, 0)):
        folder = os.path.dirname(name)
        while folder:
            folders.add(folder)
            folder = os.path.dirname(folder)
        members.append((name, mode, data, device))

    def add_file(source, target):
        with open(source, "rb") as data:
            add(target.lstrip("/"), stat.S_IFREG | (0o755 if os.access(source, os.X_OK) else 0o644), data.read())

    packed = {}
    for file in files:
        packed[file.target] = file.source
        if os.access(file.source, os.X_OK):
            packed.update({library: library for library in libraries(file.source)})
    for target, source in sorted(packed.items()):
        add_file(source, target)
    for module in MODULES[kind]:
        add_file(os.path.join(kernel, "modules", module + ".ko"), f"modules/{module}.ko")
    add_file(busybox, "bin/busybox")
    for applet in initrd.APPLETS + APPLETS:
        add(f"bin/{applet}", stat.S_IFLNK | 0o777, b"busybox")
    add("dev/console", stat.S_IFCHR | 0o600, b"", (5, 1))
    add("dev/null", stat.S_IFCHR | 0o666, b"", (1, 3))
    add("init", stat.S_IFREG | 0o755, init(kind, cases))
    folders |= {"proc", "sys", "tmp", "case"}
    # On Debian /lib, /lib64 and the like are links into /usr: here they are folders, and ldd's names are as good.
    everything = [(name, stat.S_IFDIR | 0o755, b"", (0, 0)) for name in sorted(folders)] + members
    return b"".join(initrd.entry(name, mode, data, inode, device)
                    for inode, (name, mode, data, device) in enumerate(everything, 1)) + initrd.entry("TRAILER!!!", 0)


def run_qemu(work, kernel, memory, timeout):
    command = ["qemu-system-x86_64", "-accel", "tcg", "-cpu", "max,+svm", "-m", str(memory), "-nodefaults", "-display", "none",
               "-no-reboot", "-kernel", os.path.join(kernel, "vmlinuz"), "-initrd", os.path.join(work, "initrd"),
               "-append", COMMAND_LINE, "-serial", f"file:{work}/console", "-serial", f"file:{work}/cases"]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=timeout,
                              check=False)
        return done.stdout.decode(errors="replace")
    except subprocess.TimeoutExpired:
        return f"not done after {timeout} s"


def results(text, cases):
    """The cases that ended, by name."""
    found = {}
    for case in cases:
        match = re.search(rf"{MARK} begin {re.escape(case.name)}\r?\n(.*?)\r?\n?{MARK} end {re.escape(case.name)} (\d+)", text,
                          re.DOTALL)
        if match:
            found[case.name] = Result(int(match[2]), match[1].removesuffix("\n"))
    return found


def run(kind, cases, files, memory=2048, timeout=600):
    """Runs the cases, one after the other, in one host; gives their results by name. Raises HostError."""
    if kind == "direct":
        return run_direct(cases)
    kernel, busybox = fetch("6.1-cloud", "busybox")
    with tempfile.TemporaryDirectory() as work:
        with open(os.path.join(work, "initrd"), "wb") as archive:
            archive.write(initramfs(kind, cases, files, kernel, os.path.join(busybox, "busybox")))
        runner = run_qemu if kind == "amd" else bochs_runner()
        said = runner(work, kernel, memory, timeout)
        text = read(os.path.join(work, "cases"))
        found = results(text, cases)
        if f"{MARK} done" not in text:
            undone = [case.name for case in cases if case.name not in found]
            tail = "\n".join((read(os.path.join(work, "console")) + said).splitlines()[-30:])
            raise HostError(f"the {kind} host did not come to its end; not done: {', '.join(undone)}\n{text[-6000:]}\n{tail}")
        return found


def bochs_runner():
    import bochs_host  # pylint: disable=import-outside-toplevel
    return bochs_host.run


def read(path):
    if not os.path.exists(path):
        return ""
    with open(path, "rb") as data:
        return data.read().decode(errors="replace")


def run_direct(cases):
    found = {}
    for case in cases:
        with tempfile.TemporaryDirectory() as folder:
            done = subprocess.run(["timeout", str(case.timeout), "sh", "-c", case.command], cwd=folder, stdin=subprocess.DEVNULL,
                                  stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
            found[case.name] = Result(done.returncode, done.stdout.decode(errors="replace"))
    return found
