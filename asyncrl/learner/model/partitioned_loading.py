"""Loads models of ZeRO stage 3: each rank reads its part of every parameter from the folder, and holds nothing else."""

from __future__ import annotations

import math
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import structlog
import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.modeling_utils import set_zero3_state

from asyncrl.config.config import Config
from asyncrl.learner.model.deepspeed_import import deepspeed
from asyncrl.learner.model.packed_attention import PACKED
from asyncrl.learner.model.settings import deepspeed_config
from asyncrl.weights.checkpoint import CheckpointTensor, checkpoint_tensors, pieces, unexpected_tensors

log = structlog.get_logger()


def load_partitioned(
    kind: Any, config: Config, path: str, files: dict[str, Path], *, new: tuple[str, ...], **options: Any
) -> tuple[PreTrainedModel, dict[str, Any]] | None:
    """Returns the model of the folder as an auto class `kind` builds it, with partitioned parameters, and what
    `from_pretrained` says of it: the names of parameters that the folder lacks, which are all of the modules `new`, and
    of tensors in its `files` that the model lacks. All ranks call it.

    Returns None if the folder's tensors do not have the names and shapes that the model saves; a complete load may know
    how to rename them, and says what is wrong.
    """
    trusted: dict[str, Any] = {"trust_remote_code": config.model.trust_remote_code}
    settings = AutoConfig.from_pretrained(path, **trusted, **options)
    with torch.device("meta"):
        meta = kind.from_config(settings, **trusted)
    tensors = checkpoint_tensors(meta)
    missing = {tensor.name for tensor in tensors or [] if tensor.name not in files}
    known = tensors is not None and all(name.partition(".")[0] in new for name in missing)
    if tensors is None or not known or not _have_shapes(tensors, files):
        log.warning("every rank loads the complete model, since its folder has tensors of other names", path=path)
        return None
    # Without overrides, DeepSpeed would round the buffers of rotary embeddings to bfloat16.
    partitions = deepspeed.zero.Init(config_dict_or_path=deepspeed_config(config, meta), tensor_overrides=())
    with partitions, set_zero3_state(), no_init_weights():
        model = kind.from_config(
            settings, dtype=getattr(torch, config.model.dtype), attn_implementation=PACKED, **trusted
        )
    model.tie_weights()
    _fill(model, [tensor for tensor in tensors if tensor.name not in missing], files)
    unexpected = unexpected_tensors(meta, tensors, files)
    return model.eval(), {"missing_keys": missing, "mismatched_keys": set(), "unexpected_keys": unexpected}


def read_range(file: Any, name: str, begin: int, end: int) -> Tensor:
    """Returns elements `begin` to before `end` of a flattened tensor of an open safetensors file, read with the rows
    that they are in."""
    view = file.get_slice(name)
    shape = view.get_shape()
    if not shape:
        return file.get_tensor(name).view(1)[begin:end]
    row = math.prod(shape[1:])
    first, last = begin // row, -(-end // row)
    return view[first:last].reshape(-1)[begin - first * row : end - first * row]


def _have_shapes(tensors: list[CheckpointTensor], files: dict[str, Path]) -> bool:
    with ExitStack() as stack:
        opened = {path: stack.enter_context(safe_open(path, "pt")) for path in set(files.values())}
        return all(
            tuple(opened[files[tensor.name]].get_slice(tensor.name).get_shape()) == tensor.shape
            for tensor in tensors
            if tensor.name in files
        )


@torch.no_grad()
def _fill(model: PreTrainedModel, tensors: list[CheckpointTensor], files: dict[str, Path]) -> None:
    """Reads this rank's part of the tensors into the model's partitions."""
    parameters: dict[str, Any] = dict(model.named_parameters())
    counts = {name: parameter.ds_numel for name, parameter in parameters.items()}
    with ExitStack() as stack:
        opened = {path: stack.enter_context(safe_open(path, "pt")) for path in set(files.values())}
        for piece in pieces(tensors, counts, stage=3, rank=dist.get_rank(), ranks=dist.get_world_size()):
            own = parameters[piece.tensor.parameter].ds_tensor.view(-1)[piece.at : piece.at + piece.end - piece.begin]
            own.copy_(read_range(opened[files[piece.tensor.name]], piece.tensor.name, piece.begin, piece.end))
