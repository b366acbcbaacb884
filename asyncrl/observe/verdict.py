"""Which side holds the run back, in a sentence."""

from __future__ import annotations

BUSY = 0.1
"""A side idle for less than this fraction of the time is busy."""
CLEARLY = 0.3
"""A side that is idle for so much less of the time than the other is the bottleneck."""


def bottleneck(*, generator_idle: float, learner_idle: float, max_staleness: int) -> str:
    """A sentence from the idle fractions of both sides."""
    idle = f"generators idle {generator_idle:.0%}, learners idle {learner_idle:.0%}"
    if generator_idle < BUSY and learner_idle < BUSY:
        return f"balanced: both sides are busy ({idle})"
    ahead = max_staleness > 0 and abs(generator_idle - learner_idle) > CLEARLY
    if generator_idle <= learner_idle and (generator_idle < BUSY or ahead):
        return f"generation-bound: learners wait for groups ({idle}); more generators would help"
    if learner_idle < generator_idle and (learner_idle < BUSY or ahead):
        return f"learner-bound: generators wait for admission ({idle}); more learners would help"
    if max_staleness == 0:
        return f"the sides take turns, as max_staleness 0 demands ({idle}); a higher limit lets them overlap"
    return f"both sides wait ({idle}): the staleness limit {max_staleness} or start-up holds them; try a higher limit"
