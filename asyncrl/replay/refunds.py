"""Groups without training signal: which groups they are, and which of them are refunded, so that another prompt takes
their place."""

from __future__ import annotations

from asyncrl.config.config import Config
from asyncrl.errors import RunError
from asyncrl.replay.ledger import Ledger
from asyncrl.util.durable import Durable
from asyncrl.wire.messages import GroupHeader

ENVIRONMENT_FAILURES = ("environment", "timeout", "overlong")
FAILURES = ("failed", *ENVIRONMENT_FAILURES)
"""The reasons of refunds of groups whose members have no reward, or too few of them."""
MIN_FAILURES = 16
"""Groups in a row that must have failed before failures end a run."""
MIN_SCORED = 2
"""Members with a reward that a group needs if others have none: one alone has no baseline."""
SAME_REWARD = 1e-6
"""A group whose rewards differ by less has no training signal where advantages compare within the group."""


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


MAX_REFUNDS_IN_A_ROW = 4096
"""The run fails after this many consecutive groups without signal that were refunded or dropped. Groups whose
environments or rewards failed do not count: they end a run after `launch.progress_timeout_s`."""


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

    def check(self, config: Config, ledger: Ledger, header: GroupHeader, reason: str, finished_s: float) -> None:
        """Raises RunError after a finished group if all groups have failed for `launch.progress_timeout_s`; where
        environments fail, if all groups of the run have."""
        if self.in_a_row < MIN_FAILURES:
            return
        of_environments, limit_s = reason in ENVIRONMENT_FAILURES, config.launch.progress_timeout_s
        failed = sum(amount.trajectories for name, amount in ledger.refunded.items() if name in FAILURES)
        none_worked, lasting_s = failed == ledger.generated.trajectories, finished_s - self.since_s
        if not (lasting_s >= limit_s or (of_environments and none_worked)):
            return
        what = "environments" if of_environments else "rewards"
        since = f" for {lasting_s:.0f} s (launch.progress_timeout_s = {limit_s:g})" if lasting_s >= limit_s else ""
        error = next(filter(None, header.errors), "")
        way_out = "; `asyncrl play` plays single episodes" if of_environments else ""
        raise RunError(
            f"the {what} of the last {self.in_a_row} groups have failed{since}, the last one: {error}{way_out}"
        )


def _failure(header: GroupHeader) -> str:
    """The reason why the first trajectory without a reward has none."""
    ends = [one.ended for one, status in zip(header.episodes, header.status, strict=False) if status == "failed"]
    reason = "environment" if ends[:1] == ["host"] else ends[0] if ends else "failed"
    return reason if reason in ENVIRONMENT_FAILURES else "failed"


def _is_equal(header: GroupHeader) -> bool:
    rewards = header.of_scored(header.rewards)
    return max(rewards) - min(rewards) < SAME_REWARD
