"""The names of metrics in docs/metrics.md."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from asyncrl.types import STALENESS_BUCKETS

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"
ROW = re.compile(r"^\| `([^`]+)` \|([^|]*)\|([^|]*)\|([^|]*)\|$", re.MULTILINE)


def documented() -> dict[str, str]:
    """The names of the page's table, each with verl's names in its row; `a/{b,c}` stands for `a/b` and `a/c`."""
    rows = ROW.findall(PAGE.read_text(encoding="utf-8"))
    names = [(name, verl) for cell, _, _, verl in rows for name in _expanded(cell)]
    assert len(dict(names)) == len(names), "a name has two rows"
    return dict(names)


def _expanded(cell: str) -> list[str]:
    before, brace, rest = cell.partition("{")
    choices, _, after = rest.partition("}")
    return [f"{before}{choice}{after}" for choice in choices.split(",")] if brace else [cell]


def undocumented(written: Iterable[str], *, sources: Iterable[str], parts: Iterable[str]) -> list[str]:
    """The written names that no row stands for; `sources` and `parts` are the run's data sources and reward parts."""
    rows = [pattern_of(name, sources, parts) for name in documented()]
    return [name for name in sorted(set(written)) if not any(row.fullmatch(name) for row in rows)]


def unwritten(written: Iterable[str], *, sources: Iterable[str], parts: Iterable[str]) -> list[str]:
    """The documented names that stand for no written one."""
    names = list(written)
    return [row for row in documented() if not any(pattern_of(row, sources, parts).fullmatch(name) for name in names)]


def pattern_of(name: str, sources: Iterable[str], parts: Iterable[str]) -> re.Pattern[str]:
    values = {"BUCKET": STALENESS_BUCKETS, "SOURCE": sources, "PART": parts}
    pattern = re.escape(name)
    for word, known in values.items():
        pattern = pattern.replace(word, "(" + "|".join(map(re.escape, known)) + ")")
    return re.compile(re.sub(r"\bK\b", r"\\d+", pattern))
