"""A vLLM engine in this process: completions with versions and log-probs, weights swapped between two steps."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
from numpy.typing import NDArray

from asyncrl.config.config import Config
from asyncrl.errors import InvariantError
from asyncrl.generator.engine import Completion, Engine, Sampling, Waking
from asyncrl.generator.vllm_backend.scheduling import BatchWatch, check_first_versions
from asyncrl.generator.vllm_backend.setup import build_engine, uses_adapter
from asyncrl.generator.vllm_backend.weights import (
    SentWeights,
    adapter_arguments,
    adapter_request,
    make_loader,
)
from asyncrl.generator.vllm_backend.workers import Workers
from asyncrl.types import NO_VERSION, Status
from asyncrl.util.model_files import load_tokenizer, replayed_routers
from asyncrl.util.processes import peak_memory_bytes

if TYPE_CHECKING:
    from vllm import CompletionOutput, SamplingParams
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine import EngineCoreRequest

_PAUSE = 0
"""vLLM's level of sleep at which only the scheduler sleeps."""
_TAGS: dict[Waking, str] = {"weights": "weights", "cache": "kv_cache"}
_MAX_PARAMS = 4096
"""Sampling parameters that are kept for later requests."""


@dataclass(slots=True)
class _Request:
    prompt: list[int]
    kind: Sampling = "training"
    seed: int | None = None
    max_tokens: int | None = None
    salt: int | None = None
    stop: tuple[str, ...] = ()
    priority: int = 0
    id: str = ""
    """vLLM's own id of the request."""


class VllmEngine(Engine):
    """Continuous batching with in-flight weight updates.

    Not thread-safe. Nothing can be added before the first `swap`. With `deterministic` a completion is a function of
    the weights, its prompt and its seed, bit for bit, whatever else runs in the engine.
    """

    def __init__(self, config: Config, *, seed: int) -> None:
        super().__init__(config)
        self._requests: dict[str, _Request] = {}
        self._workers_peak_bytes = 0
        sent = SentWeights(config)  # first: vLLM changes classes of transformers that it runs itself
        routers = replayed_routers(
            config.algorithm.routing_replay, config.model.path, trust_remote_code=config.model.trust_remote_code
        )
        self._watch = BatchWatch(routers)
        self._engine = build_engine(config, seed, self._watch, adapter_arguments(config, sent))
        self._workers = Workers(self._engine, timeout_s=config.launch.start_timeout_s)
        self.loader = self._loader = make_loader(config, sent, self._workers, self._set_loaded)
        self.window_tokens = self._engine.model_config.max_model_len
        self.prefix_caching = bool(self._engine.vllm_config.cache_config.enable_prefix_caching)
        """True if the engine shares the keys and values of equal prompts."""
        self._adapter: LoRARequest | None = None
        """Marks requests as the policy's, where the engine has its adapter."""
        self._params = lru_cache(_MAX_PARAMS)(partial(sampling_params, config))
        self._has_tokenizer = False
        if config.generator.stop_texts:
            self._load_tokenizer()
        self._warm_up()
        gc.collect()
        gc.freeze()  # keeps the engine's many objects out of later collections

    @property
    def num_running(self) -> int:
        """Number of completions in progress. Raises PeerTimeoutError if a worker process of the engine has ended."""
        self._workers.check()
        return len(self._requests)

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
        self._check_request(key, len(prompt), seed)
        if max_tokens == self._config.generator.max_new_tokens:
            max_tokens = None
        tokens = np.asarray(prompt).tolist()
        self._start(key, _Request(tokens, kind, seed, max_tokens, salt, tuple(stop), priority))

    def _start(self, key: str, asked: _Request) -> None:
        engine, request = self._engine, self._build(asked)
        request.request_id, request.priority = key, asked.priority
        engine.input_processor.assign_request_id(request)
        engine.output_processor.add_request(request, None, None, 0)
        engine.engine_core.add_request(request)
        asked.id = request.request_id
        self._requests[key] = asked

    def _build(self, asked: _Request) -> EngineCoreRequest:
        """Returns a request without an id."""
        from vllm.inputs.engine import tokens_input

        # Salting with the version keeps a cached prompt from being reused under other weights.
        salt = self.version if asked.salt is None else asked.salt
        if asked.stop:
            self._load_tokenizer()
        make_params = self._params if asked.seed is None else partial(sampling_params, self._config)
        return self._engine.input_processor.process_inputs(
            "",
            tokens_input(asked.prompt, cache_salt=str(salt) if self.prefix_caching else None),
            make_params(asked.kind, asked.seed, asked.max_tokens, asked.stop),
            lora_request=self._adapter,
            supported_tasks=self._engine.get_supported_tasks(),
        )

    def _load_tokenizer(self) -> None:
        """Loads the tokenizer of the texts that stop completions: vLLM may load another class than rewards."""
        if not self._has_tokenizer:
            model = self._config.model
            tokenizer = load_tokenizer(model.path, trust_remote_code=model.trust_remote_code)
            self._engine.output_processor.tokenizer = tokenizer
            self._has_tokenizer = True

    def _warm_up(self) -> None:
        """Runs the first steps, which load code for longer than a running generator may go without a heartbeat.
        Raises RunError if a token of them does not carry the version of the step that scheduled it."""
        from vllm.inputs.engine import tokens_input

        for kind in get_args(Sampling):
            params = self._params(kind).clone()
            params.max_tokens = 2
            params.ignore_eos = True
            self._engine.add_request(f"warm-up {kind}", tokens_input([0]), params)
        finished: list[Any] = []
        while self._engine.has_unfinished_requests():
            self._watch.version += 1  # from 0
            finished += self._engine.step()
        self._watch.version = NO_VERSION
        check_first_versions(finished[0].outputs[0].weight_versions)

    def step(self) -> list[Completion]:
        """Runs one decoding step of all requests and returns the completions that ended in it. Raises InvariantError
        while an update is not committed."""
        self._check_step()
        completions: list[Completion] = []
        for output in self._workers.call(self._engine.step):
            request = self._requests.pop(output.request_id)
            records = self._watch.routing if request.kind == "training" else None
            routing = None if records is None else records.pop(request.id)
            completions.append(_completion_of(output.request_id, output.outputs[0], routing))  # type: ignore[union-attr]
        return completions

    def num_generated(self, key: str) -> int:
        state = self._engine.output_processor.request_states[self._requests[key].id]
        assert state.detokenizer is not None
        return state.detokenizer.num_output_tokens()

    def abort(self, keys: Iterable[str]) -> None:
        keys = list(keys)
        self._engine.abort_request(keys)
        for key in keys:
            del self._requests[key]

    def _set_loaded(self, version: int) -> None:
        if self._adapter is None and uses_adapter(self._config):
            self._adapter = adapter_request()
        self._set_version(version)
        if len(self._workers):  # here, since the workers stand still: the loop asks for it at each heartbeat
            self._workers_peak_bytes = sum(self._workers.rpc("peak_memory_bytes"))
        if self._config.weights.kv_cache == "recompute":
            self._engine.reset_prefix_cache(reset_running_requests=True)
        elif self.prefix_caching:
            self._restart_untouched()

    @property
    def recomputed_tokens(self) -> int:
        return self._watch.recomputed_tokens

    def peak_memory_bytes(self) -> int:
        """Returns the most memory that this process has used, and up to the last swap each worker process, in all."""
        return peak_memory_bytes() + self._workers_peak_bytes

    def _set_version(self, version: int) -> None:
        self.version = self._watch.version = version

    def _restart_untouched(self) -> None:
        """Restarts requests that have not sampled a token yet, so that their prompt is of one version."""
        asked = self._requests
        untouched = [key for key in asked if asked[key].salt is None and not self.num_generated(key)]
        requests = [asked[key] for key in untouched]
        self.abort(untouched)
        for key, request in zip(untouched, requests, strict=True):
            self._start(key, request)

    def sleep(self, level: int) -> None:
        """Frees the device, also for its worker processes; the levels are vLLM's own. vLLM frees nothing on a CPU,
        where it has no sleep mode: there only the caches are dropped. Running requests are preempted and computed again
        later."""
        self._workers.call(partial(self._engine.sleep, level if self._frees else _PAUSE, mode="keep"))
        if not self._frees:
            self._engine.reset_prefix_cache(reset_running_requests=True)

    def wake(self, part: Waking) -> None:
        """Takes a part of the device back; with the cache the engine continues."""
        if self._frees:
            self._workers.call(partial(self._engine.wake_up, [_TAGS[part]]))
        elif part == "cache":
            self._workers.call(partial(self._engine.wake_up, ["scheduling"]))

    @property
    def _frees(self) -> bool:
        model: Any = self._engine.model_config
        return model.enable_sleep_mode

    def close(self) -> None:
        """Aborts all requests and frees the engine's memory and its process group."""
        if self._workers.alive:
            self.abort(list(self._requests))
        self._workers.close()
        self._engine.engine_core.shutdown()
        self._loader.close()


def _completion_of(key: str, output: CompletionOutput, routing: NDArray[np.uint8] | None) -> Completion:
    """Returns the completion in an output of vLLM, with the experts of its prompt and tokens if these are recorded."""
    tokens = list(output.token_ids)
    spans = output.weight_versions
    if spans is None or output.logprobs is None:
        raise InvariantError(f"request {key}: the engine returned no versions or log-probs")
    versions = np.empty(len(tokens), dtype=np.int32)
    for span in spans:
        versions[span.start : span.end] = int(span.version)
    logprobs = np.asarray(output.logprobs.logprobs, dtype=np.float32)  # type: ignore[union-attr]
    if len(logprobs) != len(tokens):
        raise InvariantError(f"request {key}: {len(tokens)} tokens with {len(logprobs)} log-probs")
    status: Status = "completed" if output.finish_reason == "stop" else "truncated"
    return Completion(key, tokens, logprobs, versions, status, routing=routing)


def sampling_params(
    config: Config,
    kind: Sampling,
    seed: int | None = None,
    max_tokens: int | None = None,
    stop: tuple[str, ...] = (),
) -> SamplingParams:
    """Returns the sampling of completions, and the outputs that the engine returns. `max_tokens` is by default
    `generator.max_new_tokens`; `stop` are texts in addition to `generator.stop`."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    # Of the full distribution: log-probs of a cut one would bias importance ratios.
    sampling: dict[str, Any] = {"temperature": config.generator.temperature if kind == "training" else 0.0}
    if kind == "evaluation":
        sampling = config.eval.sampling.model_dump()
    return SamplingParams(
        **sampling,
        seed=seed,
        max_tokens=max_tokens or config.generator.max_new_tokens,
        stop=[*config.generator.stop_texts, *stop],
        detokenize=bool(config.generator.stop_texts or stop),
        include_stop_str_in_output=True,  # keeps the tokens of the text that stops a completion
        skip_special_tokens=False,
        logprobs=0,
        flat_logprobs=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,  # requests share them unchanged; a deep copy for each is slow
    )
