"""Loads models as one of two ranks of ZeRO stage 3: compares them with the library's, or with a folder `large` measures
the memory, with a complete model on each rank if the file `way` says so."""

from __future__ import annotations

import ctypes
import json
import os
import re
import sys
import threading
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification
from worlds import endpoints, make_config

from asyncrl.config.config import Config
from asyncrl.learner.distributed import Ranks, deepspeed, process_group
from asyncrl.learner.model import loading, policy
from asyncrl.learner.model.loading import load_policy_model, load_value_model
from asyncrl.learner.model.policy import Policy, Reference

DTYPES = ("float32", "bfloat16")


def config_of(folder: Path, dtype: str, offload: str = "none") -> Config:
    return make_config(folder, model={"dtype": dtype}, learner={"zero_stage": 3, "offload": offload})


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


def device_of(parameter: Any) -> str:
    """Returns the device of this rank's part."""
    return parameter.ds_tensor.device.type


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


def peak_bytes(load: Any) -> int:
    """Returns by how much anonymous memory was larger at its peak while the function ran than before."""
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    before, ended, highest = anonymous_bytes(), threading.Event(), [0]

    def watch() -> None:
        while not ended.wait(0.001):
            highest[0] = max(highest[0], anonymous_bytes())

    thread = threading.Thread(target=watch)
    thread.start()
    kept = load()
    ended.set()
    thread.join()
    del kept
    return highest[0] - before


def anonymous_bytes() -> int:
    match = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match is not None
    return int(match[1]) * 1024


def measure(config: Config, ranks: Ranks, warm: Path) -> dict[str, int]:
    """Returns the peaks of making the reference and the policy with its optimizer, without their first forward pass."""
    with patch.object(policy, "check_packing", lambda *args: None):
        Policy(config_of(warm, "float32"), ranks)
        peaks = {"reference": peak_bytes(lambda: Reference(config, ranks))}
        return peaks | {"policy": peak_bytes(lambda: Policy(config, ranks))}


def main(rank: int, port: int, models: Path, out: Path) -> None:
    torch.set_num_threads(1)
    result: dict[str, Any] = {}
    with process_group(endpoints(port), rank, 2, start_timeout_s=120, timeout_s=60) as ranks:
        large = models / "large"
        if large.exists():
            way = (models / "way").read_text()
            skipped = patch.object(loading, "load_partitioned", lambda *args, **options: None)
            with skipped if way == "complete" else patch.dict(os.environ):
                result = measure(config_of(large, "float32"), ranks, models / "warm")
        else:
            for folder in sorted(models.iterdir()):
                for dtype in DTYPES:
                    result[f"{folder.name}-{dtype}"] = compare(folder, dtype)
            of_host = Policy(config_of(models / "qwen2", "float32", "all"), ranks)
            devices = set(map(device_of, of_host.model.parameters()))
            result["devices"] = sorted(devices)
    (out / f"{rank}.json").write_text(json.dumps(result))
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4]))
