"""A checkpoint on the disk: its manifest, and whether its files are as they were written."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import structlog
import xxhash

from asyncrl.files import replace_file

log = structlog.get_logger()

CHECKPOINTS = "checkpoints"
"""Folder of the checkpoints in a run's folder."""
MANIFEST = "checkpoint.json"
PARTIAL = ".partial"
"""At the end of a folder's name: the checkpoint in it is not whole yet."""
UNREADABLE = (OSError, ValueError, TypeError)
"""What reading a damaged manifest raises."""
CHUNK_BYTES = 16 << 20

Sum = dict[str, Any]
"""`bytes` and `xxh3` (of 64 bits, hexadecimal) of a file."""


@dataclass(slots=True)
class Manifest:
    """`checkpoint.json`: what the checkpoint is, and the sums of its other files."""

    step: int
    reward: float | None
    """Mean reward of the steps before it, or of its evaluation."""
    evaluated: bool = False
    files: dict[str, Sum] = field(default_factory=dict[str, Sum])

    @property
    def num_bytes(self) -> int:
        return sum(int(entry["bytes"]) for entry in self.files.values())


def folder_name(step: int) -> str:
    return f"step-{step:06d}"


def partial_folder(checkpoint: Path) -> Path:
    """Where a checkpoint is written until it is complete."""
    return checkpoint.with_name(f"{checkpoint.name}{PARTIAL}")


def step_of(checkpoint: Path) -> int:
    """The step that the folder of a checkpoint is named after, complete or not."""
    return int(checkpoint.name.removesuffix(PARTIAL).removeprefix("step-"))


def read_manifest(path: Path) -> Manifest:
    return Manifest(**json.loads((path / MANIFEST).read_text()))


def has_manifest(path: Path) -> bool:
    """Whether the checkpoint's manifest can be read."""
    try:
        read_manifest(path)
    except UNREADABLE:
        return False
    return True


def finished_steps(folder: Path) -> list[int]:
    """Steps of the checkpoints in the folder that were finished, ascending; whether they are damaged is not looked
    at."""
    names = [path.parent.name.removeprefix("step-") for path in folder.glob(f"step-*/{MANIFEST}")]
    return sorted(int(name) for name in names if name.isdigit())


def newest_checkpoint(folder: Path) -> Path | None:
    """The newest checkpoint in the folder whose files are as they were written, if there is one. Those that are
    damaged are named in the log."""
    paths = [folder / folder_name(step) for step in reversed(finished_steps(folder))]
    return next((path for path in paths if not is_damaged(path)), None)


def is_damaged(path: Path, *, part: int = 0, parts: int = 1) -> bool:
    """Whether a file of the checkpoint is not as it was written, which is named in the log; looks at the files of
    one of so many parts."""
    damage = _find_damage(path, part, parts)
    if damage:
        log.warning("a damaged checkpoint is not used", path=str(path), reason=damage)
    return bool(damage)


def _find_damage(path: Path, part: int, parts: int) -> str:
    try:
        files = read_manifest(path).files
    except UNREADABLE as error:
        return f"{path / MANIFEST}: {error}"
    for name in sorted(files)[part::parts]:
        try:
            found = sum_of(path / name)
        except OSError as error:
            return f"{path / name}: {error}"
        if found != files[name]:
            return f"{path / name}: has {found}, but was written with {files[name]}"
    return ""


def seal(path: Path) -> Sum:
    """Brings the file to the disk; gives its sum."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return sum_of(path)


def sum_of(path: Path) -> Sum:
    digest = xxhash.xxh3_64()
    num_bytes = 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
            num_bytes += len(chunk)
    return {"bytes": num_bytes, "xxh3": digest.hexdigest()}


def write_manifest(path: Path, manifest: Manifest) -> None:
    """Makes the folder a whole checkpoint, or replaces what is said of it."""
    replace_file(path / MANIFEST, json.dumps(asdict(manifest), indent=1))
