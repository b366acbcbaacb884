"""Environments of other projects, unchanged: each trains ten optimizer steps in a complete launch."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from asyncrl.environments.table import Named, load_environment
from tests.helpers import adapters
from tests.helpers.kernel import why_not_confined
from tests.helpers.played import ASK, call, save_chat_policy
from tests.helpers.runs import SMALL, Launched

STEPS = 10
CHAT = ["generator.max_new_tokens=64", "learner.tokens_per_microbatch=4096"]
PLAIN = ["model.path=demo/model", "generator.max_new_tokens=4"]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
Train = Callable[..., list[dict[str, float]]]


@pytest.fixture
def train(launch: Callable[..., Launched], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Train:
    """Trains in an environment and returns the metrics of the steps."""

    def run(
        name: str,
        *settings: str,
        options: Mapping[str, object] | None = None,
        scripts: Sequence[Sequence[str]] = (),
        package: str | None = None,
        extra: Mapping[str, object] | None = None,
    ) -> list[dict[str, float]]:
        if package is not None:
            folder = str(adapters.installed(package))
            monkeypatch.syspath_prepend(folder)
            monkeypatch.setenv("PYTHONPATH", os.pathsep.join([folder, os.environ.get("PYTHONPATH", "")]))
        prompt = ASK if scripts else "12+07="
        row = {"prompt": prompt, "reward_model": {"ground_truth": "7"}, "data_source": "test"}
        row |= {"extra_info": extra} if extra else {}
        pq.write_table(pa.Table.from_pylist([row] * 16), tmp_path / "rows.parquet")
        given = dict(options or {})
        if scripts:
            named = load_environment(name, given)  # type: ignore[arg-type]
            assert isinstance(named, Named)
            save_chat_policy(tmp_path / "model", named, scripts, extra_info=dict(extra or {}))
        model = [*CHAT, f"model.path={tmp_path / 'model'}"] if scripts else PLAIN
        launched = launch(
            "--steps", str(STEPS), *SMALL, *model, f"data.train={tmp_path / 'rows.parquet'}",
            f"environment.name={json.dumps(name)}", f"environment.options={json.dumps({name: given})}", *settings,
            plain=True,
        )  # fmt: skip
        code, output = launched.end(timeout_s=300)
        assert code == 0, output
        summary = launched.summary()
        assert summary["status"] == "finished" and not launched.left_over()
        rows = [row for row in launched.rows() if "learner/tokens" in row]
        assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
        assert all(row["learner/tokens"] > 0 for row in rows)
        return rows

    return run


def most(rows: list[dict[str, float]], name: str) -> float:
    """The largest value; a step without scored groups has none."""
    return max(row.get(name, 0.0) for row in rows)


def test_a_class_of_trl_is_trained(train: Train, tmp_path: Path) -> None:
    (tmp_path / "counter.py").write_text(adapters.TRL)
    scripts = [[call("increment", step=step), "done"] for step in (1, 2, 3, 4)]
    rows = train(f"trl:{tmp_path / 'counter.py'}:CounterEnv", scripts=scripts)
    assert most(rows, "reward_part/calls/increment") > 0.5 and most(rows, "environment/turns") > 1.5


def test_an_environment_of_gymnasium_is_trained(train: Train, tmp_path: Path) -> None:
    (tmp_path / "taxi.py").write_text("def act(text):\n    return sum(map(ord, text)) % 6\n")
    options = {"act": f"{tmp_path / 'taxi.py'}:act"}
    rows = train("gymnasium:Taxi-v4", "environment.max_turns=5", options=options, package="gymnasium")
    assert most(rows, "environment/turns") == 5.0


def test_an_environment_of_skyrl_gym_is_trained(train: Train, tmp_path: Path) -> None:
    (tmp_path / "echo.py").write_text(adapters.SKYRL)
    rows = train(f"skyrl:{tmp_path / 'echo.py'}:Echo", options={"scale": 0.5, "max_turns": 3}, package="skyrl")
    assert most(rows, "reward_part/turns") == 3.0


def test_tools_of_an_mcp_server_are_trained(train: Train, tmp_path: Path) -> None:
    (tmp_path / "server.py").write_text(adapters.MCP)
    scripts = [[call("add", first=3, second=4), answer] for answer in ("7", "8")]
    rows = train(f"mcp:{sys.executable} {tmp_path / 'server.py'}", scripts=scripts)
    assert most(rows, "reward_part/calls/add") > 0.5


@pytest.mark.skipif(bool(why_not_confined()), reason=why_not_confined())
def test_programs_in_the_sandbox_are_trained(train: Train) -> None:
    rows = train("python", scripts=[[call("run", program="print(3+4)"), answer] for answer in ("7", "8")])
    assert most(rows, "reward_part/calls/run") > 0.5


def test_tools_of_verl_are_trained(train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    (tmp_path / "ledger_of_run.py").write_text(adapters.VERL)
    (tmp_path / "tools.yaml").write_text(adapters.VERL_YAML.format(module="ledger_of_run"))
    extra = {"tools_kwargs": {"book": {"create_kwargs": {"truth": 4}}}}
    scripts = [[call("book", amount=amount), "7"] for amount in (3, 4)]
    rows = train(f"verl:{tmp_path / 'tools.yaml'}", scripts=scripts, package="verl", extra=extra)
    assert most(rows, "reward_part/calls/book") > 0.5
