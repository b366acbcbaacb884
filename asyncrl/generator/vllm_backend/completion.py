"""Reads completions from vLLM's output."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from asyncrl.errors import InvariantError
from asyncrl.generator.engine import Completion
from asyncrl.types import Status

if TYPE_CHECKING:
    from vllm import CompletionOutput


def completion_of(key: str, output: CompletionOutput, routing: NDArray[np.uint8] | None) -> Completion:
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
