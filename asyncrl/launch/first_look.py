"""A look at the first rewards of a run: when all are 0, the run says so and shows what the model wrote."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import structlog

from asyncrl.config.config import Config
from asyncrl.config.sections import ENVIRONMENT
from asyncrl.launch.conversations import CONVERSATION, in_one_line
from asyncrl.launch.samples import Query, find_samples
from asyncrl.samples import Samples
from asyncrl.util.text import printable, shortened

log = structlog.get_logger()

LOOK_AFTER_S = 60.0
"""Time after the first rewards. A model that is right once in a thousand completions scores in it."""
SHOWN = 3
TEXT_CHARACTERS = 300


class FirstLook:
    """Warns, once in a run, when there is no reward but 0 a minute after the first ones. Without a signal the queue
    replaces group after group, and only `MAX_REFUNDS_IN_A_ROW` would end the run."""

    def __init__(self, run_dir: Path, config: Config, say: Callable[[str], None]) -> None:
        self._run_dir = run_dir
        self._config = config
        self._say = say
        self._first_s: float | None = None
        self._is_over = False

    def update(self, rewards: Mapping[str, int], now_s: float) -> None:
        """Takes what `asyncrl.replay.metrics.stats.count_rewards` returns."""
        if self._is_over or not (count := rewards["scored"] + rewards["failed"]):
            return
        if self._first_s is None:
            self._first_s = now_s
        if not rewards["all_zero"]:
            self._is_over = True
        elif now_s - self._first_s >= LOOK_AFTER_S:
            self._is_over = True
            self._warn(count, rewards["failed"])

    def _warn(self, count: int, failed: int) -> None:
        what = f"warning: all {count:,} rewards so far are 0"
        what += f", {failed:,} of them because they could not be computed" if failed else ""
        log.warning("all rewards are 0", trajectories=count, failed=failed)
        self._say(f"{what}; nothing can be learned from them. The latest:")
        for line in self._samples():
            self._say(line)
        self._say(f"{self._questions()} More: asyncrl samples {self._run_dir} --refunded")

    def _questions(self) -> str:
        rewards = f"Is rewards = {self._config.rewards!r} right for this data?"
        if self._config.environment.name is None:
            form = "Does the prompt ask for the form that it looks for?"
            return f"{rewards} {form} Is generator.max_new_tokens enough for the answer?"
        questions = (
            "Does any episode come to what the environment rewards? Are calls of tools read, and do they succeed "
            "(reward_part/calls and reward_part/calls_failed in the metrics)? Are environment.max_turns and "
            "generator.max_new_tokens enough (environment/ended_max_turns, environment/ended_window)? See every turn: "
            f"asyncrl play --config {self._run_dir / 'config.yaml'}."
        )
        return questions if self._config.rewards == ENVIRONMENT else f"{rewards} {questions}"

    def _samples(self) -> list[str]:
        try:
            refunded, trained = (
                find_samples(self._run_dir, Query(refunded=refunded, limit=SHOWN)).samples for refunded in (True, False)
            )
        except Exception as error:  # a tokenizer may raise anything
            return [f"  (no samples: {error})"]
        return [_line(row) for row in Samples.concat([refunded, trained]).select(slice(SHOWN)).table.to_pylist()]


def _line(row: Mapping[str, Any]) -> str:
    reward = f"no reward: {row['error']}" if row["error"] else f"reward {row['reward']:g}"
    lines = row.get(CONVERSATION)
    prompt, completion = (row["prompt"], row["completion"]) if lines is None else in_one_line(lines)
    pairs = {"prompt": prompt, "completion": completion, "truth": row["ground_truth"]}
    texts = [f"{name} {shortened(text, TEXT_CHARACTERS)!r}" for name, text in pairs.items() if text is not None]
    return printable(f"  {', '.join(texts)}, {row['status']}, {reward}")
