"""Builds the requests of a vLLM engine: their sampling parameters, and prompts that several have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from typing import TYPE_CHECKING, Any, cast

from asyncrl.config.config import Config
from asyncrl.errors import InvariantError
from asyncrl.generator.engine import Sampling
from asyncrl.types import NO_VERSION
from asyncrl.util.model_files import end_tokens, load_tokenizer

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.engine.llm_engine import LLMEngine

MAX_CACHED = 4096
"""Sampling parameters that are kept for later requests."""


class RequestBuilder:
    """Builds requests without an id, and keeps what later ones have in common with them."""

    def __init__(self, config: Config, engine: LLMEngine) -> None:
        self.adapter: LoRARequest | None = None
        """Marks requests as those of the policy, where the engine has its adapter."""
        self._config, self._engine = config, engine
        self._last: tuple[list[int], Sampling, int | None, int, tuple[str, ...], EngineCoreRequest] | None = None
        """The last prompt, kind, limit, salt and texts, with the request built from them."""
        self._has_tokenizer = False
        if config.generator.stop_texts:
            self._load_tokenizer()
        self._sampling: dict[Sampling, dict[str, float]] = {
            # Of the full distribution: log-probs of a cut one would bias importance ratios.
            "training": {"temperature": config.generator.temperature},
            "evaluation": config.eval.sampling.model_dump(),
            "greedy": {"temperature": 0.0},
        }
        """vLLM's sampling parameters; those that are left out exclude no token."""
        self._params: dict[tuple[Sampling, int | None, tuple[str, ...]], SamplingParams] = {}
        """Sampling parameters by kind, maximum length and texts that stop."""

    @property
    def prefix_caching(self) -> bool:
        """True if the engine shares the keys and values of equal prompts."""
        return bool(self._engine.vllm_config.cache_config.enable_prefix_caching)

    @property
    def kinds(self) -> list[Sampling]:
        """The kinds of sampling."""
        return list(self._sampling)

    def build(
        self,
        prompt: list[int],
        kind: Sampling,
        *,
        salt: int,
        seed: int | None = None,
        max_tokens: int | None = None,
        stop: tuple[str, ...] = (),
    ) -> EngineCoreRequest:
        """Returns a request. The last one is cached and copied: the members of a group differ only in their id, and
        checking and preparing a request is half of the cost of adding it. Prompts of different `salt` are not shared.
        """
        from vllm.inputs.engine import tokens_input

        wanted = prompt, kind, max_tokens, salt, stop
        if seed is None and self._last is not None and self._last[:5] == wanted:
            return copy(self._last[5])
        if stop:
            self._load_tokenizer()
        request = self._engine.input_processor.process_inputs(
            "",
            tokens_input(prompt, cache_salt=str(salt) if self.prefix_caching else None),
            self.params(kind, seed, max_tokens, stop),
            lora_request=self.adapter,
            supported_tasks=self._engine.get_supported_tasks(),
        )
        self._last = (*wanted, copy(request)) if seed is None else None
        return request

    def params(
        self, kind: Sampling, seed: int | None = None, max_tokens: int | None = None, stop: tuple[str, ...] = ()
    ) -> SamplingParams:
        """Returns the sampling parameters of a request, which others may have, too."""
        if seed is None and (kind, max_tokens, stop) in self._params:
            return self._params[kind, max_tokens, stop]
        params = sampling_params(self._config, self._sampling[kind], seed, max_tokens, stop)
        if seed is None and len(self._params) < MAX_CACHED:
            self._params[kind, max_tokens, stop] = params
        return params

    def check_end_tokens(self) -> None:
        """Raises InvariantError if the engine excludes other tokens before `generator.min_new_tokens` than the learner,
        whose log-probs would be those of another distribution."""
        config = self._config
        if not config.generator.min_new_tokens:
            return
        params = self.build([0], "training", salt=NO_VERSION).sampling_params
        assert params is not None
        expected = end_tokens(config.model.path, trust_remote_code=config.model.trust_remote_code)
        if sorted(params.all_stop_token_ids) != expected:
            raise InvariantError(
                f"generator.min_new_tokens = {config.generator.min_new_tokens}: the engine ends completions with the "
                f"tokens {sorted(params.all_stop_token_ids)}, the learner expects {expected}"
            )

    def _load_tokenizer(self) -> None:
        """Loads what turns tokens into the texts that stop completions, unless it is loaded. They are those that
        rewards see: vLLM may load another class of tokenizer."""
        if self._has_tokenizer:
            return
        self._has_tokenizer = True
        own = load_tokenizer(self._config.model.path, trust_remote_code=self._config.model.trust_remote_code)
        self._engine.output_processor.tokenizer = own


def sampling_params(
    config: Config,
    sampling: Mapping[str, float],
    seed: int | None = None,
    max_tokens: int | None = None,
    stop: Sequence[str] = (),
) -> SamplingParams:
    """The sampling of completions, by the names of vLLM's parameters, and the outputs that the engine returns.
    `max_tokens` is by default `generator.max_new_tokens`; `stop` are texts in addition to `generator.stop`."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        **cast("dict[str, Any]", sampling),
        seed=seed,
        max_tokens=max_tokens or config.generator.max_new_tokens,
        min_tokens=min(config.generator.min_new_tokens, max_tokens or config.generator.min_new_tokens),
        stop=[*config.generator.stop_texts, *stop],
        detokenize=bool(config.generator.stop_texts or stop),
        include_stop_str_in_output=True,  # keeps the tokens of the text that stops a completion
        skip_special_tokens=False,
        logprobs=0,
        flat_logprobs=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,  # requests share them unchanged; a deep copy for each is slow
    )
