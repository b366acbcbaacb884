"""The places of a checkpoint's tensors in the parameters of a model, and the part of them that each rank has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion

from asyncrl.weights import model_tensors as checkpoint
from asyncrl.weights.model_tensors import checkpoint_tensors, meta_model, pieces
from benchmarks.families import FAMILIES, save_family

OFTEN = ("llama", "qwen2", "qwen3_moe", "mixtral", "gpt_oss", "gpt_neox")
FUSED = {"qwen3_moe", "mixtral"}
every_family = pytest.mark.parametrize(
    "name", [*OFTEN, *(pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES if name not in OFTEN)]
)


def found(folder: Path) -> tuple[dict[str, Tensor], list[checkpoint.CheckpointTensor]]:
    """The parameters of the model in the folder, and the tensors of its checkpoint, from the config alone."""
    tensors = checkpoint_tensors(meta_model(str(folder), trust_remote_code=False))
    assert tensors is not None
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    return {name: parameter.detach() for name, parameter in model.named_parameters()}, tensors


@every_family
def test_each_tensor_is_a_view_with_the_bytes_of_the_librarys_own_conversion(name: str, tmp_path: Path) -> None:
    parameters, tensors = found(save_family(name, tmp_path))
    expected = revert_weight_conversion(meta_model(str(tmp_path), trust_remote_code=False), parameters)
    assert {one.name for one in tensors} == expected.keys()
    for one in tensors:
        tensor = one.of(parameters[one.parameter])
        assert torch.equal(tensor, expected[one.name])
        assert tensor.untyped_storage().data_ptr() == parameters[one.parameter].untyped_storage().data_ptr()
    assert (len(tensors) > len(parameters)) == (name in FUSED) or name not in OFTEN


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("name", ["qwen2", "mixtral"])
def test_ranks_have_each_element_once_in_stage_3_and_all_of_them_before(name: str, stage: int, tmp_path: Path) -> None:
    """The model of qwen2 has tied embeddings."""
    parameters, tensors = found(save_family(name, tmp_path))
    counts = {name: parameter.numel() for name, parameter in parameters.items()}
    for ranks in (1, 2, 3, 4, 7):
        copies = {one.name: torch.full((one.num_elements,), torch.nan) for one in tensors}
        for rank in range(ranks):
            for piece in pieces(tensors, counts, stage=stage, rank=rank, ranks=ranks):
                name = piece.tensor.parameter
                size = -(-counts[name] // ranks)
                own = parameters[name].view(-1)
                own = own[rank * size : (rank + 1) * size] if stage == 3 else own
                copy = copies[piece.tensor.name][piece.begin : piece.end]
                assert copy.isnan().all() or stage < 3
                copy.copy_(own[piece.at : piece.at + piece.end - piece.begin])
        for one in tensors:
            assert torch.equal(copies[one.name].view(one.shape), one.of(parameters[one.parameter]))


def test_tensors_that_the_library_computes_are_no_views(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = meta_model(str(save_family("llama", tmp_path)), trust_remote_code=False)

    def transposed(_: Any, parameters: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor.T if name.endswith("q_proj.weight") else tensor for name, tensor in parameters.items()}

    monkeypatch.setattr(checkpoint, "revert_weight_conversion", transposed)
    assert checkpoint_tensors(model) is None
