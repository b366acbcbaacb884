"""The groups of a simulation, drawn from its workload."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from asyncrl.plan.episodes import turns_of
from asyncrl.plan.simulated_engine import SimulatedEngine
from asyncrl.plan.turns_engine import TurnsEngine
from asyncrl.plan.workload import Setup, Workload

Engine = SimulatedEngine | TurnsEngine
DRAWN_AT_ONCE = 4096


@dataclass(slots=True)
class Group:
    """A group in flight."""

    generator: int
    leased_s: float
    tokens: int
    prompt_tokens: int
    """Sum of the prompt tokens of all members."""
    signal: bool
    refunded: bool
    by_version: dict[int, int] = field(default_factory=dict[int, int])
    """Tokens by the version that sampled them; filled when the last member has ended."""


class Draws:
    """Draws rows of the workload, and starts their groups."""

    def __init__(self, workload: Workload, setup: Setup, seed: int) -> None:
        lengths = workload.lengths.of_size(setup.group_size, seed=seed)
        self._cost, self._slots = workload.engine, setup.max_running_groups * setup.group_size
        self._completions: list[list[int]] = lengths.completions.tolist()
        self._prompts: list[int] = lengths.prompts.tolist()
        self.mean_tokens = float(lengths.completions.mean())
        self._signal: list[bool] = lengths.signal.tolist()
        refunded = lengths.failed | ~lengths.signal if setup.zero_variance == "refund" else lengths.failed
        self._refunded: list[bool] = refunded.tolist()
        self._episodes = lengths.episodes
        self._dice, self._waits = np.random.default_rng(seed), np.random.default_rng([seed, 1])
        self._drawn: list[int] = []

    def engine(self) -> Engine:
        """Returns an engine for these groups."""
        kind = SimulatedEngine if self._episodes is None else TurnsEngine
        return kind(self._cost, slots=self._slots)

    def row(self) -> int:
        """Returns a row."""
        if not self._drawn:
            self._drawn = self._dice.integers(len(self._completions), size=DRAWN_AT_ONCE).tolist()
        return self._drawn.pop()

    def start(self, engine: Engine, number: int, row: int, *, generator: int, now_s: float) -> Group:
        """Starts the group of this row in an engine."""
        lengths, episodes = self._completions[row], self._episodes
        if isinstance(engine, SimulatedEngine) or episodes is None:
            engine.add(number, lengths)  # type: ignore[arg-type]
        else:
            waits = zip(
                episodes.turns[row].tolist(),
                episodes.wait_s[row].tolist(),
                episodes.slow_turns[row].tolist(),
                strict=True,
            )
            turns = [turns_of(tokens, *own, self._waits) for tokens, own in zip(lengths, waits, strict=True)]
            engine.add(number, turns)
        prompt_tokens = self._prompts[row] * len(lengths)
        signal, refunded = self._signal[row], self._refunded[row]
        return Group(generator, now_s, sum(lengths), prompt_tokens, signal, refunded)
