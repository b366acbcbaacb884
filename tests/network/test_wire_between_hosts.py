"""Requests between hosts: over links that are cut, slow or lossy, and those of strangers."""

from __future__ import annotations

import json
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import pytest

from asyncrl.wire.sockets import new_keys
from tests.network.hosts import Host, Network
from tests.network.link import Quality

PORTS = (6000, 6001, 6002)
GREETING_BYTES = 64
"""The limit of ZeroMQ's greeting, which everybody gets: its version, and that it wants CURVE."""
BACK_S = 3.0
"""The limit of a request's answer after the end of a cut."""
START_S = 90.0


class Lines:
    """The output of a process, line by line."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._lines: SimpleQueue[str] = SimpleQueue()
        threading.Thread(target=self._read, args=(process,), daemon=True).start()

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout
        for line in process.stdout:
            if line.startswith("{"):  # otherwise it is a log line
                self._lines.put(line)

    def next(self, timeout_s: float = START_S) -> dict[str, Any]:
        try:
            return json.loads(self._lines.get(timeout=timeout_s))
        except Empty:
            pytest.fail(f"nothing was said within {timeout_s:g} s")

    def until(self, fits: Callable[[dict[str, Any]], object], timeout_s: float = START_S) -> dict[str, Any]:
        """The first line that fits."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            if fits(line := self.next(deadline_s - time.monotonic())):
                return line


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    """A file with the keys of the run."""
    file = tmp_path / "keys.json"
    file.write_text(new_keys())
    return file


@pytest.fixture
def server(network: Network, keys: Path) -> tuple[list[str], Lines]:
    """The addresses of a server on a separate host, and its output."""
    host = network.add("server")
    addresses = [f"tcp://{host.address}:{port}" for port in PORTS]
    lines = Lines(host.start("tests.network.peers", "serve", str(keys), *addresses))
    lines.next()
    return addresses, lines


def ask(host: Host, address: str, keys: Path, *, connections: int = 1, num_bytes: int = 4) -> Lines:
    return Lines(host.start("tests.network.peers", "ask", str(keys), address, str(connections), str(num_bytes)))


@pytest.mark.slow
def test_requests_are_answered_once_a_cut_ends(network: Network, server: tuple[list[str], Lines], keys: Path) -> None:
    """On every connection, in whatever part of its request the cut began."""
    far, count = network.add("far", linked=True), 12
    assert far.link
    lines = ask(far, server[0][0], keys, connections=count)
    for _ in range(2 * count):
        lines.next()
    far.link.set(Quality(cut=True))
    time.sleep(8.0)
    far.link.set(Quality())
    ended_s, back_s = time.monotonic(), dict[int, float]()
    while len(back_s) < count:
        line = lines.until(lambda line: line["answered_s"] > ended_s)
        back_s.setdefault(line["connection"], line["answered_s"] - ended_s)
    assert max(back_s.values()) < BACK_S, back_s


def test_large_requests_come_through_a_long_and_lossy_link(
    network: Network, server: tuple[list[str], Lines], keys: Path
) -> None:
    far = network.add("far", linked=True)
    assert far.link
    far.link.set(Quality(delay_s=0.025, loss=0.05))
    lines = ask(far, server[0][0], keys, num_bytes=1 << 20)
    assert lines.next() == {"connection": 0, "up": True}
    took_s = [(line := lines.next(60.0))["answered_s"] - line["asked_s"] for _ in range(5)]
    assert min(took_s) > 0.05, took_s


@pytest.mark.slow
def test_strangers_get_nothing_and_change_nothing(
    network: Network, server: tuple[list[str], Lines], keys: Path
) -> None:
    """Without keys, with another run's keys, and with bytes that are no messages, at every port."""
    addresses, said = server
    stranger, friend = network.add("stranger"), network.add("friend")
    others = keys.with_name("others.json")
    # What a stranger may know: which key the servers show.
    public = {"server_public": json.loads(keys.read_text())["server_public"]}
    others.write_text(json.dumps(json.loads(new_keys()) | public))
    lines = Lines(stranger.start("tests.network.peers", "intrude", str(others), *addresses))
    came = lines.next()
    assert came["answers"] == 0 and came["greeted"] <= GREETING_BYTES, came
    line = said.until(lambda line: "strangers" not in line or min(line["strangers"]) >= 1)
    assert line["bad"] == 0, "a message was taken"
    assert ask(friend, addresses[0], keys).next()["connection"] == 0
