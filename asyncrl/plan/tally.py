"""The counters of a simulation, and the prediction that is made from them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from asyncrl.observe.stats import Goodput
from asyncrl.plan.engine_clock import EngineClock
from asyncrl.plan.prediction import Prediction
from asyncrl.plan.workload import Setup, Workload, slowdown
from asyncrl.replay.ledger import Ledger


@dataclass(slots=True)
class Tally:
    """Sums over a simulation."""

    histogram: Counter[int] = field(default_factory=Counter[int])
    """Trained tokens by staleness."""
    signal_tokens: int = 0
    trained_signal_tokens: int = 0
    """Tokens of finished and of trained groups with signal."""
    scoring_tokens: int = 0
    """Tokens of complete groups without rewards."""
    waited_s: float = 0.0
    """Seconds in which learners waited."""
    lived_s: float = 0.0
    """Total lifetime of groups that are trained or refunded."""
    in_flight: list[float] = field(default_factory=list[float])
    """Tokens in flight at the ends of steps."""

    def prediction(
        self,
        workload: Workload,
        setup: Setup,
        ledger: Ledger,
        *,
        wall_s: float,
        mean_tokens: float,
        idle_s: float,
        environments_s: float,
        unfinished_s: float,
        running_tokens: float,
    ) -> Prediction:
        """The prediction of a simulation that ended at `wall_s`, with the lengths' mean, the engines' idle times, the
        age of groups in flight, and the tokens of groups in the engines."""
        refunded = sum(amount.groups for amount in ledger.refunded.values())
        offered_s = wall_s * setup.generators
        slowed = slowdown(min(setup.generators_per_device, setup.generators), workload.turns)
        bare = workload.engine.bare_tokens_per_s(setup.max_running_groups * setup.group_size, mean_tokens)
        finished = ledger.generated.tokens
        goodput = Goodput.of_sums(
            bare_tokens_per_s=bare / slowed,
            offered_s=offered_s,
            busy_s=offered_s - (idle_s + environments_s),
            generated=finished + self.scoring_tokens + running_tokens,
            finished=finished,
            finished_signal=self.signal_tokens,
            trained_signal=self.trained_signal_tokens,
        )
        return Prediction(
            setup=setup,
            wall_s=wall_s,
            tokens_per_s=ledger.trained.tokens / wall_s,
            signal_tokens_per_s=self.trained_signal_tokens / wall_s,
            goodput=goodput,
            generated_tokens_per_s=(finished + self.scoring_tokens) / wall_s,
            generator_idle=idle_s / offered_s,
            environments=environments_s / offered_s,
            learner_idle=self.waited_s / wall_s,
            staleness=[self.histogram[staleness] for staleness in range(max(self.histogram, default=-1) + 1)],
            tokens_in_flight=float(np.mean(self.in_flight)),
            groups_in_flight=(self.lived_s + unfinished_s) / wall_s,
            life_s=self.lived_s / (ledger.trained.groups + refunded),
            leased_groups=ledger.issued,
            refunded_groups=refunded,
        )


def total_idle_s(engines: Sequence[EngineClock]) -> tuple[float, float]:
    """The seconds in which the engines had nothing to do, and in which all their episodes waited."""
    return sum(engine.idle_s for engine in engines), sum(engine.environments_s for engine in engines)
