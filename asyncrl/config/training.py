"""The sections of a config for the algorithm, the learner and the critic."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, JsonValue, model_validator

from asyncrl.config.engine_options import check_deepspeed_options
from asyncrl.config.sections import MappingValue, Options, Section


class Correction(MappingValue):
    """Importance weights against the behavior policy, and the off-policy sequence mask."""

    level: Literal["token", "sequence", "geometric"] = "token"
    """Ratio that weighs a token: its own, the product over its sequence, or the geometric mean over its sequence."""
    mode: Literal["truncate", "clip", "mask"] = "truncate"
    """Effect of the bounds: weights are capped at `high`, held within both bounds, or set to 0 outside of them."""
    low: float | None = None
    """Lower bound of the weights; null for none."""
    high: float | None = 2.0
    """Upper bound of the weights; null for none."""
    mask_delta: float | None = Field(default=None, gt=0.0)
    """Trajectories of negative advantage whose mean log ratio against the behavior policy is below minus this many
    nats are not trained (arXiv:2512.02556); null for no mask."""

    def weight_options(self) -> dict[str, Any]:
        """The options of `corrections.importance_weights`."""
        return self.model_dump(exclude={"mask_delta"})


LORA_ALPHA = 32.0


class Lora(MappingValue):
    """Low-rank adapters (LoRA) are trained, and the model is frozen."""

    rank: int = Field(default=0, ge=0)
    """Rank of the adapters; 0 trains the complete model."""
    alpha: float = Field(default=LORA_ALPHA, gt=0.0)
    """Adapters are scaled by this over the rank."""
    targets: tuple[str, ...] | None = Field(default=None, min_length=1)
    """Names of the layers that have adapters, such as [q_proj, v_proj]; null: all linear layers but the output
    layer."""

    load: Literal["adapter", "merged"] = "adapter"
    """Use of the adapters in generators, which alone are sent to them. adapter: the engine computes with the base
    and the adapter, as the learner does. merged: it adds the adapter to a copy of the base that it keeps in host
    memory, and computes with the sum, rounded to `model.dtype`, at the speed of the base; also for models whose
    adapters vLLM cannot load."""

    @property
    def scale(self) -> float:
        """The factor of B A."""
        return self.alpha / self.rank

    @model_validator(mode="after")
    def _check_rank(self) -> Self:
        if not self.rank and (self.alpha, self.targets, self.load) != (LORA_ALPHA, None, "adapter"):
            raise ValueError(f"rank = {self.rank} with other options: there are no adapters; set rank, such as 16")
        return self


Decay = Annotated[float, Field(ge=0.0, lt=1.0)]


class OptimizerOptions(MappingValue):
    """The options of AdamW, with torch's names."""

    weight_decay: float = Field(default=0.01, ge=0.0)
    """Fraction of the weights that an update subtracts, times the learning rate."""
    betas: tuple[Decay, Decay] = (0.9, 0.95)
    """Decay rates of the first and second moment, per update."""
    eps: float = Field(default=1e-8, gt=0.0)
    """Added to the root of the second moment, by which updates are divided."""


class AlgorithmConfig(Section):
    """From rewards to the loss: advantages, importance weights, divergence from a reference, aggregation."""

    advantage: str = "grpo"
    """An advantage estimator of `asyncrl list`, or your own as `module:function` or `file.py:function`."""
    advantage_options: Options = Field(default={})
    """Options of the advantage estimator, as `asyncrl list` shows them."""
    loss: str = "ppo_clip"
    """A policy loss of `asyncrl list`, or your own as `module:function` or `file.py:function`."""
    loss_options: Options = Field(default={})
    """Options of the loss, as `asyncrl list` shows them."""
    correction: Correction = Correction()
    """Importance weights against the behavior policy, and the off-policy sequence mask."""
    proximal: Literal["recompute", "loglinear"] = "recompute"
    """The proximal policy: the learner's weights before the step, or an interpolation by token age that needs no
    forward pass (arXiv:2512.06547)."""
    max_divergence: float | None = Field(default=None, gt=0.0, allow_inf_nan=False)
    """Bound, in nats a token, of the divergence of trained tokens from the policies that sampled them, such as 0.02:
    the learning rate falls where it would move the policy further, and where it would fall below half, the limit of
    staleness that groups are admitted by falls to 1. By default there is none."""
    whiten: bool = False
    """Standardize the advantages over all action tokens of the step."""
    truncated: Literal["keep", "mask", "bootstrap"] = "keep"
    """Completions cut at the token limit are trained as they are (keep), not trained although their rewards count in
    their group (mask), or trained as if they continued with the critic's value after their last token (bootstrap, with
    gae and vtrace). The reward `truncated` gives them a penalty."""
    kl_reward_coef: float = Field(default=0.0, ge=0.0)
    """Weight of the divergence from the reference policy that is subtracted from the reward of every token."""
    kl_loss_coef: float = Field(default=0.0, ge=0.0)
    """Weight of the divergence from the reference policy that is added to the loss."""
    kl_estimator: Literal["k1", "k2", "k3", "k3+", "abs"] | None = None
    """Estimator of that divergence; by default k1 in the reward and k3+ in the loss."""
    entropy_coef: float = Field(default=0.0, ge=0.0)
    """Weight of the mean entropy of the sampled distribution, aggregated as the loss, that is subtracted from the
    loss."""
    reference: str | None = None
    """Folder of the reference policy; by default `model.path`. Loaded only if a coefficient above is positive."""
    routing_replay: Literal["off", "engine"] = "off"
    """Mixture-of-experts models: engine routes each token of the policy's passes in the learner to the experts that the
    engine chose. Not with an environment."""
    aggregation: Literal[
        "token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"
    ] = "token-mean"
    """Reduction of token losses to the loss of a step: token-sum is their sum, token-mean divides it by the number of
    tokens; seq-mean-* are means over all trajectories of the batch of their sum, their mean, or their sum over the
    limit of a trajectory: `generator.max_new_tokens`, of an episode times `environment.max_turns`."""


class LearnerConfig(Section):
    """The optimizer, and the division of a batch into updates and micro-batches."""

    lr: float = Field(default=1e-6, gt=0.0)
    """Learning rate after the warm-up."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after the warm-up; linear and cosine end at 0 with the last step."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps in which the learning rate rises to `lr`."""
    optimizer_options: OptimizerOptions = OptimizerOptions()
    """Options of AdamW, which trains policy and critic."""
    lora: Lora = Lora()
    """Train low-rank adapters of the policy in place of its weights, from `rank` 1 on: {rank: 16, alpha: 32}. Needs
    a learning rate about ten times as high."""
    max_grad_norm: float = Field(default=1.0, gt=0.0)
    """Gradients with a larger norm, over all parameters, are scaled down to it."""
    on_collapse: Literal["warn", "stop", "rollback"] = "warn"
    """While an alarm is active (docs/staleness.md) and the reward is below 0.9 of its best: the alarm alone
    (warn), end the run (stop), or continue from the last checkpoint before the alarm's first step with half of `lr`, at
    most twice (rollback); without one, as with `checkpoint.every_steps: null`, from the initial model."""
    zero_stage: Literal[0, 1, 2, 3] = 0
    """DeepSpeed ZeRO stage. Sharded over learner ranks: 0 nothing, 1 optimizer, 2 also gradients, 3 also weights."""
    offload: Literal["none", "optimizer", "all"] = "none"
    """Data kept in host memory: the optimizer's state, which is updated there (from `zero_stage` 1 on), or also the
    weights, of which each layer is on the GPU while it computes (`zero_stage: 3`)."""
    epochs: int = Field(default=1, ge=1)
    """Passes over the batch of a step."""
    minibatches: int = Field(default=1, ge=1)
    """Parts of the batch, each with its own optimizer update. Versions and staleness count steps, not updates."""
    tokens_per_microbatch: int = Field(default=8192, ge=1)
    """Tokens of one packed forward pass; a longer trajectory is a separate micro-batch."""
    gradient_checkpointing: bool = False
    """Compute activations again in the backward pass instead of storing them: less memory, more time."""
    sequence_parallel: int = Field(default=1, ge=1)
    """Learner ranks that share each sequence, for long ones: each computes a part of its tokens, and in attention a
    part of the heads. It divides `launch.learners` and the model's attention heads, and divides its key-value heads or
    is a multiple of them."""
    deepspeed_options: dict[str, JsonValue] = Field(default={})
    """DeepSpeed settings such as zero_optimization.overlap_comm, merged over the learner's own. Refused: those that
    have a key here, and those that the learner's own gradient handling replaces."""

    @property
    def updates(self) -> int:
        """Optimizer updates of a step."""
        return self.epochs * self.minibatches

    @model_validator(mode="after")
    def _check_offload(self) -> Self:
        needed = {"none": 0, "optimizer": 1, "all": 3}[self.offload]
        if self.zero_stage < needed:
            raise ValueError(
                f"offload = {self.offload!r}: needs zero_stage {'>= 1' if needed == 1 else '= 3'}, but it is "
                f"{self.zero_stage}"
            )
        return self

    @model_validator(mode="after")
    def _check_deepspeed_options(self) -> Self:
        check_deepspeed_options(self.deepspeed_options)
        return self


class CriticConfig(Section):
    """The value function of advantages that need values (gae, vtrace); it shares the learner's batch settings."""

    path: str | None = None
    """Folder of its initial model; by default `model.path`."""
    lr: float = Field(default=1e-5, gt=0.0)
    """Learning rate of the critic, with the learner's schedule and warm-up."""
    warmup_steps: int = Field(default=0, ge=0)
    """First steps in which only the critic is trained."""
    clip: float | None = Field(default=0.5, gt=0.0)
    """Distance from the old value at which the loss stops to decrease (PPO's value clipping)."""
    ranks: int = Field(default=0, ge=0)
    """Processes of the critic; 0 keeps it in the learner ranks."""
