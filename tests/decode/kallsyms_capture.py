#!/usr/bin/env python3
"""Boots kernels under QEMU, and keeps their memory and their own /proc/kallsyms: what kallsyms_test is judged by.

  kallsyms_capture.py NAME...     NAME: a kernel of tests/guests/fetch, with "+kaslr" or without (then: nokaslr)

Results go to the cache, ${XDG_CACHE_HOME:-~/.cache}/vtrace/kallsyms/NAME/{memory,kallsyms.gz,version}, and are kept until
the kernel's version changes. Exit status: 0 all there, 77 QEMU or the guests are missing (one line says which), 1 failed.
"""

import fcntl
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
GUESTS = HERE.parent / "guests"
CACHE = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "vtrace"
MEMORY_MB = 512
DONE = b"vtrace-guest: done"
TIMEOUT = 240  # seconds for one boot under TCG, on a busy machine

INIT = """#!/bin/sh
mount -t proc proc /proc
mount -t devtmpfs dev /dev
echo 0 >/proc/sys/kernel/kptr_restrict
/bin/busybox stty -F /dev/ttyS1 raw
gzip -c /proc/kallsyms >/dev/ttyS1
sleep 1
echo "vtrace-guest: done"
while true; do sleep 1000; done
"""


def skip(reason):
    print(f"SKIP: {reason}")
    sys.exit(77)


def fetch(name):
    done = subprocess.run([GUESTS / "fetch", name], capture_output=True, text=True)
    if done.returncode:
        skip(f"guest '{name}' is not there: {done.stderr.strip()}")
    return pathlib.Path(done.stdout.strip())


def sparse_copy(source, target):
    subprocess.run(["cp", "--sparse=always", source, target], check=True)


def capture(name, work):
    kernel_name, _, kaslr = name.partition("+")
    kernel = fetch(kernel_name)
    version = (kernel / "version").read_text() + INIT
    target = CACHE / "kallsyms" / name
    if (target / "version").is_file() and (target / "version").read_text() == version:
        return
    (work / "init").write_text(INIT)
    subprocess.run([sys.executable, GUESTS / "initrd.py", "--busybox", fetch("busybox") / "busybox", "--init",
                    work / "init", "--output", work / "initrd.gz"], check=True)
    memory, console, symbols = work / "memory", work / "console", work / "kallsyms.gz"
    append = "console=ttyS0 panic=-1 " + ("" if kaslr else "nokaslr")
    # -cpu max has RDRAND, without which KASLR under TCG takes its offset from the clock alone.
    qemu = subprocess.Popen(
        ["qemu-system-x86_64", "-accel", "tcg", "-cpu", "max", "-M", "pc,memory-backend=ram", "-m", str(MEMORY_MB),
         "-object", f"memory-backend-file,id=ram,size={MEMORY_MB}M,share=on,mem-path={memory}",
         "-nodefaults", "-display", "none", "-no-reboot", "-serial", f"file:{console}", "-serial", f"file:{symbols}",
         "-kernel", kernel / "vmlinuz", "-initrd", work / "initrd.gz", "-append", append],
        stdin=subprocess.DEVNULL)
    try:
        end = time.monotonic() + TIMEOUT
        while DONE not in (console.read_bytes() if console.exists() else b""):
            if qemu.poll() is not None or time.monotonic() > end:
                sys.exit(f"kallsyms_capture: {name} did not boot: " + console.read_text(errors="replace")[-300:])
            time.sleep(0.5)
    finally:
        qemu.terminate()
        qemu.wait()
    subprocess.run(["gzip", "-t", symbols], check=True)
    staged = work / "out"
    staged.mkdir()
    sparse_copy(memory, staged / "memory")
    shutil.move(symbols, staged / "kallsyms.gz")
    (staged / "version").write_text(version)
    shutil.rmtree(target, ignore_errors=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.move(staged, target)


def main():
    if not shutil.which("qemu-system-x86_64"):
        skip("qemu-system-x86_64 is not installed")
    CACHE.mkdir(parents=True, exist_ok=True)
    with open(CACHE / "kallsyms.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for name in sys.argv[1:]:
            with tempfile.TemporaryDirectory(dir=CACHE) as work:
                capture(name, pathlib.Path(work))


if __name__ == "__main__":
    main()
