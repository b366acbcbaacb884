"""Reading, overriding and refusing configs."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest
import yaml

from asyncrl.algorithms.corrections import importance_weights
from asyncrl.config import config as models
from asyncrl.config import sections, training
from asyncrl.config.config import Config
from asyncrl.config.load import config_keys, load_config, option_keys, parse_override
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
        ({"environment.history": "all"}, "environment.history = 'all': input should be 'keep' or 'template'"),
        ({"run": "../else"}, "run = '../else': string should match pattern"),
        (
            {"launch.learners": 3, "replay.groups_per_step": 8},
            "launch.learners = 3 does not divide replay.groups_per_step = 8: every learner rank takes the same number "
            "of whole groups; use 1, 2, 4, 8 learners",
        ),
        ({"generator.top_p": 0.9}, "generator.top_p = 0.9: unknown key; did you mean eval.sampling.top_p?"),
        (
            {"data.weights": [1.0, 2.0]},
            "data.weights = [1.0, 2.0]: there are 1 training files; set one for each",
        ),
        ({"data.weights": [-1.0]}, "data.weights = [-1.0]: each must be above 0"),
        (
            {"learner.minibatches": 3},
            "learner.minibatches = 3 does not divide the 32 groups that a learner rank gets in a step; use one of 1, 2",
        ),
        ({"generator.stop": ["a", ""]}, "generator.stop: an empty text would end every completion at its first token"),
        ({"eval.sampling.stop": ["a"]}, "eval.sampling.stop = ['a']: cannot be set here: it is generator.stop"),
        (
            {"critic.ranks": 2, "algorithm.advantage": "gae"},
            "critic.ranks = 2: each serves at least one of the learner ranks, of which there are 1",
        ),
        (
            {"replay.min_staleness": 3},
            "replay.min_staleness = 3: no more than replay.max_staleness = 2 batches are ever generated ahead",
        ),
        (
            {
                "generator.tensor_parallel": 4,
                "placement.pools": {"gen": "6 x gpu", "train": "2 x gpu"},
                "placement.roles": {"generator": "gen", "learner": "train"},
            },
            "placement.pools.gen has 6 GPUs: it must be a multiple of generator.tensor_parallel = 4, the GPUs of one",
        ),
        (
            {"generator.tensor_parallel": 2, "deterministic": True, "replay.max_staleness": 0},
            "deterministic with generator.tensor_parallel = 2: sums over several devices are not guar",
        ),
        (
            {"generator.tensor_parallel": 2, "generator.engine": "transformers"},
            "generator.tensor_parallel = 2: the engine 'transformers' computes on one device; use",
        ),
        (
            {"learner.deepspeed_options": {"zero_optimization": {"overlap_comm": True, "stage": 3}}},
            "learner.deepspeed_options.zero_optimization.stage = 3: cannot be set here: it is learner.zero_stage",
        ),
        (
            {"learner.offload": "all", "learner.zero_stage": 2},
            "learner.offload = 'all': needs zero_stage = 3, but it is 2",
        ),
        (
            {"learner.sequence_parallel": 2, "launch.learners": 3, "replay.groups_per_step": 6},
            "learner.sequence_parallel = 2: does not divide launch.learners = 3",
        ),
        (
            {"learner.sequence_parallel": 2, "launch.learners": 2, "critic.ranks": 1},
            "learner.sequence_parallel = 2 with critic.ranks = 1: critic ranks of their own take complete sequences",
        ),
        (
            {"learner.sequence_parallel": 2, "launch.learners": 4, "replay.groups_per_step": 3},
            "launch.learners / learner.sequence_parallel = 2 does not divide replay.groups_per_step = 3",
        ),
        (
            {"learner.offload": "optimizer"},
            "learner.offload = 'optimizer': needs zero_stage >= 1, but it is 0",
        ),
        (
            {"learner.deepspeed_options": {"zero_optimization": {"offload_param": {"device": "cpu"}}}},
            "learner.deepspeed_options.zero_optimization.offload_param = {'device': 'cpu'}: cannot be set here: it is "
            "learner.offload",
        ),
        (
            {"learner.deepspeed_options.gradient_clipping": 1.0},
            "learner.deepspeed_options.gradient_clipping = 1.0: cannot be set here: it is learner.max_grad_norm",
        ),
        (
            {"generator.engine_options.max_model_len": 16, "generator.max_new_tokens": 16},
            "generator.engine_options.max_model_len = 16 leaves no room for a prompt",
        ),
        (
            {"generator.engine_options.max_model_len": "4k"},
            "generator.engine_options.max_model_len = '4k': must be a number of tokens, at least 2, or null",
        ),
        (
            {"generator.engine_options.enable_prefix_caching": "yes"},
            "generator.engine_options.enable_prefix_caching = 'yes': must be true or false",
        ),
        (
            {"generator.engine_options.enable_prefix_caching": True, "deterministic": True, "replay.max_staleness": 0},
            "deterministic with generator.engine_options.enable_prefix_caching: log-probs would depend on what is",
        ),
        (
            {"generator.engine_options.async_scheduling": 1},
            "generator.engine_options.async_scheduling = 1: must be true or false",
        ),
        (
            {"generator.engine_options.async_scheduling": True, "deterministic": True, "replay.max_staleness": 0},
            "deterministic with generator.engine_options.async_scheduling: log-probs would depend on what is in flight",
        ),
        (
            {"algorithm.correction.level": "sentence"},
            "algorithm.correction.level = 'sentence': input should be 'token', 'sequence' or 'geometric'",
        ),
        ({"algorithm.correction.hihg": 2.0}, "algorithm.correction.hihg = 2.0: unknown key; did you mean"),
        ({"algorithm.correction.mask_delta": 0.0}, "algorithm.correction.mask_delta = 0.0: input should be greater"),
        ({"algorithm.truncated": 3}, "algorithm.truncated = 3: input should be 'keep', 'mask' or 'bootstrap'"),
        ({"data.columns.promt": "q"}, "data.columns.promt = 'q': unknown key; did you mean data.columns.prompt?"),
        ({"data.columns": "q"}, "data.columns = 'q': must be a mapping with prompt, ground_truth, data_source"),
        (
            {"learner.optimizer_options.beta": []},
            "learner.optimizer_options.beta = []: unknown key; did you mean learner",
        ),
        (
            {"learner.optimizer_options.betas": [0.9, 1.0]},
            "learner.optimizer_options.betas.1 = 1.0: input should be less than 1",
        ),
        ({"eval.sampling.n": 4}, "eval.sampling.n = 4: cannot be set here: it is eval.samples"),
        ({"eval.sampling.seed": 4}, "eval.sampling.seed = 4: cannot be set here: it follows from seed"),
        ({"eval.sampling.topp": 0.9}, "eval.sampling.topp = 0.9: unknown key; did you mean eval.sampling.top_p?"),
        ({"eval.sampling.top_p": 0}, "eval.sampling.top_p = 0: input should be greater than 0"),
        ({"launch.address": "10.0.0.5:99999"}, "launch.address = '10.0.0.5:99999': must be HOST or HOST:PORT"),
        ({"launch.address": ":5"}, "launch.address = ':5': must be HOST or HOST:PORT"),
        (
            {"launch.address": "[::1]:5"},
            "launch.address = '[::1]:5': runs do not use IPv6; give an IPv4 address, or an",
        ),
        (
            {"launch.address": "10.0.5"},
            "launch.address = '10.0.5': not an IPv4 address (Expected 4 octets in '10.0.5')",
        ),
        ({"launch.address": "10.0.0.0/33"}, "launch.address = '10.0.0.0/33': not an IPv4 network such as 10.0.0.0/8 ("),
        (
            {"launch.address": "10.0.0.5/8:1"},
            "launch.address = '10.0.0.5/8:1': not a network, but an address with a prefix; its network is 10.0.0.0/8",
        ),
        (
            {"launch.address": "node-1.example.org:5"},
            "launch.address = 'node-1.example.org:5': neither an IPv4 address, nor a network such as 10.0.0.0/8, nor "
            "the name of an interface, which has at most 15 characters; host names are not looked up",
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


def test_a_mapping_keeps_the_defaults_of_the_names_that_it_leaves_out() -> None:
    values = {
        "data.columns": {"prompt": "question", "ground_truth": None},
        "learner.optimizer_options.betas": [0.9, 0.99],
        "eval.sampling": {"temperature": 0.6},
        "eval.sampling.top_k": 20,
        "algorithm.correction": {"mode": "mask"},
        "generator.engine_options": {"max_model_len": 4096},
    }
    config = load_config(None, {**NEEDED, **values})
    assert tuple(config.data.columns.model_dump().values()) == ("question", None, "data_source")
    options = config.learner.optimizer_options
    assert (options.betas, options.weight_decay, options.eps) == ((0.9, 0.99), 0.01, 1e-8)
    assert (config.eval.sampling.temperature, config.eval.sampling.top_p, config.eval.sampling.top_k) == (0.6, 1.0, 20)
    assert (config.algorithm.correction.mode, config.algorithm.correction.high) == ("mask", 2.0)
    assert config.generator.engine_settings == {"max_model_len": 4096}
    assert Config.model_validate(yaml.safe_load(config.to_yaml())) == config


def test_the_names_of_a_correction_are_the_options_of_importance_weights() -> None:
    parameters = inspect.signature(importance_weights).parameters.values()
    options = {
        parameter.name: parameter.default for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY
    }
    assert training.Correction().weight_options() == options


@pytest.mark.parametrize(
    ("address", "host", "port"),
    [
        ("127.0.0.1", "127.0.0.1", 0),
        ("10.0.0.5:29500", "10.0.0.5", 29500),
        ("10.0.0.5:0", "10.0.0.5", 0),
        ("ib0", "ib0", 0),
        ("eth0.100:29500", "eth0.100", 29500),
        ("10.0.0.0/8", "10.0.0.0/8", 0),
        ("10.0.0.0/8:29500", "10.0.0.0/8", 29500),
    ],
)
def test_an_address_is_a_host_and_perhaps_a_port(address: str, host: str, port: int) -> None:
    launch = load_config(None, {**NEEDED, "launch.address": address}).launch
    assert (launch.host, launch.port) == (host, port)


def test_what_a_launcher_chose_is_no_other_setting() -> None:
    asked = {"model.path": "m", "data.train": "d", "rewards": "auto", "weights.staging": "auto", "epochs": 2.0}
    chosen = {"rewards": "gsm8k", "weights.staging": "buckets", "epochs": None, "steps": 7}
    chosen |= {"launch.start_timeout_s": 180.0}
    saved = load_config(None, asked | chosen)
    assert load_config(None, asked).with_choices_of(saved) == saved
    other = load_config(None, asked | {"weights.staging": "host"}).with_choices_of(saved)
    assert other.weights.staging == "host"
    slower = load_config(None, asked | {"launch.start_timeout_s": 600.0}).with_choices_of(saved)
    assert slower.launch.start_timeout_s == 600.0


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
    with pytest.raises(ConfigError, match=r"seed.x: seed is a scalar, not a section"):
        load_config(None, {**NEEDED, "seed": 1, "seed.x": 2})


MAX_KEYS = 121
"""A new key takes the place of another."""


def test_the_config_is_small(capsys: pytest.CaptureFixture[str]) -> None:
    count = len(config_keys())
    with capsys.disabled():
        print(f"\nthe config has {count} keys, and {len(option_keys())} names inside mappings")
    assert count <= MAX_KEYS


PRESETS = ("grpo", "dapo", "dr_grpo", "gspo", "cispo", "ppo_gae", "rloo", "reinforce_pp")


def test_presets_are_short_and_run_on_the_demo() -> None:
    by_name = {path.stem: path for path in CONFIGS}
    demo = load_config("demo")
    for name in PRESETS:
        assert len(by_name[name].read_text().splitlines()) <= 25, name
        preset = load_config(name)
        assert (preset.recipe, preset.model, preset.data) == ("demo", demo.model, demo.data), name
        assert preset.steps == demo.steps, name
    assert all(len(path.read_text().splitlines()) <= 25 for path in CONFIGS)


def test_every_key_is_documented_where_it_is_defined() -> None:
    modules = (models, sections, training)
    nodes = [node for module in modules for node in ast.parse(inspect.getsource(module)).body]
    classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
    fields = documented = 0
    bare: list[str] = []
    entries = 0
    """Fields of the entries of mappings, which are not keys."""
    for section in classes:
        if ast.get_docstring(section) is None and section.name != "_Settings":
            bare.append(section.name)
        for node, after in zip(section.body, [*section.body[1:], None], strict=True):
            if not isinstance(node, ast.AnnAssign) or ast.unparse(node.annotation).endswith("Config"):
                continue  # a section has a docstring
            fields += 1
            entries += any(ast.unparse(base) == "MappingEntry" for base in section.bases)
            if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                documented += 1
            else:
                bare.append(f"{section.name}.{ast.unparse(node.target)}")
    assert bare == []
    assert documented == fields == len(config_keys()) + len(option_keys()) + entries
