"""Environments of other projects, unchanged: each trains some optimizer steps in a complete launch."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from asyncrl.environments.table import Named, load_environment
from tests.helpers import adapters
from tests.helpers.played import ASK, call, save_chat_policy
from tests.helpers.runs import SMALL, Launched

STEPS = 5


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("name", "source", "scripts"),
    [
        ("trl:{}:CounterEnv", adapters.TRL, [[call("increment", step=step), "done"] for step in (1, 2, 3, 4)]),
        (f"mcp:{sys.executable} {{}}", adapters.MCP, [[call("add", first=3, second=4), last] for last in ("7", "8")]),
    ],
    ids=["trl", "mcp"],
)
def test_tools_of_another_project_are_trained(
    launch: Callable[..., Launched], tmp_path: Path, name: str, source: str, scripts: list[list[str]]
) -> None:
    (tmp_path / "tools.py").write_text(source)
    name = name.format(tmp_path / "tools.py")
    row = {"prompt": ASK, "reward_model": {"ground_truth": "7"}, "data_source": "test"}
    pq.write_table(pa.Table.from_pylist([row] * 16), tmp_path / "rows.parquet")
    named = load_environment(name, {})
    assert isinstance(named, Named)
    save_chat_policy(tmp_path / "model", named, scripts)
    launched = launch(
        "--steps", str(STEPS), *SMALL, f"model.path={tmp_path / 'model'}", f"data.train={tmp_path / 'rows.parquet'}",
        "generator.max_new_tokens=64", "learner.tokens_per_microbatch=4096", f"environment.name={json.dumps(name)}",
        plain=True,
    )  # fmt: skip
    code, output = launched.end(timeout_s=300)
    assert code == 0, output
    assert launched.summary()["status"] == "finished" and not launched.left_over()
    rows = [row for row in launched.rows() if "learner/tokens" in row]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    tool = scripts[0][0].split('"name": "')[1].split('"')[0]
    assert max(row.get(f"reward_part/calls/{tool}", 0.0) for row in rows) > 0.5
