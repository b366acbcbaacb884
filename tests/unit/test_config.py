"""Reading, overriding and refusing configs."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import pytest
import yaml

from asyncrl.config import Config, config_keys, load_config, parse_override, sections
from asyncrl.config import config as models
from asyncrl.config.loading import RENAMED
from asyncrl.errors import ConfigError

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))
NEEDED = {"model.path": "model", "data.train": "data.parquet"}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_shipped_config_loads_and_round_trips(path: Path) -> None:
    config = load_config(path)
    assert load_config(path.stem) == config, "found by its name alone"
    assert Config.model_validate(yaml.safe_load(config.to_yaml())) == config


def test_overrides_are_yaml() -> None:
    config = load_config(
        None, ["model.path=m", "data.train=[a, b]", "learner.lr=1e-4", "replay.max_staleness=0", "seed=7"]
    )
    assert config.data.train_files == ["a", "b"]
    assert (config.learner.lr, config.replay.max_staleness, config.seed) == (1e-4, 0, 7)
    assert parse_override("algorithm.loss_options={clip_low: 3e-4}") == ("algorithm.loss_options", {"clip_low": 3e-4})


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"learner.lrr": 1e-4}, "learner.lrr = 0.0001: unknown key; did you mean learner.lr?"),
        ({"lr": 1e-4}, "lr = 0.0001: unknown key; did you mean learner.lr?"),
        ({"replay.staleness": 4}, "replay.staleness = 4: unknown key; did you mean replay.max_staleness?"),
        ({"lerner.lr": 1e-4}, "lerner = {'lr': 0.0001}: unknown key; did you mean learner?"),
        ({"learner.lr": -1.0}, "learner.lr = -1.0: input should be greater than 0"),
        ({"learner.lr": "fast"}, "learner.lr = 'fast': input should be a valid number, unable to parse string"),
        ({"learner.zero_stage": 5}, "learner.zero_stage = 5: input should be 0, 1, 2 or 3"),
        ({"launch.generators": 0}, "launch.generators = 0: input should be greater than or equal to 1"),
        ({"replay.max_staleness": -1}, "replay.max_staleness = -1: input should be greater than or equal to 0"),
        ({"run": "../else"}, "run = '../else': string should match pattern"),
        (
            {"launch.learners": 3, "replay.groups_per_step": 8},
            "launch.learners = 3 does not divide replay.groups_per_step = 8: every learner rank takes the same number "
            "of whole groups; use 1, 2, 4, 8 learners",
        ),
        (
            {"generator.top_p": 0.9},
            "generator.top_p = 0.9: unknown key; training samples from the full distribution",
        ),
        (
            {"data.weights": [1.0, 2.0]},
            "data.weights = [1.0, 2.0]: there are 1 training files; set one for each",
        ),
        ({"data.weights": [-1.0]}, "data.weights = [-1.0]: each must be above 0"),
        (
            {"learner.minibatches": 3},
            "learner.minibatches = 3 does not divide the 32 groups that a learner rank gets in a step; use one of 1, 2",
        ),
        (
            {"critic.ranks": 2, "algorithm.advantage": "gae"},
            "critic.ranks = 2: each serves at least one of the learner ranks, of which there are 1",
        ),
        (
            {"replay.min_staleness": 3},
            "replay.min_staleness = 3: no more than replay.max_staleness = 2 batches are ever generated ahead",
        ),
        (
            {"generator.engine_options": {"block_size": 32, "tensor_parallel_size": 2}},
            "generator.engine_options.tensor_parallel_size = 2: cannot be set here: new weights reach the engine",
        ),
        (
            {"generator.engine_options.data_parallel_size": 2},
            "generator.engine_options.data_parallel_size = 2: cannot be set here: new weights",
        ),
        (
            {"generator.engine_options.logprobs_mode": "raw_logprobs"},
            "generator.engine_options.logprobs_mode = 'raw_logprobs': cannot be set here: the log-probs of sampled",
        ),
        (
            {"learner.deepspeed_options": {"zero_optimization": {"overlap_comm": True, "stage": 3}}},
            "learner.deepspeed_options.zero_optimization.stage = 3: cannot be set here: it is learner.zero_stage",
        ),
        (
            {"learner.deepspeed_options.gradient_clipping": 1.0},
            "learner.deepspeed_options.gradient_clipping = 1.0: cannot be set here: it is learner.max_grad_norm",
        ),
        (
            {"generator.max_model_tokens": 16, "generator.max_new_tokens": 16},
            "generator.max_model_tokens = 16 leaves no room for a prompt",
        ),
    ],
)
def test_what_cannot_work_is_refused_with_path_value_and_rule(overrides: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, {**NEEDED, **overrides})
    assert message in str(caught.value)


def test_everything_wrong_is_said_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, {"model.path": "m", "learner.lr": 0, "generator.temperature": 0})
    text = str(caught.value)
    for part in ("data: required, but not set", "learner.lr = 0", "generator.temperature = 0"):
        assert part in text


@pytest.mark.parametrize(("former", "name"), RENAMED.items())
def test_a_former_key_is_refused_with_its_new_name(former: str, name: str) -> None:
    assert name in config_keys()
    with pytest.raises(ConfigError, match=re.escape(f"{former} = 1: unknown key; it is now {name}")):
        load_config(None, {**NEEDED, former: 1})


def test_missing_file_names_what_is_shipped() -> None:
    with pytest.raises(ConfigError, match=r"--config demoo: no such file; did you mean demo\?; shipped: .*demo"):
        load_config("demoo")


def test_broken_yaml(tmp_path: Path) -> None:
    broken = tmp_path / "broken.yaml"
    broken.write_text("a: [1")
    with pytest.raises(ConfigError, match="not valid YAML"):
        load_config(broken)
    broken.write_text("just text")
    with pytest.raises(ConfigError, match="expected sections with keys, found str"):
        load_config(broken)


def test_override_without_equals_or_into_a_value() -> None:
    with pytest.raises(ConfigError, match=r"override 'learner.lr': expected section.key=value"):
        parse_override("learner.lr")
    with pytest.raises(ConfigError, match=r"seed.x: seed is a value, not a section"):
        load_config(None, {**NEEDED, "seed": 1, "seed.x": 2})


KEYS, GOAL = 109, 95
"""Keys of today, a number that may only fall, and how many there are to be: a new key takes the place of another."""


def test_config_becomes_small() -> None:
    assert GOAL <= len(config_keys()) <= KEYS


PRESETS = ("grpo", "dapo", "dr_grpo", "gspo", "cispo", "ppo_gae", "rloo", "reinforce_pp")


def test_presets_are_short_and_run_on_the_demo() -> None:
    by_name = {path.stem: path for path in CONFIGS}
    demo = load_config("demo")
    for name in PRESETS:
        assert len(by_name[name].read_text().splitlines()) <= 25, name
        preset = load_config(name)
        assert (preset.model, preset.data, preset.steps) == (demo.model, demo.data, demo.steps), name
    assert all(len(path.read_text().splitlines()) <= 25 for path in CONFIGS)


def test_every_key_is_documented_where_it_is_defined() -> None:
    nodes = [node for module in (sections, models) for node in ast.parse(inspect.getsource(module)).body]
    classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
    fields = documented = 0
    bare: list[str] = []
    for section in classes[1:]:
        if ast.get_docstring(section) is None:
            bare.append(section.name)
        for node, after in zip(section.body, [*section.body[1:], None], strict=True):
            if not isinstance(node, ast.AnnAssign) or ast.unparse(node.annotation).endswith("Config"):
                continue  # a section's own docstring says what it is
            fields += 1
            if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                documented += 1
            else:
                bare.append(f"{section.name}.{ast.unparse(node.target)}")
    assert bare == []
    assert documented == fields == len(config_keys())
