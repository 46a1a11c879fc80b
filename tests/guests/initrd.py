#!/usr/bin/env python3
"""Writes an initramfs: static busybox, links for its applets that the guests use, and an init script.

Reproducible: fixed order, times, owners and inode numbers, so that equal inputs give equal bytes. Being written here and
not by cpio(1), it needs no root for the device nodes and no further package.
"""

import argparse
import gzip
import stat

APPLETS = ["sh", "mount", "true", "echo", "cat", "ls", "dmesg", "poweroff", "reboot", "sleep", "sha256sum", "gzip",
           "awk", "seq", "uname", "dd", "sync"]


def entry(name, mode, data=b"", inode=0, device=(0, 0)):
    """One member in the "newc" format (cpio(5)): 13 fields of 8 hex digits, name and data padded to 4 bytes."""
    encoded = name.encode() + b"\0"
    fields = [inode, mode, 0, 0, 1, 0, len(data), 0, 0, *device, len(encoded), 0]
    header = b"070701" + b"".join(b"%08X" % field for field in fields)
    head = header + encoded
    return head + b"\0" * (-len(head) % 4) + data + b"\0" * (-len(data) % 4)


def archive(busybox, init, more=()):
    """`more`: names of further programs, and their bytes."""
    members = [(name, stat.S_IFDIR | 0o755, b"", (0, 0)) for name in ["bin", "dev", "proc", "sys", "tmp"]]
    members += [("dev/console", stat.S_IFCHR | 0o600, b"", (5, 1)), ("dev/null", stat.S_IFCHR | 0o666, b"", (1, 3))]
    members += [("bin/busybox", stat.S_IFREG | 0o755, busybox, (0, 0)), ("init", stat.S_IFREG | 0o755, init, (0, 0))]
    members += [(name, stat.S_IFREG | 0o755, data, (0, 0)) for name, data in dict(more).items()]
    members += [(f"bin/{applet}", stat.S_IFLNK | 0o777, b"busybox", (0, 0)) for applet in APPLETS]
    body = b"".join(entry(name, mode, data, inode, device)
                    for inode, (name, mode, data, device) in enumerate(members, 1))
    return body + entry("TRAILER!!!", 0)


def write(path, busybox, init, more=()):
    """As archive(), compressed, into a file."""
    with open(path, "wb") as raw, gzip.GzipFile("", "wb", compresslevel=9, fileobj=raw, mtime=0) as output:
        output.write(archive(busybox, init, more))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--busybox", required=True)
    parser.add_argument("--init", required=True)
    parser.add_argument("--output", required=True)
    options = parser.parse_args()
    with open(options.busybox, "rb") as busybox, open(options.init, "rb") as init:
        write(options.output, busybox.read(), init.read())


if __name__ == "__main__":
    main()
