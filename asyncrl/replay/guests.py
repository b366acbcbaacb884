"""The replay queue's side of guests: how one is welcomed, and which of its generators are up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from asyncrl.config import Config
from asyncrl.replay.guest_logs import GuestLogs
from asyncrl.replay.state import QueueState
from asyncrl.types import FIRST_GUEST
from asyncrl.wire.guest_messages import Hello, Welcome
from asyncrl.wire.guests import Guest, Guests


@dataclass
class Reception:
    """The guests of a run and their keys, as the replay queue needs them."""

    guests: Guests
    config: Config
    run_id: str
    prompt_tokens: int
    greedy_baseline: bool
    reward_model: bool
    """True if rewards come from a process of the run, which guests do not reach."""
    read_facts: Callable[[str], dict[str, str]]
    """Returns the facts of this machine with the model in a folder."""
    logs: GuestLogs
    """The logs of guests."""

    @cached_property
    def facts(self) -> dict[str, str]:
        """The facts of this machine, which are read once."""
        return self.read_facts(self.config.model.path)

    def welcome(self, guest: Guest, hello: Hello, *, ended: bool) -> Welcome:
        """The answer to a hello."""
        if problem := self._problem(hello.facts):
            return Welcome(problem, "", "", "", guest.first, 0, 0, greedy_baseline=False, ended=ended)
        return Welcome(
            "",
            self.config.run,
            self.run_id,
            self.config.to_yaml(),
            guest.first,
            guest.generators,
            self.prompt_tokens,
            greedy_baseline=self.greedy_baseline,
            ended=ended,
        )

    def _problem(self, facts: dict[str, str]) -> str:
        if problem := transport_problem(self.config):
            return problem
        if self.reward_model:
            return "the run has a reward model, which guests do not reach; use reward functions"
        differs = [
            f"{name} is {facts[name]} at the guest, {own} at the run"
            for name, own in self.facts.items()
            if name in facts and facts[name] != own
        ]
        return "; ".join(differs)


def transport_problem(config: Config) -> str:
    """The reason why guests cannot get the weights of a run with this config; empty if they can."""
    weights = config.weights
    if weights.transport == "files" and weights.url is not None:
        return ""
    return (
        f"weights.transport = {weights.transport!r}, weights.url = {weights.url!r}: guests get weights by files only; "
        "start the run with weights.transport=files, and with weights.url at a place that the guest reads"
    )


class GuestsUp:
    """The generators of guests that are up. Nobody reports one whose machine is gone: it is up until it has been silent
    for the time-out of a heartbeat."""

    def __init__(self, config: Config, state: QueueState, now_s: float) -> None:
        self._limit_s = config.launch.heartbeat_timeout_s
        known = state.measure.generators.items()
        self._heard_s = {
            index: now_s for index, one in known if index >= FIRST_GUEST and one.last_heartbeat_s is not None
        }

    def __len__(self) -> int:
        return len(self._heard_s)

    def heartbeat(self, generator: int, now_s: float) -> None:
        """Notes the ask of a generator, if it is a guest's."""
        if generator >= FIRST_GUEST:
            self._heard_s[generator] = now_s

    def lost(self, generator: int) -> None:
        """Notes that the generator has ended."""
        self._heard_s.pop(generator, None)

    def silent(self, now_s: float) -> list[int]:
        """The generators that count as lost."""
        return [index for index, heard_s in self._heard_s.items() if now_s - heard_s > self._limit_s]
