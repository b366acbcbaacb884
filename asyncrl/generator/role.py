"""Set-up of a generator process before its engine is up: seed, weight limit, scheduling."""

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
"""Allowance for padding, and for tied heads that files hold once and a learner may send twice."""
_LEAST_BYTES = 1 << 20


def engine_seed(seed: int, index: int, start: int) -> int:
    """The engine's seed for the `start`-th start of generator `index`: no two starts draw the same samples."""
    return int(np.random.SeedSequence([seed, index, start]).generate_state(1)[0])


def max_weight_bytes(model_path: str) -> int:
    """An upper bound of the bytes of the model's weights in transfer, at any precision: the most that a learner may
    announce. Raises ConfigError when the model's safetensors files cannot be read."""
    files = sorted(Path(model_path).glob("*.safetensors"))
    elements = sum(_num_elements(file) for file in files)
    if not elements:
        raise ConfigError(
            f"model.path = {model_path!r}: no weights in *.safetensors files; save the model in that format"
        )
    return int(elements * _BYTES_PER_ELEMENT * _MARGIN) + _LEAST_BYTES


def try_batch_scheduling(how: Callable[[], None]) -> None:
    """Calls `use_batch_scheduling` or `set_time_slice`; logs a warning where the system forbids that."""
    try:
        how()
    except OSError as error:
        log.warning("no batch scheduling: generators on one core switch often and are slower", reason=str(error))


def _num_elements(file: Path) -> int:
    """The number of elements of all tensors in a safetensors file."""
    try:
        return sum(math.prod(tensor["shape"]) for tensor in read_tensor_descriptions(file).values())
    except (KeyError, TypeError) as error:
        raise ConfigError(
            f"{file}: not a complete safetensors file ({type(error).__name__}: {error}); save or download the model "
            "again"
        ) from None
