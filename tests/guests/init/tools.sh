#!/bin/sh
# Everyday user-mode work: pipes, files, hashing, compression, arithmetic.
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
echo "vtrace-guest: start $(uname -r)"
dd if=/bin/busybox of=/tmp/copy bs=64k 2>/dev/null
echo "vtrace-guest: sum $(sha256sum </tmp/copy)"
gzip -c /tmp/copy | gzip -dc | sha256sum
seq 1 2000 | awk '{ sum += $1 * 1.5 } END { print "vtrace-guest: awk " sum }'
echo "vtrace-guest: done"
poweroff -f
