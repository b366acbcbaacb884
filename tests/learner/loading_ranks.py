"""Loads and saves models as one of two ranks of ZeRO stage 3, and compares them with the library's."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification
from worlds import endpoints, make_config, partitioning

from asyncrl.config.config import Config
from asyncrl.learner.distributed import Ranks, deepspeed, process_group
from asyncrl.learner.model import policy
from asyncrl.learner.model.loading import deepspeed_config, load_policy_model, load_value_model
from asyncrl.learner.model.policy import Policy
from asyncrl.learner.model.saving import save_model

DTYPES = ("float32", "bfloat16")


def config_of(folder: Path, dtype: str, offload: str = "none") -> Config:
    learner = {"zero_stage": 3, "offload": offload}
    return make_config(folder, **partitioning({"model": {"dtype": dtype}, "learner": learner}, 8))


def difference(model: nn.Module, expected: nn.Module) -> str:
    """Returns what differs in weights, buffers, and which of them are tied; empty if nothing does."""
    found = dict(model.named_parameters())
    wanted = dict(expected.named_parameters())
    if found.keys() != wanted.keys():
        return f"names {sorted(found.keys() ^ wanted.keys())}"
    for name, parameter in found.items():
        assert not parameter.numel(), "the parameter is complete on this rank"
        with deepspeed.zero.GatheredParameters([parameter]):
            if parameter.dtype != wanted[name].dtype or not torch.equal(parameter, wanted[name]):
                return f"weight {name}"
    buffers = dict(expected.named_buffers())
    if dict(model.named_buffers()).keys() != buffers.keys():
        return "names of buffers"
    for name, buffer in model.named_buffers():
        if buffer.dtype != buffers[name].dtype or not torch.equal(buffer, buffers[name]):
            return f"buffer {name}"
    return ""


def compare(folder: Path, dtype: str) -> dict[str, str]:
    config, path = config_of(folder, dtype), str(folder)
    options: dict[str, Any] = {"dtype": getattr(torch, dtype)}
    causal = AutoModelForCausalLM.from_pretrained(path, **options)
    found = {"policy": difference(load_policy_model(config, path), causal)}
    if folder.name == "qwen2":
        value, _ = load_value_model(config, path, "critic.path")
        of_values = AutoModelForTokenClassification.from_pretrained(path, num_labels=1, **options)
        nn.init.zeros_(of_values.score.weight)
        nn.init.zeros_(of_values.score.bias)
        found["critic"] = difference(value, of_values)
    return found


def save(folder: Path, out: Path, ranks: Ranks) -> str:
    """Saves the model as it is loaded. Returns the names of the tensors that are not the folder's, bit for bit."""
    with patch.object(policy, "check_packing", lambda *args: None):
        save_model(Policy(config_of(folder, "float32"), ranks), out / folder.name)
    saved, source = (load_file(path / "model.safetensors") for path in (out / folder.name, folder))
    names = sorted(saved.keys() | source.keys())
    return " ".join(
        name for name in names if not torch.equal(*(each.get(name, torch.empty(0)) for each in (saved, source)))
    )


class Block(nn.Module):
    """Two experts; the sign of a token's first number chooses one."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        chosen, output = (tokens[:, 0] > 0).long(), tokens.clone()
        for number in chosen.unique().tolist():
            rows = (chosen == number).nonzero().flatten()
            output = output.index_add(0, rows, self.experts[number](tokens[rows]))
        return output


def visit_other_experts(folder: Path, ranks: Ranks) -> list[float]:
    """Trains experts that are modules, of which each rank visits one. Returns the loss of the complete network, and the
    losses of two steps."""
    torch.manual_seed(0)
    network: Any = nn.Sequential(nn.Linear(8, 8), Block(), nn.Linear(8, 1))
    nn.init.eye_(network[0].weight)
    tokens = torch.full((4, 8), 10.0 if ranks.rank else -10.0)
    losses = [float(network(tokens).square().sum())]
    settings = deepspeed_config(config_of(folder, "float32"), network)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-4)
    engine, *_ = deepspeed.initialize(model=network, optimizer=optimizer, config=settings)
    for _ in range(2):
        loss = engine(tokens).square().sum()
        engine.backward(loss)
        engine.step()
        losses.append(float(loss))
    return losses


def main(rank: int, port: int, models: Path, out: Path) -> None:
    torch.set_num_threads(1)
    result: dict[str, Any] = {}
    with process_group(endpoints(port), rank, 2, start_timeout_s=120, timeout_s=60) as ranks:
        for folder in sorted(models.iterdir()):
            for dtype in DTYPES:
                result[f"{folder.name}-{dtype}"] = compare(folder, dtype)
            result[f"{folder.name}-saved"] = save(folder, out, ranks)
        of_host = Policy(config_of(models / "qwen2", "float32", "all"), ranks)
        parameters: list[Any] = list(of_host.model.parameters())
        result["losses"] = visit_other_experts(models / "qwen2", ranks)
        result["devices"] = sorted({parameter.ds_tensor.device.type for parameter in parameters})
    (out / f"{rank}.json").write_text(json.dumps(result))
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4]))
