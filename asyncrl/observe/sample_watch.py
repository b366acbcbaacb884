"""Follows the samples of a live run: shows the latest ones, and warns when all rewards are 0."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import structlog

from asyncrl.config.config import Config
from asyncrl.config.sections import ENVIRONMENT
from asyncrl.errors import ConfigError, DataError
from asyncrl.launch.bottleneck import Background
from asyncrl.observe.live import ShownSample
from asyncrl.observe.sample_search import CONVERSATION, Query, RunTexts, find_samples, in_one_line
from asyncrl.observe.samples import CHOSEN, FOLDER, TRAINED, Samples, read_latest
from asyncrl.util.text import printable, shortened

log = structlog.get_logger()

CHECK_AFTER_S = 60.0
"""Time after the first rewards. A model that is right once in a thousand completions scores in it."""
SHOWN = 3
TEXT_CHARACTERS, SHOWN_CHARACTERS = 300, 120


class SampleWatch:
    """Reads and decodes samples for the live view and checks the first rewards, in parallel with the supervision."""

    def __init__(self, run_dir: Path, config: Config, say: Callable[[str], None]) -> None:
        self._check = ZeroRewardCheck(run_dir, config, say)
        self._shown = ShownSamples(run_dir, config)
        self._background = Background[list[ShownSample]]("samples")

    def poll(self, status: dict[str, Any]) -> list[ShownSample]:
        """Returns new samples to show, if there are any by now, and reads on in the background."""
        samples = self._background.poll() or []
        self._background.start(partial(self._read, status))
        return samples

    def _read(self, status: dict[str, Any]) -> list[ShownSample]:
        self._check.update(status["rewards"], time.monotonic())
        return self._shown.update() if status["step"] > 0 else []


class ShownSamples:
    """Follows `samples/trained.jsonl` of a run."""

    def __init__(self, run_dir: Path, config: Config) -> None:
        self._run_dir = run_dir
        self._config = config
        self._file = run_dir / FOLDER / TRAINED
        self._texts: RunTexts | None = None
        self._bytes = 0
        self._is_over = not config.observe.samples

    def update(self) -> list[ShownSample]:
        """Returns the samples of the latest recorded step; none if nothing new is recorded."""
        if self._is_over or not self._file.is_file() or (size := self._file.stat().st_size) == self._bytes:
            return []
        self._bytes = size
        try:
            self._texts = self._texts or RunTexts(self._run_dir, self._config)
            samples = self._texts.decode(read_latest(self._run_dir))
        except (ConfigError, DataError) as error:
            self._is_over = True
            log.warning("samples are not shown", error=str(error))
            return []
        samples = samples.select(samples.begins_member).select(slice(self._config.observe.samples))
        rows = self._texts.converse(samples).table.to_pylist(maps_as_pydicts="strict")
        return [shown_sample(row) for row in rows]


def shown_sample(row: Mapping[str, Any]) -> ShownSample:
    """A sample for the live view, its texts shortened."""
    prompt, completion = (printable(shortened(text, SHOWN_CHARACTERS)) for text in _texts(row))
    tokens = row["num_action_tokens"]
    facts = f"step {row['step']}, {row[CHOSEN]}: {_reward(row)}, staleness {row['staleness']}, {tokens} tokens"
    return ShownSample(printable(facts), prompt, completion)


def _texts(row: Mapping[str, Any]) -> tuple[str, str]:
    return (row["prompt"], row["completion"]) if row.get(CONVERSATION) is None else in_one_line(row[CONVERSATION])


def _reward(row: Mapping[str, Any]) -> str:
    return f"no reward: {row['error']}" if row["error"] else f"reward {row['reward']:g}"


class ZeroRewardCheck:
    """Warns, once in a run, when there is no reward but 0 a minute after the first ones. Without a signal the queue
    replaces group after group, and only `MAX_REFUNDS_IN_A_ROW` would end the run."""

    def __init__(self, run_dir: Path, config: Config, say: Callable[[str], None]) -> None:
        self._run_dir = run_dir
        self._config = config
        self._say = say
        self._first_s: float | None = None
        self._is_over = False

    def update(self, rewards: Mapping[str, int], now_s: float) -> None:
        """Takes what `count_rewards` returns."""
        if self._is_over or not (count := rewards["scored"] + rewards["failed"]):
            return
        if self._first_s is None:
            self._first_s = now_s
        if not rewards["all_zero"]:
            self._is_over = True
        elif now_s - self._first_s >= CHECK_AFTER_S:
            self._is_over = True
            self._warn(count, rewards["failed"])

    def _warn(self, count: int, failed: int) -> None:
        log.warning("all rewards are 0", trajectories=count, failed=failed)
        causes = f", {failed:,} of them because they could not be computed" if failed else ""
        self._say(f"warning: all {count:,} rewards so far are 0{causes}; nothing can be learned from them. The latest:")
        try:
            parts = [find_samples(self._run_dir, Query(refunded=flag, limit=SHOWN)).samples for flag in (True, False)]
            for row in Samples.concat(parts).select(slice(SHOWN)).table.to_pylist():
                self._say(_line(row))
        except Exception as error:  # a tokenizer may raise anything
            self._say(f"  (no samples: {error})")
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


def _line(row: Mapping[str, Any]) -> str:
    texts = dict(zip(("prompt", "completion"), _texts(row), strict=True)) | {"truth": row["ground_truth"]}
    shown = [f"{name} {shortened(text, TEXT_CHARACTERS)!r}" for name, text in texts.items() if text is not None]
    return printable(f"  {', '.join(shown)}, {row['status']}, {_reward(row)}")
