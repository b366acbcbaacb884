"""The clients of the replay queue: for generators, learners and the launcher."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from msgspec import structs

from asyncrl.errors import ProtocolError
from asyncrl.replay.codec import check_group, pack_group, unpack_group
from asyncrl.types import Group, Shard
from asyncrl.wire.endpoints import Endpoints
from asyncrl.wire.frames import Arrays, Message
from asyncrl.wire.messages import (
    Announced,
    Ask,
    Begin,
    Commit,
    Committed,
    Error,
    Evaluated,
    EvaluationResult,
    Finished,
    Follower,
    GeneratorStats,
    GroupHeader,
    Leases,
    Lost,
    NextEvaluation,
    Ok,
    Publish,
    ReadStatus,
    ReadSummary,
    Release,
    ReleasedEvaluation,
    ReleasedLease,
    RequestBody,
    Scale,
    ShardHeader,
    Shutdown,
    Stop,
    Take,
)
from asyncrl.wire.rpc import BACK_OFF, Connection

RESEND_S = 2.0
"""A message without an answer is sent again after this time: the replay queue may have died with it. The time doubles
with each repetition, so that a slow queue, or one that sends a large answer, is not flooded with requests."""
EVALUATION_POLL_S = 0.1


@dataclass(slots=True)
class _Unanswered:
    """A message that is sent again until it is answered."""

    seq: int
    first_s: float
    last_s: float
    body: RequestBody
    arrays: Sequence[Arrays]
    resend_s: float
    """Time until it is sent again."""


class GeneratorClient:
    """A generator's side: asks for leases and sends finished groups without ever blocking.

    Used by one thread. `timeout_s` is how long the queue may stay silent while an answer is due.
    """

    def __init__(self, endpoints: Endpoints, generator: int, *, timeout_s: float = 60.0) -> None:
        self.generator = generator
        self.timeout_s = timeout_s
        self.session = uuid.uuid4().hex
        """Name of this start of the generator."""
        self._connection = Connection(endpoints, resend_s=RESEND_S)
        self._number = 0
        self._ask: _Unanswered | None = None
        self._unacknowledged: dict[int, _Unanswered] = {}
        """By the number of the message."""

    @property
    def outstanding(self) -> bool:
        """True while an ask has not been answered."""
        return self._ask is not None

    @property
    def unacknowledged(self) -> int:
        """Groups, evaluated prompts and releases sent and not yet acknowledged."""
        return len(self._unacknowledged)

    def ask(self, version: int, num_groups: int, stats: GeneratorStats, *, num_evaluations: int = 0) -> None:
        """Asks for up to `num_groups` leases and up to `num_evaluations` evaluation prompts, with `version` loaded.
        Does nothing while an ask is outstanding."""
        if self.outstanding:
            return
        self._number += 1
        body = Ask(
            generator=self.generator,
            session=self.session,
            number=self._number,
            version=version,
            num_groups=num_groups,
            num_evaluations=num_evaluations,
            stats=structs.replace(stats),
        )
        self._ask = self._send(body)

    def poll(self, timeout_s: float = 0.0) -> Leases | None:
        """Returns the answer to the ask if it arrives within the time. Also processes acknowledgements, and repeats
        messages without one. Raises PeerTimeoutError if the queue is silent for too long, RunError if it refuses."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            message = self._connection.receive(max(0.0, deadline_s - time.monotonic()))
            if message is None:
                self._keep_sending()
                return None
            try:
                reply = self._take(message)
            except ProtocolError as error:
                self._connection.ignore(error)
                reply = None
            if reply is not None:
                return reply
            if time.monotonic() >= deadline_s:
                self._keep_sending()

    def finish(self, group: Group) -> None:
        """Sends a finished group; it is kept and sent again until the queue acknowledges it."""
        header, block = pack_group(group)
        self._deliver(header, [block])

    def evaluated(self, result: Evaluated, recorded: Group | None = None) -> None:
        """Sends an evaluated prompt, with the completions that are recorded, as `finish` does a group."""
        arrays: list[Arrays] = []
        if recorded is not None:
            header, block = pack_group(recorded)
            result, arrays = structs.replace(result, recorded=header), [block]
        self._deliver(result, arrays)

    def release(self, leases: Sequence[tuple[int, int, int]], *, evaluations: Sequence[tuple[int, int]] = ()) -> None:
        """Releases unfinished leases: (ticket, attempt, action tokens generated so far), and (ticket, attempt) of
        evaluation prompts. Like a group, the message is sent again until it is acknowledged."""
        body = Release(
            generator=self.generator,
            leases=[ReleasedLease(*lease) for lease in leases],
            evaluations=[ReleasedEvaluation(*lease) for lease in evaluations],
        )
        self._deliver(body)

    def close(self, *, linger_s: float = 5.0) -> None:
        """Waits for acknowledgements, at most `linger_s`, and closes."""
        deadline_s = time.monotonic() + linger_s
        while self._unacknowledged and time.monotonic() < deadline_s:
            self.poll(0.05)
        self._connection.close()

    def _send(self, body: RequestBody, arrays: Sequence[Arrays] = ()) -> _Unanswered:
        seq, now_s = self._connection.send(_with_ages(body), arrays), time.monotonic()
        return _Unanswered(seq, now_s, now_s, body, arrays, RESEND_S)

    def _deliver(self, body: RequestBody, arrays: Sequence[Arrays] = ()) -> None:
        """Sends a message, again and again until it is acknowledged."""
        sent = self._send(body, arrays)
        self._unacknowledged[sent.seq] = sent

    def _take(self, message: Message) -> Leases | None:
        """Raises ProtocolError for an invalid answer, RunError if an outstanding message is refused."""
        body, seq = message.body, message.seq
        match body:
            case Finished() | Ok():
                self._unacknowledged.pop(seq, None)
            case Leases() if self._ask is not None and seq == self._ask.seq:
                self._ask = None
                return body
            case Error() if seq == 0 or any(seq == sent.seq for sent in self._due()):
                self._connection.check(message)
            case _:
                pass  # the second answer to a repeated message
        return None

    def _due(self) -> list[_Unanswered]:
        return [*self._unacknowledged.values(), *([self._ask] if self._ask is not None else [])]

    def _keep_sending(self) -> None:
        now_s, lost_s = time.monotonic(), self._connection.lost_s()
        for sent in self._due():
            if now_s - sent.first_s > self.timeout_s:
                raise self._connection.silent(sent.body, self.timeout_s)
            if (lost := sent.last_s < lost_s) or now_s - sent.last_s > sent.resend_s:
                self._connection.send(_with_ages(sent.body), sent.arrays, seq=sent.seq)
                sent.last_s, sent.resend_s = time.monotonic(), sent.resend_s if lost else BACK_OFF * sent.resend_s


def _with_ages(body: RequestBody) -> RequestBody:
    """A group's header with its times as seconds before now, since the queue's machine may have another clock; for
    an evaluated prompt, its recorded group."""
    if isinstance(body, Evaluated) and body.recorded is not None:
        return structs.replace(body, recorded=_with_ages(body.recorded))
    if not isinstance(body, GroupHeader):
        return body
    now_s = time.monotonic()
    return structs.replace(body, started_s=now_s - body.started_s, finished_s=now_s - body.finished_s)


class LearnerClient:
    """A learner rank's side: takes its shard of each step, and rank 0 commits.

    `take` may be called by another thread than the other methods. Every method raises PeerTimeoutError when the queue
    is silent for `timeout_s`, and RunError when it refuses.
    """

    def __init__(self, endpoints: Endpoints, rank: int, *, timeout_s: float = 60.0) -> None:
        self.endpoints = endpoints
        self.rank = rank
        self.timeout_s = timeout_s
        self._connection = Connection(endpoints, resend_s=RESEND_S)
        self._closed = threading.Event()

    def begin(self, step: int) -> int:
        """Registers this rank, which starts from a checkpoint of the step (0 without one). Returns the number of
        committed steps, up to which `take` and `commit` return the same as before."""
        body = Begin(self.rank, self.endpoints.epoch, step)
        return self._connection.request(body, timeout_s=self.timeout_s).body.steps

    def take(self, step: int) -> Shard | None:
        """This rank's shard of the step, as soon as the batch is complete, which may be while the step before it is
        trained; None when the run is stopping, the same for all ranks, or when the client is closed while it waits."""
        body = Take(self.rank, self.endpoints.epoch, step)
        connection = Connection(self.endpoints, resend_s=RESEND_S)  # separate: a socket belongs to one thread
        try:
            while not self._closed.is_set():
                outcome, groups = connection.request(body, timeout_s=self.timeout_s, read=_shard)
                if outcome != "wait":
                    return Shard(step, groups) if outcome == "shard" else None
        finally:
            connection.close()
        return None

    def commit(
        self, step: int, metrics: dict[str, float], *, saving: bool = False, checkpoints: Sequence[int] = ()
    ) -> Committed:
        """Reports the step as trained, and the steps of the complete checkpoints. With `saving` the answer contains the
        queue's part of a checkpoint of the step. Only rank 0 calls it."""
        body = Commit(self.endpoints.epoch, step, metrics, saving, list(checkpoints))
        return self._connection.request(body, timeout_s=self.timeout_s).body

    def evaluations(self, should_stop: Callable[[], bool]) -> Iterator[tuple[int, dict[str, float]]]:
        """Yields the evaluations that no commit has reported, as (step at which they ended, metrics), until there are
        no more. Only rank 0 calls it, after its last commit; a restarted rank gets all of them again."""
        after = 0
        while not should_stop():
            request = NextEvaluation(self.endpoints.epoch, after)
            body: EvaluationResult = self._connection.request(request, timeout_s=self.timeout_s).body
            match body.outcome:
                case "ended":
                    after += 1
                    yield body.step, body.metrics
                case "none":
                    return
                case _:
                    time.sleep(EVALUATION_POLL_S)

    def close(self) -> None:
        """Closes the connection. A `take` in another thread ends with the next answer."""
        self._closed.set()
        self._connection.close()


def _shard(message: Message) -> tuple[str, list[Group]]:
    """Raises ProtocolError unless the groups are complete."""
    body: ShardHeader = message.body
    headers, arrays = body.groups, message.arrays
    ends = [*accumulate((header.num_arrays for header in headers), initial=0)]
    if len(arrays) != ends[-1]:
        raise ProtocolError(f"shard of {len(headers)} groups with {len(arrays)} arrays, expected {ends[-1]}")
    parts = [arrays[begin:end] for begin, end in pairwise(ends)]
    for header, part in zip(headers, parts, strict=True):
        check_group(header, part, group_size=header.num_members)
    return body.outcome, [unpack_group(header, part) for header, part in zip(headers, parts, strict=True)]


class Announcer:
    """Learner rank 0's connection for announcements of versions in a store, used by the thread that publishes them.
    `timeout_s` is how long the queue may be silent."""

    def __init__(self, endpoints: Endpoints, *, timeout_s: float) -> None:
        self._connection = Connection(endpoints, resend_s=RESEND_S)
        self._timeout_s = timeout_s

    def announce(self, announced: Announced, check: Callable[[], None]) -> list[Follower]:
        """Makes this the version that generators fetch. Returns what they have. Raises PeerTimeoutError if the queue is
        silent, RunError if it refuses, and as `check` does, which is called during the wait."""
        body = Publish(self._connection.endpoints.epoch, announced)
        return self._connection.request(body, timeout_s=self._timeout_s, check=check).body.followers

    def close(self) -> None:
        """Closes the connection."""
        self._connection.close()


class LauncherClient:
    """The launcher's side: watches and ends the run. Every method raises PeerTimeoutError and RunError."""

    def __init__(self, endpoints: Endpoints, *, timeout_s: float = 5.0) -> None:
        self.timeout_s = timeout_s
        self._connection = Connection(endpoints, resend_s=RESEND_S)

    def status(self) -> dict[str, Any]:
        """The state of the run: see `ReplayQueue.status`."""
        return self._request(ReadStatus())

    def summary(self) -> dict[str, Any]:
        """The queue's part of the run's summary."""
        return self._request(ReadSummary())

    def lost(self, generator: int) -> None:
        """Reports that the generator's process has ended, so that its leases are returned at once."""
        self._request(Lost(generator))

    def scale(self, generators: int) -> None:
        """Sets the number of generators from now on; those with a higher index leave."""
        self._request(Scale(generators))

    def stop(self, reason: str) -> None:
        """Stops the run: learners before their next step, generators at once."""
        self._request(Stop(reason))

    def shutdown(self) -> None:
        """Ends the replay process."""
        self._request(Shutdown())

    def close(self) -> None:
        """Closes the connection."""
        self._connection.close()

    def _request(self, body: RequestBody) -> dict[str, Any]:
        return self._connection.request(body, timeout_s=self.timeout_s).body.result
