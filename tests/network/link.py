"""A bad link: a process that passes frames between two TAP devices, each in a separate network namespace.

`python -m tests.network.link FILE PID:DEVICE PID:DEVICE` makes the devices in the namespaces of the two processes. The
JSON of FILE has the quality of the link; it is read again whenever it has changed.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import random
import select
import struct
import subprocess
import sys
import time
from collections import deque
from dataclasses import asdict, dataclass
from pathlib import Path

TUNSETIFF, IFF_TAP, IFF_NO_PI, CLONE_NEWNET = 0x400454CA, 0x0002, 0x1000, 0x40000000
MTU_BYTES = 9000
HEADER_BYTES = 14
QUEUE_BYTES = 1 << 20
"""Frames that wait for a slow link; further ones are lost."""
LOOK_S = 0.01
"""Interval of the looks at the control file."""
AT_ONCE = 64
"""Frames taken from a device before the other direction gets its turn."""


@dataclass(frozen=True, slots=True)
class Quality:
    """The faults of a link, the same in both directions."""

    delay_s: float = 0.0
    """The delay of each direction: the round trip takes twice as long."""
    loss: float = 0.0
    """Fraction of the frames that are lost."""
    rate_bits_per_s: float = float("inf")
    cut: bool = False
    """Every frame is lost, also those on their way."""


class Link:
    """The end of a link at which a test sets how bad it is."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.set(Quality())

    def set(self, quality: Quality) -> None:
        """Changes the quality, within LOOK_S."""
        new = self.file.with_suffix(".new")
        new.write_text(json.dumps(asdict(quality)))
        new.replace(self.file)


class Direction:
    """Frames from one device to the other, which wait until they are due."""

    def __init__(self, source: int, target: int) -> None:
        self.source = source
        self._target = target
        self._frames: deque[tuple[float, bytes]] = deque()
        """When each frame arrives, and the frame."""
        self._free_s = 0.0
        """When the link has sent all frames that wait."""
        self._random = random.Random(source)

    @property
    def due_s(self) -> float:
        return self._frames[0][0] if self._frames else float("inf")

    def take(self, quality: Quality) -> None:
        """Takes the frames that the device has."""
        for _ in range(AT_ONCE):
            try:
                frame = os.read(self.source, MTU_BYTES + HEADER_BYTES)
            except BlockingIOError:
                return
            now_s, size_s = time.monotonic(), 8 * len(frame) / quality.rate_bits_per_s
            free_s = max(self._free_s, now_s)
            is_full = free_s > now_s + 8 * QUEUE_BYTES / quality.rate_bits_per_s
            if quality.cut or is_full or self._random.random() < quality.loss:
                continue
            self._free_s = free_s + size_s
            self._frames.append((self._free_s + quality.delay_s, frame))

    def deliver(self, quality: Quality) -> None:
        """Passes on the frames that are due."""
        if quality.cut:
            self._frames.clear()
            self._free_s = 0.0
        now_s = time.monotonic()
        while self._frames and self._frames[0][0] <= now_s:
            try:
                os.write(self._target, self._frames.popleft()[1])
            except OSError:  # its queue is full, or the device is down: lost
                continue


def open_tap(pid: int, name: str) -> int:
    """Makes a TAP device in the network namespace of the process. Returns its file descriptor."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/proc/{pid}/ns/net") as namespace:
        if libc.setns(namespace.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns to process {pid}")
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TAP | IFF_NO_PI))
    subprocess.run(["ip", "link", "set", name, "mtu", str(MTU_BYTES), "up"], check=True)
    return device


def main() -> None:
    """Passes frames until it is killed."""
    file, *ends = sys.argv[1:]
    devices = [open_tap(int(pid), name) for pid, name in (end.split(":") for end in ends)]
    directions = [Direction(*devices), Direction(*reversed(devices))]
    print("up", flush=True)
    quality, read, looked_s = Quality(), None, 0.0
    while True:
        now_s = time.monotonic()
        if now_s - looked_s > LOOK_S:
            looked_s, status = now_s, os.stat(file)
            if (status.st_ino, status.st_mtime_ns) != read:
                read, quality = (status.st_ino, status.st_mtime_ns), Quality(**json.loads(Path(file).read_text()))
        wait_s = min(min(direction.due_s for direction in directions) - now_s, LOOK_S)
        ready, _, _ = select.select(devices, [], [], max(wait_s, 0.0))
        for direction in directions:
            if direction.source in ready:
                direction.take(quality)
            direction.deliver(quality)


if __name__ == "__main__":
    main()
