"""The values of keys that are mappings with known names, such as `data.columns` and `eval.sampling`."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from asyncrl.config.base import MappingValue, Options
from asyncrl.config.passthrough import check_sampling

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


class Sampling(MappingValue):
    """The sampling of evaluation completions, as in `vllm.SamplingParams`."""

    temperature: float = Field(default=1.0, ge=0.0)
    """Temperature of the distribution; 0 is greedy."""
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    """Probability mass of the most likely tokens that are sampled from; 1 excludes none."""
    top_k: int = Field(default=0, ge=0)
    """Number of most likely tokens that are sampled from; 0 excludes none."""
    min_p: float = Field(default=0.0, ge=0.0, le=1.0)
    """Least probability of a token, relative to that of the most likely one; 0 excludes none."""

    @model_validator(mode="before")
    @classmethod
    def _check_names(cls, values: Any) -> Any:
        check_sampling(values)
        return values


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


class Penalize(MappingValue):
    """Truncated completions are trained with a penalty."""

    penalize: float = Field(ge=0.0)
    """Reward that a truncated completion loses."""


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
    """What generators do with the adapters, which alone are sent to them. adapter: the engine computes with the base
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
    """The options of the optimizers, with torch's names."""

    weight_decay: float = Field(default=0.01, ge=0.0)
    """Fraction of the weights that an update subtracts, times the learning rate."""
    betas: tuple[Decay, Decay] = (0.9, 0.95)
    """AdamW, and muon's AdamW: decay rates of the first and second moment, per update."""
    eps: float = Field(default=1e-8, gt=0.0)
    """AdamW, and muon's AdamW: added to the root of the second moment, by which updates are divided."""
    momentum: Decay = 0.95
    """Muon: decay rate of the momentum, per update."""
    nesterov: bool = True
    """Muon: Nesterov's form of the momentum."""
    beta2_decay: float = Field(default=-0.8, le=0.0)
    """Adafactor: the second moment's decay rate in update t is 1 - t to this power."""
    d: float = Field(default=1.0, ge=1.0)
    """Adafactor: largest root mean square of an update, relative to the learning rate."""
