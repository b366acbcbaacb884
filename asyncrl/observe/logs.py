"""Structured logs: one JSON object a line, one file per role."""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Iterable, Iterator, MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from heapq import merge
from pathlib import Path
from typing import Any

import structlog

from asyncrl.util.text import printable, redact


def configure_logs(run_dir: Path, role: str, *, host: str = "") -> Path:
    """Sends this process's events, and other libraries' warnings, to `logs/<role>.jsonl`; returns its path. Events have
    the `host` unless it is the launcher's own.

    Secrets (asyncrl/util/text.py) are shown as ***."""
    path = run_dir / "logs" / f"{role}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(path)
    shared = [
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
    ]
    render = structlog.processors.JSONRenderer()
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=[structlog.stdlib.add_logger_name, *shared],
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, _redacted, render],
    )
    handler.setFormatter(formatter)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        wrapper_class=structlog.make_filtering_bound_logger("info"),
        logger_factory=lambda *_: logging.getLogger("asyncrl"),
        cache_logger_on_first_use=True,
    )
    logging.getLogger("asyncrl").setLevel(logging.INFO)
    structlog.contextvars.bind_contextvars(role=role, **({"host": host} if host else {}))
    return path


def _redacted(_: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    return redact(dict(event))


def last_error(path: Path, *, start_bytes: int = 0) -> str:
    """The text of the last event of level error or above, from byte `start_bytes` of a log file on; "" without one."""
    for event in _latest_events(path, start_bytes):
        if event.get("level") in ("error", "critical"):
            return str(event.get("error") or event.get("event"))
    return ""


def last_phase(path: Path) -> str:
    """The phase of a role's start by its last event that names one, and for how long: "building its engine
    for 60 s"; "" without one."""
    for event in _latest_events(path):
        if "doing" in event:
            seconds = time.time() - datetime.fromisoformat(event["timestamp"]).timestamp()
            return f"{event['doing']} for {max(seconds, 0.0):.0f} s"
        if event.get("event") == "started":
            break
    return ""


def _latest_events(path: Path, start_bytes: int = 0) -> Iterator[dict[str, Any]]:
    """Yields the events of a log file from a byte on, the last one first."""
    if not path.is_file():
        return
    for line in reversed(path.read_bytes()[start_bytes:].decode(errors="replace").splitlines()):
        with suppress(json.JSONDecodeError):
            yield json.loads(line)


LEVELS = ("debug", "info", "warning", "error", "critical")
CHUNK_BYTES = 1 << 16
"""A file is read in pieces of this size, and is not open in between: a run may have a thousand of them."""
INDENT = "    "
_COLORS = re.compile("\x1b\\[[0-9;]*m")
_PLAIN = re.compile(r"[^\s\"'=]+")
"""A text that needs no quotes as a value."""
_BLOCKS = ("exception", "stack")
"""Fields of several lines."""


@dataclass(frozen=True, slots=True)
class LogEntry:
    """An entry of a log, or a line of it that is none, as a killed process leaves one."""

    time_s: float
    """Seconds since the epoch; of a line that is no entry, the previous entry's."""
    role: str
    """Role, with its host where it is known: `generator-0@host`."""
    level: str
    """One of LEVELS; empty for a line that is no entry."""
    lines: tuple[str, ...]
    """Event and fields in the first line; further lines of the event, and tracebacks."""

    def text(self, role_width: int) -> str:
        """The entry as it is shown, further lines indented."""
        when = datetime.fromtimestamp(self.time_s).isoformat(" ", "milliseconds")
        first = f"{when} {self.role:<{role_width}} {self.level or '?':<8} {self.lines[0]}"
        return "\n".join([first, *(INDENT + line for line in self.lines[1:])])


class LineReader:
    """Reads the complete lines of a file that grows, from where it stopped the last time. A file that was replaced or
    cut is read from its start."""

    def __init__(self, path: Path, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._path, self._chunk_bytes = path, chunk_bytes
        self._inode = self._offset = 0
        self.num_starts = 0
        """How often `lines` began at the start of a file."""

    def lines(self, *, with_rest: bool) -> Iterator[str]:
        """Yields the lines up to the present end; `with_rest` also a last one that no newline ends."""
        for chunk in self.chunks(with_rest=with_rest):
            yield from chunk.decode(errors="replace").removesuffix("\n").split("\n")

    def chunks(self, *, with_rest: bool = False) -> Iterator[bytes]:
        """Yields the same as pieces of several lines."""
        try:
            status = self._path.stat()
        except FileNotFoundError:  # the run's folder was moved aside
            return
        if status.st_ino != self._inode or status.st_size < self._offset:
            self._inode, self._offset = status.st_ino, 0
            self.num_starts += 1
        most_bytes = self._chunk_bytes
        while self._offset < status.st_size:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                chunk = file.read(min(most_bytes, status.st_size - self._offset))
            end = chunk.rfind(b"\n") + 1
            if not end and self._offset + len(chunk) < status.st_size and len(chunk) == most_bytes:
                most_bytes *= 2
                continue
            if not chunk or not (end or with_rest):
                return
            complete = chunk[:end] if end else chunk
            self._offset += len(complete)
            yield complete


class RoleLog:
    """The log of a role; `level` is the lowest that is read."""

    def __init__(self, path: Path, *, level: str) -> None:
        self._reader = LineReader(path)
        self._levels = {"", *LEVELS[LEVELS.index(level) :]}
        self._last = LogEntry(0.0, path.stem, "", ())

    def new_entries(self, *, with_rest: bool) -> Iterator[LogEntry]:
        """Yields the entries that were not read yet, with lines that are none; `with_rest` as for LineReader."""
        for line in self._reader.lines(with_rest=with_rest):
            self._last = entry = parse_entry(line, self._last)
            if entry.level in self._levels:
                yield entry


def merged(logs: Iterable[RoleLog], *, with_rest: bool) -> Iterator[LogEntry]:
    """Yields the new entries of all logs by time; those of one log stay in its order."""
    return merge(*(log.new_entries(with_rest=with_rest) for log in logs), key=lambda entry: entry.time_s)


def parse_entry(line: str, before: LogEntry) -> LogEntry:
    """Returns the entry in a line of a role's log, which follows the entry `before`. Entries of libraries and of some
    threads do not name role and host: they are of the same ones."""
    try:
        fields: Any = json.loads(line)
        time_s = datetime.fromisoformat(fields.pop("timestamp")).timestamp()
        level, event = fields.pop("level"), str(fields.pop("event"))
        if level not in LEVELS:
            raise ValueError(level)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
        return LogEntry(before.time_s, before.role, "", (plain_line(line),))
    role = before.role
    if isinstance(fields.get("role"), str):
        role = printable(fields.pop("role"))
        if isinstance(fields.get("host"), str):
            role = f"{role}@{printable(fields.pop('host'))}"
    blocks = [str(fields.pop(name)).rstrip("\n") for name in _BLOCKS if name in fields]
    first, *rest = event.split("\n")
    first = " ".join([first, *(f"{name}={_value(value)}" for name, value in fields.items())])
    lines = [first, *rest, *(line for block in blocks for line in block.split("\n"))]
    return LogEntry(time_s, role, level, tuple(map(printable, lines)))


def plain_line(line: str) -> str:
    """The line without colors, as a terminal leaves it when its cursor returned to the start, safe to print."""
    return printable(_COLORS.sub("", line).rstrip("\r").rpartition("\r")[2])


def _value(value: Any) -> str:
    if isinstance(value, str) and _PLAIN.fullmatch(value):
        return value
    return json.dumps(value, ensure_ascii=False)
