"""A group that the replay queue keeps: its prompt, its lease, and its data once it is finished; and the rules by which
a finished group is refunded, so that another prompt takes its place."""

from __future__ import annotations

import numpy as np
from msgspec import field

from asyncrl.config.config import Config
from asyncrl.errors import InvariantError, ProtocolError, RunError
from asyncrl.observe.stats import completion_tokens, tokens_by_version
from asyncrl.replay.codec import header_bytes, prompt_bytes
from asyncrl.replay.journal import Location
from asyncrl.replay.ledger import Ledger
from asyncrl.types import Prompt
from asyncrl.util.durable import Durable
from asyncrl.wire.frames import Array
from asyncrl.wire.messages import GroupHeader

MAX_AWAITED = 64
"""Outstanding attempts of one ticket that are remembered; groups of older ones are not counted."""
ENVIRONMENT_FAILURES = ("environment", "timeout", "overlong")
FAILURES = ("failed", *ENVIRONMENT_FAILURES)
"""The reasons of refunds of groups whose members have no reward, or too few of them."""
MIN_FAILURES = 16
"""Groups in a row that must have failed before failures end a run."""
MAX_REFUNDS_IN_A_ROW = 4096
"""The run fails after this many consecutive groups without signal that were refunded or dropped. Groups whose
environments or rewards failed do not count: they end a run after `launch.progress_timeout_s`."""
MIN_SCORED = 2
"""Members with a reward that a group needs if others have none: one alone has no baseline."""
SAME_REWARD = 1e-6
"""A group whose rewards differ by less has no training signal where advantages compare within the group."""


class LiveLease(Durable):
    """The part of a live group that is stored. Times are seconds of the run."""

    row: int
    """The row of its prompt."""
    holders: list[int]
    """The generator of each attempt so far."""
    session: str
    number: int
    """Number, in its session, of the ask that got the lease."""
    counted: list[int]
    """Attempts that were returned or arrived too late to be used; their tokens are in the ledger."""
    location: Location | None
    """Location of the finished group in the journal."""
    taken_s: float


class LiveGroup(LiveLease, kw_only=True):
    """A live ticket's prompt and lease, and its group once it is finished."""

    counted: list[int] = field(default_factory=list[int])
    location: Location | None = None
    taken_s: float = 0.0
    prompt: Prompt
    header: GroupHeader | None = None
    arrays: list[Array] = field(default_factory=list[Array])
    """A Block if they are in one frame, as they were received."""
    completion: list[int] = field(default_factory=list[int])
    """Action tokens of each trajectory."""
    by_version: dict[int, int] = field(default_factory=dict[int, int])
    """Action tokens by the policy version that sampled them."""
    num_bytes: int = 0
    """Size of frames, header and prompt."""
    signal: bool = True
    """As in `has_signal`."""

    @property
    def generator(self) -> int:
        """The generator of the last attempt."""
        return self.holders[-1]

    @property
    def attempt(self) -> int:
        """The last attempt."""
        return len(self.holders) - 1

    @property
    def awaited(self) -> dict[int, int]:
        """The latest attempts whose tokens are not in the ledger yet, with their generators: their groups may still
        arrive."""
        known = {*self.counted, -1 if self.header is None else self.header.attempt}
        first = max(0, self.attempt + 1 - MAX_AWAITED)
        return {attempt: self.holders[attempt] for attempt in range(first, self.attempt + 1) if attempt not in known}

    @property
    def finished(self) -> GroupHeader:
        """Header of the finished group. Raises InvariantError if there is none."""
        if self.header is None:
            raise InvariantError("replay: a group without data counts as finished")
        return self.header

    def finish(self, header: GroupHeader, arrays: list[Array], location: Location | None, *, signal: bool) -> None:
        """Stores the finished group."""
        _, mask, _, versions = arrays[:4]
        self.header, self.arrays, self.location, self.signal = header, arrays, location, signal
        self.num_bytes = sum(array.nbytes for array in arrays) + header_bytes(header) + prompt_bytes(self.prompt)
        self.completion, self.by_version = completion_tokens(header, mask), tokens_by_version(versions, mask)

    def check_prompt(self, header: GroupHeader, tokens: Array, action_mask: Array) -> None:
        """Raises ProtocolError unless the group belongs to this prompt: same row, same data source, and the prompt's
        tokens, none of them an action, at the start of every trajectory, which an environment may replace. The arrays
        are those of all trajectories end to end."""
        prompt, where = self.prompt, f"ticket {header.ticket}"
        if header.row != prompt.row:
            raise ProtocolError(f"{where} is for row {prompt.row}, not {header.row}")
        if header.data_source != prompt.data_source:
            raise ProtocolError(f"{where} is for data source {prompt.data_source!r}, not {header.data_source!r}")
        if header.episodes:
            return
        expected, size, begin = np.asarray(prompt.tokens, dtype=np.int32).tobytes(), len(prompt.tokens), 0
        for number, length in enumerate(header.lengths):
            if tokens[begin : begin + min(size, length)].tobytes() != expected:
                raise ProtocolError(f"{where}: trajectory {number} does not begin with the tokens of row {prompt.row}")
            if action_mask[begin : begin + min(size, length)].any():
                raise ProtocolError(f"{where}: trajectory {number} has actions in the prompt of row {prompt.row}")
            begin += length


class TakenStep(Durable):
    """A batch that is taken and not trained yet."""

    number: int
    """The step."""
    shards: list[list[int]]
    """The tickets of each learner rank."""
    dropped: list[int]
    """Tickets of groups without signal that no rank computes (`replay.zero_variance: drop`)."""

    @property
    def tickets(self) -> list[int]:
        """All tickets of the batch."""
        return [*(ticket for shard in self.shards for ticket in shard), *self.dropped]


# --- refunds


def has_signal(header: GroupHeader, *, group_relative: bool) -> bool:
    """True if training on a finished group that is not refunded changes the policy.

    `group_relative`: the advantage of a group whose rewards are all equal is 0.
    """
    return not (group_relative and _is_equal(header))


def refund_reason(config: Config, header: GroupHeader, *, group_relative: bool) -> str:
    """The reason why a finished group is refunded; empty if it stays. `group_relative` as in `has_signal`."""
    num_scored = len(header.of_scored(header.rewards))
    if num_scored < header.num_members and (config.replay.failed == "refund" or num_scored < MIN_SCORED):
        return _failure(header)
    if config.algorithm.truncated == "mask" and set(header.status) <= {"truncated", "failed"}:
        return "truncated"
    choice = config.replay.zero_variance
    refunds_equal = choice == "refund" or (choice == "auto" and group_relative)
    return "zero_variance" if refunds_equal and _is_equal(header) else ""


def _failure(header: GroupHeader) -> str:
    """The reason why the first trajectory without a reward has none."""
    ends = [
        episode.ended for episode, status in zip(header.episodes, header.status, strict=False) if status == "failed"
    ]
    reason = "environment" if ends[:1] == ["host"] else ends[0] if ends else "failed"
    return reason if reason in ENVIRONMENT_FAILURES else "failed"


def _is_equal(header: GroupHeader) -> bool:
    rewards = header.of_scored(header.rewards)
    return max(rewards) - min(rewards) < SAME_REWARD


def check_refunds(ledger: Ledger, unused_in_a_row: int) -> None:
    """Raises RunError if too many groups in a row that were scored were refunded or dropped."""
    if unused_in_a_row >= MAX_REFUNDS_IN_A_ROW:
        counts = {name: amount.groups for name, amount in ledger.refunded.items()}
        raise RunError(
            f"the last {MAX_REFUNDS_IN_A_ROW} groups had no training signal (refunded so far: {counts}): their "
            "rewards are equal; check the reward function and the difficulty of the data, or set "
            "replay.zero_variance=train"
        )


class Failures(Durable):
    """The failed groups since the last one with another end: they end a run by the time that they last, so that a
    service of environments or rewards may be away for a while."""

    in_a_row: int = 0
    since_s: float = 0.0
    """When the first of them was finished, in seconds of the run."""

    def note(self, reason: str, finished_s: float) -> None:
        """Counts a finished group that was refunded for this reason; "" for another end."""
        if reason not in FAILURES:
            self.in_a_row = 0
            return
        self.since_s = self.since_s if self.in_a_row else finished_s
        self.in_a_row += 1

    def check(self, config: Config, ledger: Ledger, header: GroupHeader, reason: str) -> None:
        """Raises RunError after a finished group if all groups have failed for `launch.progress_timeout_s`; where
        environments fail, if all groups of the run have."""
        if self.in_a_row < MIN_FAILURES:
            return
        of_environments, limit_s = reason in ENVIRONMENT_FAILURES, config.launch.progress_timeout_s
        failed = sum(amount.trajectories for name, amount in ledger.refunded.items() if name in FAILURES)
        none_worked, lasting_s = failed == ledger.generated.trajectories, header.finished_s - self.since_s
        if not (lasting_s >= limit_s or (of_environments and none_worked)):
            return
        what = "environments" if of_environments else "rewards"
        since = f" for {lasting_s:.0f} s (launch.progress_timeout_s = {limit_s:g})" if lasting_s >= limit_s else ""
        error = next(filter(None, header.errors), "")
        hint = "; `asyncrl play` plays single episodes" if of_environments else ""
        raise RunError(f"the {what} of the last {self.in_a_row} groups have failed{since}, the last one: {error}{hint}")
