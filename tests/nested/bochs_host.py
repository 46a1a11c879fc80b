"""The "intel" host: Bochs with kvm-intel, for host.py.

Bochs is slow, but it has what TCG lacks: VMX, and debug exceptions that reach KVM. It boots from a CD only, so the kernel and
the initramfs go into a GRUB ISO; it wants a terminal, so it gets one; and Debian's build starts in its debugger, so it is
told to continue.
"""

import errno
import gzip
import os
import pty
import select
import shutil
import signal
import subprocess
import time

import host

TAIL = 4000  # characters of the terminal's text that are given back: the screen is drawn over and over
POLL = 0.5  # seconds
GRACE = 2  # seconds from the last case's end to the power-off

CONFIGURATION = """\
config_interface: textconfig
display_library: term
megs: {memory}
romimage: file=/usr/share/bochs/BIOS-bochs-latest
vgaromimage: file=/usr/share/vgabios/vgabios.bin
cpu: model=corei7_skylake_x, count=1, ips=50000000, reset_on_triple_fault=0
clock: sync=none
ata0: enabled=1, ioaddr1=0x1f0, ioaddr2=0x3f0, irq=14
ata0-master: type=cdrom, path={work}/boot.iso, status=inserted
boot: cdrom
com1: enabled=1, mode=file, dev={work}/console
com2: enabled=1, mode=file, dev={work}/cases
log: {work}/bochs.log
panic: action=fatal
error: action=ignore
info: action=ignore
debug: action=ignore
"""

GRUB = """\
set timeout=0
menuentry host {{
  linux /vmlinuz {command_line}
  initrd /initrd.gz
}}
"""


def write(path, text):
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)


def make_iso(work, kernel):
    """work/boot.iso; gives what went wrong, or None. All of it is compressed: reads through the BIOS are slow."""
    tree = os.path.join(work, "iso")
    os.makedirs(os.path.join(tree, "boot", "grub"))
    shutil.copyfile(os.path.join(kernel, "vmlinuz"), os.path.join(tree, "vmlinuz"))
    with open(os.path.join(work, "initrd"), "rb") as data, gzip.open(os.path.join(tree, "initrd.gz"), "wb", 6) as packed:
        packed.write(data.read())
    write(os.path.join(tree, "boot", "grub", "grub.cfg"), GRUB.format(command_line=host.COMMAND_LINE))
    done = subprocess.run(["grub-mkrescue", "-d", "/usr/lib/grub/i386-pc", "-o", os.path.join(work, "boot.iso"), tree],
                          stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    return None if done.returncode == 0 else "grub-mkrescue: " + done.stdout.decode(errors="replace")


def read_terminal(terminal):
    """What the terminal has, after at most POLL seconds; None once its other end is closed."""
    if not select.select([terminal], [], [], POLL)[0]:
        return b""
    try:
        return os.read(terminal, 65536) or None
    except OSError as error:
        if error.errno == errno.EIO:
            return None
        raise


def watch(work, terminal, deadline):
    """Waits for the cases' end, Bochs's or the deadline's; gives the terminal's last text, and why it stopped waiting."""
    said = b""
    while True:
        data = read_terminal(terminal)
        if data is None:
            return said, "bochs ended"
        said = (said + data)[-TAIL:]
        if time.monotonic() > deadline:
            return said, "stopped: done, or not done in time"
        if f"{host.MARK} done" in host.read(os.path.join(work, "cases")):
            deadline = min(deadline, time.monotonic() + GRACE)


def run(work, kernel, memory, timeout):
    """Boots the host and waits for its end, or for the timeout; gives what Bochs said. Raises nothing."""
    deadline = time.monotonic() + timeout
    try:
        if wrong := make_iso(work, kernel):
            return wrong
        write(os.path.join(work, "bochsrc"), CONFIGURATION.format(work=work, memory=memory))
        write(os.path.join(work, "commands"), "c\n")
        terminal, inner = pty.openpty()
        bochs = subprocess.Popen(  # pylint: disable=consider-using-with
            ["bochs-bin", "-q", "-f", os.path.join(work, "bochsrc"), "-rc", os.path.join(work, "commands")],
            stdin=inner, stdout=inner, stderr=inner, cwd=work, start_new_session=True, env=dict(os.environ, TERM="xterm"))
        os.close(inner)
        try:
            said, why = watch(work, terminal, deadline)
        finally:
            os.killpg(bochs.pid, signal.SIGKILL)
            bochs.wait()
            os.close(terminal)
        return f"{said.decode(errors='replace')}\n{host.read(os.path.join(work, 'bochs.log'))[-TAIL:]}\n{why}"
    except (OSError, subprocess.SubprocessError) as error:
        return f"bochs: {error}"
