"""How much work an engine has room for."""

from __future__ import annotations

from dataclasses import dataclass

from asyncrl.config import Config
from asyncrl.replay.ledger import wanted_groups
from asyncrl.types import NO_VERSION


@dataclass(frozen=True, slots=True)
class Asked:
    """What the last ask said."""

    version: int = NO_VERSION
    groups: int = 0
    evaluations: int = 0


def room(config: Config, *, running: int, evaluating: int | None, denied: bool) -> tuple[int, int]:
    """Groups and evaluation prompts that there is room for beside so many running completions.

    `evaluating` of them are of evaluation prompts; None when none are wanted. Evaluation gets half of the engine, or
    all that training leaves when it may not start more (`denied`). A group takes the room of its members that still
    run, so that stragglers do not leave the engine half empty; a few groups more than run wait in it (`wanted_groups`).
    """
    generator, samples = config.generator, config.eval.samples
    slots = generator.max_running_groups * generator.group_size
    evaluations = 0
    if evaluating is not None:
        limit = slots if denied else slots // 2
        free = min(slots - running, limit - evaluating)
        evaluations = max(free // samples, 0 if evaluating else 1)
    taken = running + evaluations * samples
    return max(0, wanted_groups(generator.max_running_groups) - -(-taken // generator.group_size)), evaluations
