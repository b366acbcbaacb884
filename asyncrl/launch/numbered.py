"""Names that are not taken yet."""

from __future__ import annotations

from itertools import count
from pathlib import Path


def first_free(folder: Path, prefix: str) -> Path:
    """The first of `prefix`1, `prefix`2 and so on that is not in the folder."""
    return next(path for number in count(1) if not (path := folder / f"{prefix}{number}").exists())
