"""Whether training gets on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from asyncrl.config import Config
from asyncrl.errors import RunError


class Progress:
    """Watches for steps, evaluations and steps of a catch-up that end, and, while there is no batch for the
    learners, for generated tokens: a step whose completions take long is none that hangs."""

    def __init__(self, config: Config, now_s: float) -> None:
        self._config = config
        self._batch_groups = (config.replay.held_steps + 1) * config.replay.groups_per_step
        """Finished groups that make a batch."""
        self._seen: tuple[Any, ...] = ()
        self._since_s = now_s
        self._missing_s = now_s
        """When something was last not up."""
        self._blamed: int | None = None
        """The step that the learners were restarted for."""

    def check(self, status: dict[str, Any], *, learners_started_s: float, missing: Sequence[str], now_s: float) -> str:
        """Why the learners must be started again, or nothing. Raises RunError when that would not help."""
        # A batch that lies there to be taken is the learners' turn, too.
        training = status["taken"] or status["finished"] >= self._batch_groups
        tokens = None if training else sum(generator["tokens"] for generator in status["generators"].values())
        again = (status["catching_up"] or {}).get("step")
        seen = status["step"], status["eval"]["prompts_done"], again, training, tokens
        if seen != self._seen:
            self._seen, self._since_s = seen, now_s
        launch = self._config.launch
        limit_s, since_s = launch.progress_timeout_s, max(self._since_s, learners_started_s)
        if missing:
            limit_s, self._missing_s = max(limit_s, launch.start_timeout_s), now_s
        if now_s - (since_s if missing else max(since_s, self._missing_s)) <= limit_s:
            return ""
        reason = (
            f"no optimizer step ended{'' if training else ', and no token was generated,'} within "
            f"launch.progress_timeout_s = {launch.progress_timeout_s:g} s: "
            + _describe(status)
            + (f"; not up: {', '.join(missing)}" if missing else "")
        )
        if not training or self._blamed == status["step"]:
            raise RunError(reason)
        self._blamed = status["step"]
        return reason


def _describe(status: dict[str, Any]) -> str:
    running = (
        f", evaluation of version {one['version']} at {one['done']} of {one['prompts']} prompts"
        for one in status["eval"]["running"]
    )
    return (
        f"step {status['step']}, {status['leased']} groups leased, {status['finished']} waiting for the learner"
        + "".join(running)
    )
