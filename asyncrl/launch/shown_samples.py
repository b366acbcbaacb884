"""The samples that the live view shows: those of the latest recorded step."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import structlog

from asyncrl.config.config import Config
from asyncrl.errors import ConfigError, DataError
from asyncrl.launch.bottleneck import Background
from asyncrl.launch.conversations import CONVERSATION, Conversations, in_one_line
from asyncrl.launch.first_look import FirstLook
from asyncrl.launch.samples import conversations, run_decoder
from asyncrl.observe.panel import ShownSample
from asyncrl.samples.book import CHOSEN, FOLDER, TRAINED, read_latest
from asyncrl.util.model_files import Decoder
from asyncrl.util.text import printable, shortened

log = structlog.get_logger()

TEXT_CHARACTERS = 120


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
    prompt, completion = (printable(shortened(text, TEXT_CHARACTERS)) for text in texts)
    reward = f"no reward: {row['error']}" if row["error"] else f"reward {row['reward']:g}"
    facts = (
        f"step {row['step']}, {row[CHOSEN]}: {reward}, staleness {row['staleness']}, {row['num_action_tokens']} tokens"
    )
    return ShownSample(printable(facts), prompt, completion)
