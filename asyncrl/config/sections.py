"""The sections of a config for the model, the data, the queue, storage and processes.

Those of generation and evaluation are in `generation.py`, those of the algorithm, the learner and the critic in
`training.py`. Values that cannot work are refused.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, JsonValue, field_validator, model_validator

from asyncrl.config.addresses import parse_host, split_address
from asyncrl.config.base import Options, Section
from asyncrl.config.mappings import Columns, CustomData
from asyncrl.config.passthrough import check_template_options
from asyncrl.config.paths import LocalPath

MAX_GENERATORS = 1024
"""Maximum number of generators of a run: each is a process on this machine, and one replay queue serves all."""


class ModelConfig(Section):
    """The policy to train."""

    path: LocalPath
    """Folder of the policy to start from, in Hugging Face format, or the name of a model of the hub."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Number format of weights and activations in engine and learner; log-probs are always float32."""
    trust_remote_code: bool = False
    """Run the Python code in the model's folder; models that transformers has itself need none."""


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
    """A dataset, sampler or filter of your own, by `module:name` or `file.py:name`, and their options."""
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
    writes them, at the latest after 64 MiB. A killed process loses nothing in any of them; a power failure loses the
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
    every generator have their own GPUs, else gloo. ipc is for one generator and one learner rank that share a card
    (`launch.colocate`)."""
    timeout_s: float = Field(default=60.0, gt=0.0)
    """Deadline of each phase of a broadcast."""
    staging: Literal["auto", "whole", "host", "buckets"] = "auto"
    """Memory for a version on its way, with all transports but files. whole: learner ranks send a copy of their shares,
    generators receive a complete copy where the transport receives, in parallel to training and decoding. host: the
    same, but generators have their copy in host memory, once for each engine, as whole does where the transport
    receives there, as on a CPU, and with `generator.tensor_parallel`. buckets: no copies but two buckets on each side;
    the next update waits until the version is delivered, engines stand still meanwhile, and one that keeps a version
    for an evaluation gets a later one. auto: whole if by arithmetic it fits the GPUs, else buckets with nccl and host
    with others; with ipc buckets."""
    kv_cache: Literal["keep", "recompute"] = "keep"
    """Keys and values of running completions after a weight swap: the old ones, or computed again, which costs a
    prefill of all that runs with each version (the metric `generator/recomputed_tokens`)."""
    url: LocalPath | None = None
    """With the transport files: the folder or object store (s3://bucket/path) in which each run has a folder of its
    own for its versions; null for one in the run folder."""


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
    """on: each learner rank and a generator share a card, of which one of them uses it at a time; on a CPU the card is
    a part of the cores. There are as many learner ranks as generators, times `generator.tensor_parallel`. force: on
    GPUs with an engine other than transformers, too, where this is not proven."""
    start_timeout_s: float = Field(default=1800.0, gt=0.0)
    """Deadline for the start of every role. The default is for GPUs, whose engines read, compile and capture for
    minutes; in a run without GPUs it is 180."""
    progress_timeout_s: float = Field(default=600.0, gt=0.0)
    """The run fails after this time without an optimizer step and, while the learners wait for a batch, without a
    generated token or a refunded group, and when the environments or rewards of all groups of this time failed."""
    stop_timeout_s: float = Field(default=15.0, gt=0.0)
    """Deadline for a role that was asked to stop, and for a generator that leaves; after it they are killed."""
    heartbeat_timeout_s: float = Field(default=60.0, gt=0.0)
    """A generator or replay queue that is silent for this time is restarted, and a lease that its generator does not
    renew for this time is handed out again. Generators send heartbeats and renew their leases every second, however
    long a group takes."""
    max_restarts: int = Field(default=10, ge=0)
    """More restarts of one role than this within 10 minutes end the run; 0 restarts nothing. A role that never worked
    and fails twice for one reason ends it earlier; so does one that fails five times for one reason, however slowly,
    while no optimizer step ends."""

    @property
    def colocated(self) -> bool:
        """True if learner ranks and generators share cards."""
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
                f"observe.profile = {self.profile}: the run has {steps} steps and never comes to step "
                f"{', '.join(map(str, late))}; name steps from 1 to {steps}"
            )
