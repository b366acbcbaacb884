"""The sections of a config, as frozen pydantic models; a value that cannot work is refused."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, JsonValue, field_validator, model_validator

from asyncrl.config.passthrough import check_deepspeed_options, check_engine_options

MAX_GENERATORS = 1024
"""Of a run: each is a process of this machine, and one replay queue answers them all."""

Options = dict[str, bool | int | float | str | None]
"""Keyword-only arguments for a function named in the config."""

RewardSpec = str | dict[str, float]
"""The reward of a row: one function, or several with their weights."""
Rewards = RewardSpec | dict[str, RewardSpec]


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, protected_namespaces=())


class ModelConfig(Section):
    """The policy to train."""

    path: str
    """Folder of the policy to start from, in Hugging Face format; one of the hub is downloaded first."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Number format of weights and activations in engine and learner; log-probs are float32 always."""
    recipe: Literal["tiny-model"] | None = None
    """When `path` does not exist, make this small model there."""
    trust_remote_code: bool = False
    """Run the Python code that lies in the model's folder; a model of one of transformers' own kinds needs none."""


class DataConfig(Section):
    """The prompts."""

    train: str | list[str]
    """Parquet file or files of prompts."""
    eval: str | list[str] | None = None
    """Parquet file or files of prompts that policies are evaluated on; none is evaluated when not set."""
    recipe: Literal["arithmetic"] | None = None
    """When `train` does not exist, make this small dataset there."""
    weights: list[float] | None = None
    """Share of the prompts that each training file gives, in their order; by their numbers of rows when not set."""
    prompt_column: str = "prompt"
    """Column with a string or a list of chat messages."""
    ground_truth_column: str | None = "reward_model.ground_truth"
    """Column, or field of a struct column, that the reward compares with; None for data without one."""
    data_source_column: str = "data_source"
    """Column that names where a row is from, which chooses its reward; the name of the file where it is missing."""
    string_prompts: Literal["text", "user"] = "text"
    """A prompt that is a string is the text itself, or what a user says under the model's chat template."""
    shuffle: bool = True
    """Rows in another order in each epoch, by `seed`; else in that of the files."""
    max_prompt_tokens: int | None = Field(default=None, ge=1)
    """Longer prompts are counted and skipped; never more than the model's window leaves."""

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
                    f"weights = {self.weights}: there are {len(self.train_files)} training files; give one for each"
                )
            if min(self.weights, default=0.0) <= 0:
                raise ValueError(f"weights = {self.weights}: each must be above 0; leave the file out of train instead")
        return self


class GeneratorConfig(Section):
    """What is sampled, in which engine, and how long rewards may take."""

    group_size: int = Field(default=8, ge=1)
    """Trajectories of one prompt; advantages that compare within a group need at least 2."""
    temperature: float = Field(default=1.0, gt=0.0)
    """Of the sampled distribution; all log-probs, the learner's too, are those at this temperature."""
    max_new_tokens: int = Field(default=512, ge=1)
    """Tokens at which a completion is cut; it counts as truncated then."""
    max_running_groups: int = Field(default=64, ge=1)
    """Groups one generator works on at once (continuous batching); an eighth more wait in the engine for a place."""
    max_model_tokens: int | None = Field(default=None, ge=2)
    """Window of the engine, prompt and completion; the model's own when not set."""
    kv_cache_bytes: int | None = Field(default=None, ge=1 << 20)
    """Key-value cache of each engine; when not set, 1 GiB on a CPU and the engine's own choice on a GPU."""
    gpu_memory_utilization: float = Field(default=0.9, gt=0.0, le=1.0)
    """Share of a GPU's memory that its roles use together where one is an engine. The engine gets what the others and
    the weights staged beside it leave, by arithmetic. Not used on a CPU."""
    prefix_caching: bool = False
    """Share the prompt's keys and values inside a group; never across policy versions."""
    reward_workers: int = Field(default=1, ge=1)
    """Processes per generator that run the reward function."""
    reward_timeout_s: float = Field(default=10.0, gt=0.0)
    """For the rewards of a group; then for each of its completions by itself, and one that takes longer has failed."""
    engine_options: dict[str, JsonValue] = {}
    """More arguments of vLLM's engine (`vllm.EngineArgs`), such as max_num_batched_tokens, kv_cache_dtype or
    enforce_eager. Refused: those that have a key here, and those that versions or log-probs depend on."""

    @model_validator(mode="after")
    def _check_engine_options(self) -> Self:
        check_engine_options(self.engine_options)
        return self


class ReplayConfig(Section):
    """The queue between generators and learner: what a step trains, how stale it may be, and what is held."""

    groups_per_step: int = Field(default=32, ge=1)
    """Groups in the batch of one optimizer step."""
    max_staleness: Annotated[int, Field(ge=0)] | Literal["auto"] = 2
    """Hard bound, in learner steps, between the version that sampled a token and the one that trains on it.
    0 is synchronous training; auto moves the limit within `auto_bounds`, of which the upper one is the hard bound."""
    auto_bounds: tuple[int, int] = (1, 8)
    """Lowest and highest limit of `max_staleness: auto`, which starts with the lowest."""
    auto_ess: float = Field(default=0.9, gt=0.0, lt=1.0)
    """`max_staleness: auto` keeps the effective sample size of tokens of every staleness above this."""
    min_staleness: int = Field(default=0, ge=0)
    """Batches that must lie finished in the queue before another is trained. Holding `max_staleness` of them forces
    tokens to be that old, to study corrections at a known staleness."""
    order: Literal["ready", "ticket"] = "ready"
    """ready: finished groups may pass a slow one as long as the bound holds for all; ticket: strictly in order."""
    zero_variance: Literal["auto", "refund", "train"] = "auto"
    """What happens to a group whose rewards are all equal: its place is given to another prompt, or it is trained.
    auto refunds it where the advantage compares within the group, and would be 0."""
    failed: Literal["zero", "refund"] = "zero"
    """What happens to a completion whose reward raises or times out: its reward is 0, or its group is given up and
    another prompt takes its place. A group of which no completion has a reward is always given up."""
    max_refunds_in_a_row: int = Field(default=4096, ge=1)
    """The run fails when so many groups one after another gave no training signal."""
    lease_timeout_s: float = Field(default=600.0, gt=0.0)
    """A lease is handed out again when its generator has not said for so long that it works on it. Generators say so
    every second; how long a group takes does not matter."""
    max_bytes: int = Field(default=4 << 30, ge=1 << 20)
    """Ceiling of the finished groups held in memory; above it only what the next batch needs may still start."""

    @property
    def staleness_limit(self) -> int:
        """The hard bound."""
        return self.auto_bounds[1] if self.max_staleness == "auto" else self.max_staleness

    @property
    def first_limit(self) -> int:
        """What is admitted when the run begins."""
        return self.auto_bounds[0] if self.max_staleness == "auto" else self.max_staleness

    @model_validator(mode="after")
    def _can_hold(self) -> Self:
        low, high = self.auto_bounds
        if not 0 <= low < high:
            raise ValueError(
                f"auto_bounds = [{low}, {high}]: must be a limit of at least 0 and a higher one; for one that stays "
                "set max_staleness to it"
            )
        if self.min_staleness > self.first_limit:
            raise ValueError(
                f"min_staleness = {self.min_staleness}: no more than replay.max_staleness = {self.max_staleness} "
                "batches are ever generated ahead, so that the learner would wait forever; use at most that, and "
                "none with auto"
            )
        return self


class AlgorithmConfig(Section):
    """From rewards to the loss: advantages, importance weights, divergence from a reference, aggregation."""

    advantage: str = "grpo"
    """An advantage estimator of `asyncrl list`, or your own as `module:function` or `file.py:function`."""
    advantage_options: Options = {}
    """Its options, as `asyncrl list` shows them."""
    loss: str = "decoupled_ppo"
    """A policy loss of `asyncrl list`, or your own as `module:function` or `file.py:function`."""
    loss_options: Options = {}
    """Its options, as `asyncrl list` shows them."""
    correction: Options = {"level": "token", "mode": "truncate", "high": 2.0}
    """Importance weights against the behavior policy (options of `corrections.importance_weights`)."""
    proximal: Literal["recompute", "loglinear"] = "recompute"
    """The proximal policy: the learner's weights before the step, or an interpolation by token age that needs no
    forward pass (arXiv:2512.06547)."""
    offpolicy_mask_delta: float | None = Field(default=None, gt=0.0)
    """Trajectories of negative advantage whose mean log ratio against the behavior policy is below minus this many
    nats are not trained (off-policy sequence mask, arXiv:2512.02556)."""
    whiten: bool = False
    """Standardize the advantages of all action tokens of the step."""
    truncated: Literal["keep", "mask", "penalize", "bootstrap"] = "keep"
    """Completions cut at the token limit are trained as they are, or not trained (their rewards still count in
    their group), or trained with `truncated_penalty` subtracted from their reward, or as if they continued with the
    critic's value after their last token (gae and vtrace)."""
    truncated_penalty: float = Field(default=1.0, ge=0.0)
    """Reward that a truncated completion loses with `truncated: penalize`."""
    kl_reward_coef: float = Field(default=0.0, ge=0.0)
    """Weight of the divergence from the reference policy that is subtracted from every token's reward."""
    kl_loss_coef: float = Field(default=0.0, ge=0.0)
    """Weight of the divergence from the reference policy that is added to the loss."""
    kl_estimator: Literal["k1", "k2", "k3", "k3+", "abs"] | None = None
    """Estimator of that divergence; k1 in the reward and k3+ in the loss when not set."""
    kl_target: float | None = Field(default=None, gt=0.0)
    """Adapt `kl_reward_coef` so that the divergence stays near this many nats; fixed when not set."""
    kl_horizon: int = Field(default=10000, ge=1)
    """Trajectories over which the coefficient adapts."""
    reference: str | None = None
    """Folder of the reference policy; `model.path` when not set. Loaded only when a coefficient above asks for it."""
    aggregation: Literal[
        "token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"
    ] = "token-mean"
    """How token losses become the loss of a step: token-mean divides their sum by the step's tokens, token-sum by
    nothing; seq-mean-* are means over trajectories of their sum, their mean, or their sum over `max_new_tokens`."""


class LearnerConfig(Section):
    """The optimizer, and how the batch of a step is cut for it."""

    lr: float = Field(default=1e-6, gt=0.0)
    """Learning rate of AdamW after the warm-up."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape after the warm-up; linear and cosine end at 0 with the last step."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps in which the rate rises to `lr`."""
    ess_scaled_lr: bool = False
    """Scale the rate of every update by the root of the effective sample size of its importance weights, so that
    stale batches take smaller steps (arXiv:2602.17616)."""
    weight_decay: float = Field(default=0.01, ge=0.0)
    """Of AdamW: each update shrinks the weights by this times the rate."""
    adam_betas: tuple[float, float] = (0.9, 0.95)
    """Decay rates of AdamW's first and second moment, per update."""
    max_grad_norm: float = Field(default=1.0, gt=0.0)
    """Gradients with a larger norm, over all parameters, are scaled down to it."""
    max_skipped_updates: int = Field(default=5, ge=0)
    """An update whose loss or gradient is not finite is skipped; more than this many in a row end the run."""
    zero_stage: Literal[0, 1, 2, 3] = 0
    """What DeepSpeed divides between the learner ranks: 0 nothing, 1 the optimizer, 2 gradients too, 3 weights too."""
    epochs: int = Field(default=1, ge=1)
    """Passes over the batch of a step."""
    minibatches: int = Field(default=1, ge=1)
    """Parts of the batch, each with an optimizer update of its own. Versions and staleness count steps, not updates."""
    tokens_per_microbatch: int = Field(default=8192, ge=1)
    """Tokens of one packed forward pass; one longer trajectory makes a micro-batch of its own."""
    gradient_checkpointing: bool = False
    """Compute activations again in the backward pass instead of keeping them: less memory, more time."""
    deepspeed_options: dict[str, JsonValue] = {}
    """More of DeepSpeed's settings, such as zero_optimization.overlap_comm, laid over the learner's own. Refused: those
    that have a key here, and those that the learner's own gradient handling replaces."""

    @model_validator(mode="after")
    def _check_deepspeed_options(self) -> Self:
        check_deepspeed_options(self.deepspeed_options)
        return self


class CheckpointConfig(Section):
    """Checkpoints hold all that a run needs to go on: weights, optimizer, queue, prompt cursor, random states."""

    every_steps: int | None = Field(default=50, ge=1)
    """Steps between two checkpoints, of which the last is where training ends; when not set, only those that
    `journal.max_bytes` asks for."""
    keep_last: int = Field(default=2, ge=1)
    """Newest checkpoints that stay; older ones are deleted."""
    keep_best: bool = True
    """Also keep the checkpoint with the best reward: of its evaluation, else of the `every_steps` steps before it."""
    max_bytes: int | None = Field(default=None, ge=1 << 20)
    """Ceiling of `checkpoints/`; a checkpoint that does not fit beside the newest ends the run with an error."""


class JournalConfig(Section):
    """The journal holds every finished group and every committed step on disk."""

    flush: Literal["group", "step", "os"] = "step"
    """When records must have reached the disk: before a group is acknowledged, before a step is, or when the system
    writes them, at the latest with 64 MiB more. A killed process loses nothing in any of them; a machine that loses
    power loses what came after."""
    retention: Literal["needed", "all"] = "needed"
    """needed: what checkpoints cover is deleted; all: nothing is, so that the whole run can be replayed offline."""
    max_bytes: int = Field(default=16 << 30, ge=1 << 20)
    """Ceiling of `journal/`; a checkpoint is asked for at half of it, and above it only what the next batch needs may
    still start."""


class CriticConfig(Section):
    """The value function that advantages with `values` need (gae, vtrace); it shares the learner's batch settings."""

    path: str | None = None
    """Folder of the model it starts from; `model.path` when not set."""
    lr: float = Field(default=1e-5, gt=0.0)
    """Learning rate of the critic; it rises and falls as the learner's does."""
    warmup_steps: int = Field(default=0, ge=0)
    """First steps in which only the critic is trained."""
    clip: float | None = Field(default=0.5, gt=0.0)
    """Furthest that a value may move from its old one before its loss stops to fall (PPO's value clipping)."""
    ranks: int = Field(default=0, ge=0)
    """Processes of its own for the critic; 0 keeps it in the learner ranks."""


class EvalConfig(Section):
    """Evaluation on the prompts of `data.eval`."""

    every_steps: int | None = Field(default=None, ge=1)
    """Versions that are multiples of this are evaluated while training goes on; the first and last version always."""
    samples: int = Field(default=1, ge=1)
    """Completions of each prompt; pass@k is reported for k = 1 and up to this."""
    temperature: float = Field(default=1.0, ge=0.0)
    """0 is greedy."""
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    """Share of the probability that tokens are sampled from; 1 cuts nothing."""
    max_prompts: int | None = Field(default=None, ge=1)
    """Only the first so many prompts."""


class WeightsConfig(Section):
    """How weights get from the learner to the generators."""

    transport: str = "auto"
    """A transport of `asyncrl list`, or your own as `module:NAME` or `file.py:NAME`; auto is nccl where the learner and
    every generator have a GPU of their own, else gloo."""
    bucket_bytes: int = Field(default=64 << 20, ge=1 << 16)
    """Size of the pieces that weights are broadcast in."""
    timeout_s: float = Field(default=60.0, gt=0.0)
    """Deadline of each phase of a broadcast."""
    kv_cache: Literal["keep", "recompute"] = "keep"
    """What a weight swap does to running completions: go on with the old keys and values, or prefill again."""


class LaunchConfig(Section):
    """Processes: how many, where they listen, how long each may take or be silent, and when the run gives up."""

    cluster: str = "local"
    """A launcher of `asyncrl list`, or your own as `module:Class` or `file.py:Class`."""
    generators: int = Field(default=1, ge=1)
    """Generator processes at the start, at most 1024; `asyncrl scale` changes their number."""
    learners: int = Field(default=1, ge=1)
    """Learner ranks; a divisor of `replay.groups_per_step`."""
    host: str = "127.0.0.1"
    """Address that the roles listen on. On a loopback address ZeroMQ listens on unix sockets that only the user can
    reach; on another one on ports, encrypted (CURVE), while weights and collectives travel in clear."""
    port: int = Field(default=0, ge=0, le=65535)
    """First of the ports that the roles use; 0 takes free ones. On a loopback address no ports are used, and only 0 is
    accepted."""
    pin_cores: bool = True
    """On CPU, give generators and learners cores of their own."""
    start_timeout_s: float = Field(default=180.0, gt=0.0)
    """Deadline for every role to be up."""
    progress_timeout_s: float = Field(default=600.0, gt=0.0)
    """The run fails when no optimizer step ends for so long, nor, while the learners wait for a batch, a token is
    generated."""
    stop_timeout_s: float = Field(default=15.0, gt=0.0)
    """After this long a role that was asked to stop is ended, and a generator that leaves hands back its groups."""
    heartbeat_timeout_s: float = Field(default=60.0, gt=0.0)
    """A generator or the replay queue that was up and says nothing for so long is restarted."""
    max_restarts: int = Field(default=10, ge=0)
    """More restarts of one role than this within `restart_window_s` end the run; 0 restarts nothing. A role that never
    worked and falls twice for one cause ends it before."""
    restart_window_s: float = Field(default=600.0, gt=0.0)
    """How long a restart counts against `max_restarts`."""

    @field_validator("generators")
    @classmethod
    def _bound_generators(cls, generators: int) -> int:
        if generators > MAX_GENERATORS:
            raise ValueError(too_many_generators())
        return generators


def too_many_generators() -> str:
    """Why there are not more, and what to do."""
    return (
        f"at most {MAX_GENERATORS}: each is a process of this machine, and one replay queue answers them all; raise "
        "generator.max_running_groups to have each generate more at once"
    )


class ObserveConfig(Section):
    """Where a run tells how it goes."""

    trackers: list[str] = ["jsonl"]
    """Where step metrics go: trackers of `asyncrl list`, or your own as `module:Class` or `file.py:Class`; wandb is in
    offline mode unless WANDB_MODE says otherwise."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least level of the events in `logs/<role>.jsonl`."""
