"""`asyncrl data verifiers`: the rows of a verifiers environment, made in the interpreter that has it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from asyncrl.data.files import check_rows_file, write_rows
from asyncrl.data.rows import ground_truth_text
from asyncrl.environments.programs.agent_client import read_rows, verifiers_python
from asyncrl.errors import ConfigError


def make_verifiers_rows(
    name: str, out: Path, *, python: str | None, split: str, limit: int | None, options: dict[str, Any]
) -> int:
    """Writes the rows of the environment in verl's schema, each with the environment's row in `extra_info.verifiers`;
    returns their number. Raises ConfigError if the environment or its rows cannot be loaded, and DataError for a value
    that a row cannot hold."""
    check_rows_file(out)
    interpreter = verifiers_python(name, python)
    rows = [
        {
            "data_source": name,
            "prompt": found["prompt"],
            "ability": "agent",
            "reward_model": {
                "style": "rule",
                "ground_truth": ground_truth_text(found["ground_truth"], f"verifiers:{name}, row {index}: answer"),
            },
            "extra_info": {"index": index, "verifiers": found["row"]},
        }
        for index, found in enumerate(read_rows(name, options, python=interpreter, split=split, limit=limit))
    ]
    if not rows:
        raise ConfigError(f"verifiers:{name}: it has no rows of the split {split}")
    write_rows(out, rows)
    return len(rows)
