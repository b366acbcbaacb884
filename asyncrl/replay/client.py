"""The replay queue as generators, learners and the launcher see it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import zmq

from asyncrl.errors import PeerTimeoutError, ProtocolError, RunError
from asyncrl.replay.messages import EvaluatedBody
from asyncrl.replay.wire import Array, Message, decode, encode, pack_group, unpack_group, unpack_leases
from asyncrl.types import Endpoints, Group, Lease, Shard

RESEND_S = 5.0
"""A finished group that is not acknowledged by then is sent again."""
ARRAYS_PER_GROUP = 4
EVALUATION_POLL_S = 0.1

_Finished = tuple[str, Any, list[Array]]
"""Kind, body and arrays of a message that is kept until it is acknowledged."""


@dataclass(slots=True)
class GeneratorStats:
    """What a generator tells of itself with every ask; sums since its first ask."""

    tokens: int = 0
    """Action tokens generated."""
    idle_s: float = 0.0
    """Time without a running request."""
    busy_s: float = 0.0
    stall_ms: list[float] = field(default_factory=list[float])
    """How long each weight swap since the last ask held the engine."""
    rewards_failed: int = 0
    """Trajectories whose reward could not be had."""


@dataclass(frozen=True, slots=True)
class LeaseReply:
    leases: list[Lease]
    done: bool
    """The run is over or stopping: give back what is unfinished and return."""
    reason: str
    """What limits the number of leases: "staleness", "bytes", "share" (of each generator), or nothing."""
    evaluations_left: bool = False
    """Evaluation prompts of the version asked for are left to hand out."""


class Connection:
    """A DEALER socket that speaks the wire, with numbered requests; to the replay queue unless told otherwise."""

    def __init__(self, endpoints: Endpoints, address: str = "", peer: str = "the replay queue") -> None:
        self.endpoints = endpoints
        self.address = address or endpoints.replay
        self.peer = peer
        self._seq = 0
        self._socket = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 500)
        self._socket.connect(self.address)

    def send(self, kind: str, body: Any, arrays: Sequence[Array] = ()) -> int:
        self._seq += 1
        frames = encode(self.endpoints.run_id, kind, body, seq=self._seq, arrays=arrays)
        self._socket.send_multipart(frames, copy=False)
        return self._seq

    def receive(self, timeout_s: float) -> Message | None:
        """The next message within the time, or None. Raises RunError when the peer answers with an error."""
        if not self._socket.poll(max(0, round(timeout_s * 1000))):
            return None
        frames = self._socket.recv_multipart(copy=False)
        message = decode(self.endpoints.run_id, [frame.buffer for frame in frames])
        if message.kind == "error":
            raise RunError(f"{self.peer} refused a message: {message.body['text']}")
        return message

    def request(self, kind: str, body: Any, arrays: Sequence[Array] = (), *, timeout_s: float) -> Message:
        """Sends and waits for the answer. Raises PeerTimeoutError."""
        return self.await_answer(kind, self.send(kind, body, arrays), timeout_s=timeout_s)

    def await_answer(self, kind: str, seq: int, *, timeout_s: float) -> Message:
        """The answer to the request `seq` of that kind. Raises PeerTimeoutError."""
        deadline_s = time.monotonic() + timeout_s
        while (left_s := deadline_s - time.monotonic()) > 0:
            message = self.receive(left_s)
            if message is not None and message.seq == seq:
                return message
        raise self.silent(kind, timeout_s)

    def silent(self, kind: str, timeout_s: float) -> PeerTimeoutError:
        return PeerTimeoutError(f"{self.peer} at {self.address} did not answer {kind!r} within {timeout_s:g} s")

    def close(self) -> None:
        self._socket.close()


class GeneratorClient:
    """A generator's side: asks for leases and sends finished groups without ever blocking.

    Used by one thread. `timeout_s` is how long the queue may stay silent while an answer is due.
    """

    def __init__(self, endpoints: Endpoints, generator: int, *, timeout_s: float = 60.0) -> None:
        self.generator = generator
        self.timeout_s = timeout_s
        self._connection = Connection(endpoints)
        self._ask_seq: int | None = None
        self._ask_s = 0.0
        self._unacknowledged: dict[tuple[bool, int, int], tuple[float, float, _Finished]] = {}
        """(evaluation, ticket, attempt) -> first sent, last sent, message"""

    @property
    def outstanding(self) -> bool:
        """True while an ask has not been answered."""
        return self._ask_seq is not None

    @property
    def unacknowledged(self) -> int:
        """Groups and evaluated prompts sent and not yet acknowledged."""
        return len(self._unacknowledged)

    def ask(self, version: int, num_groups: int, stats: GeneratorStats, *, num_evaluations: int = 0) -> None:
        """Asks for up to `num_groups` leases, and so many more of evaluation prompts, with `version` loaded; does
        nothing while an ask is outstanding."""
        if self.outstanding:
            return
        body = {
            "generator": self.generator,
            "version": version,
            "num_groups": num_groups,
            "num_evaluations": num_evaluations,
            "stats": asdict(stats),
        }
        self._ask_seq = self._connection.send("ask", body)
        self._ask_s = time.monotonic()

    def poll(self, timeout_s: float = 0.0) -> LeaseReply | None:
        """The answer to the ask, if it came within the time; also takes acknowledgements and sends again what
        lacks one. Raises PeerTimeoutError when the queue has been silent for too long."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            message = self._connection.receive(max(0.0, deadline_s - time.monotonic()))
            if message is None:
                self._keep_sending()
                return None
            if message.kind == "finished":
                key = message.body["evaluation"], message.body["ticket"], message.body["attempt"]
                self._unacknowledged.pop(key, None)
            elif message.kind == "leases" and message.seq == self._ask_seq:
                self._ask_seq = None
                leases = unpack_leases(message.body["leases"], message.arrays)
                body = message.body
                return LeaseReply(leases, body["done"], body["reason"], body["evaluations_left"])

    def finish(self, group: Group) -> None:
        """Sends a finished group; it is kept and sent again until the queue acknowledges it."""
        self._send_finished((False, group.ticket, group.attempt), ("finish", *pack_group(group)))

    def evaluated(self, result: EvaluatedBody) -> None:
        """Sends an evaluated prompt, as `finish` does a group."""
        self._send_finished((True, result["ticket"], result["attempt"]), ("evaluated", result, []))

    def release(self, leases: Sequence[tuple[int, int, int]], *, evaluations: Sequence[tuple[int, int]] = ()) -> None:
        """Gives back unfinished leases: (ticket, attempt, action tokens generated so far); (ticket, attempt) of
        evaluation prompts."""
        body = {
            "generator": self.generator,
            "leases": [{"ticket": ticket, "attempt": attempt, "tokens": tokens} for ticket, attempt, tokens in leases],
            "evaluations": [{"ticket": ticket, "attempt": attempt} for ticket, attempt in evaluations],
        }
        self._connection.send("release", body)

    def close(self, *, linger_s: float = 5.0) -> None:
        """Waits for acknowledgements, at most `linger_s`, and closes."""
        deadline_s = time.monotonic() + linger_s
        while self._unacknowledged and time.monotonic() < deadline_s:
            self.poll(0.05)
        self._connection.close()

    def _send_finished(self, key: tuple[bool, int, int], message: _Finished) -> None:
        now_s = time.monotonic()
        self._unacknowledged[key] = (now_s, now_s, message)
        self._connection.send(*message)

    def _keep_sending(self) -> None:
        now_s = time.monotonic()
        waits_s = [now_s - first_s for first_s, _, _ in self._unacknowledged.values()]
        if self.outstanding:
            waits_s.append(now_s - self._ask_s)
        if waits_s and max(waits_s) > self.timeout_s:
            raise self._connection.silent("ask" if self.outstanding else "finish", self.timeout_s)
        for key, (first_s, sent_s, message) in self._unacknowledged.items():
            if now_s - sent_s > RESEND_S:
                self._unacknowledged[key] = (first_s, now_s, message)
                self._connection.send(*message)


class LearnerClient:
    """A learner rank's side: takes its shard of each step, and rank 0 commits."""

    def __init__(self, endpoints: Endpoints, rank: int, *, timeout_s: float = 60.0) -> None:
        self.rank = rank
        self.timeout_s = timeout_s
        self._connection = Connection(endpoints)

    def take(self, step: int) -> Shard | None:
        """This rank's shard of the step, as soon as the batch is complete; None when the run is stopping, the
        same for all ranks. Raises PeerTimeoutError when the queue is silent for `timeout_s`."""
        while True:
            message = self._connection.request("take", {"rank": self.rank, "step": step}, timeout_s=self.timeout_s)
            match message.body["outcome"]:
                case "stop":
                    return None
                case "shard":
                    return Shard(step, self._groups(message))
                case _:
                    continue

    def commit(self, step: int, metrics: dict[str, float]) -> dict[str, float]:
        """Reports the step as trained; gives the replay side's metrics of it. Only rank 0 calls it."""
        body = {"step": step, "metrics": metrics}
        return self._connection.request("commit", body, timeout_s=self.timeout_s).body["metrics"]

    def evaluations(self, should_stop: Callable[[], bool]) -> Iterator[tuple[int, dict[str, float]]]:
        """Evaluations that no commit has reported, as (step they ended at, metrics), until there are no more to
        come. Only rank 0 calls it, after its last commit."""
        while not should_stop():
            body = self._connection.request("next_evaluation", {}, timeout_s=self.timeout_s).body
            match body["outcome"]:
                case "ended":
                    yield body["step"], body["metrics"]
                case "none":
                    return
                case _:
                    time.sleep(EVALUATION_POLL_S)

    def close(self) -> None:
        self._connection.close()

    def _groups(self, message: Message) -> list[Group]:
        metas, arrays = message.body["groups"], message.arrays
        if len(arrays) != ARRAYS_PER_GROUP * len(metas):
            raise ProtocolError(f"shard of {len(metas)} groups with {len(arrays)} arrays")
        parts = [arrays[i : i + ARRAYS_PER_GROUP] for i in range(0, len(arrays), ARRAYS_PER_GROUP)]
        return [unpack_group(meta, part) for meta, part in zip(metas, parts, strict=True)]


class LauncherClient:
    """The launcher's side: watches and ends the run."""

    def __init__(self, endpoints: Endpoints, *, timeout_s: float = 5.0) -> None:
        self.timeout_s = timeout_s
        self._connection = Connection(endpoints)

    def status(self) -> dict[str, Any]:
        return self._request("status", {})

    def summary(self) -> dict[str, Any]:
        return self._request("summary", {})

    def stop(self, reason: str) -> None:
        """Asks everybody to stop: learners before their next step, generators at once."""
        self._request("stop", {"text": reason})

    def shutdown(self) -> None:
        """Ends the replay process."""
        self._request("shutdown", {})

    def close(self) -> None:
        self._connection.close()

    def _request(self, kind: str, body: dict[str, Any]) -> dict[str, Any]:
        return self._connection.request(kind, body, timeout_s=self.timeout_s).body
