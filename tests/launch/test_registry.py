"""The output of `asyncrl list`."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from asyncrl.launch.registry import print_parts, tables

pytestmark = pytest.mark.timeout(240)


def test_every_part_is_described_as_it_is_written() -> None:
    out = io.StringIO()
    print_parts(Console(file=out, width=400))
    lines = {words[0]: line for line in out.getvalue().splitlines() if (words := line.split())}
    assert {name for parts in tables().values() for name in parts} <= lines.keys()
    assert "PPO's surrogate within [min(e^-tau, 1 - clip_low), max(e^tau, 1 + clip_high)]" in lines["m2po"]
    assert r'("1/2", "\frac{1}{2}", "0.5")' in lines["math"] and lines["math"].rstrip().endswith("; else 0.")
    assert lines["gloo"].split(maxsplit=1)[1].startswith("By TCP")
    assert "Transport(" not in out.getvalue()
