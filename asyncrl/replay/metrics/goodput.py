"""Goodput: the trained tokens with signal, as a fraction of what bare engines make in the same time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod

from msgspec.structs import replace

from asyncrl.replay.metrics.stats import GeneratorState
from asyncrl.types import GOODPUT_FACTORS
from asyncrl.util.durable import Durable

ENGINE_PHASES, LOOP_PHASES = ("engine", "requests"), ("rewards", "messages")
"""The phases of a generator's work that a bare engine has too, and those that it lacks."""


@dataclass(frozen=True, slots=True)
class Goodput:
    """The factors of the goodput, which is their product."""

    engine: float
    """Tokens per second of engines that work, by those of bare engines."""
    admitted: float
    """Fraction of the time in which engines worked."""
    signal: float
    """Fraction of the tokens of finished groups that are of groups with signal."""
    trained: float
    """Tokens trained with signal, by those generated with signal."""

    @classmethod
    def of_sums(
        cls, *, bare_tokens_per_s: float, offered_s: float, busy_s: float,
        generated: float, finished: float, finished_signal: float, trained_signal: float,
    ) -> Goodput:  # fmt: skip
        """The goodput `trained_signal / (bare_tokens_per_s * offered_s)` in its factors.

        Seconds are those of all generators together: `offered_s` in which they could work and `busy_s` in which they
        did. The last four are action tokens: generated, of finished groups, and of groups with signal, which may be 0.
        """
        return cls(
            engine=generated / (bare_tokens_per_s * busy_s),
            admitted=busy_s / offered_s,
            signal=finished_signal / finished,
            trained=trained_signal * finished / (generated * finished_signal) if finished_signal else 0.0,
        )

    @property
    def total(self) -> float:
        """The goodput."""
        return prod(getattr(self, name) for name in GOODPUT_FACTORS)

    def table(self) -> dict[str, float]:
        """The goodput as "total", and its factors by name."""
        return {"total": self.total} | {name: getattr(self, name) for name in GOODPUT_FACTORS}


class GoodputSums(Durable):
    """The sums over a run that its goodput is made of. Tokens are action tokens."""

    offered_s: float = 0.0
    """Seconds in which the generators could work, up to the last step: each step's seconds times the wanted
    generators."""
    finished: int = 0
    """Tokens of groups that arrived. The next two are those of groups with signal."""
    finished_signal: int = 0
    trained_signal: int = 0

    def arrived(self, tokens: int, *, signal: bool) -> None:
        """Counts a group."""
        self.finished += tokens
        self.finished_signal += tokens if signal else 0

    def after_step(self, *, offered_s: float, trained_signal: int) -> GoodputSums:
        """The sums after another step with these seconds and tokens."""
        return replace(self, offered_s=self.offered_s + offered_s, trained_signal=self.trained_signal + trained_signal)

    def metrics(self, generators: Mapping[int, GeneratorState], *, slots: int) -> dict[str, float]:
        """`goodput/NAME` with the rate of a bare engine; empty while there is no goodput. `slots` are the sequences
        that run at once in an engine."""
        every = generators.values()
        known = {
            "bare_tokens_per_s": mean_bare_tokens_per_s(every, slots=slots),
            "offered_s": self.offered_s,
            "busy_s": sum(g.busy_s for g in every),
            "generated": sum(g.tokens for g in every),
            "finished": self.finished,
        }
        if not min(known.values()) > 0:
            return {}
        goodput = Goodput.of_sums(**known, finished_signal=self.finished_signal, trained_signal=self.trained_signal)
        table = goodput.table() | {"bare_tokens_per_s": known["bare_tokens_per_s"]}
        return {f"goodput/{name}": value for name, value in table.items()}


def mean_bare_tokens_per_s(generators: Iterable[GeneratorState], *, slots: int) -> float:
    """Mean of `bare_tokens_per_s` over the time of the generators that know their costs; 0 if none does."""
    known = [g for g in generators if len(g.costs) >= 3 and g.tokens and g.samples]
    rates = [
        bare_tokens_per_s(
            *g.costs[:3],
            slots=slots,
            mean_tokens=g.tokens / g.samples,
            bare_fraction=bare_fraction({name: getattr(g, f"{name}_s") for name in (*ENGINE_PHASES, *LOOP_PHASES)}),
        )
        for g in known
    ]
    seconds = [sum(g.seconds.values()) for g in known]
    total_s = sum(seconds)
    return sum(rate * own_s for rate, own_s in zip(rates, seconds, strict=True)) / total_s if total_s else 0.0


def bare_tokens_per_s(
    base_s: float, sequence_s: float, request_s: float, *, slots: int, mean_tokens: float, bare_fraction: float
) -> float:
    """The rate of an engine with all slots busy, from its seconds per step, per sequence in a step and per request; 0
    if they are 0. `bare_fraction` is the part of them that the engine takes, without the generator's loop."""
    step_s = (base_s + sequence_s * slots + request_s * slots / mean_tokens) * bare_fraction
    return slots / step_s if step_s > 0 else 0.0


def bare_fraction(phases: Mapping[str, float]) -> float:
    """The part of a generator's steps, with the work around them, that a bare engine has too; `phases` are the seconds
    or fractions of GENERATOR_PHASES."""
    engine, loop = (sum(phases[name] for name in names) for names in (ENGINE_PHASES, LOOP_PHASES))
    return engine / (engine + loop) if engine else 1.0
