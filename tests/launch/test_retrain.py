"""The parts of offline training that need no training step."""

from __future__ import annotations

import io
import json
import os
import stat
import sys
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from safetensors.numpy import save_file

from asyncrl.cli import retrain
from asyncrl.cli.retrain import first_difference, make_out, show_metrics, start, watch
from asyncrl.errors import AsyncrlError, ConfigError, RunError
from asyncrl.launch.launcher import LocalLauncher
from asyncrl.launch.worker import EXIT_CONFIG, EXIT_CRASHED, EXIT_FAILED, RoleSpec
from asyncrl.observe.console import Interrupts
from asyncrl.observe.samples import Samples
from tests.helpers.replay import loopback_endpoints, small_config


def save(folder: Path, **tensors: np.ndarray) -> Path:
    """Writes a model folder with two files."""
    folder.mkdir()
    names = sorted(tensors)
    for number, part in enumerate((names[:1], names[1:])):
        save_file({name: tensors[name] for name in part}, folder / f"model-{number}.safetensors")
    return folder


def test_weights_are_compared_tensor_by_tensor(tmp_path: Path) -> None:
    a, b = np.arange(6, dtype=np.float32).reshape(2, 3), np.ones(4, dtype=np.float16)
    first = save(tmp_path / "first", a=a, b=b)
    assert first_difference(first, save(tmp_path / "same", a=a.copy(), b=b.copy())) == ""
    negative_zero = a.copy()
    negative_zero[0, 0] = -0.0
    assert first_difference(first, save(tmp_path / "sign", a=negative_zero, b=b)) == "a has other values"
    other = save(tmp_path / "shape", a=a, b=b.astype(np.float32))
    assert first_difference(first, other) == "b is torch.float16 [4] and torch.float32 [4]"
    fewer = save(tmp_path / "more", a=a, b=b, c=b)
    assert first_difference(first, fewer) == f"c is only in {fewer}"
    (tmp_path / "empty").mkdir()
    with pytest.raises(RunError, match=r"empty: no weights in \*\.safetensors files"):
        first_difference(first, tmp_path / "empty")


def test_results_get_a_separate_folder(tmp_path: Path) -> None:
    assert make_out(tmp_path, None) == tmp_path / "retrained" / "1"
    assert make_out(tmp_path, None) == tmp_path / "retrained" / "2"
    given = tmp_path / "given"
    assert make_out(tmp_path, given) == given
    (given / "config.yaml").write_text("")
    with pytest.raises(ConfigError, match="given: exists and is not an empty folder; name another one"):
        make_out(tmp_path, given)


def test_only_the_owner_can_enter_the_folder_of_results(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        out = make_out(tmp_path, None)
    finally:
        os.umask(before)
    assert stat.S_IMODE(out.stat().st_mode) == 0o700


def test_metrics_are_shown_next_to_those_of_the_run(tmp_path: Path) -> None:
    for name, factor, steps in (("run", 1.0, 5), ("out", 2.0, 3)):
        rows = [
            {"step": s, "learner/tokens": 9.0, "learner/loss": factor * s, "correction/ess": 0.5}
            for s in range(1, steps + 1)
        ]
        (tmp_path / name).mkdir()
        lines = [json.dumps(row) for row in [*rows, {"step": 3, "eval/reward": 1.0}]]
        (tmp_path / name / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    console = Console(file=io.StringIO(), width=120)
    show_metrics(console, tmp_path / "run", tmp_path / "out")
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "3 steps" in text
    lines = [line.split() for line in text.splitlines()]
    assert ["learner/loss", "2", "6", "1", "3"] in lines
    assert ["correction/ess", "0.5", "0.5", "0.5", "0.5"] in lines


def test_steps_whose_updates_were_skipped_are_shown(tmp_path: Path) -> None:
    rows = [
        {"step": 1, "learner/tokens": 9.0, "learner/skipped_updates": 2.0},
        {"step": 2, "learner/tokens": 9.0, "learner/skipped_updates": 0.0, "learner/loss": 0.5},
    ]
    for name in ("run", "out"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    console = Console(file=io.StringIO(), width=120)
    show_metrics(console, tmp_path / "run", tmp_path / "out")
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "2 steps, 2 updates skipped" in text
    assert ["learner/loss", "-", "0.5", "-", "0.5"] in [line.split() for line in text.splitlines()]


class Failing(LocalLauncher):
    """A launcher whose roles print a cause and exit with the code."""

    def __init__(self, code: int) -> None:
        super().__init__()
        self.code = code

    def command(self, spec: RoleSpec) -> list[str]:
        return [sys.executable, "-c", f"print('the cause'); raise SystemExit({self.code})"]


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("code", "kind"), [(EXIT_CONFIG, ConfigError), (EXIT_FAILED, RunError), (EXIT_CRASHED, RunError)]
)
def test_a_role_that_fails_ends_the_command_with_its_kind_of_error(
    tmp_path: Path, code: int, kind: type[AsyncrlError]
) -> None:
    config, launcher = small_config(), Failing(code)
    try:
        start(launcher, config, loopback_endpoints(1), tmp_path, tmp_path, 0)
        with pytest.raises(kind, match=f"^learner-0 ended with code {code}: the cause$"):
            watch(launcher, config, tmp_path, Interrupts())
    finally:
        launcher.end(grace_s=0.0)


def test_samples_have_no_rewards_of_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retrain, "check_model", lambda config: None)
    (tmp_path / "journal").mkdir()
    (tmp_path / "config.yaml").write_text(small_config(environment__name="guess", model__path=str(tmp_path)).to_yaml())
    Samples.of_groups([]).save(tmp_path / "samples.parquet")
    settings = {"algorithm.advantage": "turn_grpo"}
    assert retrain.read_configs(tmp_path, settings, None)[1].algorithm.advantage == "turn_grpo"
    with pytest.raises(ConfigError, match=r"'turn_grpo' reads the rewards of turns, .* without --samples"):
        retrain.read_configs(tmp_path, settings, tmp_path / "samples.parquet")
