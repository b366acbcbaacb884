"""The rollbacks of a run, which its launcher, plans from it and its pages read; without their imports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from asyncrl.util.files import read_json

ROLLBACKS = "rollbacks.json"
"""File with the rollbacks of a run, as they are in its summary."""


def read_rollbacks(run_dir: Path) -> list[dict[str, Any]]:
    """Returns the rollbacks of a run so far, the last of which may not be complete."""
    file = run_dir / ROLLBACKS
    return read_json(file, kind=list) if file.is_file() else []


def rollback_line(summary: Mapping[str, Any]) -> str:
    """Returns a line about the rollbacks of a run; empty if it had none."""
    rollbacks: Sequence[Mapping[str, Any]] = summary.get("rollbacks", [])
    if not rollbacks:
        return ""
    steps = ", ".join(f"{record['stopped_at_step']} -> {record['to_step']}" for record in rollbacks)
    return f"was rolled back (steps {steps}), the last time since it {rollbacks[-1]['sentence']}"
