"""Structured logs: one JSON object a line, one file per role."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, MutableMapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO

import structlog

from asyncrl.util.text import redact


def configure_logs(run_dir: Path, role: str, *, host: str = "", copy: TextIO | None = None) -> Path:
    """Sends this process's events, and other libraries' warnings, to `logs/<role>.jsonl`; returns its path. Events have
    the `host` unless it is the launcher's own. The `copy` has the same lines.

    Secrets (asyncrl/util/text.py) are shown as ***."""
    path = run_dir / "logs" / f"{role}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    handlers = [logging.FileHandler(path), *([logging.StreamHandler(copy)] if copy else [])]
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
    for handler in handlers:
        handler.setFormatter(formatter)
    root = logging.getLogger()
    root.handlers[:] = handlers
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
    """What a role has been doing since the last event of its start that says so, and for how long: "building its engine
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
    import json

    if not path.is_file():
        return
    for line in reversed(path.read_bytes()[start_bytes:].decode(errors="replace").splitlines()):
        with suppress(json.JSONDecodeError):
            yield json.loads(line)
