#!/bin/sh
# Crashes the kernel on purpose: the outcome "panic".
mount -t proc proc /proc
echo "vtrace-guest: crash"
echo c >/proc/sysrq-trigger
