"""The seam between the generator's loop and an inference library, and the table of engines.

An engine completes many prompts at the same time, one token of each per step, and takes new weights between two steps.
Every token of a `Completion` carries the log-prob and the version of the weights that sampled it. For example:

    engine = make_engine(config, seed=0)
    engine.swap(0, weights)                            # [(name, tensor), ...] as the learner sends them
    engine.add("a", prompt_tokens)
    while engine.num_running:
        for completion in engine.step():
            print(completion.key, completion.tokens, completion.versions)
    engine.close()
"""

from __future__ import annotations

import importlib.util
import inspect
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import structlog
from numpy.typing import NDArray

from asyncrl.colocate import NoLock
from asyncrl.config.config import Config
from asyncrl.config.training import Lora
from asyncrl.errors import ConfigError, InvariantError, PeerTimeoutError, RunError
from asyncrl.types import NO_VERSION, Status
from asyncrl.util.user_code import resolve

if TYPE_CHECKING:
    from torch import Tensor

    from asyncrl.weights.receiver import BackgroundReceiver
    from asyncrl.weights.staging import BucketLoader, BucketRound, StagedWeights

log = structlog.get_logger()

KEY = "generator.engine"
ENGINES = {
    "vllm": "asyncrl.generator.vllm_backend.engine:VllmEngine",
    "transformers": "asyncrl.generator.transformers_backend.engine:TransformersEngine",
}
"""An entry is imported when it is used."""

GPU_FRACTION = "ASYNCRL_GPU_MEMORY_FRACTION"
"""Environment variable with the fraction of the GPU's memory that the launcher assigns to the engine."""
CPU_KV_CACHE_BYTES = 1 << 30
"""Key-value cache on a CPU when `generator.kv_cache_bytes` is not set."""
STEP_TOKENS = {"cpu": 2048, "cuda": 8192}
"""Most tokens of a step of the engine on transformers, by kind of device, without `max_num_batched_tokens` in
`generator.engine_options`."""
_POLL_S = 0.005
"""Longest wait between two calls of the callback in `WeightSwaps`."""
_SHOWN = 5
"""Faults of weights that an error names."""

Waking = Literal["weights", "cache"]
"""The two parts of an engine that wakes up."""
Shapes = Mapping[str, tuple[int, ...]]
Sampling = Literal["training", "evaluation", "greedy"]
"""The sampling of a completion: as in section `generator`, as in section `eval`, or greedily."""


@dataclass(frozen=True, slots=True)
class Completion:
    """One completion of a prompt. All arrays are [tokens] and include the tokens that ended it: the end-of-sequence
    token, or the tokens of a text of `generator.stop`."""

    key: str
    tokens: list[int]
    logprobs: NDArray[np.float32]
    """Nats, at the sampling temperature, under the weights that sampled the token."""
    versions: NDArray[np.int32]
    status: Status
    action_mask: NDArray[np.bool_] | None = None
    """[tokens], true where the policy sampled the token; None if it sampled all of them. Log-prob and version of the
    others are 0 and NO_VERSION."""
    prompt: NDArray[np.int32] | None = None
    """The tokens before it, if they differ from the prompt of its lease."""
    routing: NDArray[np.uint8] | None = None
    """[prompt and completion, layers, chosen], with `algorithm.routing_replay`: the experts that each token was routed
    to in the pass that sampled the token after it. Of a prompt that was computed again, the ones of the last pass;
    a recomputed token of the completion keeps its own. The last token has none, and zeros."""

    @property
    def num_action_tokens(self) -> int:
        """Tokens sampled by the policy."""
        return len(self.tokens) if self.action_mask is None else int(self.action_mask.sum())


class Engine(ABC):
    """Continuous batching with weights that change between two steps.

    It is made as `Class(config, seed=...)` in the generator's process, and used by one thread. Nothing is added before
    the first version.
    """

    loader: BucketLoader
    """Loads a version part by part. Until it commits one, `step` raises InvariantError, and requests wait."""
    window_tokens: int
    """The longest sequence, of prompt and completion."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self.version = NO_VERSION
        """Version of the loaded weights; NO_VERSION before the first one."""
        self._requests: dict[str, Any] = {}
        """Those in progress, by their keys."""

    @property
    def num_running(self) -> int:
        """Number of completions in progress."""
        return len(self._requests)

    @abstractmethod
    def add(
        self,
        key: str,
        prompt: Sequence[int] | NDArray[np.int32],
        *,
        kind: Sampling = "training",
        seed: int | None = None,
        max_tokens: int | None = None,
        salt: int | None = None,
        stop: Sequence[str] = (),
        priority: int = 0,
    ) -> None:
        """Starts a completion of `prompt` (token ids); never blocks. `kind` selects the sampling. `seed` is for
        `deterministic` runs only. `max_tokens` is at most, and by default, `generator.max_new_tokens`; `stop` are texts
        that end it in addition to those of `generator.stop`. Cached keys and values are shared among requests of the
        same `salt`, by default the loaded version. With an environment the waiting completion of the lowest `priority`
        takes the next free place. Raises RunError when the prompt does not fit the window."""

    @abstractmethod
    def step(self) -> list[Completion]:
        """Runs one decoding step of all requests and returns the completions known to have ended."""

    @abstractmethod
    def num_generated(self, key: str) -> int:
        """Tokens sampled so far for a running request, without one that is in flight."""

    @abstractmethod
    def abort(self, keys: Iterable[str]) -> None:
        """Drops requests in progress."""

    def swap(self, version: int, tensors: Sequence[tuple[str, Tensor]]) -> float:
        """Loads weights, named as in `TrainedModel.sent_shapes`, between two steps; returns the time it took in ms.
        Tokens that are sampled afterwards carry `version`. Requests in progress continue, with their keys and values
        kept or recomputed (`weights.kv_cache`). On a GPU the copies may end after the return, in the order of the
        calling thread's stream. Raises RunError, and changes nothing, when the weights do not match the model."""
        from asyncrl.weights.layout import WeightPart

        started_s = time.perf_counter()
        self.loader.begin(version, {name: tuple(tensor.shape) for name, tensor in tensors})
        self.loader.load([WeightPart(name, tensor) for name, tensor in tensors])
        self.loader.commit(version)
        return (time.perf_counter() - started_s) * 1e3

    def use_own_weights(self, version: int) -> None:
        """Uses the weights in `model.path` as `version`, instead of a first `swap`."""
        if self.version != NO_VERSION:
            raise InvariantError(f"engine: version {self.version} is loaded already, over the model's own weights")
        self._set_version(version)

    def _set_version(self, version: int) -> None:
        self.version = version

    @abstractmethod
    def sleep(self, level: int) -> None:
        """Frees the device between two steps, with `launch.colocate`: at level 2 the cache and the weights are given
        up, at level 1 the weights are kept. Requests in progress stay and lose no token. Until it wakes up, `add` and
        `abort` work, and `step` must not be called."""

    @abstractmethod
    def wake(self, part: Waking) -> None:
        """Takes the device back: first the memory of the weights, which after level 2 a `swap` must fill, then that of
        the cache, after which `step` computes the requests in progress again."""

    @property
    @abstractmethod
    def recomputed_tokens(self) -> int:
        """Tokens of running requests whose keys and values were computed more than once, since the start: after a
        `swap` that does not keep them, after a wake-up, and where other requests needed their place in the cache."""

    @abstractmethod
    def peak_memory_bytes(self) -> int:
        """Returns the most memory that this process has used, and that processes of the engine have, in addition."""

    @abstractmethod
    def close(self) -> None:
        """Aborts all requests and frees the engine's memory."""

    def _check_step(self) -> None:
        """Raises InvariantError between two versions."""
        if self.loader.updating:
            raise InvariantError("engine: a step between two versions; an update of the weights is not committed")

    def _check_request(self, key: str, num_prompt: int, seed: int | None) -> None:
        """Raises RunError if a prompt of this many tokens does not fit the window, and InvariantError if the engine has
        no version, the key is in use, or a seed is not for this run."""
        if seed is not None and not self._config.deterministic:
            raise InvariantError(f"request {key}: a seed of its own works with `deterministic` only")
        if self.version == NO_VERSION:
            raise InvariantError(f"request {key}: the engine has no version yet; swap weights in first")
        if key in self._requests:
            raise InvariantError(f"request {key}: the key is in use")
        window = self.window_tokens
        if not 0 < num_prompt < window:
            raise RunError(f"request {key}: a prompt of {num_prompt} tokens does not fit the window of {window} tokens")


def check_installed(config: Config) -> None:
    """Raises ConfigError if the engine of the config needs vLLM, which is not installed."""
    if config.generator.engine == "vllm" and importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            f"{KEY} = 'vllm': vLLM is not installed; install it with `make setup`, or use {KEY}=transformers"
        )


def find_engine(config: Config) -> type[Engine]:
    """Returns the class of `generator.engine`. Raises ConfigError if it cannot be imported or lacks methods."""
    found = resolve(KEY, config.generator.engine, ENGINES)
    if not (isinstance(found, type) and issubclass(found, Engine)) or inspect.isabstract(found):
        raise ConfigError(
            f"{KEY} = {config.generator.engine!r}: must be a subclass of asyncrl.generator.engine.Engine, with all of "
            "its methods"
        )
    return found


def make_engine(config: Config, *, seed: int) -> Engine:
    """Returns the engine of `generator.engine`. Raises ConfigError as `find_engine` does."""
    check_installed(config)
    make: Any = find_engine(config)
    return make(config, seed=seed)


def check_fit(version: int, sent: Shapes, known: Shapes, path: str) -> None:
    """Raises RunError unless the names and shapes that were sent are those of the model at `path`."""
    if sent == known:
        return
    faults = [f"{name} is missing" for name in known.keys() - sent.keys()]
    faults += [f"{name} is unknown" for name in sent.keys() - known.keys()]
    faults += [
        f"{name} has shape {sent[name]}, the model {shape}"
        for name, shape in known.items()
        if name in sent and sent[name] != shape
    ]
    shown = "; ".join(sorted(faults)[:_SHOWN]) + ("; ..." if len(faults) > _SHOWN else "")
    raise RunError(f"weights of version {version} do not fit model.path = {path}: {shown}")


def make_own_engine(config: Config) -> Engine:
    """Returns an engine with the weights in `model.path` as version 0, which never gets others."""
    learner = config.learner.model_copy(update={"lora": Lora()})  # adapters come from a learner
    engine = make_engine(config.model_copy(update={"learner": learner}), seed=config.seed)
    engine.use_own_weights(0)
    return engine


class WeightSwaps:
    """Brings versions of a receiver into the engine between two steps: staged ones at once, others bucket by bucket.

    From the first bucket until the version is proven the engine is updating: it makes no step, and its requests wait. A
    round that fails in between is followed by another one, of the same version or of a later one, possibly by another
    learner. `meanwhile` is called in every wait, and returns False to end all of them.

        waits for                          woken by                              deadline
        a bucket, or the end of the round  the receiver's thread, or _POLL_S     the receiver's
        another round, while updating      polled                                `launch.progress_timeout_s`
    """

    def __init__(
        self,
        engine: Engine,
        receiver: BackgroundReceiver,
        *,
        timeout_s: float,
        meanwhile: Callable[[], bool],
        turn: NoLock | None = None,
    ) -> None:
        """`timeout_s` is the longest time that the engine may be updating."""
        self._engine, self._receiver, self._turn = engine, receiver, turn or NoLock()
        self._timeout_s, self._meanwhile = timeout_s, meanwhile
        self.stands_still = False
        """True while the engine waits for a version: its own is about to be replaced."""
        self._loaded: BucketRound | None = None
        """The last round whose version was loaded; the receiver ends it a little later."""

    def swap(self) -> float | None:
        """Swaps to the version that is there, if there is one. Returns the stall in ms, or None if the engine keeps its
        version, or the waits were ended: then it may be updating. Raises PeerTimeoutError if it is updating for too
        long."""
        started_s = time.perf_counter()
        self.stands_still = True
        staged = self._load_buckets()
        self.stands_still = False
        stall_ms = 1e3 * (time.perf_counter() - started_s)
        if staged is None:
            staged = self._receiver.staged()
            if staged is None:
                return None
            stall_ms = self._engine.swap(staged.version, staged.tensors)
        self._receiver.loaded(staged)
        return stall_ms

    def _load_buckets(self) -> StagedWeights | None:
        """Takes part in rounds until the engine has a version that is proven, or needs none."""
        since_s = None
        while True:
            current, loader = self._receiver.round(), self._engine.loader
            current = None if current is self._loaded else current
            if current is None and not loader.updating:
                return None
            staged = None if current is None else self._take_part(current, loader)
            if staged is not None:
                self._loaded = current
                return staged
            now_s = time.monotonic()
            if loader.updating and since_s is None:
                since_s = now_s
                log.warning("the engine has parts of a version, and waits for all", version=self._engine.version)
            if since_s is not None and now_s - since_s > self._timeout_s:
                raise PeerTimeoutError(
                    f"weights.staging = 'buckets': the engine has had parts of a version for {self._timeout_s:g} s "
                    "(launch.progress_timeout_s), and no learner has sent another one"
                )
            if not self._meanwhile():
                return None
            time.sleep(_POLL_S if loader.updating else 0.0)

    def _take_part(self, current: BucketRound, loader: BucketLoader) -> StagedWeights | None:
        """Loads the buckets of a round. Returns the version if it is proven; None if the round has failed."""
        self._turn.wake_weights()
        current.accept()
        has_begun = False
        while True:
            parts = current.take(_POLL_S)
            if parts is not None:
                if not has_begun:
                    loader.begin(current.version, current.shapes)
                    has_begun = True
                loader.load(parts)
                current.give_back()
            elif current.committed is not None:
                loader.commit(current.version)
                return current.committed
            elif current.has_failed or not self._meanwhile():
                self._turn.give_up()
                return None
