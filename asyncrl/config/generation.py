"""The sections of a config for generation, environments and evaluation."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, JsonValue, model_validator

from asyncrl.config.base import Rewards, Section
from asyncrl.config.mappings import Sampling
from asyncrl.config.passthrough import check_engine_options


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
    min_new_tokens: int = Field(default=0, ge=0)
    """Minimum length of a completion: before it the tokens that end a completion are excluded, in the engine and in the
    learner's log-probs, and no text of `stop` ends it."""
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
    others and the staged weights leave, by arithmetic. Not used on a CPU."""
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
        if self.min_new_tokens > self.max_new_tokens:
            raise ValueError(
                f"min_new_tokens = {self.min_new_tokens}: must be at most max_new_tokens = {self.max_new_tokens}"
            )
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
    """Turns of the policy after which an episode is truncated, unless its environment has a number of its own."""
    max_observation_tokens: int = Field(default=2048, ge=1)
    """Longer observations keep their two ends."""
    tool_format: Literal["auto", "hermes", "qwen3_coder", "deepseek", "kimi", "json", "none"] = "auto"
    """How the model writes calls of tools. Auto is the response template of its tokenizer or, if it has none, the form
    in which its chat template shows earlier calls."""
    history: Literal["keep", "template"] = "keep"
    """What the policy reads of earlier turns under a chat template. Keep: all that it said, one row for an episode.
    Template: what the template renders for the messages, which may leave out reasoning; where that does not continue
    the row, another one begins: the same tokens are trained, more are computed."""
    timeout_s: float = Field(default=300.0, gt=0.0)
    """Time limit of an episode."""
    step_timeout_s: float = Field(default=60.0, gt=0.0)
    """Time limit of one call of an environment."""
    retries: int = Field(default=1, ge=0)
    """Retries of an episode whose environment failed, after 1, 2, 4 ... 30 s, before the episode counts as failed."""


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
