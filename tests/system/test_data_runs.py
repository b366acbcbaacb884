"""A run with a dataset, a sampler and a filter of the user's own, killed and resumed."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from asyncrl.config.load import load_config
from asyncrl.data.cursor import PromptCursor
from asyncrl.data.demo import make_demo_rows
from tests.helpers.runs import SMALL, Launched, check_ledger

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

PARTS = '''
from pathlib import Path


class Sums:
    """The sums of two numbers, from a file with a number in each line."""

    def __init__(self, files, *, largest=19):
        numbers = [int(line) for file in files for line in Path(file).read_text().split()]
        self.pairs = [(a, b) for a in numbers for b in numbers if max(a, b) <= largest]

    def __len__(self):
        return len(self.pairs)

    def __getitem__(self, row):
        a, b = self.pairs[row]
        return {"prompt": f"{a:02d}+{b:02d}=", "reward_model": {"ground_truth": f"{a + b:02d}"}, "extra_info": {"a": a}}


class Twice:
    """Each row twice in a row, from the last to the first."""

    def __init__(self, rows, *, seed):
        self.size, self.drawn = len(rows), 0

    def __iter__(self):
        while self.drawn < 2 * self.size:
            self.drawn += 1
            yield self.size - 1 - (self.drawn - 1) // 2
        self.drawn = 0

    def state_dict(self):
        return {"drawn": self.drawn}

    def load_state_dict(self, state):
        self.drawn = state["drawn"]


def odd(row):
    return row["extra_info"]["a"] % 2 == 1
'''


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1])
def test_own_dataset_sampler_and_filter_and_the_same_order_after_a_kill(
    launch: Callable[..., Launched], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    (tmp_path / "mine.py").write_text(PARTS)
    (tmp_path / "numbers").write_text("\n".join(map(str, range(20))))
    custom = {
        part: f"{tmp_path}/mine.py:{name}"
        for part, name in (("dataset", "Sums"), ("sampler", "Twice"), ("filter", "odd"))
    }
    settings = [
        *(f"data.custom.{part}={name}" for part, name in custom.items()),
        "data.custom.options.dataset.largest=15",
    ]
    first = launch(
        *SMALL, *settings, f"data.train={tmp_path}/numbers", f"data.workers={workers}", "steps=6", "rewards=exact"
    )
    first.wait_for_step(2)
    os.kill(first.pid("replay"), signal.SIGKILL)
    first.wait_for_step(4)
    first.note_tree()
    for pid in (first.process.pid, *first.tree):
        if Path(f"/proc/{pid}").exists():
            os.kill(pid, signal.SIGKILL)
    first.process.wait()
    second = launch("--resume", run=first.run)
    code, output = second.end(300)
    assert code == 0, output
    summary = second.summary()
    assert summary["steps"] == 6 and summary["filtered_rows"] > 0
    assert "rows left out by data.custom.filter" in output
    check_ledger(summary)
    monkeypatch.chdir(second.folder)
    cursor = PromptCursor(load_config(second.run_dir / "config.yaml"), limit_tokens=50)
    by_ticket = {row["ticket"]: row["row"] for row in pq.read_table(second.run_dir / "trace.parquet").to_pylist()}
    expected = [next(cursor).row for _ in range(max(by_ticket) + 1)]
    assert {ticket: expected[ticket] for ticket in by_ticket} == by_ticket


@pytest.mark.slow
def test_the_results_of_rows_survive_a_kill_of_the_queue(
    launch: Callable[..., Launched], asyncrl: Callable[..., str], tmp_path: Path
) -> None:
    make_demo_rows("demo", tmp_path / "few.parquet", rows=16)
    run = launch(*SMALL, f"data.train={tmp_path}/few.parquet", "steps=8", "rewards=exact")
    run.wait_for_step(4)
    os.kill(run.pid("replay"), signal.SIGKILL)
    code, output = run.end(300)
    assert code == 0, output
    summary = run.summary()
    check_ledger(summary)
    prompts = summary["prompts"]
    assert sum(prompts[kind] for kind in ("solved", "learning", "never_solved", "unseen")) == 16
    assert prompts["unseen"] == 0
    assert prompts["by_source"]["arithmetic"]["learning"] == prompts["learning"]
    groups = pq.read_table(run.run_dir / "trace.parquet")
    assert len(set(groups["row"].to_pylist())) == 16
    assert "rows: " in asyncrl("samples", str(run.run_dir))
