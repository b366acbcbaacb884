"""An engine around the forward pass of transformers, in this process, with weights swapped between two steps."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from asyncrl.config.config import Config
from asyncrl.config.sections import Sampling as How
from asyncrl.generator.engine import Completion, Engine, Sampling, Waking
from asyncrl.generator.transformers_backend.cache import Request, Scheduler
from asyncrl.generator.transformers_backend.decoder import Decoder
from asyncrl.util.model_files import end_tokens, load_decoder
from asyncrl.util.processes import peak_memory_bytes


class TransformersEngine(Engine):
    """The transformers library with asyncrl's continuous batching: for models that vLLM lacks, and where it cannot be
    installed.

    Not thread-safe. There is no cache of prompts, so that a `salt` means nothing. With `deterministic` requests run one
    after the other, each with a separate random generator.
    """

    def __init__(self, config: Config, *, seed: int) -> None:
        super().__init__(config)
        self._decoder = Decoder(config)
        self._device = self._decoder.device
        self.loader = loader = self._decoder.loader
        loader.committed = self._set_loaded
        self.window_tokens = self._decoder.window_tokens
        self._ends = frozenset(end_tokens(config.model.path, trust_remote_code=config.model.trust_remote_code))
        self._how: dict[Sampling, How] = {
            # Of the full distribution: log-probs of a cut one would bias importance ratios.
            "training": How(temperature=config.generator.temperature),
            "evaluation": config.eval.sampling,
            "greedy": How(temperature=0.0),
        }
        self._generator = torch.Generator(self._device).manual_seed(seed)
        self._stops: StopTexts | None = None
        self._requests: dict[str, Request] = {}
        self._arrivals = 0
        generator = config.generator
        self._scheduler = Scheduler(
            self._decoder.cache,
            max_running=1 if config.deterministic else generator.max_running_groups * generator.group_size,
            step_tokens=self._decoder.step_tokens,
        )
        gc.collect()
        gc.freeze()  # keeps the engine's many objects out of later collections

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
        config, generator = self._config, self._config.generator
        self._check_request(key, len(prompt), seed)
        limit = min(max_tokens or generator.max_new_tokens, self.window_tokens - len(prompt))
        self._arrivals += 1
        # When many environments answer at once, more turns wait than fit: the oldest groups' go first.
        rank = priority if config.environment.name is not None else 0
        routers = self._decoder.routers if kind == "training" else None
        request = Request(
            key=key,
            order=(rank, self._arrivals),
            tokens=np.asarray(prompt).tolist(),
            num_prompt=len(prompt),
            kind=kind,
            max_tokens=limit,
            stop=(*generator.stop_texts, *stop),
            generator=None if seed is None else torch.Generator(self._device).manual_seed(seed),
            routing=None if routers is None else routers.new_record(len(prompt) + limit),
        )
        if request.stop and self._stops is None:
            self._stops = StopTexts(config)
        self._requests[key] = request
        self._scheduler.add(request)

    def step(self) -> list[Completion]:
        """Runs one decoding step of all requests and returns the completions that ended in it. Raises InvariantError
        while an update is not committed."""
        self._check_step()
        requests, rows = self._scheduler.schedule()
        if not rows:
            return []
        logits = self._decoder.logits(rows)
        if self._decoder.routers is not None:
            chosen = self._decoder.routers.taken([len(row.tokens) for row in rows])
            for request, row, experts in zip(requests, rows, chosen, strict=True):
                request.record_routing(row.start, experts)
        sampling = [i for i, row in enumerate(rows) if row.end == len(requests[i].tokens)]
        ended: list[Request] = []
        for _, members in groupby(sorted(sampling, key=lambda i: requests[i].kind), key=lambda i: requests[i].kind):
            indices = list(members)
            ended += self._sample([requests[i] for i in indices], self._rows_of(logits, indices))
        self._scheduler.remove(ended)
        return [self._completion(request) for request in ended]

    def _rows_of(self, logits: Tensor, indices: list[int]) -> Tensor:
        if len(indices) == len(logits):
            return logits
        return logits.index_select(0, torch.tensor(indices, device=self._device))

    @torch.inference_mode()
    def _sample(self, requests: list[Request], logits: Tensor) -> list[Request]:
        """Samples a token for each of the requests, which are of one kind. Returns those that ended."""
        first = requests[0]  # with `deterministic` the only one
        drawn = sample(logits, self._how[first.kind], first.generator or self._generator)
        tokens, logprobs = (tensor.tolist() for tensor in drawn)
        for request, token, logprob in zip(requests, tokens, logprobs, strict=True):
            request.tokens.append(token)
            request.logprobs.append(logprob)
            request.versions.append(self.version)
        return [x for x in requests if self._is_complete(x) or x.num_generated >= x.max_tokens]

    def _is_complete(self, request: Request) -> bool:
        if request.tokens[-1] in self._ends:
            return True
        if not request.stop:
            return False
        assert self._stops is not None
        return self._stops.completed(request.tokens[request.num_prompt :], request.stop)

    def _completion(self, request: Request) -> Completion:
        del self._requests[request.key]
        return Completion(
            request.key,
            request.tokens[request.num_prompt :],
            np.array(request.logprobs, dtype=np.float32),
            np.array(request.versions, dtype=np.int32),
            "completed" if self._is_complete(request) else "truncated",
            routing=None if request.routing is None else request.routing[: len(request.tokens)],
        )

    def num_generated(self, key: str) -> int:
        return self._requests[key].num_generated

    def abort(self, keys: Iterable[str]) -> None:
        self._scheduler.remove([self._requests.pop(key) for key in list(keys)])

    def _set_loaded(self, version: int) -> None:
        self._set_version(version)
        # A prompt is of one version, also if it is computed in several steps.
        self._scheduler.recompute(all_requests=self._config.weights.kv_cache == "recompute")

    @property
    def recomputed_tokens(self) -> int:
        return self._scheduler.recomputed_tokens

    def peak_memory_bytes(self) -> int:
        """Returns the most memory that this process has used."""
        return peak_memory_bytes()

    def sleep(self, level: int) -> None:
        self._scheduler.preempt()
        self._decoder.free(keep_weights=level == 1)

    def wake(self, part: Waking) -> None:
        if part == "weights":
            self._decoder.restore_weights()
        else:
            self._decoder.cache.restore()

    def close(self) -> None:
        """Aborts all requests and frees the memory of model and cache."""
        self.abort(list(self._requests))
        del self._decoder, self._scheduler
        gc.unfreeze()
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()


def sample(logits: Tensor, how: How, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
    """Returns tokens [rows] and their log-probs [rows] for logits [rows, vocabulary] in float32."""
    if not how.temperature:
        logprobs = logits.log_softmax(dim=-1)
        tokens = logprobs.argmax(dim=-1, keepdim=True)
        return tokens[:, 0], logprobs.gather(1, tokens)[:, 0]
    if how.temperature != 1.0:
        logits = logits / how.temperature
    warpers: list[Any] = [MinPLogitsWarper(how.min_p)] if how.min_p else []
    warpers += [TopKLogitsWarper(how.top_k)] if how.top_k > 0 else []
    warpers += [TopPLogitsWarper(how.top_p)] if how.top_p < 1.0 else []
    for warper in warpers:
        logits = warper(None, logits)
    logprobs = logits.log_softmax(dim=-1)
    tokens = torch.multinomial(logprobs.exp(), 1, generator=generator)
    return tokens[:, 0], logprobs.gather(1, tokens)[:, 0]


_MARGIN_TOKENS = 8
"""Tokens that are decoded in front of those that may be part of the text, so that it is not at the beginning."""


class StopTexts:
    """Decodes the end of completions, with special tokens, as rewards see them."""

    def __init__(self, config: Config) -> None:
        self._decode = load_decoder(config.model.path, trust_remote_code=config.model.trust_remote_code)

    def completed(self, tokens: Sequence[int], texts: Sequence[str]) -> bool:
        """True if the last of the tokens completes one of the texts."""
        longest = max(len(text.encode()) for text in texts)
        end = list(tokens[-longest - _MARGIN_TOKENS :])
        before, after = self._decode([end[:-1], end], special_tokens=True)
        known = len(before.rstrip("\ufffd"))
        return any(after.find(text, max(0, known - len(text) + 1)) >= 0 for text in texts)
