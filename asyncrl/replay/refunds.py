"""Groups that are not trained, so that their place goes to another prompt."""

from __future__ import annotations

from asyncrl.config import Config
from asyncrl.errors import RunError
from asyncrl.replay.ledger import Ledger
from asyncrl.wire.messages import GroupHeader

SAME_REWARD = 1e-6
"""A group whose rewards differ by less has no training signal."""


def refund_reason(config: Config, header: GroupHeader, *, group_relative: bool) -> str:
    """The reason why a finished group is refunded; empty if it is to be trained.

    `group_relative`: the advantage of a group whose rewards are all equal is 0.
    """
    if "failed" in header.status:
        return "failed"
    if config.algorithm.truncated == "mask" and set(header.status) == {"truncated"}:
        return "truncated"
    choice = config.replay.zero_variance
    refunds_equal = choice == "refund" or (choice == "auto" and group_relative)
    if refunds_equal and max(header.rewards) - min(header.rewards) < SAME_REWARD:
        return "zero_variance"
    return ""


def check_refunds(config: Config, ledger: Ledger, refunds_in_a_row: int) -> None:
    """Raises RunError if too many groups in a row were refunded."""
    limit = config.replay.max_refunds_in_a_row
    if refunds_in_a_row >= limit:
        counts = {name: amount.groups for name, amount in ledger.refunded.items()}
        raise RunError(
            f"the last {limit} groups had no training signal (refunded so far: {counts}): their rewards are equal or "
            "failed; check the reward function and the difficulty of the data, or set replay.zero_variance=train "
            "or a higher replay.max_refunds_in_a_row"
        )
