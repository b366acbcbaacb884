"""The sections of a config, and the values of keys that are mappings with known names.

The algorithm, the learner and the critic are in `training.py`. Invalid values are rejected here, invalid combinations
of sections in `config.py`.
"""

from __future__ import annotations

import os
import re
from ipaddress import IPv4Address, IPv4Network
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    field_validator,
    model_validator,
)

from asyncrl.config.engine_options import check_engine_options, check_sampling, check_template_options

Options = dict[str, bool | int | float | str | None]
"""Keyword-only arguments for a function named in the config."""

RewardSpec = str | dict[str, float]
"""The reward of a row: one function, or several with their weights."""
Rewards = RewardSpec | dict[str, RewardSpec]
AUTO = "auto"
"""The value of `rewards` that a run replaces by its own choice."""
ENVIRONMENT = "environment"
"""The name in `rewards` of the environment's reward."""


class _Settings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, protected_namespaces=())


class Section(_Settings):
    """A group of keys; unknown ones are refused."""


class MappingValue(_Settings):
    """The value of one key: a mapping with known names. Missing names have their defaults, unknown ones are refused."""


class MappingEntry(_Settings):
    """An entry of a mapping whose names the user chooses; unknown fields are refused."""


_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")


def expand_path(path: Any) -> Any:
    """The path with `~`, `~user`, `$NAME` and `${NAME}` replaced. Raises ValueError for a variable that is not set."""
    if not isinstance(path, str):
        return path

    def value_of(found: re.Match[str]) -> str:
        name = found[1] or found[2]
        if name not in os.environ:
            raise ValueError(f"the environment variable {name} is not set; set it, or write the path out")
        return os.environ[name]

    return os.path.expanduser(_VARIABLE.sub(value_of, path))


LocalPath = Annotated[str, BeforeValidator(expand_path)]
"""A path in which `~` and environment variables are expanded."""


class ModelConfig(Section):
    """The policy to train."""

    path: LocalPath
    """Folder of the policy to start from, in Hugging Face format, or the name of a model of the hub."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Number format of weights and activations in engine and learner; log-probs are always float32."""
    trust_remote_code: bool = False
    """Run the Python code in the model's folder; models that transformers has itself need none."""


CUSTOM_PARTS: tuple[Literal["dataset", "sampler", "filter"], ...] = ("dataset", "sampler", "filter")


class Columns(MappingValue):
    """The columns of a dataset, by the project's names for them; `a.b` is field b of the struct column a."""

    prompt: str = "prompt"
    """Column with a string or a list of chat messages."""
    ground_truth: str | None = "reward_model.ground_truth"
    """Column that the reward compares with; null for data without one."""
    data_source: str = "data_source"
    """Column with the source of a row, which selects its reward. A file without the column is its own source."""

    @property
    def ground_truth_name(self) -> str:
        """Name of the ground truth's column, or of its field, for reward functions."""
        return (self.ground_truth or "ground_truth").rpartition(".")[2]


class CustomData(MappingValue):
    """The user's own parts of the data, each by `module:name` or `file.py:name`."""

    dataset: str | None = None
    """Makes the rows of `data.train` and of `data.eval` from these files; null: the rows that the files have."""
    sampler: str | None = None
    """Determines the order of the training rows; null: each epoch has every row once, shuffled by `seed`."""
    filter: str | None = None
    """Called with each training row; a row for which it returns False is left out. Null: none is."""
    options: dict[Literal["dataset", "sampler", "filter"], Options] = Field(default={})
    """Options (keyword-only arguments) of these parts."""

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        for part in CUSTOM_PARTS:
            name = getattr(self, part)
            if name is not None and ":" not in name:
                raise ValueError(f"{part} = {name!r}: must be module:name or file.py:name")
            if name is None and part in self.options:
                raise ValueError(
                    f"options.{part} = {self.options[part]}: there is no {part}; name one, or leave it out"
                )
        return self


class DataConfig(Section):
    """The prompts."""

    train: LocalPath | list[LocalPath]
    """File or files of training prompts: Parquet, JSON lines, JSON, CSV, or a folder of `datasets.save_to_disk`; of the
    hub `hf://datasets/OWNER/NAME/FILE`."""
    eval: LocalPath | list[LocalPath] | None = None
    """The same of evaluation prompts; without any nothing is evaluated."""
    weights: list[float] | None = None
    """Fraction of the prompts from each training file, in their order; by default proportional to their rows."""
    columns: Columns = Columns()
    """Columns of the files, by the names prompt, ground_truth and data_source."""
    string_prompts: Literal["text", "user"] = "text"
    """A string prompt is the complete text (text), or a user message for the model's chat template (user)."""
    template_options: dict[str, JsonValue] = Field(default={})
    """Variables of the chat template, such as {enable_thinking: false}, for prompts, episodes and the reward model.
    Those in a row's column `chat_template_kwargs` go before them."""
    shuffle: bool = True
    """Each epoch has another order of the rows, by `seed`; otherwise it is the order of the files."""
    max_prompt_tokens: int | None = Field(default=None, ge=1)
    """Limit of a prompt; the model's window may leave less."""
    too_long: Literal["skip", "left", "right", "middle"] = "skip"
    """Prompts above the limit are counted and skipped, or lose tokens at their left end, right end or in the middle."""
    custom: CustomData = CustomData()
    """A custom dataset, sampler or filter, by `module:name` or `file.py:name`, and their options."""
    workers: int = Field(default=0, ge=0, le=64)
    """Processes that read and tokenize prompts ahead of the replay queue; 0: a thread of the queue's process does."""

    @property
    def train_files(self) -> list[str]:
        return [self.train] if isinstance(self.train, str) else list(self.train)

    @property
    def eval_files(self) -> list[str]:
        return [self.eval] if isinstance(self.eval, str) else list(self.eval or [])

    @field_validator("template_options")
    @classmethod
    def _check_template_options(cls, value: dict[str, JsonValue]) -> dict[str, JsonValue]:
        check_template_options(value)
        return value

    @model_validator(mode="after")
    def _check_weights(self) -> Self:
        own = next((part for part in ("dataset", "sampler") if getattr(self.custom, part) is not None), None)
        if self.weights is not None and own is not None:
            raise ValueError(
                f"weights = {self.weights} with custom.{own}: weights are of the files' own rows in the order by seed; "
                f"leave one out"
            )
        if self.weights is not None:
            if len(self.weights) != len(self.train_files):
                raise ValueError(
                    f"weights = {self.weights}: there are {len(self.train_files)} training files; set one for each"
                )
            if min(self.weights, default=0.0) <= 0:
                raise ValueError(f"weights = {self.weights}: each must be above 0; leave the file out of train instead")
        return self


class ReplayConfig(Section):
    """The queue between generators and learner: the groups of a step, their staleness, and the memory for them."""

    groups_per_step: int = Field(default=32, ge=1)
    """Groups in the batch of one optimizer step."""
    max_staleness: int = Field(default=2, ge=0)
    """Hard bound, in learner steps, between the version that sampled a token and the one that trains on it.
    0 is synchronous training."""
    min_staleness: int = Field(default=0, ge=0)
    """Complete batches that the queue holds before one is trained. With `max_staleness` of them all tokens are that
    old, to study corrections at a known staleness."""
    zero_variance: Literal["auto", "refund", "train", "drop"] = "auto"
    """A group whose rewards are all equal is replaced by another prompt (refund), trained (train), or counted in its
    step without being computed (drop). auto refunds it if the advantage compares within the group, and would be 0."""
    failed: Literal["exclude", "zero", "refund"] = "exclude"
    """The treatment of a completion whose reward raises, times out or is None. exclude: it is not trained, and the
    others of its group are compared without it; zero: it has reward 0; refund: its group is replaced by another prompt.
    A group with fewer than two rewards is always replaced, except with zero if it has one."""
    max_bytes: int = Field(default=4 << 30, ge=1 << 20)
    """Limit of the finished groups in memory, with their prompts; above it only groups that the next batch needs may
    start."""

    @property
    def drops(self) -> bool:
        """True if groups without signal stay in their step without being computed."""
        return self.zero_variance == "drop"

    @model_validator(mode="after")
    def _check_min_staleness(self) -> Self:
        if self.min_staleness > self.max_staleness:
            raise ValueError(
                f"min_staleness = {self.min_staleness}: no more than replay.max_staleness = {self.max_staleness} "
                "batches are ever generated ahead, so that the learner would wait forever; use at most that"
            )
        return self


class CheckpointConfig(Section):
    """Checkpoints hold the complete state of a run: weights, optimizer, queue, prompt cursor, random states."""

    every_steps: int | None = Field(default=50, ge=1)
    """Steps between two checkpoints; the last one is at the end of training. With null, only those that
    `journal.max_bytes` requires."""
    keep_last: int = Field(default=2, ge=1)
    """Newest checkpoints that are kept; older ones are deleted."""
    keep_best: bool = True
    """Also keep the checkpoint with the best reward: of its evaluation, else of the `every_steps` steps before it."""


class JournalConfig(Section):
    """The journal holds every finished group and every committed step on disk."""

    flush: Literal["group", "step", "os"] = "step"
    """When records are synced to the disk: before each group is acknowledged, before each step is, or when the system
    writes them, at most 64 MiB later. A killed process loses nothing in any of them; a power failure loses the
    records after the last sync."""
    retention: Literal["needed", "all"] = "needed"
    """needed: records that checkpoints cover are deleted; all: none are, so that the run can be replayed offline."""
    max_bytes: int = Field(default=16 << 30, ge=1 << 20)
    """Limit of `journal/`; half of it requests a checkpoint, and above it only groups that the next batch needs may
    start."""


class WeightsConfig(Section):
    """Transfer of weights from the learner to the generators."""

    transport: str = "auto"
    """A transport of `asyncrl list`, or your own as `module:NAME` or `file.py:NAME`; auto is nccl if the learner and
    every generator have their own GPUs, else gloo. ipc is for one generator and one learner rank that share a device
    (`launch.colocate`)."""
    timeout_s: float = Field(default=60.0, gt=0.0)
    """Deadline of each phase of a broadcast."""
    staging: Literal["auto", "whole", "host", "buckets"] = "auto"
    """Memory for a version on its way, with all transports but files. `whole`: learner ranks send a copy of their
    shares, generators receive a complete copy where the transport receives, in parallel to training and decoding.
    host: the same, but generators have their copy in host memory, once for each engine, as `whole` does where the
    transport receives there, as on a CPU, and with `generator.tensor_parallel`. buckets: no copies but two buckets on
    each side; the next update waits until the version is delivered, during which engines stand still; one that keeps
    a version for an evaluation gets a later one. auto: `whole` if it is estimated to fit the GPUs, else buckets with
    nccl and host with others; with ipc buckets."""
    kv_cache: Literal["keep", "recompute"] = "keep"
    """Keys and values of running completions after a weight swap: the old ones, or computed again, which costs a
    prefill of all that runs with each version (the metric `generator/recomputed_tokens`)."""
    url: LocalPath | None = None
    """With the transport files: the folder or object store (s3://bucket/path) in which each run has a folder of its
    own for its versions; null for one in the run folder."""


class GeneratorConfig(Section):
    """Sampling of training completions, the engine, and the workers that compute rewards."""

    engine: str = "vllm"
    """The library that generates: an engine of `asyncrl list`, or your own as `module:Class` or `file.py:Class`."""
    tensor_parallel: int = Field(default=1, ge=1)
    """Devices of one generator, among which the engine divides the model: GPUs of one host, on a CPU cores."""
    group_size: int = Field(default=8, ge=1)
    """Trajectories of one prompt; advantages that compare within a group need at least 2."""
    temperature: float = Field(default=1.0, gt=0.0)
    """Temperature of the sampled distribution; all log-probs, the learner's too, are at this temperature."""
    max_new_tokens: int = Field(default=512, ge=1)
    """Maximum length of a completion; one that reaches it is truncated."""
    stop: str | list[str] = Field(default=[])
    """Texts that end a completion. The tokens up to the one that completes the text are kept and trained. Special
    tokens count with their text, such as <|im_end|>."""
    max_running_groups: int = Field(default=64, ge=1)
    """Groups that one generator processes at once (continuous batching); an eighth more wait inside the engine."""
    kv_cache_bytes: int | None = Field(default=None, ge=1 << 20)
    """Key-value cache of each engine, on all its devices together; by default 1 GiB on a CPU and the engine's own
    choice on a GPU."""
    gpu_memory_utilization: float = Field(default=0.9, gt=0.0, le=1.0)
    """Fraction of a GPU's memory that all roles on it use together, if one is an engine. The engine gets what the
    others and the staged weights leave, as estimated. Not used on a CPU."""
    reward_workers: int = Field(default=1, ge=1)
    """Processes per generator that run the reward function."""
    reward_timeout_s: float = Field(default=10.0, gt=0.0)
    """Time limit for the rewards of a group; when it is exceeded, for each completion alone, which may then fail."""
    engine_options: dict[str, JsonValue] = Field(default={})
    """Options of vLLM's engine (`vllm.EngineArgs`): max_model_len limits prompt and completion together (default: the
    model's window); enable_prefix_caching shares the prompt's keys and values inside a group, never across versions
    (default: where vLLM supports it for the model); async_scheduling schedules a batch while the one before is computed
    (default: true on a GPU; never on a CPU); others are max_num_batched_tokens, kv_cache_dtype, enforce_eager. With
    `deterministic` both are off. Refused: those that have a key here, and those that versions or log-probs depend
    on. With the engine transformers, max_model_len and max_num_batched_tokens alone."""

    @property
    def stop_texts(self) -> list[str]:
        """The texts that end a completion."""
        return [self.stop] if isinstance(self.stop, str) else list(self.stop)

    @property
    def engine_settings(self) -> dict[str, Any]:
        """The options of vLLM's engine, with the run's own defaults."""
        return {"max_model_len": None, **self.engine_options}

    @property
    def max_model_tokens(self) -> int | None:
        """Window of the engine, prompt and completion; None for the model's own."""
        return self.engine_settings["max_model_len"]

    @model_validator(mode="after")
    def _check_engine_options(self) -> Self:
        check_engine_options(self.engine_options, self.engine)
        return self

    @model_validator(mode="after")
    def _check_ends(self) -> Self:
        if "" in self.stop_texts:
            raise ValueError("stop: an empty text would end every completion at its first token; leave it out")
        return self


class EnvironmentConfig(Section):
    """The environment of episodes with several turns."""

    name: str | dict[str, str] | None = None
    """A built-in environment, or your own as `module:Class` or `file.py:Class`; one of another project, as
    `trl:file.py:Class`, `gymnasium:ID`, `skyrl:NAME`, `verl:TOOLS.yaml`, `verifiers:ID`, or `mcp:COMMAND` for the tools
    of a server; or an agent program that speaks the OpenAI API, as `agent:file.py:function` or `agent:COMMAND`; or a
    mapping of these by data source, with "default" for the others. Without one a trajectory is a single completion."""
    options: dict[str, dict[str, Any]] = Field(default={})
    """Options (keyword-only arguments) of environments, by their names in `environment.name`."""
    python: str | None = None
    """Interpreter of agent programs and of the verifiers library, as `venv/bin/python`, for packages that do not fit
    asyncrl's."""
    hosts: int = Field(default=1, ge=1)
    """Processes per generator in which environments run."""
    max_episodes: int | None = Field(default=None, ge=1)
    """Maximum number of episodes that one generator plays at once, for environments that are expensive to hold."""
    max_turns: int = Field(default=16, ge=1)
    """Turns of the policy after which an episode is truncated, unless its environment has its number."""
    max_observation_tokens: int = Field(default=2048, ge=1)
    """Longer observations keep their two ends."""
    tool_format: Literal["auto", "hermes", "qwen3_coder", "json", "none"] = "auto"
    """The form in which the model writes calls of tools. Auto is the response template of its tokenizer or, if it has
    none, the form in which its chat template shows earlier calls."""
    history: Literal["keep", "template"] = "keep"
    """The part of earlier turns that the policy reads under a chat template. Keep: all of them, one row for an episode.
    Template: what the template renders for the messages, which may leave out reasoning; where that does not continue
    the row, another one begins: the same tokens are trained, more are computed."""
    timeout_s: float = Field(default=300.0, gt=0.0)
    """Time limit of an episode."""
    step_timeout_s: float = Field(default=60.0, gt=0.0)
    """Time limit of one call of an environment."""


class Sampling(MappingValue):
    """The sampling of evaluation completions, as in `vllm.SamplingParams`."""

    temperature: float = Field(default=1.0, ge=0.0)
    """Temperature of the distribution; 0 is greedy."""
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    """Probability mass of the most likely tokens that are sampled from; 1 excludes none."""
    top_k: int = Field(default=0, ge=0)
    """Number of most likely tokens that are sampled from; 0 excludes none."""
    min_p: float = Field(default=0.0, ge=0.0, le=1.0)
    """Minimum probability of a token, relative to the most likely one; 0 excludes none."""

    @model_validator(mode="before")
    @classmethod
    def _check_names(cls, values: Any) -> Any:
        check_sampling(values)
        return values


class EvalConfig(Section):
    """Evaluation on the prompts of `data.eval`."""

    every_steps: int | None = Field(default=None, ge=1)
    """Versions that are multiples of this are evaluated during training; the first and last version always."""
    samples: int = Field(default=1, ge=1)
    """Completions of each prompt; pass@k is reported for k from 1 up to this."""
    sampling: Sampling = Sampling()
    """Sampling of evaluation completions, with the names of `vllm.SamplingParams`."""
    max_prompts: int | None = Field(default=None, ge=1)
    """Number of prompts that are evaluated, from the start of the files; by default all."""
    rewards: Rewards | None = None
    """Reward of evaluations, in any form of `rewards`; by default that of training."""


MAX_GENERATORS = 1024
"""Maximum number of generators of a run: each is a process on this machine, and one replay queue serves all."""


class LaunchConfig(Section):
    """Processes: their number, addresses, deadlines and restarts."""

    cluster: str = "local"
    """A launcher of `asyncrl list`, or your own as `module:Class` or `file.py:Class`."""
    slurm: Options = Field(default={})
    """With the launcher slurm: options of sbatch, such as `{partition: gpu, account: team, time: 0-08:00:00}`; true for
    one without a value. The number of nodes and GPUs is that of `placement.pools`, if there are any."""
    generators: int = Field(default=1, ge=1)
    """Generator processes at the start, at most 1024; `asyncrl scale` changes their number."""
    learners: int = Field(default=1, ge=1)
    """Learner ranks; a divisor of `replay.groups_per_step`."""
    address: str = "127.0.0.1"
    """The address that the roles listen on, as HOST or HOST:PORT. HOST is an IPv4 address of the launcher's machine,
    or a network interface (`ib0`) or network (`10.0.0.0/8`) on which each machine has its own. On a loopback address
    ZeroMQ uses unix sockets that only the user can open, and a port is refused. On another one the replay queue listens
    on PORT (by default a free one), with encryption (CURVE); weights and collectives are not encrypted."""
    colocate: Literal["off", "on", "force"] = "off"
    """on: each learner rank and a generator share a device, one at a time; on a CPU the device is
    a part of the cores. There are as many learner ranks as generators, times `generator.tensor_parallel`. force: on
    GPUs also with engines other than transformers, where this is not proven."""
    start_timeout_s: float = Field(default=1800.0, gt=0.0)
    """Deadline for the start of every role. The default is for GPUs, whose engines read, compile and capture for
    minutes; in a run without GPUs it is 180."""
    progress_timeout_s: float = Field(default=600.0, gt=0.0)
    """The run fails after this time without an optimizer step and, while the learners wait for a batch, without a
    generated token or a refunded group, and when the environments or rewards of all groups of this time failed."""
    stop_timeout_s: float = Field(default=15.0, gt=0.0)
    """Deadline for a role that was asked to stop, and for a generator that leaves; after it they are killed."""
    heartbeat_timeout_s: float = Field(default=60.0, gt=0.0)
    """A generator or replay queue that is silent for this time is restarted. Generators send heartbeats every second,
    however long a group takes."""
    max_restarts: int = Field(default=10, ge=0)
    """More restarts of one role than this within 10 minutes, or without an optimizer step in between, end the run; 0
    restarts nothing. A role that never worked and fails twice for one reason ends it earlier."""

    @property
    def colocated(self) -> bool:
        """True if learner ranks and generators share devices."""
        return self.colocate != "off"

    @property
    def host(self) -> str:
        """The address, interface or network to listen on (`launch/machine.py`)."""
        return split_address(self.address)[0]

    @property
    def port(self) -> int:
        """The port of the replay queue; 0 for a free one."""
        return split_address(self.address)[1]

    @field_validator("generators")
    @classmethod
    def _check_generators(cls, generators: int) -> int:
        if generators > MAX_GENERATORS:
            raise ValueError(too_many_generators())
        return generators

    @field_validator("colocate", mode="before")
    @classmethod
    def _read_boolean(cls, colocate: Any) -> Any:
        return {True: "on", False: "off"}[colocate] if isinstance(colocate, bool) else colocate  # YAML reads on as true

    @field_validator("address")
    @classmethod
    def _check_address(cls, address: str) -> str:
        parse_host(split_address(address)[0])
        return address


def too_many_generators() -> str:
    """The error text for too many generators."""
    return (
        f"at most {MAX_GENERATORS}: each is a process of this machine, and one replay queue answers them all; raise "
        "generator.max_running_groups to have each generate more at once"
    )


PlacedRole = Literal["generator", "learner", "critic", "reward_model"]
"""A role that can be placed; the replay queue is on the launcher's host."""
SHORT_POOL = re.compile(r"(\d+) ?x ?gpu")


class HostPool(MappingEntry):
    """Hosts, or GPUs wherever they are."""

    nodes: int | None = Field(default=None, ge=1)
    """Number of hosts; null: as many as it takes for the GPUs or the cores."""
    gpus: int = Field(default=0, ge=0)
    """GPUs of each host; without `nodes` those of all hosts together."""
    cpus: int | None = Field(default=None, ge=1)
    """Cores of each host; null: 1 for each GPU, without GPUs all that a host has free."""

    @model_validator(mode="after")
    def _check_size(self) -> Self:
        if self.nodes is None and not self.gpus:
            raise ValueError("has neither nodes nor gpus: give the number of hosts or GPUs of the pool")
        return self


class PlacementConfig(Section):
    """Which hosts the roles run on. Without pools all roles share all hosts."""

    pools: dict[str, HostPool] = Field(default={})
    """Pools by name, such as `{gen: 8 x gpu, train: {nodes: 2, gpus: 8}}`; `8 x gpu` is short for `{gpus: 8}`."""
    roles: dict[PlacedRole, str] = Field(default={})
    """The pool of each role, such as `{generator: gen, learner: train}`. Several roles may share a pool."""

    def pool_of(self, role: str) -> str:
        """The pool of a role; empty if it may run on all hosts."""
        return next((pool for one, pool in self.roles.items() if one == role), "")

    @field_validator("pools", mode="before")
    @classmethod
    def _read_short(cls, pools: Any) -> Any:
        if not isinstance(pools, dict):
            return pools
        return {name: _pool(name, pool) for name, pool in pools.items()}

    @model_validator(mode="after")
    def _check_roles(self) -> Self:
        for role, pool in self.roles.items():
            if pool not in self.pools:
                raise ValueError(
                    f"roles.{role} = {pool!r}: unknown pool; placement.pools has {', '.join(self.pools) or 'none'}"
                )
        if self.pools and (missing := {"generator", "learner"} - set(self.roles)):
            raise ValueError(f"roles lacks {' and '.join(sorted(missing))}: with pools, each role is in one of them")
        if idle := set(self.pools) - set(self.roles.values()):
            raise ValueError(f"pools.{min(idle)}: no role is in it; name one in placement.roles, or leave it out")
        return self


def _pool(name: str, pool: Any) -> Any:
    if not isinstance(pool, str):
        return pool
    if not (short := SHORT_POOL.fullmatch(pool.strip())):
        raise ValueError(f"pools.{name} = {pool!r}: must be N x gpu, or a mapping of nodes, gpus and cpus")
    return {"gpus": int(short[1])}


class ObserveConfig(Section):
    """Metrics and logs."""

    trackers: list[str] = Field(default=["jsonl"])
    """Destinations of the step metrics: trackers of `asyncrl list`, or custom ones as `module:Class` or
    `file.py:Class`; all but jsonl also receive samples. wandb and swanlab are offline unless WANDB_MODE or SWANLAB_MODE
    says otherwise. A tracker that fails is tried again and never stops the run."""
    samples: int = Field(default=2, ge=0, le=5)
    """Trajectories that the live view shows of a recent step: the best, the worst, the first without a reward, the
    longest and the median, this many of them in this order. All five are recorded in `samples/`, every few seconds,
    with the completions of every evaluation; 0 records none."""
    profile: list[Annotated[int, Field(ge=1)]] = Field(default=[], max_length=16)
    """Steps of which each learner rank writes a trace of torch's profiler to `profile/`, for Perfetto."""

    def check_profile(self, steps: int) -> None:
        """Raises ValueError if a run of this many steps does not come to all of the steps to profile."""
        if late := [step for step in self.profile if step > steps]:
            raise ValueError(
                f"observe.profile = {self.profile}: the run has only {steps} steps, so it never reaches step "
                f"{', '.join(map(str, late))}; name steps from 1 to {steps}"
            )


LAST_PORT = 65535
INTERFACE = re.compile(r"[^\s/:]{1,15}")
"""The names that Linux allows for network interfaces, but those with a colon."""
NUMBERS = re.compile(r"[0-9.]+")


def split_address(address: str) -> tuple[str, int]:
    """Returns host and port of HOST or HOST:PORT; the port is 0 if there is none. Raises ValueError."""
    if address.count(":") > 1:
        raise ValueError(
            "runs do not use IPv6; give an IPv4 address, or an interface (eth0) or network (10.0.0.0/8) with one"
        )
    host, _, port = address.partition(":")
    port = port if ":" in address else "0"
    if not host or not port.isascii() or not port.isdigit() or int(port) > LAST_PORT:
        raise ValueError(f"must be HOST or HOST:PORT with a port of at most {LAST_PORT}, such as 10.0.0.5:29500")
    return host, int(port)


def parse_host(host: str) -> IPv4Address | IPv4Network | str:
    """Returns what the host of `launch.address` names: an address, a network, or an interface. Raises ValueError."""
    if NUMBERS.fullmatch(host):
        try:
            return IPv4Address(host)
        except ValueError as error:
            raise ValueError(f"not an IPv4 address ({error})") from None
    if "/" in host:
        try:
            network = IPv4Network(host, strict=False)
        except ValueError as error:
            raise ValueError(f"not an IPv4 network such as 10.0.0.0/8 ({error})") from None
        if IPv4Address(host.partition("/")[0]) != network.network_address:
            raise ValueError(f"not a network, but an address with a prefix; its network is {network}")
        return network
    if not INTERFACE.fullmatch(host):
        raise ValueError(
            "neither an IPv4 address, nor a network such as 10.0.0.0/8, nor the name of an interface, which has at "
            "most 15 characters; host names are not looked up"
        )
    return host
