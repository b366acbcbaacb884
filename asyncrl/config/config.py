"""All settings of a run.

Derived numbers are properties. A combination that cannot work is refused here, before any process starts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, Self

import yaml
from pydantic import Field, model_validator

from asyncrl.config.sections import (
    AUTO,
    ENVIRONMENT,
    CheckpointConfig,
    DataConfig,
    EnvironmentConfig,
    EvalConfig,
    GeneratorConfig,
    JournalConfig,
    LaunchConfig,
    LocalPath,
    ModelConfig,
    ObserveConfig,
    Options,
    PlacementConfig,
    ReplayConfig,
    Rewards,
    Section,
    WeightsConfig,
)
from asyncrl.config.training import AlgorithmConfig, CriticConfig, LearnerConfig


class Config(Section):
    """All settings of a run, by section."""

    model: ModelConfig
    data: DataConfig
    rewards: Rewards = AUTO
    """auto: with an environment its reward, which is named environment; otherwise the built-in reward of each known
    data source, as verl chooses it, and for other sources `exact`, with a warning. Or a reward's name,
    `module:function` or `file.py:function`; or a weighted sum, {name: weight}; or a mapping of these by data source,
    with "default" for the others."""
    reward_options: dict[str, Options] = Field(default_factory=dict)
    """Options (keyword-only arguments) of reward functions, by their names in `rewards` and `eval.rewards`."""
    generator: GeneratorConfig = GeneratorConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    replay: ReplayConfig = ReplayConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    learner: LearnerConfig = LearnerConfig()
    critic: CriticConfig = CriticConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    journal: JournalConfig = JournalConfig()
    eval: EvalConfig = EvalConfig()
    weights: WeightsConfig = WeightsConfig()
    launch: LaunchConfig = LaunchConfig()
    placement: PlacementConfig = PlacementConfig()
    observe: ObserveConfig = ObserveConfig()
    run: str = Field(default="run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Name of the run."""
    runs_dir: LocalPath = "runs"
    """The folder that contains one folder per run."""
    steps: int = Field(default=100, ge=1)
    """Optimizer steps."""
    epochs: float | None = Field(default=None, gt=0.0)
    """In place of `steps`: passes over `data.train`, rounded to complete steps. Refunded groups take further
    prompts."""
    recipe: Literal["demo", "calculator", "guess"] | None = None
    """Make the small model of a demo in `model.path`, and its rows in `data.train` and `data.eval`, where these do not
    exist. demo: sums; calculator and guess: with the environment of that name."""
    seed: int = Field(default=0, ge=0)
    """Seed of the order of prompts, the sampling of completions, and the files of the recipe."""
    deterministic: bool = False
    """Two runs with the same config have identical weights and metrics, also if one was interrupted and resumed.
    Requires `replay.max_staleness: 0`; on a CPU completions are generated one at a time."""
    resume: Literal["never", "auto", "must"] = "never"
    """never: an earlier run of this name is moved aside; auto: it is resumed if it has not finished; must: it is
    resumed, and must exist (`asyncrl launch --resume`)."""

    @model_validator(mode="after")
    def _check_epochs(self) -> Self:
        if self.epochs is not None and "steps" in self.model_fields_set:
            raise ValueError(f"epochs = {self.epochs:g} and steps = {self.steps}: set either epochs or steps, not both")
        return self

    @model_validator(mode="after")
    def _cross_checks(self) -> Self:
        groups, learners = self.replay.groups_per_step, self.launch.learners
        if learners % (together := self.learner.sequence_parallel):
            raise ValueError(
                f"learner.sequence_parallel = {together}: does not divide launch.learners = {learners}; so many "
                "of them share their sequences"
            )
        if together > 1 and self.critic.ranks:
            raise ValueError(
                f"learner.sequence_parallel = {together} with critic.ranks = {self.critic.ranks}: critic ranks of "
                "their own take complete sequences; use critic.ranks=0"
            )
        if self.epochs is None:
            self.observe.check_profile(self.steps)
        if groups % (shards := self.num_shards):
            what = "launch.learners" if together == 1 else "launch.learners / learner.sequence_parallel"
            raise ValueError(
                f"{what} = {shards} does not divide replay.groups_per_step = {groups}: "
                f"every learner rank takes the same number of whole groups; use {_divisors(groups)} learners"
            )
        if (groups // shards) % (parts := self.learner.minibatches):
            raise ValueError(
                f"learner.minibatches = {parts} does not divide the {groups // shards} groups that a learner rank "
                f"gets in a step; use one of {_divisors(groups // shards)}"
            )
        if self.critic.ranks > learners:
            raise ValueError(
                f"critic.ranks = {self.critic.ranks}: each serves at least one of the learner ranks, of which there "
                f"are {learners} (launch.learners)"
            )
        if self.deterministic and self.replay.max_staleness:
            raise ValueError(
                f"deterministic with replay.max_staleness = {self.replay.max_staleness}: which version samples a token "
                "would depend on when weights arrive; use replay.max_staleness=0"
            )
        for option, on in (("enable_prefix_caching", "cached"), ("async_scheduling", "in flight")):
            if self.deterministic and self.generator.engine_options.get(option):
                raise ValueError(
                    f"deterministic with generator.engine_options.{option}: log-probs would depend on what is {on}; "
                    "switch one off"
                )
        if self.deterministic and self.generator.tensor_parallel > 1:
            raise ValueError(
                f"deterministic with generator.tensor_parallel = {self.generator.tensor_parallel}: sums over "
                "several devices are not guaranteed to be bit-identical; use generator.tensor_parallel=1"
            )
        if self.generator.engine == "transformers" and self.generator.tensor_parallel > 1:
            raise ValueError(
                f"generator.tensor_parallel = {self.generator.tensor_parallel}: the engine 'transformers' computes on "
                "one device; use generator.engine=vllm, or generator.tensor_parallel=1"
            )
        if self.algorithm.routing_replay == "engine":
            self._check_routing()
        self._check_pool_of_generators()
        self._check_environment()
        window = self.generator.max_model_tokens
        if window is not None and window <= self.generator.max_new_tokens:
            raise ValueError(
                f"generator.engine_options.max_model_len = {window} leaves no room for a prompt: "
                f"it must be above generator.max_new_tokens = {self.generator.max_new_tokens}"
            )
        return self

    def _check_routing(self) -> None:
        key = "algorithm.routing_replay = 'engine'"
        if self.learner.sequence_parallel > 1:
            raise ValueError(
                f"{key}: routings are not divided among ranks that share sequences, and learner.sequence_parallel = "
                f"{self.learner.sequence_parallel}; use learner.sequence_parallel=1, or algorithm.routing_replay=off"
            )
        if self.learner.lora.rank:
            raise ValueError(
                f"{key}: with learner.lora.rank = {self.learner.lora.rank} the reference policy is the policy without "
                "adapters, and would replay, too; use learner.lora.rank=0, or algorithm.routing_replay=off"
            )
        if self.environment.name is not None:
            raise ValueError(
                f"{key}: routings are recorded of single turns only, not with environment.name = "
                f"{self.environment.name!r}; use algorithm.routing_replay=off"
            )

    def _check_pool_of_generators(self) -> None:
        name, parallel = self.placement.pool_of("generator"), self.generator.tensor_parallel
        pool = self.placement.pools.get(name)
        if pool is not None and pool.nodes is None and pool.gpus % parallel:
            raise ValueError(
                f"placement.pools.{name} has {pool.gpus} GPUs: it must be a multiple of generator.tensor_parallel = "
                f"{parallel}, the GPUs of one generator"
            )

    def _check_environment(self) -> None:
        if self.environment.name is None:
            changed = [name for name, value in self.environment if value != getattr(EnvironmentConfig(), name)]
            if changed:
                raise ValueError(
                    f"environment.{changed[0]} = {getattr(self.environment, changed[0])!r}: no environment is "
                    "configured; set environment.name"
                )
            return
        most = self.environment.max_episodes
        least = max(self.generator.group_size, self.eval.samples)
        if most is not None and most < least:
            raise ValueError(
                f"environment.max_episodes = {most}: must be at least {least}, the episodes of a group "
                "(generator.group_size, eval.samples)"
            )

    @model_validator(mode="after")
    def _check_colocate(self) -> Self:
        launch, parallel = self.launch, self.generator.tensor_parallel
        if not launch.colocated:
            return self
        key = f"launch.colocate = {launch.colocate!r}"
        if launch.learners != (devices := launch.generators * parallel):
            raise ValueError(
                f"{key} with launch.learners = {launch.learners}: each rank shares one device with a generator, and "
                f"launch.generators = {launch.generators} with generator.tensor_parallel = {parallel} have {devices}; "
                f"use launch.learners={devices}"
            )
        if self.critic.ranks:
            raise ValueError(
                f"{key} with critic.ranks = {self.critic.ranks}: they would use the device of a generator; use "
                "critic.ranks=0, which trains the critic in the learner ranks"
            )
        if self.weights.staging == "buckets" and not self.hands_over:
            raise ValueError(
                f"{key} with weights.staging = {self.weights.staging!r}: the learner would hold its weights until the "
                "engine has them, and the engine has no device until the learner is done; use weights.staging=whole or "
                "weights.transport=ipc"
            )
        if self.placement.pools:
            raise ValueError(f"{key} with placement.pools: generators and learners share devices; leave placement out")
        return self

    @model_validator(mode="after")
    def _check_hand_over(self) -> Self:
        launch, weights, lora = self.launch, self.weights, self.learner.lora
        if not self.hands_over:
            return self
        key, other = "weights.transport = 'ipc'", "use weights.transport=auto"
        if weights.staging not in ("auto", "buckets"):
            raise ValueError(
                f"{key} with weights.staging = {weights.staging!r}: versions go from device memory into the engine; "
                "use weights.staging=auto"
            )
        if launch.generators > 1 or launch.learners > 1:
            raise ValueError(
                f"{key} with launch.generators = {launch.generators} and launch.learners = {launch.learners}: it is "
                f"for one of each, on one device; {other}"
            )
        if lora.rank:
            raise ValueError(f"{key} with learner.lora.rank = {lora.rank}: adapters are small; {other}")
        if self.learner.offload == "all":
            raise ValueError(f"{key} with learner.offload = 'all': the weights are in host memory; {other}")
        return self

    @model_validator(mode="after")
    def _check_lora(self) -> Self:
        learner, reference = self.learner, self.algorithm.reference
        if learner.lora.rank and self.weights.staging == "buckets":
            raise ValueError(
                f"weights.staging = 'buckets' with learner.lora.rank = {learner.lora.rank}: adapters are small, and "
                "generators take them at once; use weights.staging=whole"
            )
        if learner.lora.rank and reference not in (None, self.model.path):
            raise ValueError(
                f"algorithm.reference = {reference!r} with learner.lora.rank = {learner.lora.rank}: the reference "
                "policy is the model without its adapters, of model.path; leave algorithm.reference out, or use "
                "learner.lora.rank=0"
            )
        return self

    def evaluates(self, version: int) -> bool:
        """True if the run evaluates this policy version: the first, the last, and multiples of `eval.every_steps`."""
        every = self.eval.every_steps
        due = version in (0, self.steps) or (every is not None and version % every == 0)
        return bool(self.data.eval_files) and due

    @property
    def has_reward_functions(self) -> bool:
        """True if rewards are computed by functions, and not only by environments."""
        given = (self.rewards, self.eval.rewards)
        return self.environment.name is None or any(one not in (AUTO, ENVIRONMENT, None) for one in given)

    @property
    def hands_over(self) -> bool:
        """True if a generator takes versions from the memory of the device that a learner rank shares with it."""
        return self.launch.colocated and self.weights.transport == "ipc"

    @property
    def num_shards(self) -> int:
        """Parts of the batch of a step that are dealt to the learner ranks; ranks that share sequences get the same."""
        return self.launch.learners // self.learner.sequence_parallel

    def shard_of(self, rank: int) -> int:
        """Returns the number of the part that a learner rank gets."""
        return rank // self.learner.sequence_parallel

    @property
    def run_dir(self) -> Path:
        return Path(self.runs_dir) / self.run

    @property
    def on_this_machine(self) -> Config:
        """The config with all addresses on this machine, for roles outside of a run."""
        launch = self.launch.model_copy(update={"address": LaunchConfig().address, "colocate": "off"})
        return self.model_copy(update={"launch": launch})

    def with_choices_of(self, saved: Config) -> Config:
        """The config with what a run's saved config has in place of `rewards: auto`, `eval.rewards: auto`,
        `weights.staging: auto`, `epochs`, and of a `launch.start_timeout_s` that is left to the start."""
        chosen: dict[str, Any] = {"rewards": saved.rewards} if self.rewards == AUTO else {}
        if self.eval.rewards == AUTO:
            chosen["eval"] = self.eval.model_copy(update={"rewards": saved.eval.rewards})
        if self.weights.staging == AUTO:
            chosen["weights"] = self.weights.model_copy(update={"staging": saved.weights.staging})
        if "start_timeout_s" not in self.launch.model_fields_set:
            chosen["launch"] = self.launch.model_copy(update={"start_timeout_s": saved.launch.start_timeout_s})
        if self.epochs is not None:
            chosen |= {"epochs": None, "steps": saved.steps}
        return self.model_copy(update=chosen)

    def to_yaml(self) -> str:
        """The complete resolved config; `load_config` returns an equal one from it."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False)


def _divisors(number: int) -> str:
    return ", ".join(str(d) for d in range(1, min(number, 64) + 1) if number % d == 0)
