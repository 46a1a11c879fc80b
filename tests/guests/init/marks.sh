#!/bin/sh
# Ten stretches between two markers, of a process each, for traced windows; then power-off.
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
echo "vtrace-guest: start $(uname -r)"
i=0
while [ $i -lt 10 ]; do
    vtrace-mark 1 || echo "vtrace-guest: no marker"
    /bin/true
    vtrace-mark 2
    i=$((i + 1))
done
echo "vtrace-guest: done"
poweroff -f
