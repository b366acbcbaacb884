"""Measures what environments cost: tokens/s of launches whose tool takes a second in 30 % of its calls, of the same
launches with a tool that answers at once; and of the demo through an environment of one turn, of the demo without one.

The policies do not learn, so that all launches of a pair generate the same kind of episodes.
"""

from __future__ import annotations

from collections.abc import Iterator

from asyncrl.environments import Environment, Step
from benchmarks.demo import launched, prepare, rows_of
from benchmarks.frame import CannotRun, Limit, Round, Row
from benchmarks.overlap import tokens_per_s

LIMITS_STEPS = (0, 1, 2, 4)
"""Values of `max_staleness`, in learner steps."""
GROUPS_PER_STEP = 64
"""Groups per step of the launches with the tool: a step then takes about as long as the tool."""
STEPS, WARM_STEPS, DEMO_STEPS = 24, 4, 80
LATENCY_S, LATENCY_SHARE = 1.0, 0.3
TIMEOUT_S = 600.0
SLOW = f"environment.options={{calculator: {{latency_s: {LATENCY_S}, latency_share: {LATENCY_SHARE}}}}}"


class Answers(Environment):
    """One turn, with the reward of the demo: 1 if the answer is the ground truth."""

    max_turns, returns_at_once = 1, True

    def step(self, action):  # type: ignore[no-untyped-def]
        return Step(reward=float(action.text == self.task.ground_truth), done=True)


def rate(run: str, config: str, overrides: list[str], *, max_staleness: int, steps: int) -> float:
    """Returns tokens/s of these steps of a launch, after its first ones and without the last, which train the rest
    of the queue."""
    steps += WARM_STEPS
    settings = [f"steps={steps + max_staleness}", f"replay.max_staleness={max_staleness}", "learner.lr=1e-9"]
    with launched(run, [*settings, *overrides], config=config) as process:
        if process.wait(TIMEOUT_S):
            raise CannotRun(f"asyncrl launch ended with code {process.returncode}; see runs/{run}/logs")
    return tokens_per_s(rows_of(run)[WARM_STEPS - 1 : steps], 0.0)


def measure(_: bool) -> Iterator[Round]:
    prepare()
    while True:
        figures: Round = {}
        for limit in LIMITS_STEPS:
            options = {"max_staleness": limit, "steps": STEPS}
            large = f"replay.groups_per_step={GROUPS_PER_STEP}"
            fast, slow = (
                rate("bench-environments", "calculator", [large, *extra], **options) for extra in ([], [SLOW])
            )
            figures |= {f"S={limit} with latency": slow / fast, f"S={limit} tokens/s": fast}
        through_environment = ["environment.name=benchmarks.environments:Answers"]
        alone, through = (
            rate("bench-environments", "demo", extra, max_staleness=2, steps=DEMO_STEPS)
            for extra in ([], through_environment)
        )
        yield figures | {"one turn through an environment": through / alone, "demo tokens/s": alone}


ROW = Row(
    what="tokens/s of asyncrl launch with a tool that takes 1 s in 30 % of calls; of the demo through an environment",
    against="the same with a tool that answers at once; the demo without an environment",
    limits={
        "S=2 with latency": Limit(0.8),
        "S=4 with latency": Limit(0.9),
        "one turn through an environment": Limit(0.9),
    },
    measure=measure,
    timeout_s=5400.0,
    rounds=3,
    long=True,
)
