"""The list of runs: a card for each, made again only when the run's files have changed."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from asyncrl.errors import ConfigError
from asyncrl.launch.run_dir import is_running
from asyncrl.observe.curves import Row, decode_row
from asyncrl.observe.destinations import METRICS_FILE
from asyncrl.observe.document import RUNNING, UNFINISHED
from asyncrl.types import goodput_of
from asyncrl.util.files import read_json
from asyncrl.util.text import redact

CURVE_POINTS = 60
BLOCK_BYTES = 16 << 10
"""Bytes that are read for a point of a card's curve."""
BLOCK_ROWS = 4
MAX_VERDICT_CHARACTERS = 300
REWARD = "reward/mean"
_STEPS = re.compile(r"^steps: (\d+)$", re.MULTILINE)
"""The number of steps in a resolved config: to parse the YAML of a hundred runs takes seconds."""


@dataclass(frozen=True, slots=True)
class Card:
    """A run in the list."""

    name: str
    status: str
    verdict: str = ""
    step: int | None = None
    steps: int | None = None
    """Steps that the run is configured for."""
    reward: tuple[float, float] | None = None
    """Mean of the first and of the last steps."""
    tokens_per_s: float | None = None
    goodput: float | None = None
    alarms: int = 0
    """Active alarms of a collapse."""
    updated_s: float = 0.0
    """Unix time of the last change."""
    curve: list[float] = field(default_factory=list[float])
    """Rewards of steps that are evenly spread over `metrics.jsonl`."""


class RunList:
    """The runs in a folder. Safe to use from several threads."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._known: dict[str, tuple[Any, Card]] = {}
        """Signature of the files, and the card made of them, by name."""

    def paths(self) -> dict[str, Path]:
        """The folders of runs by name. Raises ConfigError if the folder cannot be read."""
        try:
            with os.scandir(self._folder) as entries:
                paths = {entry.name: Path(entry.path) for entry in entries if entry.is_dir()}
        except OSError as error:
            raise ConfigError(f"{self._folder}: cannot be read: {error.strerror}") from None
        return {name: path for name, path in sorted(paths.items()) if (path / "config.yaml").is_file()}

    def cards(self) -> list[dict[str, Any]]:
        """The cards of all runs, by name."""
        with self._lock:
            paths = self.paths()
            self._known = {name: self._card(name, path) for name, path in paths.items()}
            return [asdict(card) for _, card in self._known.values()]

    def _card(self, name: str, path: Path) -> tuple[Any, Card]:
        running = is_running(path)
        signature = (running, *(_stamp(path / file) for file in ("config.yaml", "summary.json", METRICS_FILE)))
        known = self._known.get(name)
        return known if known is not None and known[0] == signature else (signature, make_card(path, running=running))


def make_card(path: Path, *, running: bool) -> Card:
    """The card of the run in this folder; the time that it takes does not depend on the run's length."""
    metrics, summary = path / METRICS_FILE, _summary(path)
    updated_s = max((file.stat().st_mtime for file in (metrics, path / "config.yaml") if file.is_file()), default=0.0)
    try:
        rows = list(_spread_rows(metrics))
    except ValueError as error:
        rows = []
        summary.setdefault("error", f"{metrics}: a line is not JSON: {error}")
    rewards = [row[REWARD] for row in rows if REWARD in row]
    last = rows[-1] if rows else {}
    tenth = max(1, len(rewards) // 10)
    measured = (fmean(rewards[:tenth]), fmean(rewards[-tenth:])) if rewards else None
    first, latest = summary.get("reward_first"), summary.get("reward_last")
    verdict = summary.get("error") or summary.get("bottleneck") or ""
    return Card(
        path.name,
        summary.get("status", RUNNING if running else UNFINISHED),
        redact(verdict)[:MAX_VERDICT_CHARACTERS],
        step=summary.get("steps", int(last["step"]) if last else None),
        steps=_steps(path / "config.yaml"),
        reward=measured if first is None or latest is None else (first, latest),
        tokens_per_s=summary.get("tokens_per_s", last.get("throughput/trained_tokens_per_s")),
        goodput=summary.get("goodput", goodput_of(last)).get("total"),
        alarms=int(last.get("collapse/alarms", 0)),
        updated_s=updated_s,
        curve=[float(f"{reward:.4g}") for reward in rewards],
    )


def _summary(path: Path) -> dict[str, Any]:
    file = path / "summary.json"
    if not file.is_file():
        return {}
    try:
        return read_json(file)
    except ConfigError as error:
        return {"status": UNFINISHED, "error": str(error)}


def _steps(config: Path) -> int | None:
    found = _STEPS.search(config.read_text(encoding="utf-8", errors="replace"))
    return int(found[1]) if found else None


def _stamp(file: Path) -> tuple[int, int] | None:
    try:
        status = file.stat()
    except FileNotFoundError:
        return None
    return status.st_size, status.st_mtime_ns


def _spread_rows(file: Path) -> Iterator[Row]:
    """At most CURVE_POINTS rows: each has the mean reward of a few adjacent steps, and is otherwise the last of them.
    Raises ValueError if a line is not JSON."""
    if not file.is_file():
        return
    with file.open("rb") as content:
        size = os.fstat(content.fileno()).st_size
        if size <= CURVE_POINTS * BLOCK_BYTES:
            rows = _steps_of(content.read().splitlines(keepends=True))
            part = max(1, -(-len(rows) // CURVE_POINTS))
            yield from (_mean_row(rows[begin : begin + part]) for begin in range(0, len(rows), part))
            return
        for number in range(CURVE_POINTS):
            content.seek(number * (size - BLOCK_BYTES) // (CURVE_POINTS - 1))
            lines = content.read(BLOCK_BYTES).splitlines(keepends=True)
            if rows := _steps_of(lines[1:][-BLOCK_ROWS:]):
                yield _mean_row(rows)


def _steps_of(lines: list[bytes]) -> list[Row]:
    """The rows of steps in the complete lines."""
    rows = [decode_row(line) for line in lines if line.endswith(b"\n")]
    return [row for row in rows if REWARD in row]


def _mean_row(rows: list[Row]) -> Row:
    return rows[-1] | {REWARD: fmean(row[REWARD] for row in rows)}
