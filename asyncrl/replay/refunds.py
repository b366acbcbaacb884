"""Groups without training signal: which groups they are, and which of them are refunded, so that another prompt takes
their place."""

from __future__ import annotations

from asyncrl.config import Config
from asyncrl.errors import RunError
from asyncrl.replay.ledger import Ledger
from asyncrl.wire.messages import GroupHeader

ENVIRONMENT_FAILURES = ("environment", "timeout", "overlong")
FAILURES = ("failed", *ENVIRONMENT_FAILURES)
"""The reasons of refunds of groups in which a trajectory has no reward."""
MAX_ENVIRONMENT_REFUNDS = 16
"""Groups in a row that may be refunded because their environment failed."""
SAME_REWARD = 1e-6
"""A group whose rewards differ by less has no training signal where advantages compare within the group."""


def has_signal(header: GroupHeader, *, group_relative: bool) -> bool:
    """True if training on a finished group changes the policy.

    `group_relative`: the advantage of a group whose rewards are all equal is 0.
    """
    return "failed" not in header.status and not (group_relative and _is_equal(header))


def refund_reason(config: Config, header: GroupHeader, *, group_relative: bool) -> str:
    """The reason why a finished group is refunded; empty if it stays. `group_relative` as in `has_signal`."""
    if "failed" in header.status:
        return _failure(header)
    if config.algorithm.truncated == "mask" and set(header.status) == {"truncated"}:
        return "truncated"
    choice = config.replay.zero_variance
    refunds_equal = choice == "refund" or (choice == "auto" and group_relative)
    return "zero_variance" if refunds_equal and _is_equal(header) else ""


def check_refunds(config: Config, ledger: Ledger, unused_in_a_row: int) -> None:
    """Raises RunError if too many groups in a row were refunded or dropped."""
    limit = config.replay.max_refunds_in_a_row
    if unused_in_a_row >= limit:
        counts = {name: amount.groups for name, amount in ledger.refunded.items()}
        raise RunError(
            f"the last {limit} groups had no training signal (refunded so far: {counts}): their rewards are equal or "
            "failed; check the reward function and the difficulty of the data, or set replay.zero_variance=train "
            "or a higher replay.max_refunds_in_a_row"
        )


def check_environment_refunds(header: GroupHeader, broken_in_a_row: int) -> None:
    """Raises RunError if the environments of too many groups in a row have failed."""
    if broken_in_a_row >= MAX_ENVIRONMENT_REFUNDS:
        error = next(error for error in header.errors if error)
        raise RunError(
            f"the environments of the last {broken_in_a_row} groups have failed, the last one: {error}; "
            "`asyncrl play` plays single episodes"
        )


def _failure(header: GroupHeader) -> str:
    """The reason why the first trajectory without a reward has none."""
    ends = [one.ended for one, status in zip(header.episodes, header.status, strict=False) if status == "failed"]
    reason = "environment" if ends[:1] == ["host"] else ends[0] if ends else "failed"
    return reason if reason in ENVIRONMENT_FAILURES else "failed"


def _is_equal(header: GroupHeader) -> bool:
    return max(header.rewards) - min(header.rewards) < SAME_REWARD
