"""A tool that runs Python: the policy may compute before it answers."""

from __future__ import annotations

from typing import Any

from asyncrl.environments.adapters.answers import load_reward
from asyncrl.environments.environment import Task
from asyncrl.environments.tools import ToolEnvironment, ToolError
from asyncrl.errors import ConfigError
from asyncrl.sandbox.run import Limits, check_sandbox, run_program

START_S = 10.0
"""Added to the time limit for the interpreter to start and end."""
MIN_MEMORY_BYTES = 64 << 20
SHOW_ERRORS = "import sys as _sys; _sys.stderr = _sys.stdout; exec(compile({source!r}, 'program.py', 'exec'))"


class Python(ToolEnvironment):
    """The policy runs Python programs in the sandbox before it answers. The reward is 1 if its answer is the ground
    truth, or that of a function `reward(task, answer)`.

    Programs have the standard library and a folder of their own, and neither network nor processes. Each is fresh: it
    knows nothing of earlier ones.
    """

    def __init__(
        self, task: Task, *, reward: str | None = None, time_limit_s: float = 5.0, memory_bytes: int = 1 << 30
    ) -> None:
        super().__init__(task)
        self._reward = load_reward(reward)
        self._limits = Limits(time_s=time_limit_s, memory_bytes=memory_bytes)

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
