"""Fingerprints of the files that a run reads: a resumed run names those whose content has changed, and refuses other
training rows, to which its journal refers by number."""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from asyncrl.config import Config
from asyncrl.errors import ConfigError
from asyncrl.util.files import read_json, replace_file

FILE = "fingerprints.json"
"""File of the run folder with the fingerprints of its latest launch."""
ROWS = "data.train"
ACCEPTED = "accepted"
"""Key of the file that is set when other training rows are accepted."""
COMPLETE_BYTES = 64 << 20
"""Larger files are read in part."""
BLOCKS, BLOCK_BYTES = 64, 1 << 16
"""Parts that are read of a larger file: the first, the last and others at equal distances."""
CODE = re.compile(r"(.+):[A-Za-z_]\w*")
"""The user's own function, class or reward: `file.py:NAME` or `module:NAME`."""

Fingerprints = dict[str, list[list[str]]]
"""By config key, the name and the fingerprint of each file."""


def fingerprints(config: Config) -> Fingerprints:
    """Returns those of data, models and the user's own code. Names are without their folders, so that a copied folder
    has the same ones; files that do not exist are left out."""
    paths: dict[str, Sequence[Path]] = {
        ROWS: [Path(file) for file in config.data.train_files],
        "data.eval": [Path(file) for file in config.data.eval_files],
    }
    models = {
        "model.path": config.model.path, "algorithm.reference": config.algorithm.reference,
        "critic.path": config.critic.path,
        "reward_options.reward_model.path": config.reward_options.get("reward_model", {}).get("path"),
    }  # fmt: skip
    for key, folder in models.items():
        files = sorted(Path(folder).iterdir()) if folder and Path(folder).is_dir() else []
        paths[key] = [path for path in files if not path.name.startswith(".") and path.suffix != ".md"]
    for key, path in _code(config.model_dump(mode="json"), ""):
        paths[key] = [*paths.get(key, ()), path]
    found = {key: [path for path in files if path.is_file()] for key, files in paths.items()}
    return {key: [[path.name, fingerprint(path)] for path in files] for key, files in found.items() if files}


def fingerprint(path: Path) -> str:
    """Returns the size of a file, and a hash of its content or, if it is large, of parts of it."""
    size, digest = path.stat().st_size, hashlib.sha256()
    with path.open("rb") as file:
        if size <= COMPLETE_BYTES:
            digest.update(file.read())
        else:
            for number in range(BLOCKS):
                file.seek((size - BLOCK_BYTES) * number // (BLOCKS - 1))
                digest.update(file.read(BLOCK_BYTES))
    return f"{size}-{digest.hexdigest()[:32]}"


def save_fingerprints(run_dir: Path, config: Config) -> None:
    """Writes the fingerprints of a launch."""
    replace_file(run_dir / FILE, json.dumps(fingerprints(config), indent=2) + "\n")


def changed_files(run_dir: Path, config: Config) -> list[str]:
    """Returns `key: name` of each file that has changed, is new or is missing since the run's latest launch."""
    if not (run_dir / FILE).is_file():
        return []
    before, now = read_json(run_dir / FILE), fingerprints(config)
    changed: list[str] = []
    for key in [key for key in now if key in before]:
        differing = {tuple(entry) for entry in now[key]} ^ {tuple(entry) for entry in before[key]}
        changed += [f"{key}: {name}" for name in sorted({name for name, _ in differing})]
    return changed


def refuse_other_rows(run_dir: Path, config: Config) -> None:
    """Raises ConfigError if training rows have changed since the run's latest launch and are not accepted."""
    changed = [text for text in changed_files(run_dir, config) if text.startswith(f"{ROWS}: ")]
    if changed and not read_json(run_dir / FILE).get(ACCEPTED):
        raise ConfigError(
            f"{'; '.join(changed)} has other content than when the run was last started, and the run refers to its "
            "rows by number; restore it, continue with the new rows (--accept-data), or start another run without "
            "--resume"
        )


def accept_rows(run_dir: Path) -> None:
    """Has the next launch continue with other training rows."""
    if (run_dir / FILE).is_file():
        replace_file(run_dir / FILE, json.dumps(read_json(run_dir / FILE) | {ACCEPTED: True}, indent=2) + "\n")


def _code(value: Any, key: str) -> Iterator[tuple[str, Path]]:
    """The keys of a config, and the files of the user's own code that they name."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _code(name, key)
            yield from _code(inner, f"{key}.{name}" if key else name)
    elif isinstance(value, list):
        for inner in value:
            yield from _code(inner, key)
    elif isinstance(value, str) and (match := CODE.fullmatch(value)):
        where = match.group(1)
        module = sys.modules.get(where)
        file = where if where.endswith(".py") else getattr(module, "__file__", None)
        if file:
            yield key, Path(file)
