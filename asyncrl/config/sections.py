"""The sections of a config, as frozen pydantic models that reject invalid values."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, JsonValue, field_validator, model_validator

from asyncrl.config.passthrough import check_deepspeed_options, check_engine_options

MAX_GENERATORS = 1024
"""Maximum number of generators of a run: each is a process on this machine, and one replay queue serves all of them."""

Options = dict[str, bool | int | float | str | None]
"""Keyword-only arguments of a function named in the config."""

RewardSpec = str | dict[str, float]
"""The reward of a row: one function, or several with their weights."""
Rewards = RewardSpec | dict[str, RewardSpec]


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, protected_namespaces=())


class ModelConfig(Section):
    """The policy to train."""

    path: str
    """Folder of the policy before training, in Hugging Face format. Models of the hub must be downloaded first."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Number format of weights and activations in engine and learner; log-probs are always float32."""
    recipe: Literal["tiny-model"] | None = None
    """Small model to create at `path` if the folder does not exist."""
    trust_remote_code: bool = False
    """Run Python code from the model's folder. Not needed for model types that transformers implements."""


class DataConfig(Section):
    """The prompts."""

    train: str | list[str]
    """Parquet file or files of prompts."""
    eval: str | list[str] | None = None
    """Parquet file or files of evaluation prompts; without it there is no evaluation."""
    recipe: Literal["arithmetic"] | None = None
    """Small dataset to create at `train` if the file does not exist."""
    weights: list[float] | None = None
    """Weight of each training file in sampling, in the order of the files; by default its number of rows."""
    prompt_column: str = "prompt"
    """Column with a string or a list of chat messages."""
    ground_truth_column: str | None = "reward_model.ground_truth"
    """Column, or field of a struct column, with the value that the reward compares with; None for data without one."""
    data_source_column: str = "data_source"
    """Column with the data source of each row, which selects the reward; without this column, the file name."""
    string_prompts: Literal["text", "user"] = "text"
    """Use a string prompt unchanged (text), or as a user message in the model's chat template (user)."""
    shuffle: bool = True
    """Shuffle the rows in each epoch, depending on `seed`; otherwise keep the order of the files."""
    max_prompt_tokens: int | None = Field(default=None, ge=1)
    """Longer prompts are counted and skipped. The model's window may lower this limit."""

    @property
    def train_files(self) -> list[str]:
        return [self.train] if isinstance(self.train, str) else list(self.train)

    @property
    def eval_files(self) -> list[str]:
        return [self.eval] if isinstance(self.eval, str) else list(self.eval or [])

    @model_validator(mode="after")
    def _weigh_files(self) -> Self:
        if self.weights is not None:
            if len(self.weights) != len(self.train_files):
                raise ValueError(
                    f"weights = {self.weights}: there are {len(self.train_files)} training files; set one for each"
                )
            if min(self.weights, default=0.0) <= 0:
                raise ValueError(f"weights = {self.weights}: each must be above 0; leave the file out of train instead")
        return self


class GeneratorConfig(Section):
    """Sampling, the inference engine, and deadlines of rewards."""

    group_size: int = Field(default=8, ge=1)
    """Trajectories per prompt; group-relative advantages need at least 2."""
    temperature: float = Field(default=1.0, gt=0.0)
    """Sampling temperature. All log-probs, including those of the learner, are at this temperature."""
    max_new_tokens: int = Field(default=512, ge=1)
    """Maximum length of a completion; a longer one is truncated."""
    max_running_groups: int = Field(default=64, ge=1)
    """Groups that a generator runs concurrently (continuous batching); an eighth more are queued in the engine."""
    max_model_tokens: int | None = Field(default=None, ge=2)
    """Window of the engine, for prompt and completion; by default that of the model."""
    kv_cache_bytes: int | None = Field(default=None, ge=1 << 20)
    """Key-value cache of each engine; by default 1 GiB on a CPU, and chosen by the engine on a GPU."""
    gpu_memory_utilization: float = Field(default=0.9, gt=0.0, le=1.0)
    """Fraction of a GPU's memory for all roles on it, if one of them is an engine. The engine gets the memory that the
    computed needs of the other roles and of its staged weights leave. Not used on a CPU."""
    prefix_caching: bool = False
    """Share the prompt's keys and values within a group; never across policy versions."""
    reward_workers: int = Field(default=1, ge=1)
    """Processes per generator that run the reward function."""
    reward_timeout_s: float = Field(default=10.0, gt=0.0)
    """Deadline for the rewards of a group. After it each completion is scored alone with this deadline, or fails."""
    engine_options: dict[str, JsonValue] = {}
    """Additional arguments of vLLM's engine (`vllm.EngineArgs`), such as max_num_batched_tokens, kv_cache_dtype or
    enforce_eager. Rejected: those that have a key here, and those that versions or log-probs depend on."""

    @model_validator(mode="after")
    def _check_engine_options(self) -> Self:
        check_engine_options(self.engine_options)
        return self


class ReplayConfig(Section):
    """The queue between generators and learner: batches, staleness limit, filtering of groups, and memory."""

    groups_per_step: int = Field(default=32, ge=1)
    """Groups in the batch of one optimizer step."""
    max_staleness: Annotated[int, Field(ge=0)] | Literal["auto"] = 2
    """Hard bound, in learner steps, between the version that sampled a token and the version that trains on it.
    0 is synchronous training; auto adapts the limit within `auto_bounds`, whose upper value is the hard bound."""
    auto_bounds: tuple[int, int] = (1, 8)
    """Lowest and highest limit of `max_staleness: auto`, which starts with the lowest."""
    auto_ess: float = Field(default=0.9, gt=0.0, lt=1.0)
    """`max_staleness: auto` keeps the effective sample size of tokens of every staleness above this."""
    min_staleness: int = Field(default=0, ge=0)
    """Finished batches that must be in the queue before another batch is trained. With `max_staleness` as the value
    all tokens have that staleness, to study corrections at a known staleness."""
    order: Literal["ready", "ticket"] = "ready"
    """ready: finished groups may overtake slower ones if no group exceeds the bound; ticket: strictly in order."""
    zero_variance: Literal["auto", "refund", "train"] = "auto"
    """Handling of a group whose rewards are all equal: replace it by another prompt (refund), or train it (train).
    auto refunds it if the advantage is group-relative and would therefore be 0."""
    failed: Literal["zero", "refund"] = "zero"
    """Handling of a completion whose reward raises or times out: a reward of 0 (zero), or its group is dropped and
    replaced by another prompt (refund). A group without any reward is always dropped."""
    max_refunds_in_a_row: int = Field(default=4096, ge=1)
    """The run fails after this many consecutive refunded groups."""
    lease_timeout_s: float = Field(default=600.0, gt=0.0)
    """A lease is reassigned if its generator has not confirmed it for this long. Generators confirm their leases every
    second, however long a group takes."""
    max_bytes: int = Field(default=4 << 30, ge=1 << 20)
    """Size limit of the finished groups in memory; above it, only groups that the next batch needs may start."""

    @property
    def staleness_limit(self) -> int:
        """The hard bound of the staleness."""
        return self.auto_bounds[1] if self.max_staleness == "auto" else self.max_staleness

    @property
    def first_limit(self) -> int:
        """The admission limit at the start of a run."""
        return self.auto_bounds[0] if self.max_staleness == "auto" else self.max_staleness

    @model_validator(mode="after")
    def _can_hold(self) -> Self:
        low, high = self.auto_bounds
        if not 0 <= low < high:
            raise ValueError(
                f"auto_bounds = [{low}, {high}]: must be a limit of at least 0 and a higher one; for a constant limit "
                "set max_staleness to a number"
            )
        if self.min_staleness > self.first_limit:
            raise ValueError(
                f"min_staleness = {self.min_staleness}: no more than replay.max_staleness = {self.max_staleness} "
                "batches are ever generated ahead, so the learner would wait forever; use at most that number, and 0 "
                "with auto"
            )
        return self


class AlgorithmConfig(Section):
    """Advantages, importance weights, divergence from a reference policy, and aggregation of the loss."""

    advantage: str = "grpo"
    """An advantage estimator of `asyncrl list`, or your own as `module:function` or `file.py:function`."""
    advantage_options: Options = {}
    """Options of the advantage, as listed by `asyncrl list`."""
    loss: str = "decoupled_ppo"
    """A policy loss of `asyncrl list`, or your own as `module:function` or `file.py:function`."""
    loss_options: Options = {}
    """Options of the loss, as listed by `asyncrl list`."""
    correction: Options = {"level": "token", "mode": "truncate", "high": 2.0}
    """Importance weights against the behavior policy (options of `corrections.importance_weights`)."""
    proximal: Literal["recompute", "loglinear"] = "recompute"
    """The proximal policy: the learner's weights before the step (recompute), or an interpolation by token age that
    needs no forward pass (loglinear, arXiv:2512.06547)."""
    offpolicy_mask_delta: float | None = Field(default=None, gt=0.0)
    """Trajectories of negative advantage whose mean log ratio against the behavior policy is below minus this many
    nats are not trained (off-policy sequence mask, arXiv:2512.02556)."""
    whiten: bool = False
    """Standardize the advantages of all action tokens of the step."""
    truncated: Literal["keep", "mask", "penalize", "bootstrap"] = "keep"
    """Truncated completions are trained unchanged (keep), are not trained, but count in their group (mask), lose
    `truncated_penalty` from their reward (penalize), or end with the critic's value of the state after their last token
    (bootstrap; gae and vtrace)."""
    truncated_penalty: float = Field(default=1.0, ge=0.0)
    """Amount subtracted from the reward of a truncated completion with `truncated: penalize`."""
    kl_reward_coef: float = Field(default=0.0, ge=0.0)
    """Weight of the divergence from the reference policy that is subtracted from every token's reward."""
    kl_loss_coef: float = Field(default=0.0, ge=0.0)
    """Weight of the divergence from the reference policy that is added to the loss."""
    kl_estimator: Literal["k1", "k2", "k3", "k3+", "abs"] | None = None
    """Estimator of that divergence; by default k1 in the reward and k3+ in the loss."""
    kl_target: float | None = Field(default=None, gt=0.0)
    """Adapt `kl_reward_coef` to keep the divergence near this many nats; by default the coefficient is constant."""
    kl_horizon: int = Field(default=10000, ge=1)
    """Number of trajectories over which the coefficient adapts."""
    reference: str | None = None
    """Folder of the reference policy; by default `model.path`. Loaded only if a coefficient above is positive."""
    aggregation: Literal[
        "token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"
    ] = "token-mean"
    """Aggregation of token losses to the loss of a step: token-mean divides their sum by the step's tokens, token-sum
    does not divide it; seq-mean-* average the sums, the means, or the sums divided by `max_new_tokens` of the
    trajectories."""


class LearnerConfig(Section):
    """The optimizer, and the division of a step's batch into mini-batches and micro-batches."""

    lr: float = Field(default=1e-6, gt=0.0)
    """Learning rate of AdamW after the warm-up."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Schedule after the warm-up; linear and cosine reach 0 after the last step."""
    warmup_steps: int = Field(default=0, ge=0)
    """Number of steps in which the rate rises to `lr`."""
    ess_scaled_lr: bool = False
    """Scale the rate of every update by the square root of the effective sample size of its importance weights, so
    that stale batches take smaller steps (arXiv:2602.17616)."""
    weight_decay: float = Field(default=0.01, ge=0.0)
    """Weight decay of AdamW: each update shrinks the weights by this factor times the rate."""
    adam_betas: tuple[float, float] = (0.9, 0.95)
    """Decay rates of AdamW's first and second moment, per update."""
    max_grad_norm: float = Field(default=1.0, gt=0.0)
    """Maximum norm of the gradient over all parameters; larger gradients are scaled down to it."""
    max_skipped_updates: int = Field(default=5, ge=0)
    """An update whose loss or gradient is not finite is skipped; more than this many in a row end the run."""
    zero_stage: Literal[0, 1, 2, 3] = 0
    """DeepSpeed ZeRO stage: partition nothing (0), the optimizer (1), also gradients (2), also weights (3)."""
    epochs: int = Field(default=1, ge=1)
    """Passes over the batch of a step."""
    minibatches: int = Field(default=1, ge=1)
    """Parts of the batch, with one optimizer update each. Versions and staleness count steps, not updates."""
    tokens_per_microbatch: int = Field(default=8192, ge=1)
    """Tokens of one packed forward pass; a longer trajectory gets a separate micro-batch."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass instead of storing them: less memory, more time."""
    deepspeed_options: dict[str, JsonValue] = {}
    """Additional DeepSpeed settings, such as zero_optimization.overlap_comm, which override the learner's settings.
    Rejected: those that have a key here, and those that the learner's gradient handling replaces."""

    @model_validator(mode="after")
    def _check_deepspeed_options(self) -> Self:
        check_deepspeed_options(self.deepspeed_options)
        return self


class CheckpointConfig(Section):
    """Checkpoints contain the state to resume a run: weights, optimizer, queue, prompt cursor, random states."""

    every_steps: int | None = Field(default=50, ge=1)
    """Steps between two checkpoints; the last checkpoint is at the end of training. Without it, checkpoints are written
    only when `journal.max_bytes` requires one."""
    keep_last: int = Field(default=2, ge=1)
    """Number of newest checkpoints to keep; older ones are deleted."""
    keep_best: bool = True
    """Also keep the checkpoint with the best reward: of its evaluation, or of the `every_steps` steps before it."""
    max_bytes: int | None = Field(default=None, ge=1 << 20)
    """Size limit of `checkpoints/`. If a new checkpoint and the newest one together exceed it, the run fails."""


class JournalConfig(Section):
    """The journal stores every finished group and every committed step on disk."""

    flush: Literal["group", "step", "os"] = "step"
    """When records are flushed to disk: before a group is acknowledged (group), before a step is (step), or when the
    system writes them, at most 64 MiB late (os). A killed process loses no record; a power failure loses the records
    that were not flushed."""
    retention: Literal["needed", "all"] = "needed"
    """needed: delete records that checkpoints cover; all: keep all records, to retrain the complete run offline."""
    max_bytes: int = Field(default=16 << 30, ge=1 << 20)
    """Size limit of `journal/`. At half of it a checkpoint is requested; above it, only groups needed by the next batch
    may start."""


class CriticConfig(Section):
    """The value function of advantages that take `values` (gae, vtrace); it uses the learner's batch settings."""

    path: str | None = None
    """Folder of the critic's initial model; by default `model.path`."""
    lr: float = Field(default=1e-5, gt=0.0)
    """Learning rate of the critic, with the learner's schedule."""
    warmup_steps: int = Field(default=0, ge=0)
    """Number of steps at the start in which only the critic is trained."""
    clip: float | None = Field(default=0.5, gt=0.0)
    """Maximum change of a value in one step beyond which its gradient is 0 (PPO's value clipping)."""
    ranks: int = Field(default=0, ge=0)
    """Number of separate critic processes; 0 runs the critic in the learner ranks."""


class EvalConfig(Section):
    """Evaluation on the prompts of `data.eval`."""

    every_steps: int | None = Field(default=None, ge=1)
    """Evaluate versions that are multiples of this, concurrently with training; the first and the last version are
    always evaluated."""
    samples: int = Field(default=1, ge=1)
    """Completions per prompt; pass@k is reported for k from 1 up to this number."""
    temperature: float = Field(default=1.0, ge=0.0)
    """Sampling temperature; 0 is greedy."""
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    """Nucleus sampling: fraction of the probability mass that tokens are sampled from; 1 disables it."""
    max_prompts: int | None = Field(default=None, ge=1)
    """Evaluate only this many prompts, from the start of the data."""


class WeightsConfig(Section):
    """Transfer of weights from the learner to the generators."""

    transport: str = "auto"
    """A transport of `asyncrl list`, or your own as `module:NAME` or `file.py:NAME`; auto is nccl if the learner and
    every generator each have a separate GPU, otherwise gloo."""
    bucket_bytes: int = Field(default=64 << 20, ge=1 << 16)
    """Size of the buckets in which weights are broadcast."""
    timeout_s: float = Field(default=60.0, gt=0.0)
    """Deadline of each phase of a broadcast."""
    kv_cache: Literal["keep", "recompute"] = "keep"
    """Effect of a weight swap on running completions: continue with the old keys and values, or prefill again."""


class LaunchConfig(Section):
    """Processes: their number, addresses, deadlines, heartbeats and restarts."""

    cluster: str = "local"
    """A launcher of `asyncrl list`, or your own as `module:Class` or `file.py:Class`."""
    generators: int = Field(default=1, ge=1)
    """Generator processes at the start, at most 1024; `asyncrl scale` changes their number."""
    learners: int = Field(default=1, ge=1)
    """Learner ranks; a divisor of `replay.groups_per_step`."""
    host: str = "127.0.0.1"
    """Address on which the roles listen. On a loopback address ZeroMQ uses unix sockets that only the user can open; on
    any other address it uses ports with encryption (CURVE), while weights and collectives are not encrypted."""
    port: int = Field(default=0, ge=0, le=65535)
    """First of the ports that the roles use; 0 selects free ports. On a loopback address no ports are used, and only 0
    is accepted."""
    pin_cores: bool = True
    """On a CPU, assign separate cores to generators and learners."""
    start_timeout_s: float = Field(default=180.0, gt=0.0)
    """Deadline for the start of every role."""
    progress_timeout_s: float = Field(default=600.0, gt=0.0)
    """The run fails if for this long no optimizer step ends and, while the learners wait for a batch, no token is
    generated."""
    stop_timeout_s: float = Field(default=15.0, gt=0.0)
    """Time after which a role that was asked to stop is killed, and a leaving generator returns its groups."""
    heartbeat_timeout_s: float = Field(default=60.0, gt=0.0)
    """A running generator or replay queue that sends no heartbeat for this long is restarted."""
    max_restarts: int = Field(default=10, ge=0)
    """The run fails after more restarts of one role than this within `restart_window_s`; with 0 no role is restarted.
    A role that never worked and fails twice for the same cause ends the run earlier."""
    restart_window_s: float = Field(default=600.0, gt=0.0)
    """Time for which a restart counts against `max_restarts`."""

    @field_validator("generators")
    @classmethod
    def _bound_generators(cls, generators: int) -> int:
        if generators > MAX_GENERATORS:
            raise ValueError(too_many_generators())
        return generators


def too_many_generators() -> str:
    """Returns the error text for more than MAX_GENERATORS generators, with the reason and the alternative."""
    return (
        f"at most {MAX_GENERATORS}: each is a process of this machine, and one replay queue serves all of them; raise "
        "generator.max_running_groups so that each generates more groups at once"
    )


class ObserveConfig(Section):
    """Metrics and logs of a run."""

    trackers: list[str] = ["jsonl"]
    """Trackers that record step metrics: names of `asyncrl list`, or your own as `module:Class` or `file.py:Class`.
    wandb is in offline mode unless WANDB_MODE is set otherwise."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Minimum level of the events in `logs/<role>.jsonl`."""
