"""Complete runs with generator.engine=transformers, in processes that cannot import vLLM."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import fmean

import pytest

from benchmarks.families import save_family
from tests.helpers.runs import SMALL, Launched, check_ledger, start_launch

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(300)]

NO_VLLM = """
import importlib.util, sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "vllm":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name == "vllm" else find_spec(name, package)
"""
"""A sitecustomize.py under which every Python process is one without vLLM."""
OWN_CLASS = """
from transformers import LlamaConfig, LlamaForCausalLM

class OwnConfig(LlamaConfig):
    model_type = "own"

class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""


@pytest.fixture
def without_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text(NO_VLLM)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    assert subprocess.run([sys.executable, "-c", "import vllm"], capture_output=True, check=False).returncode == 1


def run(folder: Path, name: str, *settings: str, timeout_s: float = 250) -> Launched:
    """A run that has ended well."""
    engine = ("generator.engine=transformers", *SMALL)
    launched = start_launch(folder, name, *engine, *settings, preloaded=None)
    try:
        code, output = launched.end(timeout_s)
    finally:
        launched.kill()
    assert code == 0, output
    assert launched.left_over() == []
    check_ledger(launched.summary())
    return launched


def test_the_demo_learns(demo_folder: Path, without_vllm: None) -> None:
    settings = ("--steps", "150", "replay.groups_per_step=16", "learner.warmup_steps=10")
    ended = run(demo_folder, "transformers", *settings)
    rows = ended.rows()
    assert len(rows) == 150 and sum(ended.summary()["restarts"].values()) == 0
    (agreement,) = [event for event in ended.events("learner-0") if event["event"] == "engine and learner agree"]
    assert agreement["mean_difference_nats"] < 1e-4
    first, last = (fmean(row["reward/mean"] for row in part) for part in (rows[:15], rows[-15:]))
    assert last > first + 0.2, f"reward {first:.3f} -> {last:.3f}"
    assert max(row["staleness/max"] for row in rows) <= 2
    command = [sys.executable, "-m", "asyncrl.cli", "eval", "--config", "demo", "generator.engine=transformers"]
    command += ["model.path=demo/model", "data.eval=demo/arithmetic.parquet", "eval.max_prompts=20"]
    done = subprocess.run(command, cwd=demo_folder, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0 and "pass@1" in done.stdout and not done.stderr, done.stderr


def test_a_class_of_the_users_own_and_a_family_that_differs_in_vllm_are_trained(
    demo_folder: Path, without_vllm: None, tmp_path: Path
) -> None:
    own = save_family("llama", tmp_path / "own")
    (own / "modeling_own.py").write_text(OWN_CLASS)
    settings = json.loads((own / "config.json").read_text())
    names = {"AutoConfig": "modeling_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    settings |= {"model_type": "own", "architectures": ["OwnForCausalLM"], "auto_map": names}
    (own / "config.json").write_text(json.dumps(settings))
    trained = ("--steps", "3", "replay.zero_variance=train")
    for path, more in ((own, ["model.trust_remote_code=true"]), (save_family("gpt_neox", tmp_path / "neox"), [])):
        ended = run(demo_folder, path.name, *trained, f"model.path={path}", *more, timeout_s=120)
        assert len(ended.rows()) == 3
        (agreement,) = [event for event in ended.events("learner-0") if event["event"] == "engine and learner agree"]
        assert agreement["mean_difference_nats"] < 1e-4
