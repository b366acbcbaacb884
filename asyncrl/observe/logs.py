"""Structured logs: one JSON object a line, one file per role."""

from __future__ import annotations

import logging
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any, TextIO

import structlog

from asyncrl.util.redaction import redact


def configure_logs(run_dir: Path, role: str, level: str, *, host: str = "", copy: TextIO | None = None) -> Path:
    """Sends this process's events, and other libraries' warnings, to `logs/<role>.jsonl`; returns its path. Events have
    the `host` unless it is the launcher's own. The `copy` has the same lines.

    Secrets (asyncrl/util/redaction.py) are shown as ***."""
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
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=lambda *_: logging.getLogger("asyncrl"),
        cache_logger_on_first_use=True,
    )
    logging.getLogger("asyncrl").setLevel(level.upper())
    structlog.contextvars.bind_contextvars(role=role, **({"host": host} if host else {}))
    return path


def _redacted(_: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    return redact(dict(event))


def last_error(path: Path, *, start_bytes: int = 0) -> str:
    """The text of the last event of level error or above, from byte `start_bytes` of a log file on; "" without one."""
    import json

    if not path.is_file():
        return ""
    for line in reversed(path.read_bytes()[start_bytes:].decode(errors="replace").splitlines()):
        try:
            event = json.loads(line)
        except json.JSONDecodeError:
            continue
        if event.get("level") in ("error", "critical"):
            return str(event.get("error") or event.get("event"))
    return ""
