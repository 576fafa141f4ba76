"""Carries packets late, and loses some: wire.py DELAY_US LOSS_PER_THOUSAND.

Makes the TUN device wire0, says "ready", and gives back every packet that is sent into it after the
delay, except for those that it loses. What it loses is the same in every run. Ends with its input.
"""

import collections, fcntl, os, random, select, struct, sys, time

delay = int(sys.argv[1]) / 1e6
loss = int(sys.argv[2]) / 1000
chance = random.Random(7)
tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
IFF_TUN, IFF_NO_PI, TUNSETIFF = 0x0001, 0x1000, 0x400454CA
fcntl.ioctl(tun, TUNSETIFF, struct.pack("16sH", b"wire0", IFF_TUN | IFF_NO_PI))
print("ready", flush=True)

queue = collections.deque()
while True:
    wait = max(0.0, queue[0][0] - time.monotonic()) if queue else None
    ready, _, _ = select.select([tun, sys.stdin], [], [], wait)
    if sys.stdin in ready and not os.read(sys.stdin.fileno(), 1):
        break
    for _ in range(64):
        try:
            packet = os.read(tun, 65536)
        except OSError:
            break
        if chance.random() >= loss:
            queue.append((time.monotonic() + delay, packet))
    while queue and queue[0][0] <= time.monotonic():
        try:
            os.write(tun, queue.popleft()[1])
        except OSError:
            pass  # The device is down for a moment.
