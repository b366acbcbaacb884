"""Sends mutated messages to a real replay server, and mutated answers to real clients, over real sockets."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgpack
import psutil
import zmq

from asyncrl.launch.machine import find_port
from asyncrl.types import MAX_COUNT
from asyncrl.wire.frames import BODIES
from asyncrl.wire.messages import Body, ReadStatus, ReadSummary, Take
from tests.fuzz import frames as sound
from tests.fuzz.mutate import Frames, Mutator

ROOT = Path(__file__).parents[2]
PER_IDENTITY = 24
"""Messages of one peer."""
PER_ROUND = 192
PEERS_ALIVE = 16
MUTANTS_PER_ANSWER = 4
STATUS_S = 10.0
START_S = 60.0
RSS_GROWTH, RSS_SLACK_BYTES = 0.10, 8 << 20


class FuzzError(AssertionError):
    """A process died, hung, or grew."""


@dataclass
class Report:
    what: str
    outcomes: Counter[str] = field(default_factory=Counter[str])
    seconds: float = 0.0
    slowest_status_s: float = 0.0
    rss_bytes: list[int] = field(default_factory=list[int])
    """At the start and after each tenth."""

    def check_growth(self) -> None:
        first, last = self.rss_bytes[1], self.rss_bytes[-1]
        if last > first * (1 + RSS_GROWTH) + RSS_SLACK_BYTES:
            raise FuzzError(f"{self.what}: grew from {first >> 20} to {last >> 20} MiB: {self.rss_bytes}")

    def __str__(self) -> str:
        counts = ", ".join(f"{count} {name}" for name, count in self.outcomes.most_common())
        rss = " ".join(f"{size / (1 << 20):.1f}" for size in self.rss_bytes)
        times = f"{self.seconds:.1f} s, slowest answer {self.slowest_status_s:.3f} s"
        return f"{self.what}: {times}\n  {counts}\n  RSS (MiB) {rss}"


@contextmanager
def process(module: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    # What is free goes back to the system, so that the resident size is what the process holds.
    allocator = {"MALLOC_ARENA_MAX": "2", "MALLOC_TRIM_THRESHOLD_": "131072", "MALLOC_MMAP_THRESHOLD_": "131072"}
    environment = {**os.environ, **allocator, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", module, *arguments]
    with tempfile.TemporaryFile("w+") as errors:
        child = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True)
        try:
            yield child
            if child.poll() is not None:
                raise FuzzError(f"{module} ended with {child.returncode}")
        except FuzzError as error:
            if child.poll() is None:
                child.send_signal(signal.SIGUSR1)
                time.sleep(0.5)
            errors.seek(0)
            raise FuzzError(f"{error}\n{errors.read()[-4000:]}") from None
        finally:
            child.kill()
            child.wait()


def rss_bytes(child: subprocess.Popen[str]) -> int:
    return psutil.Process(child.pid).memory_info().rss


class Honest:
    """A peer that keeps to the rules: it advances the run, and yields messages to the fuzzer that fit its state."""

    def __init__(self, address: str, report: Report, child: subprocess.Popen[str]) -> None:
        self.report = report
        self.child = child
        self.step = 0
        self._address = address
        self._seq = self._sessions = 0
        self._socket = self._connect()

    def send(self, body: Body) -> int:
        self._seq += 1
        self._socket.send_multipart(sound.frames_of(body, seq=self._seq))
        return self._seq

    def ask(self, body: Body, timeout_s: float = STATUS_S) -> dict[str, Any] | None:
        """The body of the answer; None when it is an error. Raises FuzzError when there is none in time."""
        seq, start_s = self.send(body), time.monotonic()
        while (left_s := start_s + timeout_s - time.monotonic()) > 0:
            if self._socket.poll(round(left_s * 1000)):
                header = msgpack.unpackb(self._socket.recv_multipart()[0])
                if header["seq"] == seq:
                    return None if header["kind"] == "Error" else header["body"]
            if self.child.poll() is not None:
                raise FuzzError(f"{self.report.what}: ended with {self.child.returncode}")
        raise FuzzError(f"{self.report.what}: {type(body).__name__} was not answered within {timeout_s} s")

    def status(self, timeout_s: float = STATUS_S) -> dict[str, Any]:
        start_s = time.monotonic()
        answer = self.ask(ReadStatus(), timeout_s)
        if answer is None:
            raise FuzzError(f"{self.report.what}: a status request was refused")
        status = answer["result"]
        if timeout_s == STATUS_S:
            self.report.slowest_status_s = max(self.report.slowest_status_s, time.monotonic() - start_s)
        self.step = status["step"]
        return status

    def lease(self) -> list[Frames]:
        """Sound messages that end new leases."""
        body = sound.ask_body(0, self.step, 4, session=f"honest-{self._sessions}")
        answer = self.ask(body) or {"leases": []}
        found: list[Frames] = []
        for lease in answer["leases"]:
            if lease["evaluation"]:
                body = sound.evaluated_body(lease["ticket"], lease["attempt"], self.step)
                found.append(sound.frames_of(body))
            else:
                found.append(sound.finish_frames(lease["ticket"], lease["attempt"], lease["prompt"]["row"], self.step))
        return found

    def finish(self, work: list[Frames]) -> None:
        for frames in work:
            self._socket.send_multipart(frames)
        self.send(Take(0, MAX_COUNT, self.step + 1))  # of the last epoch: no mutant supersedes it
        self.send(sound.commit_body(self.step + 1, epoch=MAX_COUNT))

    def renew(self) -> None:
        """Goes on under another identity: what the others do to the run makes its own requests wrong at times."""
        self._sessions += 1
        self._socket.close()
        self._socket = self._connect()

    def close(self) -> None:
        self._socket.close()

    def _connect(self) -> zmq.Socket[bytes]:
        socket = zmq.Context.instance().socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 1000)
        socket.connect(self._address)
        return socket


class Rabble:
    """Peers that send what the mutator makes, each a few messages only."""

    def __init__(self, address: str, outcomes: Counter[str]) -> None:
        self._address = address
        self._outcomes = outcomes
        self._peers: deque[zmq.Socket[bytes]] = deque()

    def send(self, messages: list[Frames]) -> None:
        for start in range(0, len(messages), PER_IDENTITY):
            peer = zmq.Context.instance().socket(zmq.DEALER)
            peer.setsockopt(zmq.LINGER, 1000)
            peer.connect(self._address)
            for message in messages[start : start + PER_IDENTITY]:
                peer.send_multipart(message)
            self._peers.append(peer)
        while len(self._peers) > PEERS_ALIVE:
            self._drain(self._peers.popleft())

    def close(self) -> None:
        time.sleep(0.2)
        while self._peers:
            self._drain(self._peers.popleft())

    def _drain(self, peer: zmq.Socket[bytes]) -> None:
        while peer.poll(0):
            header = msgpack.unpackb(peer.recv_multipart()[0])
            self._outcomes[f"answered {header['kind']}"] += 1
        peer.close()


def fuzz_server(messages: int, seed: int, say: Callable[[str], None]) -> Report:
    """Raises FuzzError when the server dies, does not answer a status request in time, or grows."""
    report = Report("server")
    mutator = Mutator(seed)
    port = find_port()
    address = f"tcp://127.0.0.1:{port}"
    with tempfile.TemporaryDirectory() as folder, process("tests.fuzz.server_process", str(port), folder) as child:
        honest, rabble = Honest(address, report, child), Rabble(address, report.outcomes)
        honest.status(START_S)
        report.rss_bytes.append(rss_bytes(child))
        start_s = time.monotonic()
        sent = 0
        while sent < messages:
            honest.status()
            work = honest.lease()
            pool = [*sound.requests(honest.step).values(), *sound.answers().values(), *work * 3]
            count = min(PER_ROUND, messages - sent)
            rabble.send([mutator.mutant(pool) for _ in range(count)])
            honest.finish(work)
            honest.renew()
            sent += count
            if sent * 10 // messages >= len(report.rss_bytes):
                report.rss_bytes.append(rss_bytes(child))
                say(f"server: {sent} messages, step {honest.step}, {report.rss_bytes[-1] >> 20} MiB")
        rabble.close()
        status = honest.status()
        honest.ask(ReadSummary())
        honest.close()
        report.seconds = time.monotonic() - start_s
        report.outcomes["sent"] = sent
        for name in ("bad_messages", "step", "trained"):
            report.outcomes[name] = status[name]
    report.check_growth()
    return report


def fuzz_clients(messages: int, seed: int, say: Callable[[str], None]) -> Report:
    """Raises FuzzError when the process of the clients dies, one of them hangs, or it grows."""
    report = Report("clients")
    mutator = Mutator(seed)
    port = find_port()
    router = zmq.Context.instance().socket(zmq.ROUTER)
    router.setsockopt(zmq.LINGER, 0)
    router.bind(f"tcp://127.0.0.1:{port}")
    with process("tests.fuzz.client_process", str(port)) as child:
        assert child.stdout is not None
        pipe = child.stdout.fileno()
        os.set_blocking(pipe, False)
        deadline_s = time.monotonic() + START_S
        while not router.poll(100):
            if child.poll() is not None or time.monotonic() > deadline_s:
                raise FuzzError("clients: no request")
        report.rss_bytes.append(rss_bytes(child))
        start_s = heard_s = time.monotonic()
        sent, line, rest = 0, "", bytearray()
        while sent < messages:
            if router.poll(100):
                identity, *request = router.recv_multipart()
                for answer in _answers(mutator, request):
                    router.send_multipart([identity, *answer])
                    sent += 1
            if told := _lines(pipe, rest):
                line, heard_s = told[-1], time.monotonic()
                report.slowest_status_s = max(report.slowest_status_s, float(line.split()[0]))
            if child.poll() is not None:
                raise FuzzError(f"clients: ended with {child.returncode}")
            if time.monotonic() - heard_s > STATUS_S or report.slowest_status_s > 3 * STATUS_S:
                raise FuzzError(f"clients: hang, last said {line!r}")
            if sent * 10 // messages >= len(report.rss_bytes):
                report.rss_bytes.append(rss_bytes(child))
                say(f"clients: {sent} answers, {line}, {report.rss_bytes[-1] >> 20} MiB")
        report.seconds = time.monotonic() - start_s
        report.outcomes["sent"] = sent
        for pair in line.split()[1].split(","):
            name, _, count = pair.partition("=")
            report.outcomes[name] = int(count)
    router.close()
    report.check_growth()
    return report


def _lines(pipe: int, rest: bytearray) -> list[str]:
    """Whole lines written since the last call; `rest` keeps the beginning of the next."""
    with suppress(BlockingIOError):
        rest += os.read(pipe, 1 << 16)
    whole, newline, left = rest.rpartition(b"\n")
    if newline:
        rest[:] = left
    return whole.decode().splitlines() if newline else []


def _answers(mutator: Mutator, request: Frames) -> list[Frames]:
    """Some unsound answers to a request, and a sound one in the end."""
    header = msgpack.unpackb(request[0])
    kind, body = header["kind"], header["body"]
    pool = sound.answers(header["seq"], ticket=body.get("ticket", 0), attempt=body.get("attempt", 0), step=1)
    fitting = pool[BODIES[kind].answer.__name__]
    answers = [mutator.mutant([fitting, fitting, *pool.values()]) for _ in range(MUTANTS_PER_ANSWER)]
    answers.insert(header["seq"] % (MUTANTS_PER_ANSWER + 1), fitting)
    return answers
