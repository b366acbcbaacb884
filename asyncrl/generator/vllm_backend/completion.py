"""A completion, and how it is read from vLLM's output."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from asyncrl.errors import InvariantError
from asyncrl.types import Status

if TYPE_CHECKING:
    from vllm import CompletionOutput


@dataclass(frozen=True, slots=True)
class Completion:
    """One completion of a prompt. All arrays are [tokens] and include the tokens that ended it: the end-of-sequence
    token, or those of a text of `generator.stop`."""

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

    @property
    def num_action_tokens(self) -> int:
        """Tokens sampled by the policy."""
        return len(self.tokens) if self.action_mask is None else int(self.action_mask.sum())


def completion_of(key: str, output: CompletionOutput) -> Completion:
    """Returns the completion in an output of vLLM."""
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
    return Completion(key, tokens, logprobs, versions, status)
