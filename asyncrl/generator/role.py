"""What a generator process works out before its engine is up."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import structlog

from asyncrl.errors import ConfigError
from asyncrl.util.files import read_tensor_descriptions

log = structlog.get_logger()

_BYTES_PER_ELEMENT = 4
_MARGIN = 1.25
"""For padding, and heads that files hold once and a learner may send twice."""
_LEAST_BYTES = 1 << 20


def engine_seed(seed: int, index: int, start: int) -> int:
    """Seed of the engine of generator `index` at its `start`-th start: none draws what another drew before it."""
    return int(np.random.SeedSequence([seed, index, start]).generate_state(1)[0])


def max_weight_bytes(model_path: str) -> int:
    """More bytes than the weights of the model take on their way, at any precision: a ceiling for what a learner may
    announce. Raises ConfigError when the model's safetensors files cannot be read."""
    files = sorted(Path(model_path).glob("*.safetensors"))
    elements = sum(_num_elements(file) for file in files)
    if not elements:
        raise ConfigError(
            f"model.path = {model_path!r}: no weights in *.safetensors files; save the model in that format"
        )
    return int(elements * _BYTES_PER_ELEMENT * _MARGIN) + _LEAST_BYTES


def try_batch_scheduling(how: Callable[[], None]) -> None:
    """Does `processes.leave_the_core` or `take_long_turns`; where the system forbids that, the log says the cost."""
    try:
        how()
    except OSError as error:
        log.warning("generators on one core will change places often and be slower for it", reason=str(error))


def _num_elements(file: Path) -> int:
    """Of all tensors in a safetensors file."""
    try:
        return sum(math.prod(tensor["shape"]) for tensor in read_tensor_descriptions(file).values())
    except (KeyError, TypeError) as error:
        raise ConfigError(
            f"{file}: not a whole safetensors file ({type(error).__name__}: {error}); save or download the model anew"
        ) from None
