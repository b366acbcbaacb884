"""A look at the first rewards of a run: when all are 0, the run reports that and shows completions."""

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
from asyncrl.observe.sample_search import (
    CONVERSATION,
    Conversations,
    Query,
    conversations,
    find_samples,
    in_one_line,
    run_decoder,
)
from asyncrl.observe.samples import CHOSEN, FOLDER, TRAINED, Samples, read_latest
from asyncrl.util.model_files import Decoder
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
        """Takes what `count_rewards` returns."""
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


SHOWN_CHARACTERS = 120


class ShownSamples:
    """Follows `samples/trained.jsonl` of a run."""

    def __init__(self, run_dir: Path, config: Config) -> None:
        self._run_dir = run_dir
        self._config = config
        self._file = run_dir / FOLDER / TRAINED
        self._decoder: Decoder | None = None
        self._shown: Conversations | None = None
        self._bytes = 0
        self._is_over = not config.observe.samples

    def update(self) -> list[ShownSample]:
        """Returns the samples of the latest recorded step; none if nothing new is recorded."""
        if self._is_over or not self._file.is_file() or (size := self._file.stat().st_size) == self._bytes:
            return []
        self._bytes = size
        try:
            if self._decoder is None:
                self._decoder = run_decoder(self._run_dir, self._config)
                self._shown = conversations(self._run_dir, self._config, self._decoder)
            samples = read_latest(self._run_dir).decode(self._decoder)
        except (ConfigError, DataError) as error:
            self._is_over = True
            log.warning("samples are not shown", error=str(error))
            return []
        samples = samples.select(samples.begins_member).select(slice(self._config.observe.samples))
        if self._shown is not None:
            samples = self._shown.add_to(samples)
        return [shown_sample(row) for row in samples.table.to_pylist(maps_as_pydicts="strict")]


class Onlooker:
    """Reads and decodes samples for the live view and checks the first rewards, in parallel with the supervision."""

    def __init__(self, run_dir: Path, config: Config, say: Callable[[str], None]) -> None:
        self._first_look = FirstLook(run_dir, config, say)
        self._shown = ShownSamples(run_dir, config)
        self._background = Background[list[ShownSample]]("samples")

    def look(self, status: dict[str, Any]) -> list[ShownSample]:
        """Returns new samples to show, if there are any by now, and looks again in the background."""
        samples = self._background.poll() or []
        self._background.start(partial(self._look, status))
        return samples

    def _look(self, status: dict[str, Any]) -> list[ShownSample]:
        self._first_look.update(status["rewards"], time.monotonic())
        return self._shown.update() if status["step"] > 0 else []


def shown_sample(row: Mapping[str, Any]) -> ShownSample:
    """A sample for the live view, its texts shortened."""
    lines = row.get(CONVERSATION)
    texts = (row["prompt"], row["completion"]) if lines is None else in_one_line(lines)
    prompt, completion = (printable(shortened(text, SHOWN_CHARACTERS)) for text in texts)
    reward = f"no reward: {row['error']}" if row["error"] else f"reward {row['reward']:g}"
    facts = (
        f"step {row['step']}, {row[CHOSEN]}: {reward}, staleness {row['staleness']}, {row['num_action_tokens']} tokens"
    )
    return ShownSample(printable(facts), prompt, completion)
