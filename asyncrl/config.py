"""All settings of a run: frozen pydantic models, read from YAML and `section.key=value` overrides.

Derived numbers are properties. A value that cannot work is refused here, before any process starts.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self, cast

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from asyncrl.errors import ConfigError

Options = dict[str, bool | int | float | str | None]
"""Keyword-only arguments for a function named in the config."""


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, protected_namespaces=())


class ModelConfig(Section):
    path: str
    """Folder (or hub name) of the policy to start from, in Hugging Face format."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Number format of weights and activations in engine and learner; log-probs are float32 always."""
    recipe: Literal["tiny-model"] | None = None
    """When `path` does not exist, make this small model there."""
    trust_remote_code: bool = False


class DataConfig(Section):
    train: str | list[str]
    """Parquet file or files of prompts."""
    recipe: Literal["arithmetic"] | None = None
    """When `train` does not exist, make this small dataset there."""
    prompt_column: str = "prompt"
    """Column with a string or a list of chat messages."""
    ground_truth_column: str = "reward_model.ground_truth"
    """Column, or field of a struct column, that the reward compares with."""
    shuffle: bool = True
    max_prompt_tokens: int | None = Field(default=None, ge=1)
    """Longer prompts are counted and skipped; never more than the model's window leaves."""

    @property
    def train_files(self) -> list[str]:
        return [self.train] if isinstance(self.train, str) else list(self.train)


class GeneratorConfig(Section):
    group_size: int = Field(default=8, ge=2)
    """Trajectories of one prompt."""
    temperature: float = Field(default=1.0, gt=0.0)
    max_new_tokens: int = Field(default=512, ge=1)
    max_running_groups: int = Field(default=64, ge=1)
    """Groups one generator works on at once (continuous batching)."""
    max_model_tokens: int | None = Field(default=None, ge=2)
    """Window of the engine, prompt and completion; the model's own when not set."""
    kv_cache_bytes: int | None = Field(default=None, ge=1 << 20)
    """Key-value cache of each engine; when not set, 1 GiB on a CPU and the engine's own choice on a GPU."""
    gpu_memory_fraction: float = Field(default=0.9, gt=0.0, le=1.0)
    prefix_caching: bool = False
    """Share the prompt's keys and values inside a group; never across policy versions."""
    reward_workers: int = Field(default=1, ge=1)
    """Processes per generator that run the reward function."""
    reward_timeout_s: float = Field(default=10.0, gt=0.0)
    """A group whose rewards take longer is given up as failed."""


class ReplayConfig(Section):
    groups_per_step: int = Field(default=32, ge=1)
    """Groups in the batch of one optimizer step."""
    max_staleness: int = Field(default=2, ge=0)
    """Hard bound, in learner steps, between the version that sampled a token and the one that trains on it.
    0 is synchronous training."""
    order: Literal["ready", "ticket"] = "ready"
    """ready: finished groups may pass a slow one as long as the bound holds for all; ticket: strictly in order."""
    no_signal: Literal["refund", "train"] = "refund"
    """What happens to a group whose rewards are all equal: its place is given to another prompt, or it is trained."""
    max_refunds_in_a_row: int = Field(default=4096, ge=1)
    """The run fails when so many groups one after another gave no training signal."""
    lease_timeout_s: float = Field(default=600.0, gt=0.0)
    """A lease not finished by then is handed out again."""
    max_bytes: int = Field(default=4 << 30, ge=1 << 20)
    """Ceiling of the finished groups held in memory; no new leases above it."""


class AlgorithmConfig(Section):
    advantage: str = "grpo"
    advantage_options: Options = {}
    loss: str = "decoupled_ppo"
    loss_options: Options = {}
    correction: Options = {"level": "token", "mode": "truncate", "high": 2.0}
    """Importance weights against the behavior policy (options of `corrections.importance_weights`)."""
    aggregation: Literal[
        "token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"
    ] = "token-mean"


class LearnerConfig(Section):
    lr: float = Field(default=1e-6, gt=0.0)
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape after the warm-up; linear and cosine end at 0 with the last step."""
    warmup_steps: int = Field(default=0, ge=0)
    weight_decay: float = Field(default=0.01, ge=0.0)
    adam_betas: tuple[float, float] = (0.9, 0.95)
    max_grad_norm: float = Field(default=1.0, gt=0.0)
    zero_stage: Literal[0, 1, 2, 3] = 0
    tokens_per_microbatch: int = Field(default=8192, ge=1)
    """Tokens of one packed forward pass; one longer trajectory makes a micro-batch of its own."""
    gradient_checkpointing: bool = False
    save_every_steps: int | None = Field(default=None, ge=1)
    """Also write the model to `checkpoints/` at every so many steps; the last one is always in `model/`."""


class WeightsConfig(Section):
    transport: str = "auto"
    """A transport of `asyncrl list`; auto is nccl where every generator has a GPU, else gloo."""
    bucket_bytes: int = Field(default=64 << 20, ge=1 << 10)
    timeout_s: float = Field(default=60.0, gt=0.0)
    """Deadline of each phase of a broadcast."""
    kv_cache: Literal["keep", "recompute"] = "keep"
    """What a weight swap does to running completions: go on with the old keys and values, or prefill again."""


class LaunchConfig(Section):
    cluster: str = "local"
    """A launcher of `asyncrl list`."""
    generators: int = Field(default=1, ge=1)
    learners: int = Field(default=1, ge=1)
    port: int = Field(default=0, ge=0, le=65533)
    """First of three ports on the loopback interface; 0 takes free ones."""
    pin_cores: bool = True
    """On CPU, give generators and learners cores of their own."""
    start_timeout_s: float = Field(default=180.0, gt=0.0)
    """Deadline for every role to be up."""
    progress_timeout_s: float = Field(default=600.0, gt=0.0)
    """The run fails when no optimizer step ends for so long."""
    stop_timeout_s: float = Field(default=15.0, gt=0.0)
    """After this long a role that was asked to stop is ended."""


class ObserveConfig(Section):
    trackers: list[str] = ["jsonl"]
    """Where step metrics go (trackers of `asyncrl list`); wandb runs in offline mode unless WANDB_MODE says else."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"


class Config(Section):
    model: ModelConfig
    data: DataConfig
    rewards: str | dict[str, str] = "exact"
    """A reward's name, `module:function`, `file.py:function`, or a table of these by data source."""
    generator: GeneratorConfig = GeneratorConfig()
    replay: ReplayConfig = ReplayConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    learner: LearnerConfig = LearnerConfig()
    weights: WeightsConfig = WeightsConfig()
    launch: LaunchConfig = LaunchConfig()
    observe: ObserveConfig = ObserveConfig()
    run: str = Field(default="run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Name of the run; its folder is `runs/<name>`."""
    steps: int = Field(default=100, ge=1)
    """Optimizer steps."""
    seed: int = Field(default=0, ge=0)

    @model_validator(mode="after")
    def _cross_checks(self) -> Self:
        groups, learners = self.replay.groups_per_step, self.launch.learners
        if groups % learners:
            raise ValueError(
                f"launch.learners = {learners} does not divide replay.groups_per_step = {groups}: "
                f"every learner rank takes the same number of whole groups; use {_divisors(groups)} learners"
            )
        window = self.generator.max_model_tokens
        if window is not None and window <= self.generator.max_new_tokens:
            raise ValueError(
                f"generator.max_model_tokens = {window} leaves no room for a prompt: "
                f"it must be above generator.max_new_tokens = {self.generator.max_new_tokens}"
            )
        return self

    @property
    def run_dir(self) -> Path:
        return Path("runs") / self.run

    def to_yaml(self) -> str:
        """The whole resolved config; `load_config` of it gives an equal one."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False)


class _Loader(yaml.SafeLoader):
    """YAML's safe loader that also reads 1e-4 as a number (YAML 1.1 wants 1.0e-4)."""


_Loader.add_implicit_resolver(  # pyright: ignore[reportUnknownMemberType]
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def _divisors(number: int) -> str:
    return ", ".join(str(d) for d in range(1, min(number, 64) + 1) if number % d == 0)


def load_config(path: str | Path | None, overrides: Mapping[str, Any] | Sequence[str] = ()) -> Config:
    """Reads a YAML file (a path, or the name of a file in `configs/`) and applies overrides over it.

    `overrides` maps dotted keys to values, or lists `section.key=value` strings whose values are YAML.
    Raises ConfigError with the dotted path, the value, the rule and the way out.
    """
    values = _read_yaml(path) if path is not None else {}
    pairs = overrides.items() if isinstance(overrides, Mapping) else map(parse_override, overrides)
    for dotted, value in pairs:
        _set_dotted(values, dotted, value)
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        where = f" in {path}" if path is not None else ""
        lines = [_explain(item) for item in error.errors(include_url=False)]
        raise ConfigError(f"the configuration{where} cannot be used:\n  " + "\n  ".join(lines)) from None


def parse_override(text: str) -> tuple[str, Any]:
    """`("section.key", value)` of `section.key=value`; the value is read as YAML, numbers like 1e-4 included."""
    dotted, equals, raw = text.partition("=")
    if not equals or not dotted.strip():
        raise ConfigError(f"override {text!r}: expected section.key=value, for example learner.lr=1e-5")
    try:
        value = yaml.load(raw, _Loader) if raw else ""
    except yaml.YAMLError as error:
        raise ConfigError(f"override {text!r}: the value is not YAML ({error}); quote it") from None
    return dotted.strip(), value


def config_keys() -> list[str]:
    """All dotted keys there are."""
    return [dotted for dotted, _ in _walk(Config)]


def _walk(section: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, info in section.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, Section):
            yield from _walk(info.annotation, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", info


def find_config(path: str | Path) -> Path:
    """The file itself, or the one of that name in the project's `configs/`. Raises ConfigError."""
    given = Path(path)
    if given.is_file():
        return given
    shipped = _shipped_configs()
    by_name = {file.stem: file for file in shipped} | {file.name: file for file in shipped}
    if given.parent == Path(".") and str(given) in by_name:
        return by_name[str(given)]
    hint = did_you_mean(str(given), list(by_name))
    raise ConfigError(f"--config {path}: no such file{hint}; shipped: {', '.join(sorted(f.stem for f in shipped))}")


def _shipped_configs() -> list[Path]:
    return sorted((Path(__file__).parent.parent / "configs").glob("*.yaml"))


def _read_yaml(path: str | Path) -> dict[str, Any]:
    file = find_config(path)
    try:
        values = yaml.load(file.read_text(), _Loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{file}: not valid YAML: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{file}: expected sections with keys, found {type(values).__name__}")
    return cast(dict[str, Any], values)


def _set_dotted(values: dict[str, Any], dotted: str, value: Any) -> None:
    *parents, last = dotted.split(".")
    node: Any = values
    for parent in parents:
        node = node.setdefault(parent, {})
        if not isinstance(node, dict):
            raise ConfigError(f"{dotted}: {parent} is a value, not a section{did_you_mean(dotted, config_keys())}")
    node[last] = value


def unknown_name(key: str, name: str, known: Iterable[str]) -> ConfigError:
    """The error for a config key that names a part which does not exist."""
    names = list(known)
    return ConfigError(f"{key} = {name!r}: there is no such one{did_you_mean(name, names)} (of {', '.join(names)})")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """ "; did you mean X?" with the nearest of the known words, or nothing."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""


def _explain(item: Any) -> str:
    location = [str(part) for part in item["loc"] if not re.fullmatch(r"str|list\[.*\]|dict\[.*\]", str(part))]
    dotted = ".".join(location)
    if item["type"] == "extra_forbidden":
        last = location[-1]
        keys = config_keys()
        sections = list(Config.model_fields)
        siblings = [key for key in [*keys, *sections] if key.rpartition(".")[0] == dotted.rpartition(".")[0]]
        hint = did_you_mean(dotted, siblings) or did_you_mean(dotted, keys)
        if not hint:
            elsewhere = [key for key in keys if key.rpartition(".")[2] == last]
            hint = f"; did you mean {elsewhere[0]}?" if elsewhere else ""
        return f"{dotted} = {item['input']!r}: unknown key{hint}"
    if item["type"] == "missing":
        return f"{dotted}: required, but not set; give it in the file or as {dotted}=VALUE"
    message = item["msg"].removeprefix("Value error, ")
    if not dotted:
        return message
    return f"{dotted} = {item['input']!r}: {message[0].lower()}{message[1:]}"
