"""A calculator: the policy may ask for the value of a product before it answers."""

from __future__ import annotations

import asyncio
import re
from typing import Any

from asyncrl.environments.environment import Action, Environment, Step, Task

CALL = re.compile(r"\?(\d{1,9})\*(\d{1,9})")
"""A call of the calculator in the policy's text."""


class Calculator(Environment):
    """The policy answers with the ground truth, or calls the calculator with `?A*B` and hears `>` with the product in
    as many digits as the ground truth has.

    The part "calls" of the reward counts the calls of an episode.
    """

    max_turns = 3
    returns_at_once = True  # with latency, `step` is a coroutine

    def __init__(self, task: Task, *, broken: bool = False, latency_s: float = 0.0, latency_share: float = 1.0) -> None:
        """A `broken` calculator answers with question marks. Calls take `latency_s` in `latency_share` of them."""
        super().__init__(task)
        self._broken, self._latency_s, self._latency_share = broken, latency_s, latency_share

    async def step(self, action: Action) -> Any:
        call = CALL.fullmatch(action.text)
        if call is None:
            return Step(reward=float(action.text == self.task.ground_truth), done=True, parts={"calls": 0.0})
        if self._latency_s and self.random.random() < self._latency_share:
            await asyncio.sleep(self._latency_s)
        digits = len(self.task.ground_truth)
        product = f"{int(call[1]) * int(call[2]):0{digits}d}"
        return Step(">" + ("?" * digits if self._broken else product), parts={"calls": 1.0})
