"""The environments that asyncrl comes with: a calculator, a number to guess, and a tool that runs Python."""

from __future__ import annotations

import asyncio
import re
from typing import Any

from asyncrl.environments.adapters.answers import load_reward
from asyncrl.environments.environment import Action, Environment, Step, Task, ToolEnvironment, ToolError
from asyncrl.errors import ConfigError
from asyncrl.sandbox.run_program import ProgramLimits, check_sandbox, run_program

CALL = re.compile(r"\?(\d{1,9})\*(\d{1,9})")
"""A call of the calculator in the policy's text."""


class Calculator(Environment):
    """The policy answers with the ground truth, or calls the calculator with `?A*B` and receives `>` with the product
    in as many digits as the ground truth has.

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


class GuessNumber(Environment):
    """The number of the ground truth is to be guessed within five turns. The answers to a guess are ">" (the number is
    larger), "<" (smaller) and "?" (this was no number)."""

    max_turns = 5
    returns_at_once = True

    def reset(self) -> None:
        self.secret = int(self.task.ground_truth)

    def step(self, action: Action) -> Any:
        if not action.text.isdecimal():
            return Step("?", parts={"no_number": 1.0})
        guess = int(action.text)
        if guess == self.secret:
            return Step(reward=1.0, done=True)
        return "<" if self.secret < guess else ">"


START_S = 10.0
"""Added to the time limit for the interpreter to start and end."""
MIN_MEMORY_BYTES = 64 << 20
SHOW_ERRORS = "import sys as _sys; _sys.stderr = _sys.stdout; exec(compile({source!r}, 'program.py', 'exec'))"


class Python(ToolEnvironment):
    """The policy runs Python programs in the sandbox before it answers. The reward is 1 if its answer is the ground
    truth, or the result of a function `reward(task, answer)`.

    Programs have the standard library and a separate folder, and neither network nor processes. Each is fresh: it
    knows nothing of earlier ones.
    """

    def __init__(
        self, task: Task, *, reward: str | None = None, time_limit_s: float = 5.0, memory_bytes: int = 1 << 30
    ) -> None:
        super().__init__(task)
        self._reward = load_reward(reward)
        self._limits = ProgramLimits(time_s=time_limit_s, memory_bytes=memory_bytes)

    @classmethod
    def check_setup(cls, **options: Any) -> None:
        time_limit_s, memory_bytes = options.get("time_limit_s", 5.0), options.get("memory_bytes", MIN_MEMORY_BYTES)
        if time_limit_s <= 0:
            raise ConfigError(f"option time_limit_s = {time_limit_s!r}: must be above 0")
        if memory_bytes < MIN_MEMORY_BYTES:
            raise ConfigError(
                f"option memory_bytes = {memory_bytes!r}: must be at least {MIN_MEMORY_BYTES}, which the interpreter "
                "needs"
            )
        load_reward(options.get("reward"))
        check_sandbox("the tool")

    def run(self, program: str) -> str:
        """Runs a Python program and returns what it prints.

        Args:
            program: The source of the program. Only what it prints is returned.
        """
        source = SHOW_ERRORS.format(source=program)
        outcome = run_program(source, limits=self._limits, within_s=self._limits.time_s + START_S)
        text = outcome.output.decode(errors="replace")
        if outcome.ended != "exited":
            raise ToolError(f"the program was ended: {outcome.ended}\n{text}")
        if outcome.exit_code:
            raise ToolError(f"exit code {outcome.exit_code}\n{text}")
        return text or "(no output)"

    def reward(self) -> Any:
        return self._reward(self.task, self.answer)
